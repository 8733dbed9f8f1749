"""Messages between two ranks: every ordered pair has a stream of slots in the sender's memory, an endless pipeline with
a credit per slot, so a send returns as soon as its data is in the slots and a large one goes on as they are emptied. A
large one that lies in symmetric memory is copied from there. Compiled code does all of that, and makes plain calls by
itself (`kernels/messages.py`).

The receiver takes messages in the order in which they were sent; those with a tag that it does not ask for are put
aside, so any order of receiving is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from collectives.arrays import Array, address
from collectives.deadlock import Doing, Waiting
from collectives.errors import CollectiveMismatchError, CollectiveTimeoutError
from collectives.table import Table
from collectives.watch import Watch
from collectives.wording import counted
from kernels import again, native
from kernels import messages as layout
from kernels.dtypes import DTYPES, DType, find
from kernels.messages import SLOT_BYTES, SLOTS

if TYPE_CHECKING:
    from collectives.backends.shm import Shm

Message = tuple[Array, int]  # array, tag


class ToSelf:
    """What a rank has sent to itself and not yet received."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._messages: list[tuple[int, Array]] = []

    def send(self, array: Array, tag: int) -> None:
        self._messages.append((tag, array.copy()))

    def receive(self, out: Array, tag: int) -> None:
        for i, (sent, array) in enumerate(self._messages):
            if sent == tag:
                del self._messages[i]
                check_message(self._rank, tag, find(array.dtype), array.size, out)
                out.reshape(-1)[:] = array.reshape(-1)
                return
        raise CollectiveTimeoutError(
            f"recv from this very rank, tag {tag}: nothing was sent, and nobody else can send it"
        )


class Streams:
    """One rank's streams to and from each other rank of its communicator."""

    def __init__(self, shm: Shm, mail: Sequence[int], offset: int) -> None:
        """`mail[r]`: address of rank r's slots, one stream after the other; `offset`: of mine in my segment."""
        self._shm, self._mail, self._offset = shm, mail, offset
        self._ends: dict[tuple[int, bool], _End] = {}
        self._addresses = np.zeros(2 * shm.size, np.int64)  # see ShortWay
        self._under_way = np.zeros(2 * shm.size, np.int64)  # addresses of the ends with messages under way
        self._bell = shm.regions[shm.rank].bell
        self._to_self = ToSelf(shm.rank)
        self._advance: Callable[..., int] | None = None
        self._short_way: ShortWay | None = None

    @staticmethod
    def bytes(size: int) -> int:
        """Bytes of address space that the slots of one rank take."""
        return size * SLOTS * SLOT_BYTES

    def exchange(self, sends: Sequence[tuple[Array, int, int]], receives: Sequence[tuple[Array, int, int]]) -> None:
        """Run all messages to their ends, turning from one to the other. Each stream keeps its messages' order."""
        ends: dict[_End, None] = {}
        for messages, sending in (sends, True), (receives, False):
            for array, peer, tag in messages:
                if peer != self._shm.rank:
                    end = self._end(peer, sending)
                    end.queue.append((array, tag))
                    ends[end] = None
                elif sending:
                    self._to_self.send(array, tag)
                else:
                    self._to_self.receive(array, tag)
        if ends:
            self._run([end for end in ends if end.begin()])

    def short_way(self, acquire: Callable[[], bool], release: Callable[[], None]) -> ShortWay:
        """Compiled code that makes plain calls by itself, given what takes the communicator's lock and lets it go."""
        if self._short_way is None:
            self._shm.kernel("message_way")
            self._short_way = ShortWay(self._shm, self._addresses, acquire, release)
            self._short_way.stop(self._shm.stopped)
        return self._short_way

    def stop(self) -> None:
        """The communicator has failed or is closed: from now on no call goes the short way."""
        if self._short_way is not None:
            self._short_way.stop(True)

    def resume(self, x: Array, out: Array, dst: int | None, src: int | None, tag: int) -> None:
        """Go on with what the short way has begun and not ended."""
        ends = []
        for array, peer, sending in (x, dst, True), (out, src, False):
            if peer is not None and (end := self._end(peer, sending)).phase != layout.IDLE:
                end.queue.append((array, tag))
                ends.append(end)
        self._run(ends)

    def _run(self, ends: list[_End]) -> None:
        """Run what is under way at these ends, and what is queued there."""
        if self._advance is None:
            self._advance = self._shm.kernel("advance").call
        with Watch(self._shm, lambda: "a send or recv") as watch:
            for end in [end for end in ends if end.phase >= layout.IDLE]:
                self._attend(end, ends, watch)
            while ends:
                self._under_way[: len(ends)] = [end.address for end in ends]
                place = self._advance(address(self._under_way), len(ends), self._bell, *self._shm.patience)
                if place >= 0:
                    self._attend(ends[place], ends, watch)
                    continue
                peers = sorted({end.peer for end in ends})
                stuck = ends[0].waiting if len(ends) == 1 and not self._shm.busy else None
                watch.look(peers, partial(self._shm.history, peers), stuck)

    def _attend(self, end: _End, ends: list[_End], watch: Watch) -> None:
        """See to an end that needs Python."""
        while end.phase == layout.ABANDONED:  # of two looks one raises
            watch.look([end.peer], partial(self._shm.history, [end.peer]))
        if not end.go_on():
            ends.remove(end)

    def _end(self, peer: int, sending: bool) -> _End:
        if (peer, sending) not in self._ends:
            end = self._ends[peer, sending] = _End(self._shm, peer, sending, self._mail, self._offset)
            self._addresses[2 * peer + (not sending)] = end.address
        return self._ends[peer, sending]


