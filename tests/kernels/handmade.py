"""Programs, links and jobs written by hand, word by word, as `kernels/executor.py` lays them down.

A `World` is a few ranks in one piece of memory, which may be shared by processes: each builds the same world over its
own mapping of it. Tests run its jobs with the executor of any target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import guarded
import numpy as np
import numpy.typing as npt

from kernels import executor as x

Words = npt.NDArray[np.int64]
Execute = Callable[[int, int, int, int, int], int]

# Programs: one list of words per rank.

ENTER = [x.ENTER]


def inp(rank: int, place: int = 0) -> int:
    return x.INPUT << 56 | rank << 32 | place


def out(rank: int, place: int = 0) -> int:
    return x.OUTPUT << 56 | rank << 32 | place


def cell(rank: int, number: int = 0) -> int:
    return x.SCRATCH << 56 | rank << 32 | number


def raw(ref: int) -> int:
    return ref | 1 << 62


def move(chunk: int, dsts: Sequence[int], srcs: Sequence[int], final: bool = False) -> list[int]:
    return [x.MOVE, chunk, int(final), len(srcs), len(dsts), *srcs, *dsts]


def wait(peer: int, signal: int, lag: int = 0) -> list[int]:
    return [x.WAIT, peer, signal, lag]


def signal(peer: int) -> list[int]:
    return [x.SIGNAL, peer]


def signals(body: Sequence[Sequence[int]], peer: int) -> int:
    """How often an instruction list signals `peer`."""
    return sum(tuple(instruction[:2]) == (x.SIGNAL, peer) for instruction in body)


class World:
    """`size` ranks, their flags, boards and scratch, and inputs and outputs of `room` bytes each, all in `memory`."""

    def __init__(
        self,
        size: int,
        *,
        channels: int = 1,
        slots: int = 2,
        cells: int = 1,
        cell_bytes: int = 256,
        room: int = 1 << 16,
        patience: tuple[int, int] = (20, 20),
        memory: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.size, self.channels, self.slots, self.cell_bytes = size, channels, slots, cell_bytes
        self.slot_bytes = cells * cell_bytes
        self.patience = patience
        self.memory = guarded.zeros(1 << 22, np.uint8) if memory is None else memory
        self._taken = -self.memory.ctypes.data % 64
        self.scratch = [self._take(slots * self.slot_bytes) for _ in range(size)]
        self.boards = [self._take(channels * x.PAGES * x.PAGE_BYTES) for _ in range(size)]
        self.flags_stride = size * size * 64
        self.flags = self._take(channels * self.flags_stride)
        self.finished = [self._take(64) for _ in range(size)]
        self.inputs = [self._take(room) for _ in range(size)]
        self.outputs = [self._take(room) for _ in range(size)]
        self.counters = [np.zeros((channels, x.COUNTERS + 2 * size), np.int64) for _ in range(size)]
        self._jobs: list[Job] = []
        self._links = [self._link(rank) for rank in range(size)]

    def _take(self, nbytes: int) -> int:
        start = self._taken
        self._taken += (nbytes + 63) // 64 * 64
        assert self._taken <= self.memory.size
        return self.memory.ctypes.data + start

    def at(self, address: int, count: int, dtype: Any) -> npt.NDArray[Any]:
        """The array of `count` elements at an address of this world."""
        start = address - self.memory.ctypes.data
        return self.memory[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    def flag(self, source: int, target: int, channel: int = 0) -> int:
        """The address of the flag that `source` raises for `target`."""
        return self.flags + channel * self.flags_stride + (source * self.size + target) * 64

    def _link(self, rank: int) -> tuple[Words, list[Words]]:
        ranks = range(self.size)
        tables = {
            x.LINK_SCRATCH: self.scratch,
            x.LINK_BOARDS: self.boards,
            x.LINK_FLAGS_IN: [self.flag(peer, rank) for peer in ranks],
            x.LINK_FLAGS_OUT: [self.flag(rank, peer) for peer in ranks],
        }
        arrays = {word: np.array(table, np.int64) for word, table in tables.items()}
        link = np.zeros(x.LINK_WORDS, np.int64)
        for word, array in arrays.items():
            link[word] = array.ctypes.data
        link[x.LINK_RANK], link[x.LINK_SIZE] = rank, self.size
        link[x.LINK_SLOTS], link[x.LINK_SLOT_BYTES] = self.slots, self.slot_bytes
        link[x.LINK_SPINS], link[x.LINK_YIELDS] = self.patience
        link[x.LINK_FLAGS_STRIDE] = self.flags_stride
        link[x.LINK_COUNTERS] = self.counters[rank].ctypes.data
        link[x.LINK_FINISHED] = self.finished[rank]
        return link, list(arrays.values())

    def job(
        self,
        rank: int,
        bodies: Sequence[Sequence[Sequence[int]]],
        itemsize: int,
        lengths: Sequence[int],
        *,
        step: int | None = None,
        starts: Sequence[int] = (0,),
        combine: int = 0,
        scale: int = 0,
        descriptor: Sequence[int] = (),
        in_place: bool = False,
    ) -> Job:
        """One call of `rank`. `bodies` are the instruction lists of all ranks; `starts` serve INPUT and OUTPUT.

        It lives as long as the world, and needs the world: the executor knows nothing but addresses.
        """
        longest = max(lengths)
        step = step or max(longest, 1)
        tables = {
            x.JOB_CODE: [word for instruction in bodies[rank] for word in instruction] + [x.END],
            x.JOB_LENGTHS: lengths,
            x.JOB_INPUTS: self.outputs if in_place else self.inputs,
            x.JOB_OUTPUTS: self.outputs,
            x.JOB_IN_STARTS: starts,
            x.JOB_OUT_STARTS: starts,
            x.JOB_SIGNALS_IN: [signals(body, rank) for body in bodies],
            x.JOB_OPERANDS: [0] * (self.channels * (2 * self.size + 2)),
        }
        words = {
            x.JOB_LINK: self._links[rank][0].ctypes.data,
            x.JOB_SLICES: max(1, -(-longest // step)),
            x.JOB_STEP: step,
            x.JOB_ITEMSIZE: itemsize,
            x.JOB_CELL_BYTES: self.cell_bytes,
            x.JOB_COMBINE: combine,
            x.JOB_SCALE: scale,
            x.JOB_RANKS: self.size,
        }
        arrays = {word: np.array(table, np.int64) for word, table in tables.items()}
        self._jobs.append(Job(words, arrays, descriptor, self.channels))
        return self._jobs[-1]


class Job:
    """One rank's call: run it again as often as you like."""

    def __init__(
        self, words: dict[int, int], tables: dict[int, Words], descriptor: Sequence[int], channels: int
    ) -> None:
        self.tables = tables
        self.words = np.zeros(x.JOB_PLACE + channels * x.PLACE_WORDS, np.int64)
        for word, value in words.items():
            self.words[word] = value
        for word, table in tables.items():
            self.words[word] = table.ctypes.data
        self.words[x.JOB_DESCRIPTOR : x.JOB_DESCRIPTOR + len(descriptor)] = descriptor
        self.address = int(self.words.ctypes.data)
        self.channels = channels

    def place(self, word: int, channel: int = 0) -> int:
        """A word of the executor's place in a channel."""
        return int(self.words[x.JOB_PLACE + x.PLACE_WORDS * channel + word])

    def renew(self) -> None:
        """For `run_channel`: every channel has all to do."""
        for channel in range(self.channels):
            self.words[x.JOB_PLACE + x.PLACE_WORDS * channel + x.PLACE_STATUS] = x.BLOCKED


