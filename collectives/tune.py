"""`mgpu tune`: the cost model's constants, measured on this machine and kept for later runs.

Two collectives say what memory does. In `reduce` by "one_shot" one rank loads everybody's array and stores the sum,
while the others wait; in `reduce_scatter` by "direct" all ranks of the host do so at once, each for its own part. Both
are measured from a few hundred kilobytes, which the caches hold, to far beyond. A signal's and a Move's time come from
the smallest calls. All ranks are at work, so what they cost each other where cores are few is within the constants.

Nothing else is fitted: other algorithms, staged memory and sizes between follow from the model (`collectives.cost`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import numpy as np

from collectives import measured
from collectives.arrays import Array
from collectives.communicator import Communicator
from collectives.cost import Rate, Seconds, Topology
from collectives.launch import spawn
from collectives.threads import here

FOOTPRINTS = tuple(int(2 ** (19 + k / 2)) for k in range(17))  # bytes that all ranks touch together: 512 KB to 128 MB
_REPEATS = 7
_SMALL_CALLS = 1000
_ENTRIES = 100  # calls that nearly only enter: what is subtracted has to be the least there is
_FASTEST = 1e12  # bytes a second: no core loads so fast, from whatever cache
_LEAST = 1e-8  # seconds: of what is measured as a difference


def measure(comm: Communicator, footprints: Sequence[int] = FOOTPRINTS) -> Topology:
    """The constants of the host that all of the communicator's ranks are on; every rank gets the same. All call it."""
    word = comm.zeros(1, np.float32)
    entered, signalled, moved = (
        float(np.median(slowest(comm, call, _SMALL_CALLS)))
        for call in (
            comm.plan("barrier", algorithm="direct"),
            comm.plan("barrier", algorithm="dissemination"),
            comm.plan("all_reduce", word, out=word, algorithm="one_shot"),
        )
    )
    latency = max((signalled - entered) / max((comm.size - 1).bit_length(), 1), _LEAST)  # of so many rounds
    overhead = max((moved - entered) / 2, _LEAST)  # of two Moves
    counts = [max(footprint // ((comm.size + 1) * 4), comm.size) // comm.size * comm.size for footprint in footprints]
    x, out = comm.zeros(max(counts), np.float32), comm.zeros(max(counts), np.float32)

    def time(collective: str, algorithm: str, count: int, repeats: int = _REPEATS) -> Seconds:
        result = out[: count // comm.size if collective == "reduce_scatter" else count]
        options = {"out": result} if collective == "reduce_scatter" or comm.rank == 0 else {}
        call = comm.plan(collective, x[:count], algorithm=algorithm, **options)
        return float(slowest(comm, call, repeats, refill=x[:count]).min())

    def times(collective: str, algorithm: str) -> dict[int, Seconds]:
        least = time(collective, algorithm, comm.size, _ENTRIES)  # whatever the size: entering, a Move, signals, Python
        return {4 * count: max(time(collective, algorithm, count) - least, _LEAST) for count in counts}

    return fit(comm.size, latency, overhead, times("reduce", "one_shot"), times("reduce_scatter", "direct"))


def fit(
    size: int, latency: Seconds, overhead: Seconds, alone: Mapping[int, Seconds], together: Mapping[int, Seconds]
) -> Topology:
    """The topology of `size` ranks on one host in which `predict` gives these times back.

    By bytes of a rank's array: what `reduce` by "one_shot" and `reduce_scatter` by "direct" take, in symmetric memory,
    without entering. Each loads `size` arrays and stores one, by one rank or by all, each a part.
    """
    one = _access(size, alone)
    all_ = _access(size, {nbytes: seconds * size for nbytes, seconds in together.items()})
    footprints = {nbytes: float((size + 1) * nbytes) for nbytes in sorted(together)}
    # a rank alone is never slower than among others, whatever came between when it was measured
    rate = Rate(tuple((footprints[n], 1 / min(one[n], all_[n])) for n in footprints))
    return Topology(
        (size,),
        cores=size,  # it was measured with all ranks at work: nothing is to be added for those that share a core
        latency=latency,
        overhead=overhead,
        own=rate,
        peer=rate,
        together=Rate(tuple((footprints[n], size / all_[n]) for n in footprints)),
        arithmetic=float("inf"),  # it goes on while memory is waited for
    )


def _access(size: int, times: Mapping[int, Seconds]) -> dict[int, Seconds]:
    """What each of `size` loads and one store of a byte takes, by the array's bytes: see `Rate.store`."""
    best = min(seconds / nbytes for nbytes, seconds in times.items()) / (size + 1)
    access = {nbytes: max(best, (seconds / nbytes + best) / (size + 2)) for nbytes, seconds in times.items()}
    access[min(access)] = best  # the smallest stands for the cache
    return access


def slowest(comm: Communicator, call: Callable[[], object], repeats: int, refill: Array | None = None) -> Array:
    """What each of `repeats` calls takes on its slowest rank, in seconds. If there is something to `refill`, it is
    written anew before each, and ranks wait for each other."""
    times = np.empty(repeats)
    call()
    for repeat in range(repeats):
        if refill is not None:
            refill[:] = 1
            comm.barrier()
        start = perf_counter()
        call()
        times[repeat] = perf_counter() - start
    found: Array = comm.all_reduce(times, "max")
    return found


def main(argv: Sequence[str]) -> int:
    """`mgpu tune`: measure, keep, and say what was found."""
    parser = argparse.ArgumentParser(
        prog="mgpu tune",
        description="Measure what the cost model needs to know of this machine, in some seconds, and keep it: from "
        "then on ranks choose algorithms by it, and mgpu predict uses it. Nothing else should be running.",
    )
    parser.add_argument("-n", "--ranks", type=int, default=max(here(1), 2), help="how many (%(default)s)")
    chosen = parser.parse_args(argv)
    if chosen.ranks < 2:
        parser.error("one rank has nobody to talk to: -n is 2 or more")
    found: Topology = spawn(measure, chosen.ranks, backend="shm")[0]
    if max(rate for _, rate in found.own.points) > _FASTEST:
        print(
            "mgpu tune: some bytes seemed to take no time, as happens where other programs use the processors; "
            "nothing is kept: try again when the machine is quiet",
            file=sys.stderr,
        )
        return 1
    print(f"{chosen.ranks} ranks: a signal takes {found.latency * 1e6:.2f} us, a Move {found.overhead * 1e6:.2f} us")
    print(f"{'bytes touched':>14} {'one rank alone':>15} {'all together':>13}   GB/s")
    for (footprint, alone), (_, together) in zip(found.own.points, found.together.points, strict=True):
        print(f"{int(footprint):>14,} {alone / 1e9:>15.1f} {together / 1e9:>13.1f}")
    print(f"kept in {measured.keep(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
