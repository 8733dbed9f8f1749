"""Ranks meet, and play ping-pong, over flags in memory that they share: what benchmarks do beside each sample."""

from __future__ import annotations

from kernels.portable import portable
from kernels.primitives import await_flag, raise_flag


@portable
def meet(flags: int, stride: int, ranks: int, rank: int, epoch: int, spins: int, yields: int) -> int:
    """Raise this rank's flag to `epoch`, and wait for all the others': 1. 0: somebody has not come in about 50 ms."""
    raise_flag(flags + rank * stride, epoch)
    for other in range(ranks):
        if not await_flag(flags + other * stride, epoch, spins, yields):
            return 0
    return 1


@portable
def volley(mine: int, theirs: int, serving: int, trip: int, end: int, spins: int, yields: int) -> int:
    """Round trips number `trip` to `end` - 1 between two ranks, of which one serves; the number to go on with, `end`
    when done."""
    while trip < end:
        if serving:
            raise_flag(mine, trip)
        if not await_flag(theirs, trip, spins, yields):
            return trip
        if not serving:
            raise_flag(mine, trip)
        trip += 1
    return trip
