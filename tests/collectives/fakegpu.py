"""A GPU in memory, with the methods of `kernels.driver.Driver`: allocations are pieces of a shared file, a stream is a
thread, a launch runs the executor's Python, one thread a block. Ranks are real processes that map each other's pools.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.backends import cuda
from collectives.device_arrays import DeviceArray
from kernels import cubin, executor, grid, lowlatency, pack
from kernels.driver import DriverError, Kernel
from kernels.dtypes import find
from kernels.portable import bind
from kernels.primitives import load_acquire, load_word
from kernels.targets import python

POOL = 256 << 20
FIRST = 4096  # where the first allocation begins in the pool


def doze(round: int, flag: int, seen: int, spins: int, yields: int) -> bool:
    """CUDA's, in Python."""
    if round < spins + grid.SHORT_NAPS:
        time.sleep(0)
        return True
    time.sleep(grid.LONG_NS * 1e-9)
    if load_acquire(yields + 8 * grid.PATIENCE_STOP):
        return False
    return round - spins - grid.SHORT_NAPS < load_word(yields + 8 * grid.PATIENCE_NAPS)


def move(direction: str, dtype: Any, job: int) -> None:
    """What the kernels of `pack.cu` do, by their NumPy twins."""

    def words(address: int, count: int) -> list[int]:
        return np.frombuffer(ctypes.string_at(address, 8 * count), np.int64).tolist()

    def array(address: int, count: int) -> Any:
        memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype)

    segments, *tables, bucket, length, _ = words(job, pack.JOB_WORDS)
    starts, counts, addresses = (words(address, segments) for address in tables)
    tensors = [array(*place) for place in zip(addresses, counts)]
    if direction == "pack":
        pack.pack(tensors, array(bucket, length), starts)
    else:
        pack.unpack(array(bucket, length), tensors, starts)


