"""`mgpu bench predictions`: what the cost model says, beside what calls take, by every algorithm.

The model's constants are measured in the same run, as `mgpu tune` measures them, and nothing else is fitted. A call
takes as long as its slowest rank; the median counts, of calls whose input is written anew before each. The table shows
the prediction over the time. The score leaves out the two calls in symmetric memory that gave the constants.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import collectives
from bench.sizes import parse_size, sweep
from collectives.builder import algorithms
from collectives.cost import Topology
from collectives.lowering import Memory
from collectives.select import predicted
from collectives.tune import constants, measure, slowest

MEMORIES: tuple[Memory, ...] = ("symmetric", "staged")
WITHIN = 1.3  # times or parts of what was measured
FITTED = {("reduce", "one_shot", "symmetric"), ("reduce_scatter", "direct", "symmetric")}
_REPEATS = 7
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


Measured = dict[Case, list[tuple[int, float]]]  # (bytes, seconds)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    chosen = parser().parse_args(argv)
    if chosen.ranks < 2 or chosen.minbytes < 4 * chosen.ranks or chosen.factor < 2:
        parser().error("-n and -f are at least 2, and -b at least 4 bytes for each rank")
    # the first even where it is beyond the last
    swept = list(sweep(chosen.minbytes, max(chosen.minbytes, chosen.maxbytes), factor=chosen.factor))
    topology, measured = collectives.spawn(run, chosen.ranks, (swept,), backend="shm")[0]
    ratios = {
        case: [predict(case, nbytes, topology) / seconds for nbytes, seconds in times]
        for case, times in measured.items()
    }
    for line in report(swept, ratios):
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


def run(comm: Any, sizes: list[int]) -> tuple[Topology, Measured]:
    """One rank: the constants, and what every case takes at every size."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank % len(os.sched_getaffinity(0))]})
    topology, _, _ = constants(measure(comm))
    most = max(sizes) // 4
    arrays = {
        "symmetric": (comm.zeros(most, np.float32), comm.zeros(most, np.float32)),
        "staged": (np.zeros(most, np.float32), np.zeros(most, np.float32)),
    }
    found: Measured = {case: [] for case in cases()}
    for nbytes in sizes:
        for case, times in found.items():
            x, call = prepare(comm, case, nbytes // 4 // comm.size * comm.size, *arrays[case.memory])
            times.append((nbytes, float(np.median(slowest(comm, call, _REPEATS, refill=x)))))
    return topology, found


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
    scored = [ratio for case, row in ratios.items() if case[:3] not in FITTED for ratio in row]
    good = sum(1 / WITHIN <= ratio <= WITHIN for ratio in scored)
    yield f"{good} of {len(scored)} predictions are within {WITHIN - 1:.0%} of what was measured"


if __name__ == "__main__":
    sys.exit(main())