def finish(execute: Execute, job: Job, channel: int = 0, rounds: int = 400) -> int:
    """Run one channel of a job to its end, going on whenever it is BLOCKED (a deadlock ends after so many rounds)."""
    for _ in range(rounds):
        status = execute(job.address, channel, job.channels, 0, 1)
        if status != x.BLOCKED:
            return status
    return x.BLOCKED


def run(execute: Execute, jobs: Sequence[Job]) -> list[int]:
    """All ranks at once, each channel of each in its own thread. Returns what they ended with, rank by rank."""
    places = [(job, channel) for job in jobs for channel in range(job.channels)]
    results = [-1] * len(places)

    def work(number: int) -> None:
        job, channel = places[number]
        results[number] = finish(execute, job, channel)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# Programs that together use every instruction.


def two_shot(size: int) -> list[list[list[int]]]:
    """All-reduce on memory that everybody sees: each rank reduces one chunk from all inputs into all outputs."""
    ranks = range(size)

    def body(rank: int) -> list[list[int]]:
        others = [peer for peer in ranks if peer != rank]
        reduce = move(rank, [out(r, rank) for r in ranks], [raw(inp(r, rank)) for r in ranks], final=True)
        return [ENTER, reduce, *(signal(peer) for peer in others), *(wait(peer, 1) for peer in others)]

    return [body(rank) for rank in ranks]


def staged_gather(size: int, slots: int) -> list[list[list[int]]]:
    """All-gather through scratch: each rank puts its slice there and the others fetch it, `slots` slices in flight."""

    def body(rank: int) -> list[list[int]]:
        others = [peer for peer in range(size) if peer != rank]
        words = [ENTER]
        words += [wait(peer, 2, lag=slots) for peer in others]  # they have read what the slot held
        words += [move(rank, [cell(rank)], [inp(rank, rank)]), move(rank, [out(rank, rank)], [inp(rank, rank)])]
        words += [signal(peer) for peer in others]
        for peer in others:
            words += [wait(peer, 1), move(peer, [out(rank, peer)], [cell(peer)]), signal(peer)]
        return words

    return [body(rank) for rank in range(size)]


def chain(size: int, slots: int) -> list[list[list[int]]]:
    """All-reduce through scratch: a sum grows from rank 0 to the last, from whom the others fetch the total."""
    last = size - 1

    def body(rank: int) -> list[list[int]]:
        if rank == last:
            words = [ENTER, *(wait(peer, 2 if peer == last - 1 else 1, lag=slots) for peer in range(last))]
            words += [wait(last - 1, 1)]
            words += [move(0, [out(last), cell(last)], [cell(last - 1), raw(inp(last))], final=True)]
            return words + [signal(peer) for peer in range(last)]
        words = [ENTER, wait(rank + 1, 1, lag=slots)]  # it has read what the slot held
        if rank == 0:
            words += [move(0, [cell(0)], [raw(inp(0))])]
        else:
            words += [wait(rank - 1, 1), move(0, [cell(rank)], [cell(rank - 1), raw(inp(rank))]), signal(rank - 1)]
        return words + [signal(rank + 1), wait(last, 1), move(0, [out(rank)], [cell(last)]), signal(last)]

    return [body(rank) for rank in range(size)]