class _End:
    """This rank's end of one stream. `queue`: the message under way, and those that come after it."""

    def __init__(self, shm: Shm, peer: int, sending: bool, mail: Sequence[int], offset: int) -> None:
        sender, receiver = (shm.rank, peer) if sending else (peer, shm.rank)
        if sending:  # the slots are mine
            shm.host.own.commit(offset + receiver * SLOTS * SLOT_BYTES, SLOTS * SLOT_BYTES)
        full, taken = shm.regions[receiver].flag(1, sender), shm.regions[sender].flag(2, receiver)
        opened = shm.host.segments[shm.members[sender]]
        self.peer, self.queue = peer, deque[Message]()
        self._sending = sending
        self._aside: list[tuple[int, Array]] = []
        self._passed_over: Message | None = None  # what is under way, if that is not what is asked for
        self._words = np.zeros(layout.END_WORDS, np.int64)
        self.address = address(self._words)
        self._words[layout.END_SENDS] = sending
        self._words[layout.END_RING] = mail[sender] + receiver * SLOTS * SLOT_BYTES
        self._words[layout.END_THEIRS], self._words[layout.END_MINE] = (taken, full) if sending else (full, taken)
        self._words[layout.END_BELL] = shm.regions[peer].bell
        self._words[layout.END_OPEN] = opened.address + opened.heap
        self._words[layout.END_OPEN_BYTES] = opened.nbytes - opened.heap
        self._words[layout.END_STATE] = shm.regions[sender].address
        self._words[layout.END_PHASE] = layout.IDLE

    @property
    def phase(self) -> int:
        return int(self._words[layout.END_PHASE])

    @property
    def waiting(self) -> Waiting:
        doing = Doing.SEND if self._sending else Doing.RECV
        return Waiting(doing, self.peer, int(self._words[layout.END_COUNT]))

    def begin(self) -> bool:
        """Begin the first message of the queue that does not end at once. Returns whether there is one."""
        while self.queue:
            array, tag = self.queue[0]
            if self._sending or not self._take_aside(array, tag):
                self._put(layout.BEGUN, array, tag)
                return True
            self.queue.popleft()
        return False

    def go_on(self) -> bool:
        """What is under way has ended, or is not what is asked for. Returns whether now something is under way."""
        out, tag = self.queue[0]
        if self.phase == layout.STRANGE:
            number, known, code, count, _ = self._words[layout.END_HEADER : layout.END_MESSAGE].tolist()
            assert number == self._words[layout.END_NUMBER], "messages of a stream come in order"
            if known == tag:
                check_message(self.peer, tag, DTYPES[code], count, out)
            array = np.empty(count, DTYPES[code].numpy)
            self._passed_over = array, known
            self._put(layout.ACCEPTED, array, known)
            return True
        if self._passed_over is None:
            self.queue.popleft()
            return self.begin()
        array, known = self._passed_over
        self._passed_over = None
        self._aside.append((known, array))
        self._put(layout.BEGUN, out, tag)
        return True

    def _put(self, phase: int, array: Array, tag: int) -> None:
        """What the message under way is."""
        self._words[layout.END_MESSAGE : layout.END_LEFT] = (
            phase, address(array), array.nbytes, 0, tag, find(array.dtype).code, array.size,
        )  # fmt: skip
        self._words[layout.END_ASIDE] = len(self._aside)

    def _take_aside(self, out: Array, tag: int) -> bool:
        """Receive a message that was put aside, if there is one with this tag."""
        for i, (known, array) in enumerate(self._aside):
            if known == tag:
                del self._aside[i]
                self._words[layout.END_ASIDE] = len(self._aside)
                check_message(self.peer, tag, find(array.dtype), array.size, out)
                out.reshape(-1)[:] = array.reshape(-1)
                return True
        return False


class ShortWay:
    """Compiled code that makes plain calls by itself: see `kernels/messages.py`. `call` is `native.short_way`'s."""

    def __init__(self, shm: Shm, ends: Array, acquire: Callable[[], bool], release: Callable[[], None]) -> None:
        """`ends`: for each rank the addresses of the ends that send to it and receive from it, or 0."""
        self._table = table = Table(layout.TABLE_WORDS, shm, acquire, release)
        self._words, self._ends, self.pending = table.words, ends, table.pending
        self._words[layout.TABLE_INTEGER] = id(int)
        self._words[layout.TABLE_BELL] = shm.regions[shm.rank].bell
        self._words[layout.TABLE_SPINS], self._words[layout.TABLE_YIELDS] = shm.patience
        self._words[layout.TABLE_SIZE] = shm.size
        self._words[layout.TABLE_PEERS] = address(ends)
        self._words[layout.TABLE_DTYPES] = len(DTYPES)
        for i, dtype in enumerate(DTYPES):
            first = layout.TABLE_DTYPES + 1 + layout.DTYPE_WORDS * i
            told = again.dtype_of(table.address, id(np.empty(0, dtype.numpy)) + object.__basicsize__)
            self._words[first : first + layout.DTYPE_WORDS] = told, dtype.code, dtype.itemsize
        self.call = native.short_way(table.address, "message_way")

    def stop(self, stopped: bool) -> None:
        """Whether every call is to go the long way."""
        self._words[layout.TABLE_STOPPED] = stopped


def check_message(peer: int, tag: int, dtype: DType, count: int, out: Array) -> None:
    """Raise CollectiveMismatchError unless `out` is what takes a message of `count` elements of `dtype`."""
    if (dtype, count) != (find(out.dtype), out.size):
        raise CollectiveMismatchError(
            f"rank {peer} sent {counted(count, 'element')} of {dtype.name} with tag {tag}, "
            f"and this rank receives them into {out.size} of {find(out.dtype).name}"
        )
