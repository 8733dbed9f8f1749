"""`mgpu tune`: the cost model's constants, measured on this machine and kept for later runs.

Three collectives say what memory does. In `reduce` by "one_shot" one rank loads everybody's array and stores the sum,
while the others wait; in `reduce_scatter` by "direct" all ranks of the host do so at once, each for its own part; and
in `all_reduce` by "two_shot", in place, each stores its sum where all of it was loaded from. They are measured from a
few hundred kilobytes, which the caches hold, to far beyond. A signal's and a Move's time come from the smallest calls.
All ranks are at work, so what they cost each other where cores are few is within the constants.

Everything is measured in rounds, each kind of call once in each, so that what another program takes away for a while
falls on few rounds of every kind and not on all rounds of one. A constant is the median of its rounds, without those
that cannot be; where many cannot be, or rounds differ by far, nothing is kept.

Nothing else is fitted: other algorithms, staged memory and sizes between follow from the model (`collectives.cost`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from collectives import measured
from collectives.arrays import Array
from collectives.communicator import Communicator
from collectives.cost import Rate, Seconds, Topology
from collectives.launch import spawn
from collectives.threads import here
from collectives.wording import counted

FOOTPRINTS = tuple(int(2 ** (19 + k / 2)) for k in range(17))  # bytes that all ranks touch together: 512 KB to 128 MB
ROUNDS = 15
MOST_RANKS = 4  # for each processor: with more, starting them and taking turns is all that one would see
_SMALL_CALLS = 200  # in a round, of each kind
_NEAR = 2.0  # times the signal of the nearest quarter of rounds: cores that lie far take four times as long
_SPREAD = 4.0  # between a constant's quartiles
_SLACK = 2e-7  # seconds: by which they may differ in any case, as differences of two times do on a quiet machine
_SETTLING = 8  # calls before what is touched lies where it will, if a cache can hold it: no more bytes than
_CALL_BYTES = 32 << 20  # these, in all calls
_LEAST_SIGNAL = 1e-8  # seconds: no core hears another one sooner
_LEAST_MOVE = 2e-9
_FASTEST = 1e12  # bytes a second: no core loads so fast, from whatever cache


@dataclass(frozen=True)
class Rounds:
    """What was measured in each round among `size` ranks, in seconds; a difference of two times may be below 0.

    signal, move: what one takes. alone, together, again: by bytes of a rank's array, what `reduce` by "one_shot",
    `reduce_scatter` by "direct" and `all_reduce` by "two_shot" in place take, in symmetric memory, without entering.
    """

    size: int
    signal: Array
    move: Array
    alone: Mapping[int, Array]
    together: Mapping[int, Array]
    again: Mapping[int, Array]


def measure(comm: Communicator, footprints: Sequence[int] = FOOTPRINTS, rounds: int = ROUNDS) -> Rounds:
    """What the constants of the host that all of the communicator's ranks are on follow from; every rank gets the same.

    All ranks call it.
    """
    word = comm.zeros(1, np.float32)
    enter, disseminate, move = (
        comm.plan("barrier", algorithm="direct"),
        comm.plan("barrier", algorithm="dissemination"),
        comm.plan("all_reduce", word, out=word, algorithm="one_shot"),
    )
    kinds = [("reduce", "one_shot"), ("reduce_scatter", "direct"), ("all_reduce", "two_shot")]
    most = max(footprints) // (comm.size * 4)
    x, out = comm.zeros(most, np.float32), comm.zeros(most, np.float32)

    def plan(collective: str, algorithm: str, count: int) -> tuple[Callable[[], object], Array]:
        given = x[:count]
        results = {"reduce": out[:count], "reduce_scatter": out[: count // comm.size], "all_reduce": given}
        options = {} if collective == "reduce" and comm.rank else {"out": results[collective]}
        return comm.plan(collective, given, algorithm=algorithm, **options), given

    def counts(collective: str) -> list[int]:
        arrays = comm.size + (collective != "all_reduce")  # that all touch: each one's, and where the sum goes
        return [max(footprint // (arrays * 4), comm.size) // comm.size * comm.size for footprint in footprints]

    least = [plan(*kind, comm.size) for kind in kinds]  # whatever the size: entering, a Move, signals, Python
    large = [{4 * count: plan(*kind, count) for count in counts(kind[0])} for kind in kinds]
    small: list[list[Seconds]] = []
    beyond: list[list[list[Seconds]]] = []
    for _ in range(rounds):
        small.append([float(np.median(slowest(comm, call, _SMALL_CALLS))) for call in (enter, disseminate, move)])
        beyond.append([])
        for (call, refilled), plans in zip(least, large, strict=True):
            without = float(np.median(slowest(comm, call, _SMALL_CALLS, refilled)))
            times = [settled(comm, call, refilled) for call, refilled in plans.values()]
            beyond[-1].append([time - without for time in times])
    entered, disseminated, moved = np.array(small).T
    alone, together, again = np.array(beyond).transpose(1, 2, 0)
    return Rounds(
        comm.size,
        signal=(disseminated - entered) / max((comm.size - 1).bit_length(), 1),  # of so many one behind the other
        move=(moved - entered) / 2,  # of two Moves
        alone=dict(zip(large[0], alone, strict=True)),
        together=dict(zip(large[1], together, strict=True)),
        again=dict(zip(large[2], again, strict=True)),
    )


def join(parts: Sequence[Rounds]) -> Rounds:
    """All rounds of what was measured at several times, among as many ranks with the same footprints."""

    def sizes(times: Sequence[Mapping[int, Array]]) -> dict[int, Array]:
        return {nbytes: np.concatenate([each[nbytes] for each in times]) for nbytes in times[0]}

    return Rounds(
        parts[0].size,
        signal=np.concatenate([part.signal for part in parts]),
        move=np.concatenate([part.move for part in parts]),
        alone=sizes([part.alone for part in parts]),
        together=sizes([part.together for part in parts]),
        again=sizes([part.again for part in parts]),
    )


def constants(rounds: Rounds) -> tuple[Topology, int, list[str]]:
    """The topology that follows, how many figures were left out because they cannot be, and why it should not be kept.

    Each time is the median of its rounds, of those with cores as near each other as in the nearest quarter: the cores
    of a virtual machine may come to lie near or far within seconds. There is a reason not to keep it where more than
    half of the rounds cannot be, or where the middle half of them differs by more than fourfold and 0.2 us.
    """
    left_out, doubts = 0, []
    near = rounds.signal <= _NEAR * max(0.0, np.quantile(rounds.signal, 0.25)) + _SLACK / 4

    def settle(what: str, times: Array, least: Seconds) -> Seconds:
        nonlocal left_out
        times = times[near]
        possible = times[times > least]
        left_out += len(times) - len(possible)
        if 2 * len(possible) <= len(times):
            doubts.append(f"{what} seemed to take no time, in {len(times) - len(possible)} of {len(times)} rounds")
            return least
        first, middle, third = np.quantile(possible, [0.25, 0.5, 0.75])
        if third > _SPREAD * first + _SLACK:
            doubts.append(f"{what} took {first * 1e6:.2f} us in one round and {third * 1e6:.2f} us in another")
        return float(middle)

    def settle_all(who: str, times: Mapping[int, Array], arrays: int) -> dict[int, Seconds]:
        touched = {nbytes: arrays * nbytes for nbytes in times}
        return {n: settle(f"{touched[n]:,} bytes, {who},", times[n], touched[n] / _FASTEST) for n in times}

    signal, move = settle("a signal", rounds.signal, _LEAST_SIGNAL), settle("a Move", rounds.move, _LEAST_MOVE)
    alone = settle_all("one rank alone", rounds.alone, rounds.size + 1)
    together = settle_all("all together", rounds.together, rounds.size + 1)
    again = settle_all("all together in place", rounds.again, rounds.size)
    topology = fit(rounds.size, signal, move, alone, together, again)
    return topology, left_out, doubts


def fit(
    size: int,
    latency: Seconds,
    overhead: Seconds,
    alone: Mapping[int, Seconds],
    together: Mapping[int, Seconds],
    again: Mapping[int, Seconds],
) -> Topology:
    """The topology of `size` ranks on one host in which `predict` gives these times back.

    By bytes of a rank's array: what `reduce` by "one_shot", `reduce_scatter` by "direct" and `all_reduce` by "two_shot"
    in place take, in symmetric memory, without entering. Each loads `size` arrays, by one rank or by all, each a part;
    the first two store one, the third all that was loaded.
    """
    one = _access(size, alone)
    all_ = _access(size, {nbytes: seconds * size for nbytes, seconds in together.items()})
    footprints = {nbytes: float((size + 1) * nbytes) for nbytes in sorted(together)}
    # a rank alone is never slower than among others, whatever came between when it was measured
    rate = Rate(tuple((footprints[n], 1 / min(one[n], all_[n])) for n in footprints))
    shared = Rate(tuple((footprints[n], size / all_[n]) for n in footprints))
    stores = {
        size * n: max(1 / _FASTEST, seconds / n - size / min(size * rate.at(size * n), shared.at(size * n)))
        for n, seconds in sorted(again.items())
    }
    return Topology(
        (size,),
        cores=size,  # it was measured with all ranks at work: nothing is to be added for those that share a core
        latency=latency,
        overhead=overhead,
        own=rate,
        peer=rate,
        together=shared,
        again=Rate(tuple((float(footprint), 1 / seconds) for footprint, seconds in stores.items())),
        arithmetic=float("inf"),  # it goes on while memory is waited for
    )


def _access(size: int, times: Mapping[int, Seconds]) -> dict[int, Seconds]:
    """What each of `size` loads and one store of a byte takes, by the array's bytes: see `Rate.store`."""
    best = min(seconds / nbytes for nbytes, seconds in times.items()) / (size + 1)
    access = {nbytes: max(best, (seconds / nbytes + best) / (size + 2)) for nbytes, seconds in times.items()}
    access[min(access)] = best  # the smallest stands for the cache
    return access


