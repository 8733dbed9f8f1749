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
        bodies, ranks = self.program.bodies, range(self.program.size)
        lengths, first_row = self._lengths.tolist(), self._first_row.tolist()
        signal_steps: dict[tuple[int, int], list[int]] = defaultdict(list)  # by (from, to)
        for rank in ranks:
            for step, instruction in enumerate(bodies[rank]):
                if isinstance(instruction, Signal):
                    signal_steps[rank, instruction.peer].append(step)
        entered = [turns[0] for turns in self._turns]  # all enter before any can wait
        self.order += ((rank, 0, entered[rank]) for rank in ranks)
        done = list(entered)  # each rank's time, at the turn it has come to
        taken = [0] * len(ranks)  # the turns it has behind it
        going = True
        while going:
            going = False
            for rank in ranks:
                turns, length = self._turns[rank], lengths[rank]
                while taken[rank] < len(turns) * self.slices:
                    slice_, turn = divmod(taken[rank], len(turns))
                    instruction = bodies[rank][turns[turn]]
                    row = first_row[rank] + taken[rank] + 1
                    clock = self._rows[row]
                    if isinstance(instruction, Wait) and slice_ >= instruction.lag:
                        peer, its_slice = instruction.peer, slice_ - instruction.lag
                        its_step = signal_steps[peer, rank][instruction.signal - 1]
                        time = its_slice * lengths[peer] + its_step + 1
                        if done[peer] < time:
                            break
                        np.maximum(self._rows[row - 1], self._rows[self._row(peer, its_slice, its_step)], out=clock)
                        if clock[peer] < time:
                            clock[peer] = time
                    elif isinstance(instruction, Enter) and slice_ == 0:
                        clock[:] = entered
                    else:
                        clock[:] = self._rows[row - 1]
                    going = True
                    taken[rank] += 1
                    stop = turns[turn + 1] if turn + 1 < len(turns) else length
                    if slice_ == 0:
                        self.order.append((rank, turns[turn] + 1, stop))
                    done[rank] = (
                        slice_ * length + stop + (turns[0] if stop == length and slice_ + 1 < self.slices else 0)
                    )
        self._check_progress(taken)

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
