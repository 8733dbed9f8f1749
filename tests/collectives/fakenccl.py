"""NCCL in memory, with the functions of nccl4py's bindings that the backend calls: collectives run in the streams of
`fakegpu.FakeDriver`, on the bytes at the addresses given, between real processes.

What travels, travels by a shm communicator of the same ranks. Numbers of types and operations are nccl.h's. Like NCCL's
non-blocking communicators, these are in progress for a while after each call, and refuse others meanwhile; and when a
peer is lost, what waits in a stream waits until it is aborted.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from fakegpu import FakeDriver, without_compilers
from nccl.bindings import nccl as real

from collectives import Communicator, premul_sum
from collectives.backends.nccl import Nccl

TYPES = [
    np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip
OPS = ["sum", "prod", "max", "min", "avg"]
POLLS = 2  # times that a communicator is in progress after a call


class FakeComm:
    """A communicator of NCCL's: `carrier` brings the data."""

    def __init__(self, carrier: Communicator) -> None:
        self.carrier, self.left = carrier, POLLS
        self.operations: dict[int, float] = {}
        self.ended = threading.Event()
        self.result = 0  # what comm_get_async_error says when nothing is in progress


class FakeNccl:
    """See above. `log` holds (function, arguments). `stuck`: whether new communicators never come to be."""

    NCCLError, UniqueId, Config = real.NCCLError, real.UniqueId, real.Config

    def __init__(self, driver: FakeDriver, carrier: Communicator, stuck: bool = False, version: int = 23203) -> None:
        self.driver, self.carrier, self.stuck, self.version = driver, carrier, stuck, version
        self.beside: Communicator | None = None  # lives as long as this
        self.log: list[tuple[Any, ...]] = []
        self.comms: list[FakeComm] = []
        self.windows: dict[int, list[int]] = {}
        self._group: list[tuple[FakeComm, str, int, Callable[[], Any]]] | None = None
        self._numbers = itertools.count(1000)
        self.get_unique_id, self.get_error_string = real.get_unique_id, real.get_error_string

    # The library and its communicators

    def get_version(self) -> int:
        return self.version

    def get_last_error(self, comm: FakeComm) -> str:
        return "last words"

    def comm_init_rank_config(self, nranks: int, comm_id: Any, rank: int, config: int) -> FakeComm:
        assert real.Config.from_ptr(config).blocking == 0 and bytes(comm_id).strip(b"\0")
        assert (rank, nranks) == (self.carrier.rank, self.carrier.size)
        if self.stuck:
            return self._new(self.carrier)
        same = self.carrier.all_gather(np.frombuffer(bytes(comm_id), np.uint8)).reshape(nranks, -1)
        assert (same == same[0]).all()
        return self._new(self.carrier)

    def comm_get_async_error(self, comm: FakeComm) -> int:
        if comm.left > 0:
            comm.left -= not self.stuck
            return int(real.Result.InProgress)
        return comm.result

    def comm_split(self, comm: FakeComm, color: int, key: int, config: int) -> FakeComm | None:
        self._begin(comm)
        part = comm.carrier.split(None if color == -1 else color, key)
        return None if part is None else self._new(part)

    def comm_finalize(self, comm: FakeComm) -> None:
        self._begin(comm)

    def comm_destroy(self, comm: FakeComm) -> None:
        assert comm.left == 0, "destroyed while in progress"
        self.log.append(("comm_destroy",))
        comm.ended.set()

    def comm_abort(self, comm: FakeComm) -> None:
        self.log.append(("comm_abort",))
        comm.ended.set()
        comm.carrier.abort("ncclCommAbort")

    # Memory

    def mem_alloc(self, size: int) -> int:
        return self.driver.allocate(size)

    def mem_free(self, ptr: int) -> None:
        self.driver.free(ptr)

    def comm_window_register(self, comm: FakeComm, buff: int, size: int, win_flags: int) -> int:
        assert win_flags == 1 and size % 4096 == 0
        self._begin(comm)
        start, _ = self.driver.extent(buff)
        mine = np.frombuffer(self.driver.export(start) + (buff - start).to_bytes(8, "little"), np.uint8)
        addresses = []
        for rank, theirs in enumerate(comm.carrier.all_gather(mine).reshape(comm.carrier.size, -1)):
            begin = start if rank == comm.carrier.rank else self.driver.attach(theirs[:-8].tobytes())
            addresses.append(begin + int.from_bytes(theirs[-8:].tobytes(), "little"))
        window = next(self._numbers)
        self.windows[window] = addresses
        return window

    def comm_window_deregister(self, comm: FakeComm, win: int) -> None:
        self._begin(comm)
        del self.windows[win]

    def get_peer_device_pointer(self, window: int, offset: int, peer: int) -> int:
        return self.windows[window][peer] + offset

    # Calls

    def red_op_create_pre_mul_sum(self, scalar: int, datatype: int, residence: int, comm: FakeComm) -> int:
        assert residence == 1
        number = next(self._numbers)
        comm.operations[number] = float(_at(scalar, 1, datatype)[0])
        return number

    def red_op_destroy(self, op: int, comm: FakeComm) -> None:
        assert comm.left == 0
        del comm.operations[op]

    def group_start(self) -> None:
        assert self._group is None
        self._group = []

    def group_end(self) -> None:
        group, self._group = self._group or [], None
        if not group:
            return
        assert len({id(comm) for comm, *_ in group}) == 1
        comm, sends, receives = group[0][0], [], []
        others = []
        for _, kind, stream, make in group:
            if kind in ("send", "recv"):
                (sends if kind == "send" else receives).append(make())
            else:
                others.append((stream, make))
        streams = list(dict.fromkeys(stream for _, _, stream, *_ in group))
        if sends or receives:
            self._enqueue(comm, streams[0], lambda: comm.carrier._backend.exchange(sends, receives))
        for stream, make in others:
            self._enqueue(comm, stream, make)
        for stream in streams[1:]:
            event = self.driver.new_event()
            self.driver.record(event, streams[0])
            self.driver.wait(stream, event)

    def all_reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: FakeComm, stream: int
    ) -> None:
        x, out = _at(sendbuff, count, datatype), _at(recvbuff, count, datatype)
        reduction = self._op(comm, op)
        self._call("all_reduce", comm, stream, lambda: comm.carrier.all_reduce(x, reduction, out=out))

    def reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: FakeComm, stream: int
    ) -> None:
        mine = comm.carrier.rank == root
        x, out = _at(sendbuff, count, datatype), _at(recvbuff, count, datatype) if mine else None
        reduction = self._op(comm, op)
        self._call("reduce", comm, stream, lambda: comm.carrier.reduce(x, reduction, root=root, out=out))

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: FakeComm, stream: int
    ) -> None:
        out = _at(recvbuff, count, datatype)
        source = _at(sendbuff, count, datatype) if comm.carrier.rank == root else out

        def run() -> None:
            out[...] = source.copy()
            comm.carrier.broadcast(out, root=root)

        self._call("broadcast", comm, stream, run)

    def all_gather(
        self, sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: FakeComm, stream: int
    ) -> None:
        size = comm.carrier.size
        x, out = _at(sendbuff, sendcount, datatype), _at(recvbuff, sendcount * size, datatype)
        self._call("all_gather", comm, stream, lambda: comm.carrier.all_gather(x, out=out))

    def reduce_scatter(
        self, sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: FakeComm, stream: int
    ) -> None:
        x, out = _at(sendbuff, recvcount * comm.carrier.size, datatype), _at(recvbuff, recvcount, datatype)
        reduction = self._op(comm, op)
        self._call("reduce_scatter", comm, stream, lambda: comm.carrier.reduce_scatter(x, reduction, out=out))

    def allto_all(self, sendbuff: int, recvbuff: int, count: int, datatype: int, comm: FakeComm, stream: int) -> None:
        x, out = (_at(each, count * comm.carrier.size, datatype) for each in (sendbuff, recvbuff))
        self._call("allto_all", comm, stream, lambda: comm.carrier.all_to_all(x, out=out))

    def gather(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: FakeComm, stream: int
    ) -> None:
        mine = comm.carrier.rank == root
        x = _at(sendbuff, count, datatype)
        out = _at(recvbuff, count * comm.carrier.size, datatype) if mine else None
        self._call("gather", comm, stream, lambda: comm.carrier.gather(x, root=root, out=out))

    def scatter(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: FakeComm, stream: int
    ) -> None:
        mine = comm.carrier.rank == root
        x = _at(sendbuff, count * comm.carrier.size, datatype) if mine else None
        out = _at(recvbuff, count, datatype)
        self._call("scatter", comm, stream, lambda: comm.carrier.scatter(x, root=root, out=out))

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: FakeComm, stream: int) -> None:
        message = _at(sendbuff, count, datatype), peer, 0
        self._call("send", comm, stream, lambda: message)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: FakeComm, stream: int) -> None:
        message = _at(recvbuff, count, datatype), peer, 0
        self._call("recv", comm, stream, lambda: message)

    # How they run

    def _new(self, carrier: Communicator) -> FakeComm:
        self.comms.append(FakeComm(carrier))
        return self.comms[-1]

    def _begin(self, comm: FakeComm) -> None:
        assert not comm.ended.is_set(), "used after its end"
        if comm.left:
            raise real.NCCLError(int(real.Result.InvalidUsage))
        comm.left = POLLS

    def _op(self, comm: FakeComm, op: int) -> Any:
        return OPS[op] if op < len(OPS) else premul_sum(comm.operations[op])

    def _call(self, name: str, comm: FakeComm, stream: int, make: Callable[[], Any]) -> None:
        self.log.append((name, stream))
        assert self.driver._current.depth, "NCCL takes the current device"
        if self._group is not None:
            self._group.append((comm, name, stream, make))
            return
        assert name not in ("send", "recv")
        self._enqueue(comm, stream, make)

    def _enqueue(self, comm: FakeComm, stream: int, run: Callable[[], Any]) -> None:
        if comm.left == 0:
            self._begin(comm)

        def attempt() -> None:
            try:
                run()
            except Exception as error:
                if not comm.ended.wait(60):  # a kernel whose peer is gone goes on until it is aborted
                    raise error

        self.driver._put(stream, attempt)


def _at(address: int, count: int, datatype: int) -> Any:
    """The array that begins at an address."""
    kind = np.dtype(TYPES[datatype])
    if count == 0:
        return np.empty(0, kind)
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


def on_nccl(comm: Communicator, uuid: str | None = None, **options: Any) -> tuple[Communicator, FakeDriver, FakeNccl]:
    """A communicator over this NCCL, beside one of processes on a host."""
    control, carrier = comm.split(0), comm.split(0)
    assert control is not None and carrier is not None
    without_compilers()
    driver = FakeDriver(uuid=uuid)
    library = FakeNccl(driver, carrier, **options)
    library.beside = control
    return Communicator(Nccl(control._backend, driver, library)), driver, library  # type: ignore[arg-type]
