"""`mgpu bench predictions`: what the cost model says, beside what calls take, by every algorithm.

The model's constants are measured in the same run, as `mgpu tune` measures them, and nothing else is fitted. Constants
and calls are measured in turns, with ping-pong between the cores beside each turn, and only turns of one state count
(`bench.states`). A call takes as long as its slowest rank; the median counts, of calls whose input is written anew
before each. The table shows the prediction over the time. The score leaves out the three calls in symmetric memory that
gave the constants.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import collectives
from bench import states
from bench.crew import LINE
from bench.pace import TRIPS, Pace
from bench.sizes import parse_size, sweep
from collectives.builder import algorithms
from collectives.cost import Topology
from collectives.lowering import Memory
from collectives.select import predicted
from collectives.tune import FOOTPRINTS, constants, join, measure, settled

MEMORIES: tuple[Memory, ...] = ("symmetric", "staged")
WITHIN = 1.3  # times or parts of what was measured
_ROUNDS = 7
_COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
)  # fmt: skip


class Case(NamedTuple):
    """One way to call one collective."""

    collective: str
    algorithm: str
    memory: Memory
    in_place: bool

    @property
    def label(self) -> str:
        """Its name in the table."""
        return f"{self.collective} {self.algorithm} {self.memory}{' in place' if self.in_place else ''}"


FITTED = {
    Case("reduce", "one_shot", "symmetric", False),
    Case("reduce_scatter", "direct", "symmetric", False),
    Case("all_reduce", "two_shot", "symmetric", True),
}

Times = dict[Case, float]  # seconds
Measured = dict[Case, list[tuple[int, float]]]  # (bytes, seconds)


class Turn(NamedTuple):
    """What was measured between two ping-pongs, whose round trips are in ns."""

    before: float
    after: float
    found: Any  # Rounds, or Times of one size


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    chosen = parser().parse_args(argv)
    if chosen.ranks < 2 or chosen.minbytes < 4 * chosen.ranks or chosen.factor < 2:
        parser().error("-n and -f are at least 2, and -b at least 4 bytes for each rank")
    # the first even where it is beyond the last
    swept = list(sweep(chosen.minbytes, max(chosen.minbytes, chosen.maxbytes), factor=chosen.factor))
    topology, measured, remark = settle(swept, collectives.spawn(run, chosen.ranks, (swept,), backend="shm")[0])
    ratios = {
        case: [predict(case, nbytes, topology) / seconds for nbytes, seconds in times]
        for case, times in measured.items()
    }
    for line in (remark, *report(swept, ratios)):
        print(line)
    if chosen.json:
        rows = [{**case._asdict(), "measured": measured[case], "ratios": ratios[case]} for case in ratios]
        chosen.json.write_text(json.dumps({"topology": json.loads(topology.text()), "rows": rows}, indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench predictions", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("-b", "--minbytes", type=parse_size, default="1M", help="smallest message (default 1M)")
    add("-e", "--maxbytes", type=parse_size, default="32M", help="largest message (default 32M)")
    add("-f", "--factor", type=int, default=2, help="from one size to the next (default 2)")
    add("--json", type=Path, metavar="FILE", help="write the constants, times and ratios")
    return flags


def cases() -> Iterator[Case]:
    """Every algorithm in both kinds of memory; all-reduce in place as well."""
    for collective in _COLLECTIVES:
        for algorithm in algorithms(collective):
            for memory in MEMORIES:
                for in_place in (False, True) if collective == "all_reduce" else (collective == "broadcast",):
                    yield Case(collective, algorithm, memory, in_place)


def predict(case: Case, nbytes: int, topology: Topology) -> float:
    """What the model says, in seconds."""
    return predicted(case.collective, case.algorithm, nbytes, case.memory, topology, in_place=case.in_place)


def run(comm: Any, sizes: list[int], footprints: Sequence[int] = FOOTPRINTS) -> list[list[Turn]]:
    """One rank: in each round a turn of the constants, and one of every case at each size."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank % len(os.sched_getaffinity(0))]})
    most = max(sizes) // 4
    arrays = {
        "symmetric": (comm.zeros(most, np.float32), comm.zeros(most, np.float32)),
        "staged": (np.zeros(most, np.float32), np.zeros(most, np.float32)),
    }
    calls = [
        {case: prepare(comm, case, nbytes // 4 // comm.size * comm.size, *arrays[case.memory]) for case in cases()}
        for nbytes in sizes
    ]

    def times(of: dict[Case, tuple[Any, Callable[[], object]]]) -> Times:
        return {case: settled(comm, call, x) for case, (x, call) in of.items()}

    track = comm.zeros((comm.size + 2) * LINE, np.uint8)
    pace = Pace(comm.peer(track, 0), comm.rank, comm.size, lambda: False)
    trips = count(1, TRIPS)

    def round_trip() -> float:
        trip = pace.round_trip(next(trips)) if comm.rank < 2 else 0.0
        return float(comm.broadcast_object(trip))

    rounds = []
    for _ in range(_ROUNDS):
        before, turns = round_trip(), []
        for of in (None, *calls):
            found = measure(comm, footprints, 2) if of is None else times(of)
            after = round_trip()
            turns.append(Turn(before, after, found))
            before = after
        rounds.append(turns)
    return rounds


def settle(sizes: list[int], rounds: list[list[Turn]]) -> tuple[Topology, Measured, str]:
    """The constants and the medians of the calls, both from turns in one state; and which state that was."""
    limit = states.threshold([trip for turns in rounds for turn in turns for trip in (turn.before, turn.after)])
    tags = [[states.state(turn.before, turn.after, limit) for turn in turns] for turns in rounds]
    chosen = states.common_state({str(part): seen for part, seen in enumerate(zip(*tags, strict=True))})
    parts = list(zip(*rounds, strict=True))
    kept = [[turn for turn in part if states.state(turn.before, turn.after, limit) == chosen] for part in parts]
    remark = f"# cores {chosen}, in at least {min(map(len, kept))} of {len(rounds)} turns of each kind"
    if not all(kept):
        kept, remark = [list(part) for part in parts], "# cores now near, now far: all turns count"
    topology, _, _ = constants(join([turn.found for turn in kept[0]]))
    measured: Measured = {case: [] for case in cases()}
    for nbytes, part in zip(sizes, kept[1:], strict=True):
        for case, times in measured.items():
            times.append((nbytes, median(turn.found[case] for turn in part)))
    return topology, measured, remark


def prepare(comm: Any, case: Case, count: int, x: Any, out: Any) -> tuple[Any, Callable[[], object]]:
    """The input of a case, and a plan of its call. `count` elements are the longer of input and output."""
    part, root = count // comm.size, comm.rank == 0
    x = x[: part if case.collective in ("all_gather", "gather") else count]
    out = x if case.in_place else out[: part if case.collective in ("reduce_scatter", "scatter") else count]
    source = None if case.collective == "scatter" and not root else x
    options = {} if case.collective == "broadcast" else {"out": out}
    if case.collective in ("reduce", "gather") and not root:
        options = {}
    return x, comm.plan(case.collective, source, algorithm=case.algorithm, **options)


def report(sizes: list[int], ratios: dict[Case, list[float]]) -> Iterator[str]:
    """The table, and the score."""
    yield f"{'predicted / measured':48}" + "".join(f"{nbytes:>12,}" for nbytes in sizes)
    for case, row in ratios.items():
        yield f"{case.label:48}" + "".join(f"{ratio:>12.2f}" for ratio in row)
    scored = [ratio for case, row in ratios.items() if case not in FITTED for ratio in row]
    good = sum(1 / WITHIN <= ratio <= WITHIN for ratio in scored)
    yield f"{good} of {len(scored)} predictions are within {WITHIN - 1:.0%} of what was measured"


if __name__ == "__main__":
    sys.exit(main())
