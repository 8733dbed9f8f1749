"""Ranks on several hosts: shared memory inside a host, MPI between hosts.

An all-reduce is a reduce-scatter inside each host, an all-reduce between hosts of each part, and an all-gather inside:
every byte crosses the network once for each host, not for each rank. Ranks with the same place in their host make a
*column*; a part travels in one, so that all of a host's ranks drive the network. A host of fewer ranks than another has
a part for each of its ranks, and the other's further ranks have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives import wire
from collectives.arrays import Array
from collectives.backends.agreement import together
from collectives.backends.base import Backend
from collectives.backends.inside import inside
from collectives.backends.mpi import IN_PLACE, SMALL, Mpi, as_bytes, plain, vector
from collectives.backends.shm import Shm
from collectives.call import Call, describe, make_call
from collectives.contract import split
from collectives.errors import CollectiveError, CollectiveTimeoutError
from collectives.wire import Identity


class Hosts(Mpi):
    """One communicator of ranks on several hosts. What has no way of its own here goes over MPI alone."""

    name = "shm+mpi"

    def __init__(self, comm: Any, words: Any, identities: Sequence[Identity], timeout: float, local: Shm) -> None:
        """As `Mpi`; `local`: the engine of this host's ranks, in the same order. All ranks make theirs together."""
        from mpi4py import MPI

        super().__init__(comm, words, identities, timeout)
        self.local = local
        by_host: dict[str, list[int]] = {}
        for rank, identity in enumerate(identities):
            by_host.setdefault(identity.host, []).append(rank)
        self.hosts = list(by_host.values())
        self.here = list(by_host).index(identities[self.rank].host)
        self.neighbours = self.hosts[self.here]
        self.columns = min(map(len, self.hosts))
        column = local.rank if local.rank < self.columns else MPI.UNDEFINED
        with wire.LOCK:
            self._column = comm.Split(column, self.here)

    def move(self, call: Call, source: Array | None, target: Array | None, frames: npt.NDArray[np.uint8]) -> None:
        large = call.count * call.dtype.itemsize > SMALL
        if large and call.collective == "all_reduce":
            self._all_reduce(call, source, target)
        elif large and call.collective == "broadcast":
            self._broadcast(call, target)
        else:
            super().move(call, source, target, frames)

    def _all_reduce(self, call: Call, source: Array | None, target: Array | None) -> None:
        assert source is not None and target is not None
        itemsize = call.dtype.itemsize
        bounds = split(call.count, self.columns, itemsize)
        lengths = np.diff(bounds).tolist()
        counts = (*lengths, *(0 for _ in self.neighbours[self.columns :]))
        start = sum(counts[: self.local.rank])
        part = target.reshape(-1)[start : start + counts[self.local.rank]]
        op = "sum" if call.op == "avg" else call.op  # all ranks' average is taken once, at the end
        summed = make_call("reduce_scatter", call.dtype, call.count, op, scale=call.scale, counts=counts)
        self._run_inside(call, summed, source, part)
        if self.local.rank < self.columns:
            between = split(part.size, len(self.hosts), itemsize) * itemsize
            mine = as_bytes(part)[between[self.here] : between[self.here + 1]]
            self.sum_parts(self._column, call, part, mine, between, self.size, raw=False)
            self.start_and_finish(call, "Iallgatherv", IN_PLACE, vector(as_bytes(part), between), comm=self._column)
        self._run_inside(call, make_call("all_gather", call.dtype, call.count, counts=counts), part, target)

    def _broadcast(self, call: Call, array: Array | None) -> None:
        host = next(index for index, ranks in enumerate(self.hosts) if call.root in ranks)
        if self.here == host:
            self._inside_broadcast(call, array, self.neighbours.index(call.root))
        if self.local.rank == 0:
            self.start_and_finish(call, "Ibcast", plain(as_bytes(array)), host, comm=self._column)
        if self.here != host:
            self._inside_broadcast(call, array, 0)

    def _inside_broadcast(self, call: Call, array: Array | None, root: int) -> None:
        self._run_inside(call, make_call("broadcast", call.dtype, call.count, root=root), array, array)

    def _run_inside(self, call: Call, part: Call, source: Array | None, target: Array | None) -> None:
        """Make a call among this host's ranks that is a part of one of all ranks."""
        try:
            with self._inside():
                self.local.run(part, source, target)
        except CollectiveTimeoutError as error:
            if error.echo:
                raise
            self._give_up(describe(call.signature()), self.timeout)  # who did not come may wait for another host

    def _inside(self) -> AbstractContextManager[None]:
        """The errors of a call among this host's ranks, which have other numbers there."""
        return inside(self.neighbours, self.peers.identities[self.rank].name)

    def _shared(self, rank: int, act: Callable[[int], Any], otherwise: Callable[[], Any]) -> Any:
        """Act on a rank of this host, by its number there, or else otherwise."""
        if rank not in self.neighbours:
            return otherwise()
        self.check_usable()
        try:
            with self._inside():
                return act(self.neighbours.index(rank))
        except CollectiveError as error:
            self.fail(error)
            raise

    # Memory is in common inside a host

    def make_memory(self, nbytes: int) -> Array:
        return self.local.allocate(nbytes)

    def peer_view(self, array: Array, rank: int) -> Array:
        if rank not in self.neighbours:
            return super().peer_view(array, rank)
        return self.local.peer_view(array, self.neighbours.index(rank))

    def fetch_add(self, word: Array, value: int, rank: int) -> int:
        found: int = self._shared(
            rank,
            lambda there: self.local.fetch_add(word, value, there),
            lambda: super(Hosts, self).fetch_add(word, value, rank),
        )
        return found

    def acquire(self, lock: Array, rank: int) -> None:
        self._shared(
            rank, lambda there: self.local.acquire(lock, there), lambda: super(Hosts, self).acquire(lock, rank)
        )

    def release(self, lock: Array, rank: int) -> None:
        self._shared(
            rank, lambda there: self.local.release(lock, there), lambda: super(Hosts, self).release(lock, rank)
        )

    def wait_until(self, word: Array, value: int, rank: int) -> None:
        self._shared(
            rank,
            lambda there: self.local.wait_until(word, value, there),
            lambda: super(Hosts, self).wait_until(word, value, rank),
        )

    def signal(self, rank: int) -> None:
        self._shared(rank, self.local.signal, lambda: super(Hosts, self).signal(rank))

    def wait_signal(self, rank: int) -> None:
        self._shared(rank, self.local.wait_signal, lambda: super(Hosts, self).wait_signal(rank))

    # Families and endings

    def found(self, color: int | None, family: list[int]) -> Backend | None:
        key = family.index(self.rank)
        local = together(self, lambda: self.local.split(color, key))
        scattered = color is not None and len({self.peers.identities[rank].host for rank in family}) > 1
        pair = self.split_comms(family if scattered else [])
        if local is None or not scattered:
            return local  # of one host, where shared memory is all it needs
        identities = [self.peers.identities[rank] for rank in family]
        return self.adopt(Hosts(*pair, identities, self.timeout, local))

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.local.fail(error)

    def disown(self, reason: str) -> None:
        super().disown(reason)
        self.local.disown(reason)

    def close(self) -> None:
        super().close()
        self.local.close()
