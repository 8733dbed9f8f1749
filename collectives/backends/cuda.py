"""GPUs of one host: a process each, joined by memory that every GPU reads and writes directly.

The device part of a communicator is what the shm backend has in shared memory: flags, boards and scratch, in GPU memory
that the processes share by CUDA IPC. A call is one launch of the executor on the caller's stream, and the host does not
wait for it. Everything else (agreement on allocations, splits, lost peers, messages, CPU arrays) is done by a shm
communicator of the same ranks beside it, `control`.

What goes wrong on the GPU is reported into a page of host memory, the *panel*, and raised by the next call, `wait` or
`close`. A thread looks at the peers' health, and lets kernels that wait for a lost one go.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives import arrays, device_arrays, programs
from collectives.backends.base import Backend, Pending
from collectives.backends.shm import SLOTS, Shm, disagreement
from collectives.call import ORDINARY, Call, describe
from collectives.device_arrays import DeviceArray
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from collectives.job import Job, Link, relocate
from collectives.memory import PAGE, Heap
from collectives.region import CLOSED, OPEN
from collectives.watch import Watch
from kernels import cubin, grid
from kernels import executor as x

if TYPE_CHECKING:
    from kernels.driver import Driver, Kernel

CHANNELS = 16  # blocks of a launch, at most
JOB_BYTES = 8 << 20  # for the jobs of the calls that are kept
LOOK = 0.05  # seconds between two looks at the peers
_FAREWELL = 1.0  # seconds that a rank waits for the others to close, to give memory back that they see
_LOOKS = 200  # at a flag, before the first nap
_LINE = 64
# The panel: byte offsets.
_FINISHED, _REPORT, _PATIENCE, _LEFT = 0, _LINE, 2 * _LINE, 3 * _LINE
# A block's number stands above its offset in the word that tells where an array lies.
_OFFSET_BITS = 44


@dataclass
class Block:
    """Device memory that every rank has and every rank sees. `addresses[r]`: rank r's, in this process."""

    addresses: list[int]
    nbytes: int
    attached: list[int]  # where the peers' allocations begin here

    def offset(self, rank: int, address: int, nbytes: int) -> int | None:
        """Where a range of `rank`'s memory lies in it, if it does."""
        at = address - self.addresses[rank]
        return at if 0 <= at and at + nbytes <= self.nbytes else None


class Launch(NamedTuple):
    """A call's job in device memory, and the kernel that runs it."""

    table: int  # the kernel's argument
    kernel: Kernel
    place: int  # in the job heap


