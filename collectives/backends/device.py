"""What the backends of GPUs share: a communicator of the same ranks on the host beside them, `control`, and streams.

Calls of GPU arrays are put into the caller's current stream, and the host goes on; `wait` of an asynchronous one makes
the caller's stream wait. What is put into streams is written down in a ledger, where ranks compare it. Arrays of the
CPU, agreement on allocations, splits, lost peers, counters and locks are `control`'s.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import arrays, device_arrays
from collectives.backends.agreement import agree, check_sizes
from collectives.backends.base import Backend, Failing, Pending
from collectives.book import Calls
from collectives.call import ORDINARY, Call, describe
from collectives.device_arrays import DeviceArray
from collectives.errors import CollectiveError, PeerLostError
from collectives.ledger import Ledger
from collectives.region import CLOSED, Region
from collectives.watch import Watch
from kernels import cubin, pack
from kernels.dtypes import DType, find

if TYPE_CHECKING:
    from collectives.backends.shm import Shm
    from collectives.backends.tcp import Seat, Tcp
    from kernels.driver import Driver, Kernel

_MOST_JOBS = 256
_MOST_KNOWN = 4096  # addresses of which it is known that they are this GPU's
LOOK = 0.05  # seconds between two looks at the peers
# A block's number stands above its offset in the word that tells where an array lies.
OFFSET_BITS = 44


@dataclass
class Block:
    """Device memory that every rank has. `addresses[r]`: where rank r's is seen in this process, 0 where it is not."""

    addresses: list[int]
    nbytes: int
    attached: list[int] = field(default_factory=list)  # where the peers' allocations begin here
    handle: Any = None  # what a library knows it by

    def offset(self, rank: int, address: int, nbytes: int) -> int | None:
        """Where a range of `rank`'s memory lies in it, if it does."""
        at = address - self.addresses[rank]
        return at if 0 <= at and at + nbytes <= self.nbytes else None


