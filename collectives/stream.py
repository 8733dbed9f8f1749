"""Messages between two ranks: every ordered pair has a stream of slots in the sender's memory, an endless pipeline
with a credit per slot, so a send returns as soon as its data is in the slots and a large one goes on as they are
emptied.

A message is a header (tag, dtype, count), which takes one slot, and its data, which takes as many as it fills. The
receiver takes messages in the order in which they were sent; those with a tag that it does not ask for are put aside,
so any order of receiving is right.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from collectives.arrays import Array, address
from collectives.contract import Contract, geometry
from collectives.deadlock import Doing, Waiting
from collectives.errors import CollectiveMismatchError, CollectiveTimeoutError
from collectives.job import Encoded, Job, Link
from collectives.program import Buffer, Move, Program, Ref, Signal, Wait
from collectives.watch import Watch
from kernels.dtypes import DTYPES, DType, find
from kernels.executor import DONE, LINK_SPINS, LINK_YIELDS

if TYPE_CHECKING:
    from collectives.backends.shm import Shm

SLOTS = 8
SLOT_BYTES = 64 << 10
JOBS = 256  # kinds of messages whose jobs are kept, for each stream
EAGER_BYTES = (SLOTS - 1) * SLOT_BYTES  # what the slots hold beside a header
_SPIN_ONLY = (64, -1)  # patience of one who has other messages to turn to
_HEADER = find("int64")
_HEADER_WORDS = 4  # number, tag, dtype, count


def stream_program() -> Program:
    """The pipeline: rank 0 fills slots, rank 1 empties them. It has no Enter: it goes on from message to message."""
    cell, source, target = Ref(Buffer.SCRATCH, 0, 0), Ref(Buffer.INPUT, 0, 0), Ref(Buffer.OUTPUT, 1, 0)
    sender = (Wait(1, signal=1, lag=SLOTS), Move(0, (cell,), (source,), (True,)), Signal(1))
    receiver = (Wait(0, signal=1), Move(0, (target,), (cell,), (True,)), Signal(0))
    contract = Contract("send_recv", 2)
    return Program(contract, "stream", "staged", SLOTS, pipelined=True, cells=1, bodies=(sender, receiver))


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
        self._to_self = ToSelf(shm.rank)

    @staticmethod
    def bytes(size: int) -> int:
        """Bytes of address space that the slots of one rank take."""
        return size * SLOTS * SLOT_BYTES

    def exchange(self, sends: Sequence[tuple[Array, int, int]], receives: Sequence[tuple[Array, int, int]]) -> None:
        """Run all messages to their ends, turning from one to the other. Each stream keeps its messages' order."""
        work: dict[tuple[int, bool], deque[Iterator[Waiting]]] = {}
        for array, peer, tag in sends:
            if peer == self._shm.rank:
                self._to_self.send(array, tag)
            else:
                work.setdefault((peer, True), deque()).append(self._end(peer, True).send(array, tag))
        for array, peer, tag in receives:
            if peer == self._shm.rank:
                self._to_self.receive(array, tag)
            else:
                work.setdefault((peer, False), deque()).append(self._end(peer, False).receive(array, tag))
        for peer, sending in work:
            self._end(peer, sending).be_patient(_SPIN_ONLY)
        self._turn(work)

    def _turn(self, work: dict[tuple[int, bool], deque[Iterator[Waiting]]]) -> None:
        """Advance the first message of every stream in turn until all are done."""
        rounds, moves = 0, 0  # the rounds in which nothing has moved
        alone = False  # whether one stream is left: its end then waits by itself, and nothing else goes on meanwhile
        with Watch(self._shm, lambda: "a send or recv") as watch:
            while work:
                if not alone and len(work) == 1:
                    alone = True
                    self._end(*next(iter(work))).be_patient(self._shm.patience)
                blocked: list[Waiting] = []
                for stream, queue in list(work.items()):
                    waiting = next(queue[0], None)
                    if waiting is not None:
                        blocked.append(waiting)
                        continue
                    queue.popleft()
                    if not queue:
                        del work[stream]
                before, moves = moves, sum(waiting.moves for waiting in blocked)
                rounds = rounds + 1 if moves == before else 1
                if len(work) > 1 and rounds > 20:  # let others have the core, then sleep
                    os.sched_yield() if rounds < 200 else time.sleep(0.0002)
                if blocked and (alone or rounds % 250 == 0):
                    peers = sorted({waiting.peer for waiting in blocked})
                    stuck = blocked[0] if alone and not self._shm.busy else None
                    watch.look(peers, partial(self._shm.history, peers), stuck)

    def _end(self, peer: int, sending: bool) -> _End:
        if (peer, sending) not in self._ends:
            self._ends[peer, sending] = _End(self._shm, peer, sending, self._mail, self._offset)
        return self._ends[peer, sending]


