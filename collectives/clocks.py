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
        self._turns = [[k for k, i in enumerate(body) if isinstance(i, Wait | Enter)] for body in program.bodies]
        self._turns_a_slice = np.array([len(turns) for turns in self._turns], dtype=np.int64)
        rows = 1 + slices * self._turns_a_slice
        self._first_row = np.cumsum(rows) - rows
        self._rows = np.zeros((int(rows.sum()), size), dtype=np.int64)
        # how many turns of a rank come before each of its steps: one array for all ranks
        self._first_step = np.cumsum(1 + self._lengths) - (1 + self._lengths)
        self._turns_before = np.concatenate(
            [np.searchsorted(turns, np.arange(n + 1)) for turns, n in zip(self._turns, self._lengths, strict=True)]
        )
        self._signal_steps: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (from, to)
        for rank, body in enumerate(program.bodies):
            for step, instruction in enumerate(body):
                if isinstance(instruction, Signal):
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
        """Let each rank go on as far as it can, in turn, until all are through or none can."""
        rows, ranks = list(self._rows), range(self.program.size)  # views of the rows, made once
        lengths, first_row, turns_a_slice = (
            self._lengths.tolist(),
            self._first_row.tolist(),
            self._turns_a_slice.tolist(),
        )
        what = [self._what_turns_wait_for(rank) for rank in ranks]
        entered = [turns[0] for turns in self._turns]  # all enter before any can wait
        self.order += ((rank, 0, entered[rank]) for rank in ranks)
        done = list(entered)  # each rank's time, at the turn it has come to
        taken = [0] * len(ranks)  # the turns it has behind it
        going = True
        while going:
            going = False
            for rank in ranks:
                turns = self._turns[rank]
                while taken[rank] < len(turns) * self.slices:
                    slice_, turn = divmod(taken[rank], len(turns))
                    row = first_row[rank] + taken[rank] + 1
                    peer, lag, time, its_row = what[rank][turn]
                    if peer is None or slice_ < lag:
                        rows[row][:] = entered if taken[rank] == 0 else rows[row - 1]
                    else:
                        time += (slice_ - lag) * lengths[peer]
                        if done[peer] < time:
                            break
                        clock = rows[row]
                        np.maximum(rows[row - 1], rows[its_row + (slice_ - lag) * turns_a_slice[peer]], out=clock)
                        if clock[peer] < time:
                            clock[peer] = time
                    going = True
                    taken[rank] += 1
                    start = turns[turn] + 1
                    stop = turns[turn + 1] if turn + 1 < len(turns) else lengths[rank]
                    if slice_ == 0:
                        self.order.append((rank, start, stop))
                    done[rank] = slice_ * lengths[rank] + stop
                    if turn + 1 == len(turns) and slice_ + 1 < self.slices:
                        done[rank] += turns[0]
        self._check_progress(taken)

    def _what_turns_wait_for(self, rank: int) -> list[tuple[int | None, int, int, int]]:
        """For each of a rank's turns: whom it waits for (nobody when it enters), the lag, and at which time and with
        which clock the signal is given, in slice 0.
        """
        found: list[tuple[int | None, int, int, int]] = []
        for turn in self._turns[rank]:
            instruction = self.program.bodies[rank][turn]
            if isinstance(instruction, Wait):
                peer, signal, lag = instruction
                step = self._signal_steps[peer, rank][signal - 1]
                found.append((peer, lag, step + 1, int(self._row(peer, 0, step))))
            else:
                found.append((None, 0, 0, 0))
        return found

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