class OnDevice(Backend):
    """One communicator of GPUs, a part of what it is. `driver` is this rank's GPU. `compares`: whether ranks compare
    what they call."""

    control: Shm | Tcp

    def __init__(self, control: Shm | Tcp, driver: Driver, compares: bool = True) -> None:
        self.control, self.driver, self._compares = control, driver, compares
        self._failing = Failing(self)
        self.rank, self.size, self.eager_bytes = control.rank, control.size, control.eager_bytes
        self._closed = False
        self._blocks: dict[int, Block] = {}  # symmetric memory, by number
        self._dropped: set[int] = set()  # blocks that nobody here uses any more
        self._known: set[int] = set()  # addresses of arrays in this GPU's memory
        self._next_block = 0
        self._enqueued = 0  # calls put into streams
        self._last_stream: int | None = None  # of the last call that was no part of a graph
        self._left_alone: deque[tuple[int, Any]] = (
            deque()
        )  # the events of calls that nobody waits for, and their arrays
        with driver:
            self._last = driver.new_event()
            self._side = driver.new_stream()
        self._mutex = threading.RLock()  # around what the guard thread shares
        self._movers: dict[tuple[str, int], Kernel] = {}
        self._jobs: dict[tuple[Any, ...], int] = {}  # of `pack` and `unpack`, in GPU memory
        self._ledger: Ledger | Calls = control.ledger()
        self._closing, self._ending = threading.Event(), threading.RLock()
        self._guard = threading.Thread(target=self._watch, name="mgpu guard", daemon=True)

    # What each of them does in its own way

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """This communicator is of no further use: let the peers know, and what is in streams end."""

    @abstractmethod
    def _watch(self) -> None:
        """What the guard thread does until `_closing` is set: look after calls for which nobody waits on the host."""

    @abstractmethod
    def _check(self) -> None:
        """Raise what has gone wrong on the GPU or with the peers."""

    @abstractmethod
    def _prepare(self, call: Call, source: DeviceArray | None, target: DeviceArray | None, captured: bool) -> Any:
        """What `_put` needs for a call. Raises for one that cannot be made, before anything has been done."""

    @abstractmethod
    def _put(self, work: Any, stream: int, captured: bool, launched: Callable[[], None]) -> None:
        """Put a call into a stream; call `launched` when it is there."""

    @abstractmethod
    def _share(self, nbytes: int) -> Block:
        """Zeroed memory of every rank's. All ranks call it together, and what it raises, all raise."""

    @abstractmethod
    def _give_back(self, block: Block, own: int) -> None:
        """Undo `_share`, all ranks together. `own`: this rank's address."""

    def settle(self) -> None:
        """Wait until what was put into streams is there."""

    def _take_leave(self) -> None:
        """Before the end, when all calls have ended and the guard thread still runs: what peers have a part in."""

    def _end(self) -> None:
        """The end, whatever has gone wrong."""

    # Calls

    def run(self, call: Call, source: Any, target: Any) -> None:
        if call.collective == "barrier":
            self._finish()
        if _on_host(source, target):
            self._check()
            self.control.run(call, source, target)
            return
        self.enqueue(call, source, target, _stream(source, target))

    def start(self, call: Call, source: Any, target: Any) -> Pending:
        if _on_host(source, target):
            self._check()
            return self.control.start(call, source, target)
        stream, driver = _stream(source, target), self.driver
        self._let_go()
        with driver:
            event = driver.new_event()
            driver.record(event, stream)
            driver.wait(self._side, event)
            running = _Running(self, event, (source, target), driver.capturing(self._side), self._left_alone)
            self.enqueue(call, source, target, self._side, running.launched)  # which keeps it until then
        return running

    def plan(self, call: Call, source: Any, target: Any) -> Callable[..., None]:
        if _on_host(source, target):
            return self.control.plan(call, source, target)

        def run(keep: object = None) -> None:
            self.enqueue(call, source, target, _stream(source, target))

        return run

    def enqueue(
        self,
        call: Call,
        source: DeviceArray | None,
        target: DeviceArray | None,
        stream: int,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Put a call into a stream; `then` is called when it is there."""
        if not all(array is None or isinstance(array, DeviceArray) for array in (source, target)):
            raise TypeError("x and out must both be in GPU memory, or both in the CPU's")
        self._check()
        regions: Sequence[Region | Seat] = self.control.regions
        gone = [rank for rank, region in enumerate(regions) if region.state == CLOSED]
        if gone:
            raise PeerLostError(f"{describe(call.signature())}: rank {gone[0]} has closed its communicator")
        driver = self.driver
        with driver:
            self._check_owner(source, target)
            captured = driver.capturing(stream)
            work = self._prepare(call, source, target, captured)
            # Calls of a communicator follow one another, whatever their streams. What is captured keeps to its graph.
            if not captured and self._last_stream not in (None, stream):
                driver.wait(stream, self._last)

            def launched(keep: object = (source, target)) -> None:
                # Who waits for others that share its GPU keeps its arrays until then: only what is in a stream is safe
                # in the hands of an allocator that knows streams.
                if not captured:
                    driver.record(self._last, stream)
                    self._last_stream = stream
                    self._enqueued += 1
                if then is not None:
                    then()

            with self._failing:
                self._announce(call)
            self._put(work, stream, captured, launched)

    def _check_owner(self, *given: DeviceArray | None) -> None:
        """Raise ValueError for arrays in another GPU's memory: a kernel that touches them ends all of CUDA here."""
        for array in given:
            if array is None or not array.size or array.address in self._known:
                continue
            owner = self.driver.owner(array.address)
            shared = (
                block.offset(rank, array.address, 0) for block in self._blocks.values() for rank in range(self.size)
            )
            if owner != self.driver.device and all(offset is None for offset in shared):
                where = "no memory of a GPU" if owner is None else f"memory of GPU {owner}"
                raise ValueError(
                    f"an array at {array.address:#x} lies in {where}, and rank {self.rank} of this communicator has "
                    f"GPU {self.driver.device}; cupy.cuda.Device({self.driver.device}).use(), or "
                    f"torch.cuda.set_device({self.driver.device}), makes arrays there"
                )
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known.add(array.address)

    def _announce(self, call: Call) -> None:
        """Write a call down for the others, and compare it with theirs."""
        ledger = self._ledger
        if self._compares and ledger.behind():
            with Watch(self.control, partial(describe, call.signature())) as watch:
                while behind := ledger.behind():
                    watch.look(behind, lambda: f"{behind} are far behind")
                    time.sleep(LOOK)
        with self._mutex:
            ledger.begin(call.signature() if self._compares else None)
            if self._compares:
                ledger.compare()

    def _finish(self) -> None:
        """Wait, on the host, for every call that was put into a stream."""
        self._check()
        self.settle()
        if self._last_stream is not None:
            with self.driver:
                self.wait_for(self._last)
        self._check()
        self._let_go()

    def _let_go(self) -> None:
        """Of the arrays of calls that nobody has waited for, and that have ended."""
        with self.driver as driver:
            while self._left_alone and driver.done(self._left_alone[0][0]):
                event, _ = self._left_alone.popleft()
                driver.drop_event(event)

    def wait_for(self, event: int) -> None:
        """Wait, on the host, for an event, in a way that Ctrl-C ends."""
        pause = 1e-5
        while not self.driver.done(event):
            self._check()
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    # Memory that is shared

    def allocate(self, nbytes: int) -> DeviceArray:
        self._finish()  # the driver may wait for kernels, which may wait for peers
        pending = sorted(self._dropped.copy())
        answers = agree(self.control, "empty", [nbytes, pending])
        check_sizes(self, [size for size, _ in answers])
        with self.driver:
            for number in sorted(set.intersection(*(set(theirs) for _, theirs in answers))):
                block = self._blocks.pop(number)
                self._give_back(block, block.addresses[self.rank])
                self._dropped.discard(number)
            block = self._share(nbytes)
        number, self._next_block = self._next_block, self._next_block + 1
        self._blocks[number] = block
        memory = DeviceArray(block.addresses[self.rank], (nbytes,), np.uint8)
        weakref.finalize(memory, self._dropped.add, number).atexit = False
        return memory

    def peer_view(self, array: Any, rank: int) -> Any:
        if not device_arrays.is_on_device(array):
            return self.control.peer_view(array, rank)
        seen = device_arrays.view(array)
        place = self._locate(seen)
        if place == ORDINARY:
            raise ValueError(
                "only symmetric memory has a peer's view; allocate the array with comm.empty or comm.zeros, on GPUs "
                "that reach each other's memory"
            )
        address = self.seen_at(seen, rank)
        if not address:
            raise ValueError(f"rank {rank}'s memory cannot be read or written from rank {self.rank}'s GPU; send it")
        return DeviceArray(address, seen.shape, seen.dtype, seen.stream, (self._blocks[place >> OFFSET_BITS], array))

    def seen_at(self, array: DeviceArray, rank: int) -> int:
        """Where this rank's GPU sees `rank`'s counterpart of symmetric memory; 0 where it does not."""
        place = self._locate(array)
        if place == ORDINARY:
            return array.address if rank == self.rank else 0
        block, offset = self._blocks[place >> OFFSET_BITS], place & (1 << OFFSET_BITS) - 1
        return block.addresses[rank] and block.addresses[rank] + offset

    def _locate(self, array: DeviceArray | None) -> int:
        """The word that says where in symmetric memory an array lies, the same on every rank, or ORDINARY."""
        if array is not None:
            for number, block in self._blocks.items():
                offset = block.offset(self.rank, array.address, array.nbytes)
                if offset is not None:
                    return number << OFFSET_BITS | offset
        return ORDINARY

    # The rest

    def view(self, x: Any, role: str = "the array", writable: bool = False) -> Any:
        on_device = device_arrays.is_on_device(x)
        return device_arrays.view(x, role, writable) if on_device else arrays.view(x, role, writable)

    def fresh(self, like: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Callable[[], Any]]:
        if not device_arrays.is_on_device(like):
            return super().fresh(like, shape, dtype)
        if isinstance(like, DeviceArray):
            with self.driver:
                address = self.driver.allocate(max(1, math.prod(shape) * np.dtype(dtype).itemsize))
            new = DeviceArray(address, shape, dtype, like.stream)
            weakref.finalize(new, _free, self.driver, address).atexit = False
            return new, lambda: new
        array = device_arrays.fresh(like, shape, dtype)
        return device_arrays.view(array), lambda: device_arrays.same_kind(like, array)

    def present(self, memory: Any) -> Any:
        return device_arrays.present(memory)

    def exchange(self, sends: Sequence[tuple[Any, int, int]], receives: Sequence[tuple[Any, int, int]]) -> None:
        """Messages go through the host's memory."""
        outgoing = [(self._fetched(array), peer, tag) for array, peer, tag in sends]
        incoming = [(self._fetched(array, copy=False), peer, tag) for array, peer, tag in receives]
        self.control.exchange(outgoing, incoming)
        with self.driver:
            for (array, _, _), (data, _, _) in zip(receives, incoming, strict=True):
                if isinstance(array, DeviceArray):
                    self.driver.write(array.address, data.tobytes())

    def _fetched(self, array: Any, copy: bool = True) -> Any:
        """A device array's contents in host memory (or only room for them), when its stream has come so far."""
        if not isinstance(array, DeviceArray):
            return array
        with self.driver:
            self.driver.synchronize(array.stream)
            if not copy:
                return np.empty(array.shape, array.dtype)
            return np.frombuffer(self.driver.read(array.address, array.nbytes), array.dtype).reshape(array.shape)

    def assign(self, target: Any, source: Any) -> None:
        if not isinstance(target, DeviceArray):
            super().assign(target, self._fetched(source))
            return
        source = arrays.contiguous(source)
        with self.driver:
            self.driver.copy(target.address, arrays.address(source), target.nbytes, target.stream)
            if not isinstance(source, DeviceArray):  # which may be a copy, and is needed until then
                self.driver.synchronize(target.stream)
            elif not self.driver.capturing(target.stream):  # `signal`, and what comes next, comes after it
                self.driver.record(self._last, target.stream)
                self._last_stream = target.stream

    def pack(self, sources: Sequence[Any], bucket: Any) -> None:
        if isinstance(bucket, DeviceArray):
            self._move("pack", sources, bucket)
        else:
            super().pack(sources, bucket)

    def unpack(self, bucket: Any, targets: Sequence[Any]) -> None:
        if isinstance(bucket, DeviceArray):
            self._move("unpack", targets, bucket)
        else:
            super().unpack(bucket, targets)

    def _move(self, direction: str, tensors: Sequence[DeviceArray], bucket: DeviceArray) -> None:
        """Between tensors and a bucket, in one launch on its stream."""
        self._check()
        if not bucket.size:
            return
        driver, dtype, stream = self.driver, find(bucket.dtype), bucket.stream
        with driver:
            captured = driver.capturing(stream)
            kernel = self._mover(direction, dtype)
            job = self._moving(tensors, bucket, captured)
            blocks = pack.blocks(bucket.size, dtype, dtype, kernel.most_blocks)
            driver.launch(kernel, (blocks, 1), pack.THREADS, job, stream)
            if not captured:
                driver.record(self._last, stream)
                self._last_stream = stream

    def _mover(self, direction: str, dtype: DType) -> Kernel:
        key = direction, dtype.itemsize
        if key not in self._movers:
            code = cubin.load_pack(dtype, self.driver.capability, self.control.look_out)
            self._movers[key] = self.driver.load(code, direction, pack.THREADS)
        return self._movers[key]

    def _moving(self, tensors: Sequence[DeviceArray], bucket: DeviceArray, captured: bool) -> int:
        """The address, in GPU memory, of the job of moving between these: the same one for the way back."""
        key = bucket.address, *((tensor.address, tensor.nbytes) for tensor in tensors)
        if key in self._jobs and not captured:
            return self._jobs[key]
        self._check_owner(bucket, *tensors)
        starts = np.cumsum([0, *(tensor.size for tensor in tensors)])[:-1].tolist()
        addresses, counts = [tensor.address for tensor in tensors], [tensor.size for tensor in tensors]
        rows = pack.table(addresses, counts, starts, bucket.size)
        at = self.driver.allocate(8 * pack.JOB_WORDS + rows.nbytes)
        words = pack.job(rows.shape[1], at + 8 * pack.JOB_WORDS, bucket.address, bucket.size)
        self.driver.write(at, words.tobytes() + rows.tobytes())
        if captured:  # a graph's job is the graph's own: replays may run at any time
            return at
        if len(self._jobs) >= _MOST_JOBS:
            self._finish()
            for old in self._jobs.values():
                self.driver.free(old)
            self._jobs.clear()
        self._jobs[key] = at
        return at

    def signal(self, rank: int) -> None:
        self._finish()
        self.control.signal(rank)

    def wait_signal(self, rank: int) -> None:
        self._check()
        self.control.wait_signal(rank)

    # Counters and locks that ranks share lie in the host's memory.

    def fetch_add(self, word: Any, value: int, rank: int) -> int:
        return self.control.fetch_add(word, value, rank)

    def acquire(self, lock: Any, rank: int) -> None:
        self.control.acquire(lock, rank)

    def release(self, lock: Any, rank: int) -> None:
        self.control.release(lock, rank)

    def wait_until(self, word: Any, value: int, rank: int) -> None:
        self.control.wait_until(word, value, rank)

    def check(self, ranks: Sequence[int]) -> None:
        self._check()
        self.control.check(ranks)

    def abort(self, reason: str) -> None:
        self.fail(CollectiveError(reason))

    def disown(self, reason: str) -> None:
        self.control.disown(reason)
        self._closed = True
        self._ending = threading.RLock()  # whoever has it is not here
        self._closing.set()

    def close(self) -> None:
        with self._ending:
            if self._closed:
                return
            self._closed = True
            try:
                self._finish()
                self._take_leave()
            except CollectiveError:
                pass  # it was raised before; memory that peers may still use stays until the process ends
            self._closing.set()
            self._guard.join()
            self._end()
            self.control.close()


@contextmanager
def beside(control: Shm | Tcp) -> Iterator[None]:
    """Where an engine is made beside `control`, which ends with it: if it cannot be made, those who wait for this rank
    in there hear so."""
    try:
        yield
    except BaseException as error:
        control.fail(error)
        control.close()
        raise


class _Running(Pending):
    """A call in a stream of the communicator's own. `left_alone`: where its event and its arrays go if it is dropped
    before anybody has waited for it: what allocates in the caller's streams does not know of that one."""

    def __init__(self, engine: OnDevice, event: int, keep: Any, captured: bool, left_alone: deque[Any]) -> None:
        self._engine, self._event, self._keep = engine, event, keep
        self._needed = [] if captured else [keep]
        weakref.finalize(self, _drop_event, engine.driver, event, self._needed, left_alone).atexit = False
        self._begun, self._ended = time.monotonic_ns(), 0

    def launched(self) -> None:
        """The call is in the stream now, perhaps only since others that share the GPU have made theirs."""
        self._engine.driver.record(self._event, self._engine._side)

    def wait(self) -> None:
        """Let the caller's current stream wait for the call; the host goes on."""
        engine = self._engine
        engine._check()
        engine.settle()
        with engine.driver:
            engine.driver.wait(_stream(*self._keep), self._event)
        self._needed.clear()

    def done(self) -> bool:
        with self._engine.driver:
            ended = self._engine.driver.done(self._event)
        if ended and not self._ended:
            self._ended = time.monotonic_ns()
        return ended

    def times(self) -> tuple[int, int]:
        """As the host saw it: when it was put into the stream, and when it was first seen to have ended."""
        return self._begun, self._ended or time.monotonic_ns()


def _on_host(source: Any, target: Any) -> bool:
    return not isinstance(source, DeviceArray) and not isinstance(target, DeviceArray)


def _drop_event(driver: Driver, event: int, needed: Sequence[Any], left_alone: deque[Any]) -> None:
    with driver:
        if needed and not driver.done(event):
            left_alone.append((event, list(needed)))
        else:
            driver.drop_event(event)


def _free(driver: Driver, address: int) -> None:
    with driver:
        driver.free(address)


def _stream(source: DeviceArray | None, target: DeviceArray | None) -> int:
    """The caller's current stream, as the arrays' library says it."""
    array = target if source is None else source
    assert array is not None
    return array.stream
