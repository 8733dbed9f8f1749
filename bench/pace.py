"""What every rank does beside a sample: meet the others at a start line, and measure the round trip between cores.

Flags in a memory that all ranks of a crew share; compiled, so that neither costs more than the cache lines' travel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from bench.crew import LINE
from kernels.native import load

_VOLLEY = 50  # round trips that are timed together
TRIPS = 9 * _VOLLEY  # in one measurement, the median of its volleys


class Pace:
    """One rank's side. `track` holds a line per rank and two for the ping-pong; `abandoned` says to stop waiting."""

    def __init__(self, track: Any, rank: int, ranks: int, abandoned: Callable[[], bool]) -> None:
        self._track = np.frombuffer(track, np.uint8)
        self._flags: int = self._track.__array_interface__["data"][0]
        self._rank = rank
        self._ranks = ranks
        self._abandoned = abandoned
        spins = 20 if ranks > (os.cpu_count() or 1) else 1000
        self._patience = spins, 1000
        self._meet, self._volley = load("meet").call, load("volley").call

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
                trip = self._volley(mine, theirs, int(self._rank == 0), trip, end, *self._patience)
                if trip < end:
                    self._look_up()
            taken.append((time.perf_counter_ns() - begin) / _VOLLEY)
        return median(taken)

    def _look_up(self) -> None:
        if self._abandoned():
            raise ConnectionError("the conductor is gone")
