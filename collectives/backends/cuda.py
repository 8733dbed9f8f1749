"""GPUs of one host: a process each, joined by memory that every GPU reads and writes directly.

The device part of a communicator is what the shm backend has in shared memory: flags, boards and scratch, in GPU memory
that the processes share by CUDA IPC. A call is one launch of the executor on the caller's stream, and the host does not
wait for it. A small all-reduce is one of `kernels.lowlatency` instead, through inboxes that lie there too. Everything
else (agreement on allocations, splits, lost peers, messages, CPU arrays) is done by a shm
communicator of the same ranks beside it.

What goes wrong on the GPU is reported into a page of host memory, the *panel*, and raised by the next call, `wait` or
`close`. A thread looks at the peers' health, and lets kernels that wait for a lost one go.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives import programs
from collectives.backends.agreement import raise_problems
from collectives.backends.device import LOOK, OFFSET_BITS, Block, OnDevice, beside
from collectives.backends.shm import Shm
from collectives.call import ORDINARY, Call, describe, disagreement
from collectives.device_arrays import DeviceArray
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)
from collectives.job import Job, Link, relocate
from collectives.lowering import Memory
from collectives.memory import PAGE, SLOTS, Heap, slot_bytes
from collectives.region import CLOSED, OPEN
from collectives.watch import Watch
from kernels import cubin, grid, lowlatency
from kernels import executor as x

if TYPE_CHECKING:
    from kernels.driver import Driver, Kernel

# Blocks of a launch, at most. A block has 32 KB of loads on their way, and a link of 450 GB/s carries 450 KB in each
# microsecond that a load takes: 16 would not fill it. vLLM's kernel has 36. Not measured; `make gpu-check` compares.
CHANNELS = 32
SCRATCH_BYTES = 16 << 20  # of a rank, for arrays outside symmetric memory; MGPU_SCRATCH of rank 0 changes it
JOB_BYTES = 16 << 20  # for the jobs of the calls that are kept, a thousand or more of 8 ranks with CHANNELS
_FAREWELL = 1.0  # seconds that a rank waits for the others to close, to give memory back that they see
_LOOKS = 200  # at a flag, before the first nap
_SHARED = 2 << 20  # bytes that memory for other processes is a multiple of: what is smaller CUDA puts beside other
# memory, and CUDA IPC shows all of that (CUDA C++ Programming Guide, Interprocess Communication)
_LINE = 64
_still_in_use: list[Any] = []  # memory of the host that GPUs may use until this process ends
# The panel: byte offsets.
_FINISHED, _REPORT, _PATIENCE, _LEFT, _SMALL_FINISHED, _SMALL_REPORT = (i * _LINE for i in range(6))


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
    def inbox(self) -> int:
        """Where small messages arrive."""
        return -(-(self.flags + self.channels * self.flags_stride) // PAGE) * PAGE

    @property
    def capacity(self) -> int:
        """Packets that a channel takes from each rank in a call."""
        return lowlatency.capacity_for(lowlatency.MOST_BYTES, self.channels)

    @property
    def scratch(self) -> int:
        """The scratch slots."""
        inbox = lowlatency.inbox_bytes(self.size, self.channels, self.capacity)
        return -(-(self.inbox + inbox) // PAGE) * PAGE

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


class Cuda(OnDevice):
    """One communicator of GPUs. All ranks of `control` make theirs together. `driver` is this rank's GPU; `process` is
    given where all ranks are in this process."""

    name = "cuda"
    control: Shm

    def __init__(self, control: Shm, driver: Driver, process: Process | None = None) -> None:
        super().__init__(control, driver)
        self._process = process
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
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._kernels: dict[tuple[str, str, str], Kernel] = {}
        self._staged = False
        self._registered: list[Any] = []  # memory of the host that the GPU uses
        layout = Layout(self.size, self.channels, slot_bytes(self.size, control.host.scratch or SCRATCH_BYTES))
        try:
            with driver:
                panel = self._register(self._panels)
                self._arena, self._staged = self._share_arena(layout)
                self._link = self._make_link(layout, panel)
                self._states = driver.allocate(8 * lowlatency.STATE_WORDS * self.channels)
                self._small = self._make_small(layout, panel)
                self._job_memory = driver.allocate(JOB_BYTES)
                self._job_heap = Heap(0, JOB_BYTES)
                link = self._link
                self._link_address, _ = self._upload(lambda base: relocate(link.words, link.tables, base))
        except BaseException:  # nothing runs yet, and the memory is the control's again
            self._unregister()
            raise
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
        return Block([self._register(view) for view in seen], layout.nbytes, []), True

    def _register(self, memory: Any) -> int:
        """Where the GPU sees memory of the host's."""
        address = self.driver.register(memory.ctypes.data, memory.nbytes)
        self._registered.append(memory)
        return address

    def _unregister(self) -> None:
        """Memory of the host is the host's alone again."""
        with self.driver as driver:
            while self._registered:
                driver.unregister(self._registered.pop().ctypes.data)

    def _share(self, nbytes: int) -> Block:
        """Device memory of every rank, zeroed and mapped here. Raises MemoryError, or PermissionError where GPUs cannot
        reach each other, on every rank alike."""
        from kernels.driver import DriverError

        driver, own, problem = self.driver, 0, ""
        if self._staged:
            own = driver.allocate(max(nbytes, 1))
            return Block([own if rank == self.rank else 0 for rank in range(self.size)], nbytes)
        handle = b""
        try:
            own = driver.allocate(-(-max(nbytes, 1) // _SHARED) * _SHARED)
            # A handle is of a whole allocation of the driver's; ours may begin inside of one.
            start, _ = driver.extent(own)
            offset = own - start
            handle = driver.export(start)
        except DriverError as error:
            problem = str(error)
            offset = 0
        mine = json.dumps([handle.hex(), own, offset, problem]).encode()
        answers = [json.loads(answer) for answer in self.control.gather_bytes(mine)]
        problems = [text for *_, text in answers]
        if any(problems) and own:
            driver.free(own)
        raise_problems(MemoryError, problems)
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
        if any(problems):
            self._give_back(block, own)
        raise_problems(PermissionError, problems)
        return block

    def _give_back(self, block: Block, own: int) -> None:
        """Unmap the peers' memory, and when all have unmapped, free this rank's."""
        for start in block.attached:
            self.driver.detach(start)
        self.control.gather_bytes(b"")
        self.driver.free(own)

    def allocate(self, nbytes: int) -> DeviceArray:
        self._finish()
        for launch in self._launches.values():  # an address may come to mean another kind of memory
            self._job_heap.free(launch.place)
        self._launches.clear()
        return super().allocate(nbytes)

    def _locate(self, array: DeviceArray | None) -> int:
        return ORDINARY if self._staged else super()._locate(array)

    # Calls

    def _put(self, work: Launch, stream: int, captured: bool, launched: Callable[[], None]) -> None:
        if self._process is not None:
            self._process.launch(self, work, stream, captured, launched)
        else:
            self.driver.launch(work.kernel, (self.channels, 1), grid.MOST_LANES, work.table, stream)
            launched()

    def _prepare(self, call: Call, source: DeviceArray | None, target: DeviceArray | None, captured: bool) -> Launch:
        """The launch for a call with these arrays, made when it is asked for the first time."""
        start, end = (0 if array is None else array.address for array in (source, target))
        key = call, start, end
        launch = self._launches.get(key)
        if launch is None or captured:  # a graph's job is the graph's own: replays may run at any time
            self._check_size(call, source, target)
            if self._is_small(call):
                launch = self._make_small_launch(call, start, end)
            else:
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

    def _is_small(self, call: Call) -> bool:
        """Whether a call goes as packets, wherever its arrays lie: all ranks that call the same agree in that."""
        itemsize = call.dtype.itemsize
        fits = itemsize <= lowlatency.DATA_BYTES and call.count * itemsize <= lowlatency.MOST_BYTES
        return call.collective == "all_reduce" and fits and not call.algorithm and not self._staged

    def _make_small_launch(self, call: Call, start: int, end: int) -> Launch:
        words, nbytes = self._small.copy(), call.count * call.dtype.itemsize
        words[lowlatency.JOB_INPUT], words[lowlatency.JOB_OUTPUT] = start, end
        words[lowlatency.JOB_BYTES] = nbytes
        words[lowlatency.JOB_SHARE] = lowlatency.share_of(nbytes, self.channels)
        words[lowlatency.JOB_SCALE] = call.scale
        inboxes = {lowlatency.JOB_INBOXES: self._inboxes}

        def compose(base: int) -> Any:
            table = np.zeros(8, np.int64)
            table[0] = base + table.nbytes
            return np.concatenate([table, relocate(words, inboxes, int(table[0]))])

        address, place = self._upload(compose)
        return Launch(address, self._kernel(call, "small"), place)

    def _make_launch(self, call: Call, start: int, end: int, places: tuple[int, int]) -> Launch:
        symmetric = ORDINARY not in places
        ordinary = self._job(call, "staged", (ORDINARY, ORDINARY))
        ordinary.inputs[self.rank], ordinary.outputs[self.rank] = start, end
        first = ordinary
        if symmetric:
            first = self._job(call, "symmetric", places)
            for table, place in zip((first.inputs, first.outputs), places, strict=True):
                block, offset = self._blocks[place >> OFFSET_BITS], place & (1 << OFFSET_BITS) - 1
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

    def _job(self, call: Call, memory: Memory, places: tuple[int, int]) -> Job:
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

    def _kernel(self, call: Call, name: str = "execute") -> Kernel:
        """The kernel for a call's dtype and reduction; what only copies needs any."""
        terms = name, *((call.dtype.name, call.op) if call.reduces else ("uint8", "max"))
        if terms not in self._kernels:
            code = cubin.load(*terms, self.driver.capability, self.control.look_out)
            self._kernels[terms] = kernel = self.driver.load(code, name, grid.MOST_LANES)
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

    def _make_small(self, layout: Layout, panel: int) -> Any:
        """What the jobs of small calls have in common."""
        self._inboxes = np.array([address + layout.inbox for address in self._arena.addresses], np.int64)
        words = np.zeros(lowlatency.JOB_WORDS, np.int64)
        words[lowlatency.JOB_RANK], words[lowlatency.JOB_SIZE] = self.rank, self.size
        words[lowlatency.JOB_SPINS], words[lowlatency.JOB_YIELDS] = _LOOKS, panel + _PATIENCE
        words[lowlatency.JOB_CAPACITY], words[lowlatency.JOB_STATES] = layout.capacity, self._states
        words[lowlatency.JOB_FINISHED] = panel + _SMALL_FINISHED
        words[lowlatency.JOB_REPORT] = panel + _SMALL_REPORT
        return words

    # Trouble

    def fail(self, error: BaseException) -> None:
        self._panel[_PATIENCE // 8 + grid.PATIENCE_STOP] = 1
        self.control.fail(error)

    def _ended(self, rank: int) -> int:
        """Calls that a rank's GPU has ended."""
        panel = self._every_panel[rank]
        return int(panel[_FINISHED // 8]) + int(panel[_SMALL_FINISHED // 8])

    def _progress(self) -> str:
        """How far each rank's GPU has come."""
        return "calls ended: " + ", ".join(f"rank {rank} {self._ended(rank)}" for rank in range(self.size))

    def _watch(self) -> None:
        # The driver is asked nothing: some stream may be captured.
        def begin() -> Watch:
            return Watch(self.control, lambda: "a call on the GPU")

        watch = begin()
        while not self._closing.wait(LOOK):
            awaited = [rank for rank in range(self.size) if self._ended(rank) < self._enqueued]
            watch = watch if self.rank in awaited else begin()
            try:
                with self._mutex:
                    self._ledger.compare()
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
            if status:
                self._failure = self._explain(status)
            elif int(self._panel[_SMALL_REPORT // 8]) & 0xFFFFFFFF:
                self._failure = self._lost or self._too_late("a small all_reduce", self._silent())
            else:
                self._failure = self._lost
            if self._failure is not None:
                self.fail(self._failure)
                raise self._failure
        self.control.check_usable()

    def _explain(self, status: int) -> CollectiveError:
        number, peer, channel = (int(self._panel[_REPORT // 8 + word]) for word in (1, 2, 3))
        with self.driver:
            pages = [self._page(rank, number, channel) for rank in range(self.size) if self._lost is None]
        number = self._ended(self.rank) + 1  # small calls counted, which the executor knows nothing of
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
        return self._too_late(describe(mine) if mine else "a call", [peer])

    def _too_late(self, what: str, peers: Sequence[int]) -> CollectiveTimeoutError:
        number, awaited = self._ended(self.rank) + 1, " and ".join(f"rank {peer}" for peer in peers) or "a rank"
        return CollectiveTimeoutError(
            f"{what} on the GPU, call {number}, did not finish in {self.control.timeout:g} s: it waited for {awaited}; "
            f"{self._progress()}"
        )

    def _silent(self) -> list[int]:
        """The ranks of which no packet has come for the small call under way."""
        with self.driver as driver:
            nbytes = 8 * lowlatency.STATE_WORDS * self.channels
            states = np.frombuffer(driver.read(self._states, nbytes), np.int64).reshape(self.channels, -1)
            channel = int(np.argmax(states[:, lowlatency.STATE_STATUS] == x.BLOCKED))
            call = (int(states[channel, lowlatency.STATE_CALLS]) + 1) & 0xFFFFFFFF
            row = (2 * channel + (call & 1)) * self.size
            stride = int(self._small[lowlatency.JOB_CAPACITY]) * lowlatency.PACKET_BYTES
            first = int(self._inboxes[self.rank]) + row * stride
            packets = [np.frombuffer(driver.read(first + rank * stride, 16), np.int64) for rank in range(self.size)]
        return [
            rank for rank, words in enumerate(packets) if any(int(word) >> 32 & 0xFFFFFFFF != call for word in words)
        ]

    def _page(self, rank: int, number: int, channel: int) -> tuple[int, ...] | None:
        """A rank's descriptor of a call, from its board; None if it has not made it."""
        at = self._arena.addresses[rank] + (channel * x.PAGES + number % x.PAGES) * x.PAGE_BYTES
        words = np.frombuffer(self.driver.read(at, x.PAGE_BYTES), np.int64).tolist()
        return tuple(words[1 : 1 + x.DESCRIPTOR_WORDS]) if words[0] & 0xFFFFFFFF == number & 0xFFFFFFFF else None

    def settle(self) -> None:
        """Wait until the ranks that share this GPU have made the calls that this one has."""
        deadline = time.monotonic() + self.control.timeout
        while self._process is not None and self._process.pending(self.rank):
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"the ranks that share a GPU with rank {self.rank} have not made its call")
            self._check()
            time.sleep(0.001)

    def split(self, color: int | None, key: int) -> Cuda | None:
        self._finish()
        child = self.control.split(color, key)
        if child is None:
            return None
        with beside(child):
            return Cuda(child, self.driver, None if self._process is None else self._family(child))

    def survivors(self) -> Cuda:
        if self._process is not None:
            return super().survivors()  # type: ignore[return-value]
        self.fail(CollectiveError("its survivors have left this communicator"))
        control = self.control.survivors()
        with beside(control):
            return Cuda(control, self.driver)

    def _family(self, child: Shm) -> Process:
        """The ranks of a sub-communicator in this process: one object for all of them."""
        assert self._process is not None
        ranks = tuple(self.control.members.index(member) for member in child.members)
        return self._process.family(ranks, child.arena)

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
            self._unregister()
            if not self._staged:
                driver.free(self._arena.addresses[self.rank])
            driver.free(self._job_memory)
            driver.free(self._states)
            driver.drop_event(self._last)
            driver.drop_stream(self._side)

    def _end(self) -> None:
        _still_in_use.extend(self._registered)
