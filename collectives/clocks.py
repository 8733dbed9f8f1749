"""Vector clocks: what each rank knows to be done, at every step of a program that runs in several slices.

L. Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978; F. Mattern, "Virtual time and
global states of distributed systems", 1989.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.errors import ProgramError
from collectives.program import Enter, Program, Signal, Wait

Integers = int | npt.NDArray[np.int64]


class Clocks:
    """All ranks' clocks over `slices` slices of one call. A rank's time is the number of instructions it has done.

    `order` is one order in which the ranks can go through the first slice: (rank, first step, step after the last).
    Raises ProgramError if ranks wait for ever.
    """

    def __init__(self, program: Program, slices: int) -> None:
        size = program.size
        self.program, self.slices = program, slices
        self.order: list[tuple[int, int, int]] = []
        self._lengths = np.array([len(body) for body in program.bodies], dtype=np.int64)
        # A clock changes when its rank waits or enters. There is a row for the very beginning, and one for the time
        # after each of these turns, slice by slice.
        self._turns = [
            [k for k, i in enumerate(body) if type(i) is Wait or type(i) is Enter] for body in program.bodies
        ]
        self._turns_a_slice = np.array([len(turns) for turns in self._turns], dtype=np.int64)
        rows = 1 + slices * self._turns_a_slice
        self._first_row = np.cumsum(rows) - rows
        self._rows = np.zeros((int(rows.sum()), size), dtype=np.int32)
        # how many turns of a rank come before each of its steps: one array for all ranks
        self._first_step = np.cumsum(1 + self._lengths) - (1 + self._lengths)
        self._turns_before = np.concatenate(
            [np.searchsorted(turns, np.arange(n + 1)) for turns, n in zip(self._turns, self._lengths, strict=True)]
        )
        self._signal_steps: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (from, to)
        for rank, body in enumerate(program.bodies):
            for step, instruction in enumerate(body):
                if type(instruction) is Signal:
                    self._signal_steps[rank, instruction.peer].append(step)
        self._play()

    def know(
        self, rank: Integers, slice_: Integers, step: Integers, peer: Integers, its_slice: Integers, its_step: Integers
    ) -> npt.NDArray[np.bool_]:
        """Whether `rank`, coming to `step` of `slice_`, knows that `peer` is through `its_step` of `its_slice`.

        The step after a rank's last stands for the end of the slice. Arrays are taken element by element.
        """
        known = self._rows[self._row(rank, slice_, step), peer]
        return np.asarray(known > its_slice * self._lengths[peer] + its_step)

    def _row(self, rank: Integers, slice_: Integers, step: Integers) -> Any:
        """Where the clock is by which `rank` does `step`."""
        turn = self._turns_before[self._first_step[rank] + step]
        return self._first_row[rank] + slice_ * self._turns_a_slice[rank] + turn

    def _play(self) -> None:
        """Let all ranks that can take their next turns, all at once, until all are through or none can."""
        peer, time, source, reached = self._turns_of_all_slices()
        rows, ranks = self._rows, np.arange(self.program.size)
        rows[self._first_row + 1] = [turns[0] for turns in self._turns]  # all enter before any can wait
        taken = [self._first_row]  # the rows from which turns were taken, in order
        at = self._first_row + 1  # the row that each rank has come to
        done = reached[self._first_row]  # its time, when it has come to its next turn
        while (able := done[peer[at]] >= time[at]).any():
            going, now = ranks[able], at[able]
            clocks = np.maximum(rows[now], rows[source[now]])
            told = np.arange(len(now)), peer[now]
            clocks[told] = np.maximum(clocks[told], time[now])
            rows[now + 1] = clocks
            done[going] = reached[now]
            at[going] += 1
            taken.append(now)
        self._check_progress((at - self._first_row).tolist())
        self._put_in_order(np.concatenate(taken))

    def _turns_of_all_slices(self) -> tuple[npt.NDArray[np.int64], ...]:
        """For the turn that leads on from each row: whom it waits for, for which time of that rank, in which row that
        rank's clock then is, and the time to which one's own goes on. Who waits for nobody "waits" for himself.
        """
        size, lengths, turns = self.program.size, self._lengths, self._turns_a_slice
        rank = np.repeat(np.arange(size), turns)
        peer, lag, step, stop = (
            np.concatenate(column) for column in zip(*map(self._turns_of, range(size)), strict=True)
        )
        first = np.concatenate([start + np.arange(n) for start, n in zip(self._first_row, turns, strict=True)])
        slice_ = np.arange(self.slices)[:, np.newaxis]
        row, back = first + slice_ * turns[rank], slice_ - lag
        waits = (peer != rank) & (back >= 0)
        tables = np.zeros((4, len(self._rows)), dtype=np.int64)
        tables[1] = np.iinfo(np.int64).max  # from the last row of a rank nothing leads on
        tables[0, row] = np.where(waits, peer, rank)
        tables[1, row] = np.where(waits, back * lengths[peer] + step + 1, 0)
        tables[2, row] = np.where(waits, self._row(peer, back, step), row)
        tables[3, row] = slice_ * lengths[rank] + stop
        return tuple(tables)

    def _turns_of(self, rank: int) -> list[list[int]]:
        """For each of a rank's turns in one slice: the peer it waits for (itself, where it enters), the lag, the step
        at which the signal is given, and the step of the next turn."""
        turns, body = self._turns[rank], self.program.bodies[rank]
        waits = [body[turn] for turn in turns]
        found = [
            (i.peer, i.lag, self._signal_steps[i.peer, rank][i.signal - 1]) if type(i) is Wait else (rank, 0, 0)
            for i in waits
        ]
        return [*map(list, zip(*found, strict=True)), [*turns[1:], len(body) + turns[0]]]

    def _put_in_order(self, taken: npt.NDArray[np.int64]) -> None:
        """`order` from the rows from which turns were taken, in the order in which they were."""
        self.order += ((rank, 0, turns[0]) for rank, turns in enumerate(self._turns))
        ranks = np.searchsorted(self._first_row, taken, side="right") - 1
        numbers = taken - self._first_row[ranks]
        first_slice = numbers < self._turns_a_slice[ranks]
        ends = [[*turns[1:], len(body)] for turns, body in zip(self._turns, self.program.bodies, strict=True)]
        for rank, number in zip(ranks[first_slice].tolist(), numbers[first_slice].tolist(), strict=True):
            self.order.append((rank, self._turns[rank][number] + 1, ends[rank][number]))

    def _check_progress(self, taken: list[int]) -> None:
        stuck: dict[int, tuple[int, int]] = {}  # rank -> (step, the peer it waits for)
        for rank, turns in enumerate(self._turns):
            if taken[rank] < len(turns) * self.slices:
                step = turns[taken[rank] % len(turns)]
                wait = self.program.bodies[rank][step]
                assert isinstance(wait, Wait)
                stuck[rank] = step, wait.peer
        if stuck:
            rank, (step, peer) = next(iter(stuck.items()))
            all_of_them = "; ".join(f"rank {r} at step {s}, for {p}" for r, (s, p) in stuck.items())
            raise ProgramError(f"waits for ever for rank {peer} (stuck: {all_of_them})", rank=rank, step=step)
