"""What every rank does beside a sample: meet the others at a start line, and measure the round trip between cores.

Flags in a memory that all ranks of a crew share; compiled, so that neither costs more than the cache lines' travel.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from functools import cache
from statistics import median

import numpy as np

from bench.crew import LINE
from kernels.portable import bind, portable
from kernels.primitives import await_flag, raise_flag

_VOLLEY = 50  # round trips that are timed together
TRIPS = 9 * _VOLLEY  # in one measurement, the median of its volleys


@portable
def meet(flags: int, stride: int, ranks: int, rank: int, epoch: int, spins: int, yields: int) -> bool:
    """Raise this rank's flag to `epoch`, and wait for all the others'. False: somebody has not come in about 50 ms."""
    raise_flag(flags + rank * stride, epoch)
    for other in range(ranks):
        if not await_flag(flags + other * stride, epoch, spins, yields):
            return False
    return True


@portable
def volley(mine: int, theirs: int, serving: bool, trip: int, end: int, spins: int, yields: int) -> int:
    """Round trips number `trip` to `end` - 1 between two ranks; the number to go on with, `end` when done."""
    while trip < end:
        if serving:
            raise_flag(mine, trip)
        if not await_flag(theirs, trip, spins, yields):
            return trip
        if not serving:
            raise_flag(mine, trip)
        trip += 1
    return trip


class Pace:
    """One rank's side. `track` holds a line per rank and two for the ping-pong; `abandoned` says to stop waiting."""

    def __init__(self, track: mmap.mmap, rank: int, ranks: int, abandoned: Callable[[], bool]) -> None:
        self._track = np.frombuffer(track, np.uint8)
        self._flags: int = self._track.__array_interface__["data"][0]
        self._rank = rank
        self._ranks = ranks
        self._abandoned = abandoned
        spins = 20 if ranks > (os.cpu_count() or 1) else 1000
        self._patience = spins, 1000
        self._meet, self._volley = _compiled()

    def start_line(self, number: int) -> None:
        """Return when all ranks are here, in all ranks at nearly the same time. Each meeting has a higher number."""
        while not self._meet(self._flags, LINE, self._ranks, self._rank, number, *self._patience):
            self._look_up()

    def round_trip(self, first: int) -> float:
        """ns that a flag takes from rank 0 to rank 1 and back; TRIPS trips are made, numbered from `first`.

        Ranks 0 and 1 call it; the others sleep.
        """
        mine, theirs = (self._flags + (self._ranks + side) * LINE for side in (self._rank, 1 - self._rank))
        taken = []
        for start in range(first, first + TRIPS, _VOLLEY):
            trip, end = start, start + _VOLLEY
            begin = time.perf_counter_ns()
            while trip < end:
                trip = self._volley(mine, theirs, self._rank == 0, trip, end, *self._patience)
                if trip < end:
                    self._look_up()
            taken.append((time.perf_counter_ns() - begin) / _VOLLEY)
        return median(taken)

    def _look_up(self) -> None:
        if self._abandoned():
            raise ConnectionError("the conductor is gone")


@cache
def _compiled() -> tuple[Callable[..., bool], Callable[..., int]]:
    from numba import njit

    from kernels.targets.cpu import PRIMITIVES

    meet_now, volley_now = (bind(function, PRIMITIVES, njit(nogil=True)) for function in (meet, volley))
    return meet_now, volley_now
