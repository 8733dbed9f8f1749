"""Processes on one host, joined by shared memory: the CPU's own backend.

A call is a job for the compiled executor, made once for each kind of call and run again and again. Arrays in symmetric
memory are read and written by every rank directly; others go through scratch. When the executor reports that it has
waited for a while, `_attend` looks at what may be wrong.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds

from collectives import programs, recorder
from collectives.arrays import Array, address
from collectives.backends import agreement
from collectives.backends.base import Backend, Failing, MessageWay, Pending, Ready
from collectives.call import ORDINARY, Call, describe, disagreement, name_ranks
from collectives.deadlock import Doing, Waiting
from collectives.errors import CollectiveError, CollectiveMismatchError, ProgramError
from collectives.host import ARENAS, SHARE, Birth, Host
from collectives.job import Job, Link
from collectives.ledger import NBYTES, Ledger
from collectives.lowering import Memory
from collectives.memory import PAGE, SLOTS, Heap, slot_bytes
from collectives.progress import Progress, Queued
from collectives.region import CLOSED, FAILED, Member, Region, region_bytes
from collectives.signals import Signals
from collectives.stream import Streams
from collectives.survivors import regroup, rejoin
from collectives.watch import Watch
from kernels import native
from kernels.executor import DIFFERENT, DONE, LINK_STOPPED, SIGNATURE_WORDS
from kernels.messages import EAGER_BYTES

# How often a rank looks at a flag before yielding its core, and then before sleeping: where each rank of the host can
# have a core to itself, and where some share one.
ALONE, CROWDED = (300, 50), (5, 500)
JOBS = 4096  # kinds of calls whose jobs are kept; the oldest give way
_NAP, _NAPS = 0.0005, 100  # seconds between two looks at a peer's word, and the looks between two at its health
_IN_COLLECTIVE = Waiting(Doing.COLLECTIVE)
_NOWHERE = 0  # for an array that a rank does not have: nobody touches it, and nobody could


class Shm(Backend):
    """One communicator of processes on one host. `members[r]` is the world's number of this communicator's rank r."""

    name = "shm"
    load = staticmethod(native.load)  # where the executor and its reductions come from
    short_way = True  # whether compiled code may make calls that it knows
    eager_bytes = EAGER_BYTES

    def __init__(
        self, host: Host, members: Sequence[int], arena: int, timeout: float, path: tuple[int, ...] = ()
    ) -> None:
        self.host, self.members, self.arena, self.timeout = host, list(members), arena, timeout
        self._birth = Birth(path, arena, tuple(members))
        self.rank, self.size = self.members.index(host.meeting.rank), len(self.members)
        start, room = host.arena(arena)
        slot = slot_bytes(self.size, host.scratch)
        scratch = start + region_bytes(self.size)
        mail = scratch + SLOTS * slot
        heap = mail + Streams.bytes(self.size)
        if heap >= start + room:
            needed = (heap - start) * (SHARE if arena else 1)
            raise MemoryError(
                f"MGPU_HEAP is too small: a communicator of {self.size} ranks takes {heap - start:,} bytes before "
                f"its first array, and has {room:,}, which is a quarter of the world's where it was split off; set it "
                f"to {max(64, 1 << (needed >> 20).bit_length())}M or more, or leave it out"
            )
        host.own.release(start, room)  # whoever had the arena before: it reads as zero
        host.own.commit(start, mail - start)
        self.patience = CROWDED if host.crowded else ALONE
        self._segments = [host.segments[member] for member in self.members]
        self.regions = [Region(segment, start, self.size) for segment in self._segments]
        own = self.regions[self.rank]
        own.member = Member(self.rank, self.size, os.getpid(), host.meeting.peers[0].pid)
        self.link = Link(
            self.rank,
            scratch=[segment.address + scratch for segment in self._segments],
            boards=[region.board for region in self.regions],
            flags_in=[own.flag(0, peer) for peer in range(self.size)],
            flags_out=[region.flag(0, self.rank) for region in self.regions],
            finished=own.finished,
            slots=SLOTS,
            slot_bytes=slot,
            patience=self.patience,
        )
        self._heap = Heap(heap, start + room - heap)
        self.heap = self._heap_start, self._heap_bytes = host.own.address + heap, start + room - heap
        # Where the members' heaps begin: what a rank publishes of arrays in symmetric memory counts from there.
        self._bases = np.array([segment.address + heap for segment in self._segments], np.int64)
        self._jobs: dict[tuple[Any, ...], list[Job]] = {}
        self._progress: Progress | None = None
        self._failure = ""  # why this communicator is of no further use
        self._closed = False
        self._unusual = False  # see `_be_unusual`
        # Its parts do not keep it alive, so that one that is closed and dropped goes at once, with its jobs.
        weak = weakref.proxy(self)
        self._streams = Streams(weak, [segment.address + mail for segment in self._segments], mail)
        self._lookout = Watch(weak, lambda: "while this rank compiled kernels")
        self._execute_on = self.kernel("execute_on").call
        if self.short_way:
            self.kernel("short_way")
        self._splits = 0
        host.engines.add(self)
        self._signals = Signals(weak)

    # Calls

    def run(self, call: Call, source: Array | None, target: Array | None) -> None:
        if self._unusual:
            self.check_usable()
            if self.busy:
                self.start(call, source, target).wait()
                return
            self._allow_short_way()
        start, end = self._addresses(source, target)
        free, job = self._take_job(call, start, end, source, target)
        try:
            if status := self._execute_on(job.address, self.rank, start, end):
                self.complete(job, call, status)
        except BaseException as error:  # Ctrl-C, too
            self.fail(error)
            raise
        free.append(job)

    def start(self, call: Call, source: Array | None, target: Array | None) -> Pending:
        self.check_usable()
        if self._progress is None:
            self._progress = Progress(self)
        self._be_unusual()
        start, end = self._addresses(source, target)
        free, job = self._take_job(call, start, end, source, target)
        job.place(self.rank, start, end)
        return self._progress.submit(Queued(call, job, (source, target), lambda: free.append(job)))

    def plan(self, call: Call, source: Array | None, target: Array | None) -> Callable[..., None]:
        self.check_usable()
        start, end = self._addresses(source, target)
        _, job = self._take_job(call, start, end, source, target)
        job.place(self.rank, start, end)
        execute_on, place, rank = self._execute_on, job.address, self.rank

        def run(keep: object = None) -> None:
            if self._unusual:
                self.check_usable()
                if self._progress is not None and self._progress.busy:
                    self._progress.submit(Queued(call, job, keep, lambda: None)).wait()
                    return
            try:
                if status := execute_on(place, rank, start, end):
                    self.complete(job, call, status)
            except BaseException as error:
                self.fail(error)
                raise

        return run

    def job(self, call: Call, source: Array | None, target: Array | None) -> Ready | None:
        if not self.short_way:
            return None
        start, end = self._addresses(source, target)
        _, job = self._take_job(call, start, end, source, target)

        def resume(status: int) -> None:
            with Failing(self):
                self.complete(job, call, status)

        return Ready(job.address, resume)

    @staticmethod
    def _addresses(source: Array | None, target: Array | None) -> tuple[int, int]:
        start = _NOWHERE if source is None else address(source)
        return start, start if target is source else _NOWHERE if target is None else address(target)

    def _take_job(
        self, call: Call, start: int, end: int, source: Array | None, target: Array | None
    ) -> tuple[list[Job], Job]:
        """A job for the call that nobody else is using, and the list to put it back into.

        `start` and `end` are the addresses of source and target, which the caller puts in.
        """
        symmetric = self._is_symmetric(source, start) and self._is_symmetric(target, end)
        free = self._jobs.get((call, symmetric))
        if free is None:
            if len(self._jobs) >= JOBS:
                self._jobs.pop(next(iter(self._jobs)))
            free = self._jobs[call, symmetric] = []
        return free, free.pop() if free else self._make_job(call, symmetric)

    def _is_symmetric(self, array: Array | None, place: int) -> bool:
        """Whether an array is in this communicator's heap, or this rank has none."""
        return array is None or 0 <= place - self._heap_start <= self._heap_bytes - array.nbytes

    def _make_job(self, call: Call, symmetric: bool) -> Job:
        """A job for ranks all of whose arrays are in symmetric memory, or not all."""
        try:
            memory: Memory = "symmetric" if symmetric else "staged"
            encoded, layout = programs.for_call(call, self.link, memory, self.host.tuned)
        except ProgramError as error:  # which rank 0 alone may have found
            self._refuse(error)
        combine = 0
        if call.reduces:
            combine = self.kernel(f"reduce-{call.dtype.name}-{call.op}").address
        return Job(
            self.link,
            encoded,
            layout,
            call.dtype,
            combine=combine,
            scale=call.scale,
            descriptor=(*call.signature(), encoded.number, ORDINARY, ORDINARY),
            bases=self._bases if symmetric else None,
        )

    def kernel(self, name: str, peers: Sequence[int] | None = None) -> native.Native:
        """A compiled function. While it compiles, which may take seconds, this rank looks after `peers`, or all."""
        return self.load(name, lambda: self.look_out(peers))

    def look_out(self, peers: Sequence[int] | None = None) -> None:
        """To be called every now and then while this rank compiles: raises PeerLostError for one of `peers`, or of all,
        that has died or closed, and what a rank gave up with."""
        try:
            self._lookout.see(range(self.size) if peers is None else peers)
        except CollectiveError as error:
            self._refuse(error)

    # Trouble

    def complete(self, job: Job, call: Call, status: int, waiting: Waiting | None = _IN_COLLECTIVE) -> None:
        """Run a job to its end. `status`: what a first attempt returned; `waiting`: see `Watch.look`."""
        with Watch(self, lambda: describe(call.signature())) as watch:
            while status != DONE:
                number = self.link.calls + 1
                if status == DIFFERENT:
                    job = self._common_job(job, call)
                else:
                    # Who has ended this call has done all that we wait for, and may have left since.
                    awaited = [rank for rank, region in enumerate(self.regions) if region.calls_ended < number]
                    watch.look(awaited, partial(self._arrivals, number), waiting)
                status = self._execute_on(job.address, self.rank, *job.placed(self.rank))

    def _common_job(self, mine: Job, call: Call) -> Job:
        """The ranks' descriptors of this call differ: find who made a mistake, or the way to run it that suits all."""
        number = self.link.calls + 1
        pages = [region.page(number) for region in self.regions]
        assert all(pages)
        words = [page for page in pages if page is not None]
        if len({page[:SIGNATURE_WORDS] for page in words}) > 1:
            raise CollectiveMismatchError(disagreement(number, words))
        built = {(page[4], page[5] == ORDINARY) for page in words}
        if len(built) > len({staged for _, staged in built}):
            raise CollectiveMismatchError(
                f"the ranks run different programs for {describe(words[0])}, call {number}; do all of them have the "
                f"same version of mgpu-core and the same algorithms registered?"
            )
        key = (call, "common")  # beside the keys of `_take_job`
        if key not in self._jobs:
            self._jobs[key] = [self._make_job(call, symmetric=False)]
        (job,) = self._jobs[key]
        job.place(self.rank, *mine.placed(self.rank))
        # The common way has an entry of its own, for which it may prepare as every call does; so this was a call.
        self.link.count_call()
        mine.restart()
        return job

    def _arrivals(self, call: int) -> str:
        """Who has begun a call and who has not, with what each did last."""
        arrived = [rank for rank, region in enumerate(self.regions) if region.calls_begun >= call]
        absent = [rank for rank in range(self.size) if rank not in arrived]
        return f"{name_ranks(arrived)} arrived, {name_ranks(absent)} did not; {self.history(range(self.size))}"

    def history(self, ranks: Iterable[int]) -> str:
        """The last calls of some ranks."""
        return "; ".join(f"rank {rank} {recorder.tell(self.regions[rank])}" for rank in ranks)

    def fail(self, error: BaseException) -> None:
        """This communicator is of no further use: remember why, and let the peers know."""
        if not self._failure:
            mine = error if isinstance(error, CollectiveError) else CollectiveError(f"{type(error).__name__}: {error}")
            self._failure = str(mine) or type(mine).__name__
            self._be_unusual()
            if not self._closed:
                self.regions[self.rank].leave(FAILED, {"kind": type(mine).__name__, "text": str(mine)})

    def _be_unusual(self) -> None:
        """From now on, as this communicator has failed, is closed or has a queue, a call has more to look at."""
        self._unusual = True
        self.link.words[LINK_STOPPED] = 1
        if self.stopped:
            self._streams.stop()

    def _allow_short_way(self) -> None:
        """Let compiled code make calls by itself again, as the queue is empty: until the next one is put into it."""
        self.link.words[LINK_STOPPED] = 0
        if self.stopped:  # in another thread, just now
            self.link.words[LINK_STOPPED] = 1

    @property
    def stopped(self) -> bool:
        """Whether this communicator has failed or is closed."""
        return self._closed or bool(self._failure)

    @property
    def busy(self) -> bool:
        """Whether asynchronous calls are under way."""
        return self._progress is not None and self._progress.busy

    def check_usable(self) -> None:
        """Raise if this communicator has failed or is closed."""
        if self._failure:
            raise CollectiveError(f"this communicator is of no further use: {self._failure}")
        if self._closed:
            raise CollectiveError("this communicator is closed")

    # Memory

    def allocate(self, nbytes: int) -> Array:
        answers = agreement.agree(self, "empty", [nbytes, self._heap.pending()])
        agreement.check_sizes(self, [size for size, _ in answers])
        self._heap.settle(set.intersection(*(set(pending) for _, pending in answers)))
        offset = agreement.together(self, partial(self._take, nbytes), self._heap.free)
        array = self.host.own.view(offset, nbytes)
        self._heap.follow(array, offset)
        for hole in self._heap.holes():
            self.host.own.release(*hole)
        return array

    def _take(self, nbytes: int) -> int:
        """Where this rank's heap has room for so many bytes; they are zero before any peer may write there."""
        offset = self._heap.allocate(nbytes)
        try:
            self.host.own.commit(offset, nbytes)
        except MemoryError:
            self._heap.free(offset)
            raise
        self.host.own.view(offset, nbytes)[:] = 0
        return offset

    def ledger(self) -> Ledger:
        """Where ranks compare what they put into the streams of GPUs. All ranks call it together."""
        pages = self.allocate(-(-NBYTES // PAGE) * PAGE)
        return Ledger([self.peer_view(pages, rank)[:NBYTES] for rank in range(self.size)], self.rank, pages)

    def peer_view(self, array: Array, rank: int) -> Array:
        self.check_usable()
        start = array.__array_interface__["data"][0]
        first, last = byte_bounds(array) if array.size else (start, start)
        offset = self.host.own.owner(first, last - first)
        if offset is None:
            raise ValueError(
                "only symmetric memory has a peer's view; allocate the array with comm.empty or comm.zeros"
            )
        data = self._segments[rank].view(offset, last - first)
        return np.ndarray(array.shape, array.dtype, data, start - first, array.strides)

    def _refuse(self, error: CollectiveError) -> NoReturn:
        self.fail(error)
        raise error

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank."""
        return agreement.gather_bytes(self, payload)

    # Messages, families, endings

    def exchange(self, sends: Sequence[tuple[Array, int, int]], receives: Sequence[tuple[Array, int, int]]) -> None:
        self.check_usable()
        with Failing(self):
            self._streams.exchange(sends, receives)

    def message_way(self, acquire: Callable[[], bool], release: Callable[[], None]) -> MessageWay | None:
        if not self.short_way:
            return None
        way = self._streams.short_way(acquire, release)

        def resume(*arguments: Any) -> None:
            with Failing(self):
                self._streams.resume(*arguments)

        return MessageWay(way.call, way.pending, resume)

    def signal(self, rank: int) -> None:
        self.check_usable()
        self._signals.send(rank)

    def wait_signal(self, rank: int) -> None:
        self.check_usable()
        with Failing(self):
            self._signals.wait(rank)

    def fetch_add(self, word: Array, value: int, rank: int) -> int:
        self.check_usable()
        return self.kernel("fetch_add", [rank]).call(self._word(word, rank), value)

    def acquire(self, lock: Array, rank: int) -> None:
        self.check_usable()
        take, place = self.kernel("acquire", [rank]).call, self._word(lock, rank)
        if take(place, self.rank + 1, *self.patience) == DONE:
            return
        with Failing(self), Watch(self, lambda: f"lock(rank {rank})") as watch:
            while True:
                holder = ctypes.c_uint32.from_address(place).value - 1
                watch.look([holder] if holder >= 0 else [], partial("rank {} holds it".format, holder))
                if take(place, self.rank + 1, *self.patience) == DONE:
                    return

    def release(self, lock: Array, rank: int) -> None:
        self.kernel("release", [rank]).call(self._word(lock, rank))

    def wait_until(self, word: Array, value: int, rank: int) -> None:
        self.check_usable()
        view = self.peer_view(word, rank)
        if view.item() >= value:
            return
        with Failing(self), Watch(self, lambda: f"wait_until({value}, rank {rank})") as watch:
            looks = 0
            while view.item() < value:
                time.sleep(_NAP)
                looks += 1
                if looks % _NAPS == 0:
                    watch.look([rank], lambda: f"rank {rank}'s word is {view.item()}")

    def check(self, ranks: Sequence[int]) -> None:
        self.check_usable()
        with Failing(self), Watch(self, lambda: "check") as watch:
            watch.look(ranks, str)
            watch.look(ranks, str)  # only the second look counts

    def _word(self, array: Array, rank: int) -> int:
        """Address of `rank`'s counterpart of a symmetric array of one int64."""
        return address(self.peer_view(array, rank))

    def split(self, color: int | None, key: int) -> Shm | None:
        mine = {"color": color, "key": key, "free": sorted(self.host.free_arenas), "vacated": self.host.vacated()}
        answers = agreement.agree(self, "split", mine)
        free = self._settle_arenas(answers)
        self._splits += 1
        family = [rank for rank in range(self.size) if answers[rank]["color"] == color]
        family.sort(key=lambda rank: (answers[rank]["key"], rank))

        def found() -> Shm | None:
            if color is None:
                return None
            common = set.intersection(*(free[rank] for rank in family))
            if not common:
                raise MemoryError(f"{ARENAS} sub-communicators are alive; close those that are done with")
            members, path = [self.members[rank] for rank in family], (*self._birth.path, self._splits)
            child = type(self)(self.host, members, min(common), self.timeout, path)
            self.host.free_arenas.discard(child.arena)
            return child

        def give_back(child: Shm | None) -> None:
            if child is not None:
                self.host.free_arenas.add(child.arena)

        return agreement.together(self, found, give_back)

    def _settle_arenas(self, answers: list[dict[str, Any]]) -> list[set[int]]:
        """Each rank's free arenas, with those of sub-communicators that all of their ranks have vacated."""
        ranks = {member: rank for rank, member in enumerate(self.members)}
        free = [set(answer["free"]) for answer in answers]
        vacated = [
            {Birth(tuple(path), arena, tuple(members)) for path, arena, members in answer["vacated"]}
            for answer in answers
        ]
        settled = {
            birth
            for birth in set.union(*vacated)
            if all(member in ranks and birth in vacated[ranks[member]] for member in birth.members)
        }
        for birth in settled:
            for member in birth.members:
                free[ranks[member]].add(birth.arena)
        self.host.settle([birth for birth in settled if self.members[self.rank] in birth.members])
        return free

    def survivors(self) -> Shm:
        return regroup(self, partial(rejoin, self))

    def abort(self, reason: str) -> None:
        self.fail(CollectiveError(reason))

    def disown(self, reason: str) -> None:
        self._failure = reason
        if self._progress is not None:
            self._progress.disown(CollectiveError(reason))
        self._closed, self._progress = True, None
        self._be_unusual()
        self.host.meeting.disown()

    def close(self) -> None:
        if self._closed:
            return
        progress = self._progress  # another thread may be closing, too
        if progress is not None:
            progress.close()
        self._closed, self._progress = True, None
        self._be_unusual()
        if not self._failure:
            self.regions[self.rank].leave(CLOSED, {})
        if self.arena:
            self.host.left.append((self._birth, self._heap))
        else:
            for engine in list(self.host.engines):
                engine.close()
            self.host.close()