@dataclass(frozen=True)
class Layout:
    """What lies where in the device memory of one rank of a communicator, in bytes from its start."""

    size: int
    channels: int
    slot_bytes: int

    @property
    def flags(self) -> int:
        """The flags that peers raise: for each channel, one line a peer. The board is before them."""
        return self.channels * x.PAGES * x.PAGE_BYTES

    @property
    def flags_stride(self) -> int:
        """From one channel's flags to the next one's."""
        return self.size * _LINE

    @property
    def scratch(self) -> int:
        """The scratch slots."""
        return -(-(self.flags + self.channels * self.flags_stride) // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.scratch + SLOTS * self.slot_bytes


class Process:
    """The ranks of one process, each on one of `drivers` (the same object for ranks that share a GPU).

    Streams promise no concurrency: kernels that wait for each other on one GPU, in launches of their own, may wait for
    ever. So of ranks that share a GPU, the last to make a call launches it for all, as one cooperative launch.
    """

    def __init__(self, drivers: Sequence[Driver]) -> None:
        self.drivers = list(drivers)
        self._calls: list[deque[tuple[Launch, int, int | None, Callable[[], None]]]] = [deque() for _ in drivers]
        self._tables: dict[tuple[int, ...], int] = {}
        self._families: dict[tuple[int, ...], Process] = {}
        self._lock = threading.Lock()

    def family(self, ranks: tuple[int, ...], arena: int) -> Process:
        """Of some of the ranks, in this order: the same object for all of them."""
        with self._lock:
            key = (*ranks, arena)
            return self._families.setdefault(key, Process([self.drivers[rank] for rank in ranks]))

    def pending(self, rank: int) -> bool:
        """Whether a call of the rank's waits for others that share its GPU."""
        return bool(self._calls[rank])

    def launch(self, engine: Cuda, launch: Launch, stream: int, captured: bool, launched: Callable[[], None]) -> None:
        """Launch a call of one rank, now or when the last of those that share its GPU makes it; then say so."""
        driver = engine.driver
        sharers = [rank for rank, other in enumerate(self.drivers) if other is driver]
        event = None
        if len(sharers) > 1 and not captured:  # what is before the call in its stream comes before all of the launch
            event = driver.new_event()
            driver.record(event, stream)
        with self._lock:
            self._calls[engine.rank].append((launch, stream, event, launched))
            if not all(self._calls[rank] for rank in sharers):
                return
            calls = [self._calls[rank].popleft() for rank in sharers]
            tables = tuple(each.table for each, _, _, _ in calls)
            if tables not in self._tables:
                jobs = b"".join(driver.read(table, 8) for table in tables)
                self._tables[tables] = tables[0] if len(tables) == 1 else driver.allocate(len(jobs))
                driver.write(self._tables[tables], jobs)
            others = {other for _, other, _, _ in calls} - {stream}
            for _, other, before, _ in calls:
                if before is not None and other != stream:
                    driver.wait(stream, before)
            grid_ = engine.channels, len(calls)
            driver.launch(launch.kernel, grid_, grid.MOST_LANES, self._tables[tables], stream)
            if others and not captured:
                after = driver.new_event()
                driver.record(after, stream)
                for other in others:
                    driver.wait(other, after)
                driver.drop_event(after)
            for _, _, before, done in calls:
                if before is not None:
                    driver.drop_event(before)
                done()


class Cuda(Backend):
    """One communicator of GPUs. All ranks of `control` make theirs together. `driver` is this rank's GPU; `process` is
    given where all ranks are in this process."""

    name = "cuda"

    def __init__(self, control: Shm, driver: Driver, process: Process | None = None) -> None:
        self.control, self.driver, self._process = control, driver, process
        self.rank, self.size, self.eager_bytes = control.rank, control.size, control.eager_bytes
        mine = {"uuid": driver.uuid, "blocks": driver.processors}
        self._devices = [json.loads(answer) for answer in control.gather_bytes(json.dumps(mine).encode())]
        sharers = max(sum(d["uuid"] == other["uuid"] for d in self._devices) for other in self._devices)
        blocks = min(device["blocks"] for device in self._devices)
        self.channels = max(1, min(CHANNELS, blocks // sharers))
        self._panels = control.allocate(PAGE)
        self._panel = self._panels.view(np.int64)
        self._every_panel = [control.peer_view(self._panel, rank) for rank in range(self.size)]
        self._failure: CollectiveError | None = None
        self._lost: CollectiveError | None = None
        self._closed = False
        self._enqueued = 0
        self._last_stream: int | None = None  # of the last call that was no part of a graph
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._blocks: dict[int, Block] = {}
        self._dropped: set[int] = set()
        self._next_block = 0
        self._host_arena: list[Any] = []  # every rank's, where GPUs do not reach each other
        layout = Layout(self.size, self.channels, control.host.scratch // SLOTS // _LINE * _LINE)
        with driver:
            panel = driver.register(self._panels.ctypes.data, PAGE)
            self._arena, self._staged = self._share_arena(layout)
            self._link = self._make_link(layout, panel)
            self._job_memory = driver.allocate(JOB_BYTES)
            self._job_heap = Heap(0, JOB_BYTES)
            link = self._link
            self._link_address, _ = self._upload(lambda base: relocate(link.words, link.tables, base))
            self._last = driver.new_event()
            self._side = driver.new_stream()
        self._closing = threading.Event()
        self._guard = threading.Thread(target=self._watch, name="mgpu guard", daemon=True)
        self._guard.start()
        control.gather_bytes(b"")  # nobody touches a peer's memory before everybody's is ready

    # Memory that is shared

    def _share_arena(self, layout: Layout) -> tuple[Block, bool]:
        """The flags, boards and scratch of every rank, and whether they lie in host memory."""
        try:
            return self._share(layout.nbytes), False
        except PermissionError as error:
            warnings.warn(
                f"no GPU of this communicator reads another's memory directly ({error}); data goes through the host's "
                f"memory, more slowly",
                stacklevel=2,
            )
        host = self.control.allocate(layout.nbytes)
        seen = [self.control.peer_view(host, rank) for rank in range(self.size)]
        addresses = [self.driver.register(view.ctypes.data, layout.nbytes) for view in seen]
        self._host_arena = seen
        return Block(addresses, layout.nbytes, []), True

    def _share(self, nbytes: int) -> Block:
        """Device memory of every rank, zeroed and mapped here. Raises MemoryError, or PermissionError where GPUs cannot
        reach each other, on every rank alike."""
        from kernels.driver import DriverError

        driver, own, problem = self.driver, 0, ""
        handle = b""
        try:
            own = driver.allocate(max(nbytes, 1))
            # A handle is of a whole allocation of the driver's; ours may begin inside of one.
            start, _ = driver.extent(own)
            offset = own - start
            handle = driver.export(start)
        except DriverError as error:
            problem = str(error)
            offset = 0
        mine = json.dumps([handle.hex(), own, offset, problem]).encode()
        answers = [json.loads(answer) for answer in self.control.gather_bytes(mine)]
        _raise_problems(MemoryError, [text for *_, text in answers], lambda: driver.free(own) if own else None)
        addresses: list[int] = []
        attached: list[int] = []
        for rank, (text, address, offset, _) in enumerate(answers):
            try:
                if self._process is not None:
                    driver.enable_access(self._process.drivers[rank])
                elif rank != self.rank:
                    attached.append(driver.attach(bytes.fromhex(text)))
                    address = attached[-1] + offset
            except DriverError as error:
                problem = str(error)
                break
            addresses.append(address)
        block = Block(addresses, nbytes, attached)
        problems = [answer.decode() for answer in self.control.gather_bytes(problem.encode())]
        _raise_problems(PermissionError, problems, lambda: self._give_back(block, own))
        return block

    def _give_back(self, block: Block, own: int) -> None:
        """Unmap the peers' memory, and when all have unmapped, free this rank's."""
        for start in block.attached:
            self.driver.detach(start)
        self.control.gather_bytes(b"")
        self.driver.free(own)

    def allocate(self, nbytes: int) -> DeviceArray:
        self._finish()  # the driver may wait for kernels, which may wait for peers
        pending = sorted(self._dropped.copy())
        answers = self.control.agree("empty", [nbytes, pending])
        if len({size for size, _ in answers}) > 1:
            sizes = ", ".join(f"rank {rank} {size:,}" for rank, (size, _) in enumerate(answers))
            error = CollectiveMismatchError(f"the ranks allocate different numbers of bytes: {sizes}")
            self.control.fail(error)
            raise error
        for launch in self._launches.values():  # an address may come to mean another kind of memory
            self._job_heap.free(launch.place)
        self._launches.clear()
        with self.driver:
            for number in sorted(set.intersection(*(set(theirs) for _, theirs in answers))):
                block = self._blocks.pop(number)
                self._give_back(block, block.addresses[self.rank])
                self._dropped.discard(number)
            if self._staged:
                address = self.driver.allocate(max(nbytes, 1))
                memory = DeviceArray(address, (nbytes,), np.uint8)
                weakref.finalize(memory, _free, self.driver, address).atexit = False
                return memory
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
                "only symmetric memory has a peer's view; allocate the array with comm.empty or comm.zeros"
                + (", on GPUs that reach each other's memory" if self._staged else "")
            )
        block, offset = self._blocks[place >> _OFFSET_BITS], place & (1 << _OFFSET_BITS) - 1
        return DeviceArray(block.addresses[rank] + offset, seen.shape, seen.dtype, seen.stream, (block, array))

    def _locate(self, array: DeviceArray | None) -> int:
        """The word that says where in symmetric memory an array lies, the same on every rank, or ORDINARY."""
        if array is not None:
            for number, block in self._blocks.items():
                offset = block.offset(self.rank, array.address, array.nbytes)
                if offset is not None:
                    return number << _OFFSET_BITS | offset
        return ORDINARY

    # Calls

    def run(self, call: Call, source: Any, target: Any) -> None:
        if call.collective == "barrier":
            self._finish()
        if _on_host(source, target):
            self._check()
            self.control.run(call, source, target)
            return
        self._enqueue(call, source, target, _stream(source, target))

    def start(self, call: Call, source: Any, target: Any) -> Pending:
        if _on_host(source, target):
            self._check()
            return self.control.start(call, source, target)
        stream, driver = _stream(source, target), self.driver
        with driver:
            event = driver.new_event()
            driver.record(event, stream)
            driver.wait(self._side, event)
            self._enqueue(call, source, target, self._side, lambda: driver.record(event, self._side))
        return _Running(self, event, (source, target))

    def plan(self, call: Call, source: Any, target: Any) -> Callable[..., None]:
        if _on_host(source, target):
            return self.control.plan(call, source, target)

        def run(keep: object = None) -> None:
            self._enqueue(call, source, target, _stream(source, target))

        return run

    def _enqueue(
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
        gone = [rank for rank, region in enumerate(self.control.regions) if region.state == CLOSED]
        if gone:
            raise PeerLostError(f"{describe(call.signature())}: rank {gone[0]} has closed its communicator")
        driver = self.driver
        with driver:
            captured = driver.capturing(stream)
            launch = self._launch(call, source, target, captured)
            # Calls of a communicator follow one another, whatever their streams. What is captured keeps to its graph.
            if not captured and self._last_stream not in (None, stream):
                driver.wait(stream, self._last)

            def launched() -> None:
                if not captured:
                    driver.record(self._last, stream)
                    self._last_stream = stream
                    self._enqueued += 1
                if then is not None:
                    then()

            if self._process is not None:
                self._process.launch(self, launch, stream, captured, launched)
            else:
                driver.launch(launch.kernel, (self.channels, 1), grid.MOST_LANES, launch.table, stream)
                launched()

    def _launch(self, call: Call, source: DeviceArray | None, target: DeviceArray | None, captured: bool) -> Launch:
        """The launch for a call with these arrays, made when it is asked for the first time."""
        start, end = (0 if array is None else array.address for array in (source, target))
        key = call, start, end
        launch = self._launches.get(key)
        if launch is None or captured:  # a graph's job is the graph's own: replays may run at any time
            self._check_size(call, source, target)
            launch = self._make_launch(call, start, end, (self._locate(source), self._locate(target)))
            if captured:
                return launch
            self._launches[key] = launch
        return launch

    def _check_size(self, call: Call, source: DeviceArray | None, target: DeviceArray | None) -> None:
        for array in (source, target):
            if array is not None and array.address % array.itemsize:
                raise ValueError(
                    f"an array of {array.dtype} at address {array.address:#x} is not aligned to its elements; "
                    f"{describe(call.signature())} needs it to be"
                )

    def _make_launch(self, call: Call, start: int, end: int, places: tuple[int, int]) -> Launch:
        symmetric = ORDINARY not in places
        ordinary = self._job(call, "staged", (ORDINARY, ORDINARY))
        ordinary.inputs[self.rank], ordinary.outputs[self.rank] = start, end
        first = ordinary
        if symmetric:
            first = self._job(call, "symmetric", places)
            for table, place in zip((first.inputs, first.outputs), places, strict=True):
                block, offset = self._blocks[place >> _OFFSET_BITS], place & (1 << _OFFSET_BITS) - 1
                table[:] = [address + offset for address in block.addresses]

        def compose(base: int) -> Any:
            """The kernel's table of one job, the job, and the one to run where the ranks' arrays lie differently."""
            jobs = [first, ordinary]
            table, at = np.zeros(8, np.int64), base + 8 * 8
            table[0] = at
            words = [table]
            for job in jobs:
                job.words[x.JOB_LINK] = self._link_address
                job.words[x.JOB_ALTERNATIVE] = 0
                words.append(relocate(job.words, job.tables, at))
                at += words[-1].nbytes
            words[1][x.JOB_ALTERNATIVE] = base + 8 * (len(table) + len(words[1]))
            return np.concatenate(words)

        address, place = self._upload(compose)
        return Launch(address, self._kernel(call), place)

    def _job(self, call: Call, memory: str, places: tuple[int, int]) -> Job:
        encoded, layout = programs.for_call(call, self._link, memory)
        descriptor = (*call.signature(), encoded.number, *places)
        return Job(
            self._link, encoded, layout, call.dtype, scale=call.scale, descriptor=descriptor, channels=self.channels
        )

    def _upload(self, make: Callable[[int], Any]) -> tuple[int, int]:
        """Put the words that make(address) gives into the memory for jobs: their address, and their place there."""
        nbytes = make(0).nbytes
        while True:
            try:
                place = self._job_heap.allocate(nbytes)
                break
            except MemoryError:
                self._forget_a_launch()
        address = self._job_memory + place
        self.driver.write(address, make(address).tobytes())
        return address, place

    def _forget_a_launch(self) -> None:
        """Make room for another call's job: the oldest that is not under way."""
        if not self._launches:
            raise MemoryError(
                f"the jobs of the calls in captured graphs fill the {JOB_BYTES >> 20} MiB for them; capture fewer calls"
            )
        self._finish()
        oldest = next(iter(self._launches))
        self._job_heap.free(self._launches.pop(oldest).place)

    def _kernel(self, call: Call) -> Kernel:
        """The kernel for a call's dtype and reduction; what only copies needs any."""
        terms = (call.dtype.name, call.op) if call.reduces else ("uint8", "max")
        if terms not in self._kernels:
            code = cubin.load(*terms, self.driver.capability)
            self._kernels[terms] = kernel = self.driver.load(code, "execute", grid.MOST_LANES)
            assert kernel.most_blocks >= self.channels, "a block of the most lanes fits into a multiprocessor"
        return self._kernels[terms]

    def _make_link(self, layout: Layout, panel: int) -> Link:
        addresses = self._arena.addresses
        self._panel[_PATIENCE // 8 + grid.PATIENCE_NAPS] = grid.naps(self.control.timeout)
        link = Link(
            self.rank,
            scratch=[address + layout.scratch for address in addresses],
            boards=addresses,
            flags_in=[addresses[self.rank] + layout.flags + peer * _LINE for peer in range(self.size)],
            flags_out=[address + layout.flags + self.rank * _LINE for address in addresses],
            finished=panel + _FINISHED,
            slots=SLOTS,
            slot_bytes=layout.slot_bytes,
            patience=(_LOOKS, panel + _PATIENCE),
            channels=self.channels,
            flags_stride=layout.flags_stride,
        )
        link.words[x.LINK_REPORT] = panel + _REPORT
        return link

    # Trouble

    def _ended(self, rank: int) -> int:
        """Calls that a rank's GPU has ended."""
        return int(self._every_panel[rank][_FINISHED // 8])

    def _progress(self) -> str:
        """How far each rank's GPU has come."""
        return "calls ended: " + ", ".join(f"rank {rank} {self._ended(rank)}" for rank in range(self.size))

    def _watch(self) -> None:
        """What the guard thread does. It asks the driver nothing: some stream may be captured."""

        def begin() -> Watch:
            return Watch(self.control, lambda: "a call on the GPU")

        watch = begin()
        while not self._closing.wait(LOOK):
            awaited = [rank for rank in range(self.size) if self._ended(rank) < self._enqueued]
            watch = watch if self.rank in awaited else begin()
            try:
                watch.look(awaited, self._progress)
            except CollectiveTimeoutError:  # the GPU has its own clock, and may not have come to the call yet
                watch = begin()
            except CollectiveError as error:
                self._lost = error
                self._panel[_PATIENCE // 8 + grid.PATIENCE_STOP] = 1
                return

    def _check(self) -> None:
        """Raise what has gone wrong on the GPU or with the peers."""
        if self._failure is None:
            status = int(self._panel[_REPORT // 8 + x.REPORT_STATUS]) & 0xFFFFFFFF
            self._failure = self._explain(status) if status else self._lost
            if self._failure is not None:
                self.control.fail(self._failure)
                raise self._failure
        self.control.check_usable()

    def _explain(self, status: int) -> CollectiveError:
        number, peer, channel = (int(self._panel[_REPORT // 8 + word]) for word in (1, 2, 3))
        with self.driver:
            pages = [self._page(rank, number, channel) for rank in range(self.size) if self._lost is None]
        if status == x.DIFFERENT and pages and all(pages):
            words = [page for page in pages if page is not None]
            if len({page[: x.SIGNATURE_WORDS] for page in words}) > 1:
                return CollectiveMismatchError(disagreement(number, words))
            return CollectiveMismatchError(
                f"the ranks run different programs for {describe(words[0])}, call {number}; do all of them have the "
                f"same version of mgpu-core and the same algorithms registered?"
            )
        if self._lost is not None:
            return self._lost
        mine = pages[self.rank]
        return CollectiveTimeoutError(
            f"{describe(mine) if mine else 'a call'} on the GPU, call {number}, did not finish in "
            f"{self.control.timeout:g} s: it waited for rank {peer}; {self._progress()}"
        )

    def _page(self, rank: int, number: int, channel: int) -> tuple[int, ...] | None:
        """A rank's descriptor of a call, from its board; None if it has not made it."""
        at = self._arena.addresses[rank] + (channel * x.PAGES + number % x.PAGES) * x.PAGE_BYTES
        words = np.frombuffer(self.driver.read(at, x.PAGE_BYTES), np.int64).tolist()
        return tuple(words[1 : 1 + x.DESCRIPTOR_WORDS]) if words[0] & 0xFFFFFFFF == number & 0xFFFFFFFF else None

    def _finish(self) -> None:
        """Wait, on the host, for every call that was put into a stream."""
        self._check()
        self.settle()
        if self._last_stream is not None:
            with self.driver:
                self.wait_for(self._last)
        self._check()

    def settle(self) -> None:
        """Wait until the ranks that share this GPU have made the calls that this one has."""
        deadline = time.monotonic() + self.control.timeout
        while self._process is not None and self._process.pending(self.rank):
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"the ranks that share a GPU with rank {self.rank} have not made its call")
            self._check()
            time.sleep(0.001)

    def wait_for(self, event: int) -> None:
        """Wait, on the host, for an event, in a way that Ctrl-C ends."""
        pause = 1e-5
        while not self.driver.done(event):
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    # The rest

    def view(self, x: Any, role: str = "the array", writable: bool = False) -> Any:
        on_device = device_arrays.is_on_device(x)
        return device_arrays.view(x, role, writable) if on_device else arrays.view(x, role, writable)

    def fresh(self, like: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Callable[[], Any]]:
        if not device_arrays.is_on_device(like):
            return super().fresh(like, shape, dtype)
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
        address = source.address if isinstance(source, DeviceArray) else arrays.address(arrays.contiguous(source))
        with self.driver:
            self.driver.copy(target.address, address, target.nbytes, target.stream)
            if not isinstance(source, DeviceArray):
                self.driver.synchronize(target.stream)

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

    def split(self, color: int | None, key: int) -> Cuda | None:
        self._finish()
        child = self.control.split(color, key)
        if child is None:
            return None
        family = None if self._process is None else self._family(child)
        return Cuda(child, self.driver, family)

    def _family(self, child: Shm) -> Process:
        """The ranks of a sub-communicator in this process: one object for all of them."""
        assert self._process is not None
        ranks = tuple(self.control.members.index(member) for member in child.members)
        return self._process.family(ranks, child.arena)

    def abort(self, reason: str) -> None:
        self.control.abort(reason)
        self._panel[_PATIENCE // 8 + grid.PATIENCE_STOP] = 1

    def disown(self, reason: str) -> None:
        self.control.disown(reason)
        self._closed = True
        self._closing.set()

    def close(self) -> None:
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
        self.control.close()

    def _take_leave(self) -> None:
        """Wait until nobody reads this rank's scratch any more, and give back what only this communicator had."""
        regions, deadline = self.control.regions, time.monotonic() + self.control.timeout
        # Who has ended the calls that this rank has ended needs it no longer for them.
        while any(self._ended(r) < self._ended(self.rank) and regions[r].state == OPEN for r in range(self.size)):
            if self._lost is not None or time.monotonic() > deadline:
                return
            time.sleep(0.001)
        regions[self.rank].leave(CLOSED, {})
        with self.driver as driver:
            for start in self._arena.attached:
                driver.detach(start)
            self._panel[_LEFT // 8] = 1
            deadline = time.monotonic() + _FAREWELL
            while not all(panel[_LEFT // 8] for panel in self._every_panel):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.001)
            for view in self._host_arena:
                driver.unregister(view.ctypes.data)
            if not self._staged:
                driver.free(self._arena.addresses[self.rank])
            driver.free(self._job_memory)
            driver.unregister(self._panels.ctypes.data)
            driver.drop_event(self._last)


class _Running(Pending):
    """A call in a stream of the communicator's own."""

    def __init__(self, engine: Cuda, event: int, keep: Any) -> None:
        self._engine, self._event, self._keep = engine, event, keep
        self._begun, self._ended = time.monotonic_ns(), 0

    def wait(self) -> None:
        """Let the caller's current stream wait for the call; the host goes on."""
        engine = self._engine
        engine._check()
        engine.settle()
        with engine.driver:
            engine.driver.wait(_stream(*self._keep), self._event)

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


def _stream(source: DeviceArray | None, target: DeviceArray | None) -> int:
    """The caller's current stream, as the arrays' library says it."""
    array = target if source is None else source
    assert array is not None
    return array.stream


def _free(driver: Driver, address: int) -> None:
    with driver:
        driver.free(address)


def _raise_problems(kind: type[Exception], problems: Sequence[str], undo: Callable[[], object]) -> None:
    if any(problems):
        undo()
        raise kind("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text))