class _End:
    """This rank's end of one stream."""

    def __init__(self, shm: Shm, peer: int, sending: bool, mail: Sequence[int], offset: int) -> None:
        sender, receiver = (shm.rank, peer) if sending else (peer, shm.rank)
        if sending:  # the slots are mine
            shm.host.own.commit(offset + receiver * SLOTS * SLOT_BYTES, SLOTS * SLOT_BYTES)
        arrived, taken = shm.regions[receiver].flag(1, sender), shm.regions[sender].flag(2, receiver)
        flags_in, flags_out = ((0, taken), (0, arrived)) if sending else ((arrived, 0), (taken, 0))
        self._finished = np.zeros(1, np.int64)
        self._link = Link(
            0 if sending else 1,
            scratch=(mail[sender] + receiver * SLOTS * SLOT_BYTES, 0),
            boards=(0, 0),
            flags_in=flags_in,
            flags_out=flags_out,
            finished=self._finished.ctypes.data,
            slots=SLOTS,
            slot_bytes=SLOT_BYTES,
            patience=_SPIN_ONLY,
        )
        self._shm, self.peer, self._sending = shm, peer, sending
        self._encoded = Encoded.of(stream_program(), self._link.rank)
        self._execute_on = shm.kernel("execute_on").call
        self._header = np.zeros(_HEADER_WORDS, np.int64)
        self._jobs: dict[tuple[DType, int], Job] = {}
        self._messages = 0
        self._aside: list[tuple[int, Array]] = []

    def be_patient(self, patience: tuple[int, int]) -> None:
        """How long to look at a flag before letting others have the core."""
        self._link.words[LINK_SPINS], self._link.words[LINK_YIELDS] = patience

    def send(self, array: Array, tag: int) -> Iterator[Waiting]:
        """Send one message; yields while the receiver is behind."""
        self._messages += 1
        dtype = find(array.dtype)
        self._header[:] = self._messages, tag, dtype.code, array.size
        yield from self._run(self._header, _HEADER)
        if array.size:
            yield from self._run(array, dtype)

    def receive(self, out: Array, tag: int) -> Iterator[Waiting]:
        """Receive the next message with this tag; yields while it has not come."""
        for i, (known, array) in enumerate(self._aside):
            if known == tag:
                del self._aside[i]
                check_message(self.peer, tag, find(array.dtype), array.size, out)
                out.reshape(-1)[:] = array.reshape(-1)
                return
        while True:
            yield from self._run(self._header, _HEADER)
            self._messages += 1
            number, known, code, count = self._header.tolist()
            assert number == self._messages, "messages of a stream come in order"
            dtype = DTYPES[code]
            if known == tag:
                check_message(self.peer, tag, dtype, count, out)
                if count:
                    yield from self._run(out, dtype)
                return
            array = np.empty(count, dtype.numpy)
            if count:
                yield from self._run(array, dtype)
            self._aside.append((known, array))

    def _run(self, array: Array, dtype: DType) -> Iterator[Waiting]:
        key = dtype, array.size
        if key not in self._jobs:
            if len(self._jobs) == JOBS:
                self._jobs.clear()
            lengths = geometry(self._encoded.program.contract, array.size, dtype.itemsize)
            self._jobs[key] = Job(self._link, self._encoded, lengths, dtype)
        job = self._jobs[key]
        place = address(array)
        while self._execute_on(job.address, self._link.rank, place, place) != DONE:
            yield Waiting(Doing.SEND if self._sending else Doing.RECV, self.peer, self._link.signals_sent)


def check_message(peer: int, tag: int, dtype: DType, count: int, out: Array) -> None:
    """Raise CollectiveMismatchError unless `out` is what takes a message of `count` elements of `dtype`."""
    if (dtype, count) != (find(out.dtype), out.size):
        raise CollectiveMismatchError(
            f"rank {peer} sent {count} elements of {dtype.name} with tag {tag}, and this rank receives them into "
            f"{out.size} of {find(out.dtype).name}"
        )