class FakeDriver:
    """See above. `log` holds (method, arguments) of what was asked of it."""

    def __init__(self, device: int = 0, reachable: bool = True, uuid: str | None = None) -> None:
        self.device, self.name, self.capability, self.processors = device, "fake", (9, 0), 2
        self.uuid, self._reachable = uuid or f"{os.getpid()}-{device}", reachable
        self._file = os.memfd_create("pool")
        os.ftruncate(self._file, POOL)
        self._pages = mmap.mmap(self._file, POOL)
        self._start = np.frombuffer(self._pages, np.uint8).ctypes.data
        self._next = FIRST
        self._free: dict[int, list[int]] = {}  # by size
        self._sizes: dict[int, int] = {}
        self._attached: dict[int, mmap.mmap] = {}
        self._streams: dict[int, queue.SimpleQueue[Callable[[], Any]]] = {}
        self._graphs: dict[int, list[Callable[[], Any]]] = {}
        self._events: dict[int, threading.Event] = {}
        self.errors: list[BaseException] = []
        self.log: list[tuple[Any, ...]] = []
        self._current = threading.local()
        self._lock = threading.Lock()
        self._numbers = itertools.count(100)
        self.beside: Communicator | None = None  # lives as long as this

    def __enter__(self) -> FakeDriver:
        self._current.depth = getattr(self._current, "depth", 0) + 1
        return self

    def __exit__(self, *_: object) -> None:
        self._current.depth -= 1

    def use(self) -> None:
        self.log.append(("use",))

    def owner(self, address: int) -> int | None:
        assert self._current.depth, "no context is current"
        if self._start <= address < self._start + POOL or "cupy" in sys.modules:  # a stand-in's arrays lie anywhere
            return self.device
        return None

    def allocate(self, nbytes: int) -> int:
        size = -(-nbytes // 512) * 512
        with self._lock:
            if self._free.get(size):
                address = self._free[size].pop()
            else:
                address, self._next = self._start + self._next, self._next + size
                if self._next > POOL:
                    raise DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc")
            self._sizes[address] = size
        ctypes.memset(address, 0, size)
        return address

    def clear(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def free(self, address: int) -> None:
        self._free.setdefault(self._sizes[address], []).append(address)
        del self._sizes[address]

    def extent(self, address: int) -> tuple[int, int]:
        return self._start, POOL

    def export(self, start: int) -> bytes:
        assert start == self._start, "a handle is of a whole allocation"
        return struct.pack("<QQ48x", os.getpid(), self._file)

    def attach(self, handle: bytes) -> int:
        if not self._reachable:
            raise DriverError("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "cuIpcOpenMemHandle")
        pid, number = struct.unpack("<QQ48x", handle)
        assert pid != os.getpid(), "the driver refuses a process's own handle"
        with open(f"/proc/{pid}/fd/{number}", "r+b") as file:
            pages = mmap.mmap(file.fileno(), POOL)
        start = np.frombuffer(pages, np.uint8).ctypes.data
        self._attached[start] = pages
        return start

    def detach(self, start: int) -> None:
        del self._attached[start]

    def register(self, address: int, nbytes: int) -> int:
        assert address % mmap.PAGESIZE == 0
        self.log.append(("register", address, nbytes))
        return address

    def unregister(self, address: int) -> None:
        self.log.append(("unregister", address))

    def enable_access(self, other: FakeDriver) -> None:
        if not self._reachable:
            raise DriverError("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "cuCtxEnablePeerAccess")

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        taken = [np.full(nbytes, 0xA5, np.uint8) for _ in range(8)]  # of src, if it is nobody's any more
        self._put(stream, lambda: taken and ctypes.memmove(dst, src, nbytes))

    def load(self, cubin: bytes, name: str, lanes: int) -> Kernel:
        if cubin.startswith(b"pack"):
            kind = find(cubin.decode().split("-")[1]).numpy
            return Kernel(lambda job, row, block, blocks: block or move(name, kind, job), self.processors)
        dtype, operation = cubin.decode().split("-")
        small = name == "small"
        bodies = python.small(find(dtype), operation) if small else python.bodies(find(dtype), operation)
        run = bind(lowlatency.run_call if small else executor.run_call, {**bodies, "doze": doze}, python.as_it_is)
        call = lambda jobs, row, block, blocks: run(load_word(jobs + 8 * row), block, blocks, 0, 1)  # noqa: E731
        return Kernel(call, self.processors)

    def launch(self, kernel: Kernel, grid: tuple[int, int], lanes: int, argument: int, stream: int) -> None:
        assert self._current.depth and grid[0] * grid[1] <= kernel.most_blocks, "not all blocks run at once"
        self.log.append(("launch", grid, lanes, argument, stream))

        def run() -> None:
            blocks = [
                threading.Thread(target=kernel.function, args=(argument, row, channel, grid[0]))
                for row in range(grid[1])
                for channel in range(grid[0])
            ]
            for block in blocks:
                block.start()
            for block in blocks:
                block.join()

        self._put(stream, run)

    def new_stream(self) -> int:
        return next(self._numbers)

    def synchronize(self, stream: int) -> None:
        ended = threading.Event()
        self._put(stream, ended.set)
        ended.wait()

    def capturing(self, stream: int) -> bool:
        return stream in self._graphs

    def capture(self, stream: int) -> list[Callable[[], Any]]:
        """From now on the stream's work goes into the list that this returns."""
        self._graphs[stream] = []
        return self._graphs[stream]

    def replay(self, graph: list[Callable[[], Any]], stream: int) -> None:
        """End the capture, if it goes on, and run its work."""
        self._graphs.pop(stream, None)
        for work in graph:
            self._put(stream, work)

    def new_event(self) -> int:
        number = next(self._numbers)
        self._events[number] = ended = threading.Event()
        ended.set()
        return number

    def record(self, event: int, stream: int) -> None:
        assert not self.capturing(stream), "an event of a graph cannot be waited for outside of it"
        assert event in self._events, "an event is recorded that was given back"
        self.log.append(("record", event, stream))
        self._events[event] = ended = threading.Event()
        self._put(stream, ended.set)

    def wait(self, stream: int, event: int) -> None:
        self.log.append(("wait", stream, event))
        self._put(stream, self._events[event].wait)

    def done(self, event: int) -> bool:
        return self._events[event].is_set()

    def drop_event(self, event: int) -> None:
        del self._events[event]

    def drop_stream(self, stream: int) -> None:
        self.log.append(("drop", stream))

    def close(self) -> None:
        self._streams.clear()

    def _put(self, stream: int, work: Callable[[], Any]) -> None:
        if stream in self._graphs:
            self._graphs[stream].append(work)
            return
        with self._lock:
            if stream not in self._streams:
                self._streams[stream] = queue.SimpleQueue()
                threading.Thread(target=self._run, args=(self._streams[stream],), daemon=True).start()
        self._streams[stream].put(work)

    def _run(self, work: queue.SimpleQueue[Callable[[], Any]]) -> None:
        while True:
            try:
                work.get()()
            except BaseException as error:
                self.errors.append(error)

    # For tests

    def array(self, values: Any, stream: int = 0) -> DeviceArray:
        """A device array with these values."""
        values = np.ascontiguousarray(values)
        address = self.allocate(max(values.nbytes, 1))
        self.write(address, values.tobytes())
        return DeviceArray(address, values.shape, values.dtype, stream, self)

    def values(self, array: DeviceArray) -> Any:
        """What a device array holds when its stream has come so far."""
        self.synchronize(array.stream)
        return np.frombuffer(self.read(array.address, array.nbytes), array.dtype).reshape(array.shape)


def without_compilers() -> None:
    """Kernels are names from now on, which a `FakeDriver` knows."""
    cubin.load = lambda name, dtype, operation, *_: f"{dtype}-{operation}".encode()  # type: ignore[assignment]
    lowlatency.MOST_BYTES = 1 << 11  # a rank's first two calls write to all of the inboxes, and this is slow Python
    cubin.load_pack = lambda dtype, *_: f"pack-{dtype.name}".encode()  # type: ignore[assignment]


def on_gpu(comm: Communicator, **options: Any) -> tuple[Communicator, FakeDriver]:
    """A communicator of fake GPUs beside one of processes on a host."""
    control = comm.split(0)  # which ends with it
    assert control is not None
    without_compilers()
    driver = FakeDriver(**options)
    driver.beside = control
    return Communicator(cuda.Cuda(control._backend, driver)), driver  # type: ignore[arg-type]