def settled(comm: Communicator, call: Callable[[], object], refill: Array) -> Seconds:
    """What a call takes when caches hold what they will: the first ones after others take up to twice as long."""
    repeats = max(1, min(_SETTLING, _CALL_BYTES // refill.nbytes))
    return float(np.median(slowest(comm, call, repeats, refill)[repeats // 2 :]))


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
    processors = here(1)
    parser = argparse.ArgumentParser(
        prog="mgpu tune",
        description="Measure what the cost model needs to know of this machine, in some seconds, and keep it: from "
        "then on ranks choose algorithms by it, and mgpu predict uses it. Nothing else should be running.",
    )
    parser.add_argument("-n", "--ranks", type=int, default=max(processors, 2), help="how many (%(default)s)")
    chosen = parser.parse_args(argv)
    if chosen.ranks < 2:
        parser.error("one rank has nobody to talk to: -n is 2 or more")
    if chosen.ranks > MOST_RANKS * processors:
        parser.error(
            f"{chosen.ranks} ranks on {counted(processors, 'processor')} would mostly wait for their turn, and that is "
            f"what would be measured; "
            f"-n is {MOST_RANKS * processors} or less here (four for each processor)"
        )
    print(f"measuring with {chosen.ranks} ranks on {counted(processors, 'processor')}, {ROUNDS} rounds ...", flush=True)
    topology, left_out, doubts = constants(spawn(measure, chosen.ranks, backend="shm")[0])
    if doubts:
        more = f", and {len(doubts) - 1} more like it" if len(doubts) > 1 else ""
        print(
            f"mgpu tune: {doubts[0]}{more}: as happens where other programs use the processors, or ranks outnumber "
            f"them. Nothing is kept; try again when the machine is quiet, or with fewer ranks",
            file=sys.stderr,
        )
        return 1
    print(f"a signal takes {topology.latency * 1e6:.2f} us, a Move {topology.overhead * 1e6:.2f} us")
    print(f"{'bytes touched':>14} {'one rank alone':>15} {'all together':>13}   GB/s")
    for (footprint, alone), (_, together) in zip(topology.own.points, topology.together.points, strict=True):
        print(f"{int(footprint):>14,} {alone / 1e9:>15.1f} {together / 1e9:>13.1f}")
    if left_out:
        print(f"without {counted(left_out, 'figure')} that cannot be: something else used the processors meanwhile")
    print(f"kept in {measured.keep(topology)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
