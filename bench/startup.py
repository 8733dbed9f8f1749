"""`mgpu bench startup`: how long until a new process has imported `collectives`, and until its ranks' first all-reduce.

Cold is with an empty cache of compiled kernels, as after an installation; warm is every time after, with the cache that
the cold run left. Each run is a fresh interpreter, and medians are reported. All processes read one clock.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from os import environ
from pathlib import Path
from statistics import median
from typing import Any

from bench import record
from bench.crew import python

STAGES = {
    "interpreter": "Python itself has started",
    "import": "`import collectives` is done",
    "ranks": "the slowest rank has its communicator",
    "first": "the slowest rank's first all-reduce is done",
    "second": "and its second",
    "end": "`spawn` has returned",
}
_HEAVY = ("numba", "numba.cuda", "cupy", "mpi4py", "torch", "matplotlib")
_PROGRAM = "import time; at = {'interpreter': time.monotonic()}; from bench.startup import run; run(at, %d)"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    parser = argparse.ArgumentParser(prog="mgpu bench startup", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    parser.add_argument("--runs", type=int, default=5, help="fresh interpreters, cold and warm each (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write medians and every run, for mgpu bench diff")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 1 or arguments.runs < 1:
        parser.error("-n and --runs are at least 1")
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as cache:
            for seen in runs.values():
                seen.append(start(arguments.ranks, cache))
    seconds = {
        kind: {stage: median(run["at"][stage] for run in seen) for stage in STAGES} for kind, seen in runs.items()
    }
    loaded = {kind: seen[-1]["loaded"] for kind, seen in runs.items()}
    for line in report(seconds, loaded, arguments.ranks):
        print(line)
    if arguments.json:
        about = {**record.about("startup", vars(arguments)), "loaded": loaded}
        samples = [
            sample
            for kind, seen in runs.items()
            for stage in STAGES
            for sample in record.samples(kind, {"stage": stage}, (run["at"][stage] for run in seen))
        ]
        rows = [
            {"label": kind, "case": {"stage": stage}, "microseconds": 1e6 * taken}
            for kind, stages in seconds.items()
            for stage, taken in stages.items()
        ]
        record.write(arguments.json, about, rows, samples)
    return 0


def start(ranks: int, cache: str) -> dict[str, Any]:
    """One fresh interpreter with this cache folder: seconds `at` each stage, and heavy modules `loaded` in rank 0.

    Raises RuntimeError with what it printed, if it fails.
    """
    begin = time.monotonic()
    process = subprocess.run(
        python(_PROGRAM % ranks), env={**environ, "MGPU_CACHE": cache}, capture_output=True, text=True, timeout=300
    )
    if process.returncode:
        raise RuntimeError(f"a run of {ranks} ranks failed:\n{process.stderr}")
    outcome: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    outcome["at"] = {stage: moment - begin for stage, moment in outcome["at"].items()}
    return outcome


def run(at: dict[str, float], ranks: int) -> None:
    """In the fresh interpreter: note when each stage is reached, and print it."""
    import collectives

    at["import"] = time.monotonic()
    outcomes = collectives.spawn(first_all_reduce, ranks)
    at["end"] = time.monotonic()
    for stage in ("ranks", "first", "second"):
        at[stage] = max(outcome[stage] for outcome in outcomes)
    print(json.dumps({"at": at, "loaded": outcomes[0]["loaded"]}))


def first_all_reduce(comm: Any) -> dict[str, Any]:
    """In each rank: a small all-reduce on an ordinary array, twice."""
    import numpy as np

    at: dict[str, Any] = {"ranks": time.monotonic()}
    x = np.ones(1000, np.float32)
    for stage in ("first", "second"):
        result = comm.all_reduce(x)
        at[stage] = time.monotonic()
        assert result[0] == comm.size
    return {**at, "loaded": [module for module in _HEAVY if module in sys.modules]}


def report(seconds: Mapping[str, Mapping[str, float]], loaded: Mapping[str, Sequence[str]], ranks: int) -> list[str]:
    """The table: milliseconds since the process was started, cold and warm."""
    lines = [f"# startup: {ranks} ranks; milliseconds since the process was started", f"# {'cold':>8} {'warm':>8}"]
    for stage, meaning in STAGES.items():
        cold, warm = (1e3 * seconds[kind][stage] for kind in ("cold", "warm"))
        lines.append(f"  {cold:8.0f} {warm:8.0f}  {meaning}")
    lines += [f"# {kind}: a rank has imported {', '.join(loaded[kind]) or 'nothing heavy'}" for kind in loaded]
    return lines


if __name__ == "__main__":
    sys.exit(main())
