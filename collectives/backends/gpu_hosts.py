"""GPUs on several hosts: peer memory inside a host, NCCL between hosts.

An all-reduce is a reduce-scatter by our own kernels inside each host, NCCL's all-reduce of each part between hosts, and
an all-gather inside, all in the caller's stream: every byte crosses the network once for each host, as with
`backends.hosts`, whose columns these are. Everything else is NCCL's, of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.backends.agreement import together
from collectives.backends.cuda import Cuda
from collectives.backends.device import Block, OnDevice, beside
from collectives.backends.inside import inside
from collectives.backends.nccl import Nccl, Request, translate
from collectives.backends.tcp import Tcp
from collectives.call import Call, describe, make_call, scale_bits
from collectives.contract import split
from collectives.device_arrays import DeviceArray
from collectives.errors import CollectiveError
from collectives.region import FAILED

if TYPE_CHECKING:
    from kernels.driver import Driver

SMALL = 1 << 16  # bytes up to which an all-reduce is NCCL's alone: a guess, as nobody has measured it
_NO_COLOR = -1


class GpuHosts(Nccl):
    """One communicator of GPUs on several hosts. `local`: the engine of this host's ranks, in the same order. All ranks
    make theirs together."""

    name = "cuda+nccl"
    control: Tcp

    def __init__(self, control: Tcp, driver: Driver, library: Any, local: Cuda, comm: Any = None) -> None:
        self.local = local
        peers = [control.host.meeting.peers[member] for member in control.members]
        by_host: dict[str, list[int]] = {}
        for rank, peer in enumerate(peers):
            by_host.setdefault(peer.host, []).append(rank)
        self._hostname = peers[control.rank].hostname
        self.neighbours = by_host[peers[control.rank].host]
        self._wide = min(map(len, by_host.values()))  # columns: a host of fewer ranks has a part for each of them
        super().__init__(control, driver, library, comm)
        column = local.rank if local.rank < self._wide else _NO_COLOR
        with self.driver, self._failing:
            with self._calling("init"):
                between = self._nccl.comm_split(self._comm, column, self.rank, 0)
            self._settle("init")
            if column != _NO_COLOR:
                self._settle("init", between)
                self._columns.append(between)

    # Calls

    def _put(self, work: Request, stream: int, captured: bool, launched: Callable[[], None]) -> None:
        inner = self._inner(work.call)
        if inner is None:
            super()._put(work, stream, captured, launched)
            return
        what = partial(describe, work.call.signature())
        with self._failing, inside(self.neighbours, self._hostname):
            self._in_parts(work, inner, stream, what)
        launched()
        if not captured:
            self._follow(self._ledger.begun(self.rank), what(), range(self.size), stream)

    def _inner(self, call: Call) -> tuple[str, int] | None:
        """The reduction inside a host, and its scale, of a call that goes in parts; None for one that does not."""
        if call.collective != "all_reduce" or call.count * call.dtype.itemsize <= SMALL:
            return None
        if call.op != "avg":
            return call.op, call.scale
        if call.dtype.kind not in ("float", "complex"):
            return None  # rounded once, of all ranks' sum
        return "premul_sum", scale_bits(1 / self.size, call.dtype)

    def _in_parts(self, work: Request, inner: tuple[str, int], stream: int, what: Callable[[], str]) -> None:
        call, source, target = work.call, work.source, work.target
        assert source is not None and target is not None
        op, scale = inner
        lengths = np.diff(split(call.count, self._wide, call.dtype.itemsize)).tolist()
        counts = (*lengths, *(0 for _ in self.neighbours[self._wide :]))
        own = counts[self.local.rank]
        start = target.address + sum(counts[: self.local.rank]) * call.dtype.itemsize
        part = DeviceArray(start, (own,), target.dtype, stream, target)
        summed = make_call("reduce_scatter", call.dtype, call.count, op, scale=scale, counts=counts)
        self.local.enqueue(summed, source, part, stream)
        if own:
            then = translate(make_call("all_reduce", call.dtype, own, "sum" if op == "premul_sum" else op))
            (column,) = self._columns
            with self._calling(what()):
                self._nccl.all_reduce(start, start, own * then.factor, then.datatype, then.op, column, stream)
            self._settle(what(), column)
        self.local.enqueue(make_call("all_gather", call.dtype, call.count, counts=counts), part, target, stream)

    # Memory, which GPUs of one host share

    def _share(self, nbytes: int) -> Block:
        def allocate() -> DeviceArray:
            with inside(self.neighbours, self._hostname):
                return self.local.allocate(nbytes)

        memory = together(self.control, allocate, name=self._name)
        addresses = [0] * self.size
        for number, rank in enumerate(self.neighbours):
            addresses[rank] = self.local.seen_at(memory, number)
        return Block(addresses, nbytes, handle=memory)

    def _give_back(self, block: Block, own: int) -> None:
        block.handle = None  # which the local engine settles at its next allocation

    # Families and endings

    def split(self, color: int | None, key: int) -> OnDevice | None:
        self._finish()
        child = self.control.split(color, key)
        with nullcontext() if child is None else beside(child):
            return self._found(child, color)

    def _found(self, child: Tcp | None, color: int | None) -> OnDevice | None:
        """The engine beside `child`, of the ranks that gave this color; all ranks call it together."""
        members = [] if child is None else [self.control.members.index(member) for member in child.members]
        across = not set(members) <= set(self.neighbours)

        def split() -> Cuda | None:
            try:
                with inside(self.neighbours, self._hostname):
                    return self.local.split(color, members.index(self.rank) if members else 0)
            except MemoryError:
                raise
            except BaseException as error:  # the other hosts wait for this one
                self.fail(error)
                raise

        def close(local: Cuda | None) -> None:
            if local is not None:
                local.close()

        local = together(self.control, split, close, self._name)
        with self.driver, self._failing:
            with self._calling("split"):
                first, place = (members[0], members.index(self.rank)) if across else (_NO_COLOR, 0)
                comm = self._nccl.comm_split(self._comm, first, place, 0)
            self._settle("split")
        if child is None or local is None:
            return None
        if not across:
            child.close()
            return local
        engine = GpuHosts(child, self.driver, self._nccl, local, comm)
        self._children.add(engine)
        return engine

    def survivors(self) -> GpuHosts:
        self.fail(CollectiveError("its survivors have left this communicator"))
        control = self.control.survivors()
        with beside(control):
            return GpuHosts(control, self.driver, self._nccl, self.local.survivors())

    def _check(self) -> None:
        if self._lost is None:
            try:
                with inside(self.neighbours, self._hostname):
                    self.local._check()
                    # One that has given up may have ended a call of this rank's, too, with what was there.
                    regions = self.local.control.regions
                    if gone := [rank for rank, region in enumerate(regions) if region.state == FAILED]:
                        self.local.control.check(gone)
            except CollectiveError as error:
                self._lose(error)
        super()._check()

    def _lose(self, error: CollectiveError) -> None:
        self.local.fail(error)  # before NCCL's part ends and the neighbours get what is there
        super()._lose(error)

    def disown(self, reason: str) -> None:
        super().disown(reason)
        self.local.disown(reason)

    def _take_leave(self) -> None:
        super()._take_leave()
        self.local.close()

    def _end(self) -> None:
        super()._end()
        self.local.close()  # if there was no leave to take
