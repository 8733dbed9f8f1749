"""GPUs joined by NVIDIA's NCCL, through nccl4py: a process for each GPU.

NCCL moves and adds; what else a call here promises is done beside it, by a communicator of the same ranks on the host,
in shared memory, or over TCP where there are several hosts.
NCCL itself neither compares what ranks have called nor notices a peer that dies on the same host, and it may block for
ever. So its communicators are non-blocking (every call returns, and is asked about until it has settled), ranks compare
their calls in a ledger beside the streams (MGPU_NCCL_CHECK=0 saves that), and a thread looks at peers, deadlines and
NCCL's own state, and aborts what waits in vain.

It is NCCL's C interface that is called, `nccl.bindings.nccl`, since arrays here are addresses, and of more types than
`nccl.core` knows arrays of.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.backends.agreement import together
from collectives.backends.device import LOOK, Block, OnDevice, beside
from collectives.backends.shm import Shm
from collectives.backends.tcp import Tcp
from collectives.call import Call, describe, scale_value
from collectives.contract import COLLECTIVES, Contract, Geometry, geometry
from collectives.device_arrays import DeviceArray
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from collectives.memory import PAGE
from collectives.watch import Watch
from collectives.wording import counted
from kernels.dtypes import DTYPES, DType, find

if TYPE_CHECKING:
    from kernels.driver import Driver

OLDEST = 22800  # the first NCCL with all calls that are made here: 2.28
_FAREWELL = 5.0  # seconds that `close` waits for the peers to close, and anybody for an abort
_LAST_NEWS = 1.0  # seconds in which a peer that NCCL has lost is found by name
_MOST_FLIGHTS = 64  # calls under way before those that have ended are sorted out
_HEADERS = -(1 << 63)  # the tag of what goes before a message

# nccl.h's numbers.
SUCCESS, REMOTE_ERROR, IN_PROGRESS, TIMEOUT = 0, 6, 7, 8
DATATYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7, "float64": 8,
    "bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11,
}  # fmt: skip
OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_BYTES = DATATYPES["uint8"]
_NO_COLOR, _HOST_IMMEDIATE, _COLL_SYMMETRIC = -1, 1, 1


class Terms(NamedTuple):
    """A call in NCCL's words: `factor` elements of `datatype` for each of the caller's; `op` is None for premul_sum."""

    datatype: int
    factor: int
    op: int | None


class _Flight(NamedTuple):
    """Work in a stream: its number in the ledger (0 for messages), what it is, whom it needs, and its end."""

    number: int
    what: str
    peers: Sequence[int]
    event: int


class Request(NamedTuple):
    """A call that can be made."""

    call: Call
    terms: Terms
    source: DeviceArray | None
    target: DeviceArray | None


def translate(call: Call) -> Terms:
    """A call in NCCL's words. Copies go as bytes. Truth values are added as uint8 by max and multiplied by min; complex
    numbers are added as twice as many reals.

    Raises TypeError for what NCCL cannot add: 16-bit integers, and products of complex numbers.
    """
    dtype = call.dtype
    if not call.reduces:
        return Terms(_BYTES, dtype.itemsize, None)
    op = None if call.op == "premul_sum" else OPERATIONS[call.op]
    if dtype.kind == "bool":
        return Terms(_BYTES, 1, OPERATIONS[{"sum": "max", "prod": "min"}.get(call.op, call.op)])
    if dtype.kind == "complex" and call.op != "prod":
        return Terms(DATATYPES[_real(dtype).name], 2, op)
    if dtype.name not in DATATYPES:
        raise TypeError(
            f"NCCL has no {call.op} of {dtype.name}; use backend='cuda', or convert to "
            f"{'int32' if dtype.kind in ('int', 'uint') else 'real numbers'}"
        )
    return Terms(DATATYPES[dtype.name], 1, op)


def scale(call: Call) -> np.ndarray[Any, Any]:
    """What premul_sum multiplies by, as NCCL reads it: one element of the type that is added."""
    value = scale_value(call.dtype.code << 8, call.scale)
    return np.array([value], _real(call.dtype).numpy)


class Nccl(OnDevice):
    """One communicator of GPUs. All ranks of `control` make theirs together. `driver` is this rank's GPU, `library` is
    nccl4py's bindings. `comm`: NCCL's communicator, where there is one already."""

    name = "nccl"

    def __init__(self, control: Shm | Tcp, driver: Driver, library: Any, comm: Any = None) -> None:
        super().__init__(control, driver, compares=os.environ.get("MGPU_NCCL_CHECK", "1") != "0")
        self._nccl, self._comm = library, comm  # around every call of it is `_mutex`
        self._columns: list[Any] = []  # further communicators of NCCL's, which end with it
        self._flights: deque[_Flight] = deque()
        self._lost: CollectiveError | None = None  # why NCCL's communicator is gone
        self._raised = False
        self._least = self._meet()
        if comm is None:
            self._comm = self._join()
        else:
            self._settle("split")
        self._children: weakref.WeakSet[Nccl] = weakref.WeakSet()
        self._guard.start()

    # Beginning

    def _meet(self) -> tuple[int, int]:
        """The least compute capability of the ranks' GPUs. Raises, on every rank alike, where NCCL cannot join them."""
        version = self._nccl.get_version()
        mine = [self.driver.uuid, self.driver.capability, version, self._compares]
        answers = [json.loads(answer) for answer in self.control.gather_bytes(json.dumps(mine).encode())]
        for rank, (_, _, theirs, checks) in enumerate(answers):
            if theirs < OLDEST:
                raise RuntimeError(
                    f"{self._name(rank)} has loaded NCCL {told(theirs)}, and this backend needs {told(OLDEST)} or "
                    f"later; `mgpu doctor` says which file that is"
                )
            if theirs != version:
                raise CollectiveMismatchError(
                    f"{self._name(rank)} has loaded NCCL {told(theirs)}, and {self._name(self.rank)} {told(version)}; "
                    f"all ranks need the same one; `mgpu doctor` says which file that is"
                )
            if checks != self._compares:
                raise CollectiveMismatchError(
                    f"{self._name(rank)} and {self._name(self.rank)} differ in MGPU_NCCL_CHECK"
                )
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            uuids = [uuid for uuid, *_ in answers]
            for rank, uuid in enumerate(uuids):
                if uuids.index(uuid) != rank:
                    raise RuntimeError(
                        f"ranks {uuids.index(uuid)} and {rank} have the same GPU, and NCCL wants one for each rank; "
                        f"use backend='cuda', fewer ranks, or NCCL_MULTI_RANK_GPU_ENABLE=1"
                    )
        return min((major, minor) for _, (major, minor), *_ in answers)

    def _join(self) -> Any:
        """A new communicator of NCCL's, of all ranks; rank 0's identifier for it goes by way of the host."""
        nccl, unique, problem = self._nccl, b"", ""
        if self.rank == 0:
            try:
                unique = bytes(nccl.get_unique_id())
            except nccl.NCCLError as error:
                problem = f"NCCL, on {self._name(0)}, finds no way to be reached: {error}. {self._advice(b'')}"
        answers = self.control.gather_bytes(json.dumps([unique.hex(), problem]).encode())
        identifier, problem = json.loads(answers[0])
        if problem:
            raise CollectiveError(problem)
        unique = bytes.fromhex(identifier)
        config = nccl.Config()
        config.blocking = 0
        with self.driver, self._failing:
            try:
                with self._calling("init"):
                    unique_id = nccl.UniqueId.from_buffer(unique)
                    self._comm = nccl.comm_init_rank_config(self.size, unique_id, self.rank, config.ptr)
                self._settle("init")
            except CollectiveError as error:
                if error.echo or isinstance(error, PeerLostError):
                    raise
                raise type(error)(f"{error}. {self._advice(unique)}") from error
        return self._comm

    def _advice(self, unique: bytes) -> str:
        """What to do where NCCL does not find its way from host to host."""
        if isinstance(self.control, Shm):
            return "NCCL_DEBUG=INFO makes NCCL say what it does"
        where = f"it listens at {address} on rank 0's host, and " if (address := listens_at(unique)) else ""
        return (
            f"NCCL takes a network interface of its own choice: {where}ranks have met by way of "
            f"{self.control.host.interface} here. Set NCCL_SOCKET_IFNAME, on each host, to an interface by which hosts "
            f"reach each other, and open its ports; NCCL_DEBUG=INFO makes NCCL say what it does"
        )

    def _name(self, rank: int) -> str:
        """A rank, with its host where there are several."""
        return f"rank {rank}{self.control.host.where(self.control.members[rank])}"

    # Calls

    def _prepare(self, call: Call, source: DeviceArray | None, target: DeviceArray | None, captured: bool) -> Request:
        if call.algorithm:
            raise ValueError(f"algorithm={call.algorithm!r}: NCCL chooses for itself; NCCL_ALGO tells it what to")
        terms = translate(call)
        if call.reduces and call.dtype.name.startswith("float8") and self._least < (9, 0):
            raise TypeError(f"NCCL adds {call.dtype.name} on GPUs of compute capability 9.0 and later")
        return Request(call, terms, source, target)

    def _put(self, work: Request, stream: int, captured: bool, launched: Callable[[], None]) -> None:
        call = work.call
        what = partial(describe, call.signature())
        with self._failing:
            operation = self._make(work, stream, what)
            self._settle(what())
            if operation is not None:
                with self._calling(what()):
                    self._nccl.red_op_destroy(operation, self._comm)
        launched()
        if not captured:
            self._follow(self._ledger.begun(self.rank), what(), range(self.size), stream)

    def _make(self, work: Request, stream: int, what: Callable[[], str]) -> int | None:
        """Make NCCL's calls for one of ours. The operation of a premul_sum, which is to be destroyed when they have
        settled."""
        nccl, call, (datatype, factor, op), operation = self._nccl, work.call, work.terms, None
        start, end = (0 if array is None else array.address for array in (work.source, work.target))
        count, root, rank = call.count * factor, call.root, self.rank
        with self._calling(what()):
            comm = self._comm
            if call.reduces and op is None:
                value = scale(call)
                op = operation = nccl.red_op_create_pre_mul_sum(value.ctypes.data, datatype, _HOST_IMMEDIATE, comm)
            if call.collective == "all_reduce":
                nccl.all_reduce(start, end, count, datatype, op, comm, stream)
            elif call.collective == "reduce":
                nccl.reduce(start, end, count, datatype, op, root, comm, stream)
            elif call.collective == "broadcast":
                nccl.broadcast(start, end, count, datatype, root, comm, stream)
            elif call.counts is None and call.collective == "reduce_scatter":
                nccl.reduce_scatter(start, end, count, datatype, op, comm, stream)
            elif call.counts is None and call.collective == "all_gather":
                nccl.all_gather(start, end, count, datatype, comm, stream)
            elif call.counts is None and call.collective == "gather":
                nccl.gather(start, end, count, datatype, root, comm, stream)
            elif call.counts is None and call.collective == "scatter":
                nccl.scatter(start, end, count, datatype, root, comm, stream)
            elif call.counts is None:
                nccl.allto_all(start, end, count, datatype, comm, stream)
            else:
                with self._grouped():
                    for block, length, at, to in _blocks(call, self.size):
                        nbytes = call.dtype.itemsize
                        at, to, length = start + at * nbytes, end + to * nbytes, length * factor
                        if call.collective == "reduce_scatter":
                            to = end if block == rank else 0
                            nccl.reduce(at, to, length, datatype, op, block, comm, stream)
                        elif call.collective == "all_gather":
                            at = start if block == rank else to
                            nccl.broadcast(at, to, length, datatype, block, comm, stream)
                        else:
                            self._pass(call, block, at, to, length, stream)
        return operation

    def _pass(self, call: Call, block: int, at: int, to: int, length: int, stream: int) -> None:
        """This rank's part in bringing a block from the rank that has it to the one that wants it."""
        terms = COLLECTIVES[call.collective]
        assert terms.source is not None and terms.target is not None
        source, target = (of(block, self.size, call.root) for of in (terms.source, terms.target))
        if source == self.rank:
            self._nccl.send(at, length, _BYTES, target, self._comm, stream)
        if target == self.rank:
            self._nccl.recv(to, length, _BYTES, source, self._comm, stream)

    def exchange(self, sends: Sequence[tuple[Any, int, int]], receives: Sequence[tuple[Any, int, int]]) -> None:
        """Messages of GPU arrays are one group of NCCL's, in their streams; before each goes a header on the host, of
        its type and length."""
        outgoing, incoming = ([m for m in side if isinstance(m[0], DeviceArray)] for side in (sends, receives))
        if any(tag for _, _, tag in (*outgoing, *incoming)):
            raise ValueError("NCCL takes messages between two ranks in their order, and has no tags: leave tag=0")
        self._check()
        plain = [[m for m in side if not isinstance(m[0], DeviceArray)] for side in (sends, receives)]
        headers: list[tuple[Any, int, int]] = []
        if self._compares:
            headers = [(np.zeros(2, np.int64), peer, _HEADERS) for _, peer, _ in incoming]
            plain[0] += [(_header(array), peer, _HEADERS) for array, peer, _ in outgoing]
            plain[1] += headers
        if any(plain):
            self.control.exchange(*plain)
        for (array, peer, _), (header, _, _) in zip(incoming, headers):
            if header.tolist() != _header(array).tolist():
                code, count = header.tolist()
                error = CollectiveMismatchError(
                    f"rank {peer} sent {counted(count, 'element')} of {DTYPES[code].name}, "
                    f"and rank {self.rank} receives {array.size} of {array.dtype}"
                )
                self._lose(error)
                self._check()
        if outgoing or incoming:
            self._send(outgoing, incoming)

    def _send(self, outgoing: Sequence[tuple[Any, int, int]], incoming: Sequence[tuple[Any, int, int]]) -> None:
        driver, nccl = self.driver, self._nccl
        to, of = ([peer for _, peer, _ in side] for side in (outgoing, incoming))
        what = f"messages to {to} and from {of}"
        streams = list(dict.fromkeys(array.stream for array, _, _ in (*outgoing, *incoming)))
        with driver:
            self._check_owner(*(array for array, _, _ in (*outgoing, *incoming)))
        with driver, self._failing:
            captured = driver.capturing(streams[0])
            for stream in streams:
                if not captured and self._last_stream not in (None, stream):
                    driver.wait(stream, self._last)
            with self._calling(what), self._grouped():
                for array, peer, _ in outgoing:
                    nccl.send(array.address, array.nbytes, _BYTES, peer, self._comm, array.stream)
                for array, peer, _ in incoming:
                    nccl.recv(array.address, array.nbytes, _BYTES, peer, self._comm, array.stream)
            self._settle(what)
            if not captured:
                driver.record(self._last, streams[0])
                self._last_stream = streams[0]
                self._follow(0, what, sorted({*to, *of}), streams[0])

    @contextmanager
    def _grouped(self) -> Iterator[None]:
        """NCCL's calls inside are one."""
        self._nccl.group_start()
        try:
            yield
        finally:
            self._nccl.group_end()

    # Symmetric memory

    def _share(self, nbytes: int) -> Block:
        """Memory of NCCL's own, registered with it: what lies there is moved without a copy between."""
        nccl, room = self._nccl, -(-max(nbytes, 1) // PAGE) * PAGE

        def allocate() -> int:
            try:
                return int(nccl.mem_alloc(room))
            except nccl.NCCLError as error:
                raise MemoryError(f"NCCL gives no {room:,} bytes: {error}") from error

        own = together(self.control, allocate, nccl.mem_free)
        self.driver.clear(own, room)
        with self._failing:
            with self._calling("empty"):
                window = nccl.comm_window_register(self._comm, own, room, _COLL_SYMMETRIC)
            self._settle("empty")
        return Block([own if rank == self.rank else self._seen(window, rank) for rank in range(self.size)],
                     nbytes, handle=window)  # fmt: skip

    def _seen(self, window: Any, rank: int) -> int:
        """Where this rank's GPU sees a rank's memory; 0 where it does not, or NCCL cannot tell."""
        try:
            return int(self._nccl.get_peer_device_pointer(window, 0, rank)) if window else 0
        except (self._nccl.NCCLError, RuntimeError):  # RuntimeError: an NCCL that is older than the call
            return 0

    def _give_back(self, block: Block, own: int) -> None:
        if block.handle:
            with self._calling("empty"):
                self._nccl.comm_window_deregister(self._comm, block.handle)
            self._settle("empty")
        self.control.gather_bytes(b"")  # a peer sees this memory as long as it has the window
        self._nccl.mem_free(own)

    # Trouble

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Around calls of NCCL: nobody else makes any, and NCCL's errors come out as this package's."""
        with self._mutex:
            if self._lost is not None:
                raise self._lost
            try:
                yield
            except self._nccl.NCCLError as error:
                raise self._explain(what, error.status) from error

    def _settle(self, what: str, comm: Any = None) -> None:
        """Wait until NCCL has done what it was asked, which may need the peers; not for what it put into streams.
        `comm`: one of the columns, in place of all ranks' communicator."""
        pause, watch, last = 1e-5, None, 0.0
        while True:
            with self._calling(what):
                state = int(self._nccl.comm_get_async_error(self._comm if comm is None else comm))
            if state == SUCCESS:
                break
            if state != IN_PROGRESS:
                raise self._explain(what, state)
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
            if watch is None or time.monotonic() - last > LOOK:
                watch, last = watch or Watch(self.control, lambda: f"{what}, in NCCL"), time.monotonic()
                watch.look([rank for rank in range(self.size) if rank != self.rank], self._standing)

    def _standing(self) -> str:
        return self._ledger.arrivals(self._ledger.begun(self.rank))

    def _explain(self, what: str, state: int) -> CollectiveError:
        """NCCL's state as an error of this package. If a peer is gone, that is found out, and it is named."""
        with self._mutex:
            details = "" if self._comm is None else self._nccl.get_last_error(self._comm)
        text = f"{what}: NCCL says: {self._nccl.get_error_string(state)}" + (f" ({details})" if details else "")
        until = time.monotonic() + (_LAST_NEWS if state in (REMOTE_ERROR, TIMEOUT) else 0)
        watch = Watch(self.control, lambda: text)
        try:
            while time.monotonic() < until:
                watch.look([rank for rank in range(self.size) if rank != self.rank], self._standing)
                time.sleep(LOOK)
        except CollectiveError as error:
            return error
        return {REMOTE_ERROR: PeerLostError, TIMEOUT: CollectiveTimeoutError}.get(state, CollectiveError)(text)

    def fail(self, error: BaseException) -> None:
        self._lose(error if isinstance(error, CollectiveError) else CollectiveError(repr(error)))
        self._raised = True

    def _lose(self, error: CollectiveError) -> None:
        """End NCCL's communicator, and what it has in streams; tell the peers."""
        with self._mutex:
            if self._lost is not None:
                return
            self._lost = error
            comms = self._take_comms()
        self.control.fail(error)
        if comms:
            abort = threading.Thread(target=self._abort, args=(comms,), name="mgpu abort", daemon=True)
            abort.start()
            abort.join(_FAREWELL)

    def _take_comms(self) -> list[Any]:
        """NCCL's communicators, which this one has no more."""
        comms = [*self._columns, self._comm] if self._comm is not None else []
        self._comm, self._columns = None, []
        return comms

    def _abort(self, comms: Sequence[Any]) -> None:
        for comm in comms:
            with suppress(self._nccl.NCCLError), self.driver, self._mutex:  # else there is nothing left to end
                self._nccl.comm_abort(comm)

    def _check(self) -> None:
        if self._lost is not None and not self._raised:
            self._raised = True
            raise self._lost
        self.control.check_usable()

    def _follow(self, number: int, what: str, peers: Sequence[int], stream: int) -> None:
        """Keep an eye on what has been put into a stream."""
        event = self.driver.new_event()
        self.driver.record(event, stream)
        with self._mutex:
            self._flights.append(_Flight(number, what, peers, event))
            if len(self._flights) > _MOST_FLIGHTS:
                self._retire()

    def _retire(self) -> None:
        """Sort out what has ended."""
        with self.driver, self._mutex:
            while self._flights and self.driver.done(self._flights[0].event):
                flight = self._flights.popleft()
                self.driver.drop_event(flight.event)
                if flight.number:
                    self._ledger.end(flight.number)

    def _watch(self) -> None:
        flight, watch = None, None
        while not self._closing.wait(LOOK):
            try:
                if self._lost is not None:
                    return
                self._retire()
                with self._mutex:
                    first = self._flights[0] if self._flights else None
                    if self._compares:
                        self._ledger.compare()
                    comms = [] if self._comm is None else [self._comm, *self._columns]
                    states = {int(self._nccl.comm_get_async_error(comm)) for comm in comms}
                if trouble := states - {SUCCESS, IN_PROGRESS}:
                    raise self._explain("a call" if first is None else first.what, trouble.pop())
                if first is None or watch is None or first != flight:
                    flight = first
                    watch = first and Watch(self.control, partial("{} on the GPU".format, first.what))
                if first is not None and watch is not None:
                    awaited = [
                        rank for rank in first.peers
                        if rank != self.rank and not (0 < first.number <= self._ledger.ended(rank))
                    ]  # fmt: skip
                    watch.look(awaited, partial(self._ledger.arrivals, first.number))
            except CollectiveError as error:
                self._lose(error)
            except self._nccl.NCCLError as error:
                self._lose(self._explain("a call", error.status))

    # Families and endings

    def split(self, color: int | None, key: int) -> OnDevice | None:
        self._finish()
        child = self.control.split(color, key)
        first = _NO_COLOR if child is None else self.control.members.index(child.members[0])
        with self.driver, self._failing:
            with self._calling("split"):
                comm = self._nccl.comm_split(self._comm, first, 0 if child is None else child.rank, 0)
            self._settle("split")
        if child is None:
            return None
        with beside(child):
            engine = Nccl(child, self.driver, self._nccl, comm)
        self._children.add(engine)
        return engine

    def survivors(self) -> Nccl:
        self.fail(CollectiveError("its survivors have left this communicator"))
        control = self.control.survivors()
        with beside(control):
            return Nccl(control, self.driver, self._nccl)

    def close(self) -> None:
        for child in list(self._children):
            child.close()
        super().close()

    def _take_leave(self) -> None:
        self._retire()  # so that the others know what has ended

    def _end(self) -> None:
        """End NCCL's communicators together with the peers, or alone if they do not come."""
        nccl, deadline = self._nccl, time.monotonic() + _FAREWELL

        def state_of(comm: Any) -> int:
            return int(nccl.comm_get_async_error(comm))

        for comm in self._take_comms():
            try:
                with self.driver:
                    nccl.comm_finalize(comm)
                    while (state := state_of(comm)) == IN_PROGRESS and time.monotonic() < deadline:
                        time.sleep(1e-3)
                    end = nccl.comm_destroy if state == SUCCESS else nccl.comm_abort
                    end(comm)
            except nccl.NCCLError:
                self._abort([comm])


def told(version: int) -> str:
    """NCCL's number for a version as people write it: 22803 is 2.28.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def listens_at(unique: bytes) -> str:
    """The address that rank 0's NCCL waits at, which its identifier holds: a magic number of 8 bytes, then a sockaddr.
    "" where it is none: NCCL does not promise this."""
    family, port = int.from_bytes(unique[8:10], sys.byteorder), int.from_bytes(unique[10:12], "big")
    if family == socket.AF_INET:
        return f"{socket.inet_ntop(family, unique[12:16])}:{port}"
    if family == socket.AF_INET6:
        return f"[{socket.inet_ntop(family, unique[16:32])}]:{port}"
    return ""


@lru_cache(maxsize=1024)
def _blocks(call: Call, size: int) -> list[tuple[int, int, int, int]]:
    """(block, elements, where it begins in the source, and in the target) of the blocks of a call with counts that are
    not empty."""
    contract = Contract(call.collective, size, call.root)
    layout: Geometry = geometry(contract, np.reshape(call.counts or (), contract.shape), call.dtype.itemsize)
    rows = zip(*(column.tolist() for column in layout))
    return [(block, length, at, to) for block, (length, at, to) in enumerate(rows) if length]


def _real(dtype: DType) -> DType:
    """The type of a complex type's parts; else the type itself."""
    return find({"complex64": "float32", "complex128": "float64"}.get(dtype.name, dtype.name))


def _header(array: DeviceArray) -> np.ndarray[Any, Any]:
    return np.array([find(array.dtype).code, array.size], np.int64)
