"""`mgpu bench all_reduce`: nccl-tests' benchmark of all-reduce, ours beside peers in one run.

Every call is timed by itself: the input is written anew, as a program does that computes gradients, all ranks meet
at a start line, and the call's time is that of its slowest rank. Candidates take turns, each in processes of its own,
on the same cores, and a ping-pong beside every sample tells in which state the machine was (`bench.states`).

Flags are nccl-tests', but for `-n`, which is the number of ranks as in `mgpu run`; their `-n` is `--iters` here, which
is its long name there too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import peers, plot, sizes, table
from bench.candidates import LIMIT, Candidate
from bench.crew import Crew, Launch, python, start
from bench.inputs import OPERATIONS
from bench.samples import LIMIT_FROM, Case, Measurement, Row, summarise, write_csv, write_json
from bench.states import FAR, NEAR
from kernels.dtypes import find

_DTYPES = {**{nccl: name for name, nccl in table.NCCL_NAMES.items()}, **{name: name for name in table.NCCL_NAMES}}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if one of our results was wrong."""
    arguments = parser().parse_args(argv)
    try:
        cases = list(plan_cases(arguments))
        against, remarks = peers.choose(arguments.against, arguments.ranks, len(os.sched_getaffinity(0)))
    except (ValueError, peers.PeerError) as error:
        parser().error(str(error))
    print("# " + describe(arguments))
    with ExitStack() as stack:
        names = [*against, *([LIMIT] if cases[-1].nbytes >= LIMIT_FROM else [])]
        crews, failures = start(
            stack, launches(names, arguments), arguments.ranks, timeout=arguments.timeout, needed="mgpu"
        )
        candidates = [*variants(arguments), *(Candidate(name) for name in names if name in crews)]
        for name, crew in crews.items():
            print(f"# {name:10} {crew.version}")
        measurement = Measurement(crews, candidates, cases)
        measurement.allocate(max(case.nbytes for case in cases))
        measure(measurement, arguments)
        remarks += failures + measurement.remarks
    labels = list(dict.fromkeys(candidate.label for candidate in candidates))
    rows = summarise(measurement.samples, arguments.ranks, labels, against, arguments.state)
    for line in itertools.chain(table.results(rows), *(table.against_peers(rows, label) for label in labels)):
        print(line)
    for remark in remarks:
        print(f"# note: {remark}")
    write(arguments, crews, rows, measurement)
    return verdict(rows)


def parser() -> argparse.ArgumentParser:
    """The flags; `--help` says what differs from nccl-tests."""
    flags = argparse.ArgumentParser(
        prog="mgpu bench all_reduce",
        description="Time all-reduce, with nccl-tests' flags and columns. Note that -n is the number of RANKS, as in "
        "`mgpu run`; nccl-tests' -n is --iters.",
    )
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("-b", "--minbytes", type=sizes.parse_size, default="8", help="first size (8, 4K, 128M; default 8)")
    add("-e", "--maxbytes", type=sizes.parse_size, default="64M", help="last size (default 64M)")
    add("-f", "--stepfactor", type=float, default=4, help="factor from one size to the next (default 4)")
    add("-i", "--stepbytes", type=sizes.parse_size, help="bytes from one size to the next, in place of a factor")
    add("--iters", type=int, default=20, help="timed calls in a sample, at most; long ones make fewer (default 20)")
    add("-w", "--warmup_iters", type=int, default=5, help="untimed calls before them, at most (default 5)")
    add("-c", "--check", type=int, default=1, metavar="0|1", help="check results (default 1)")
    add("-o", "--op", default="sum", help=f"reductions, separated by commas, or all: {', '.join(OPERATIONS)}")
    add("-d", "--datatype", default="float", help=f"dtypes, separated by commas, or all: {', '.join(_DTYPES)}")
    add("--memory", choices=["symmetric", "ordinary", "both"], default="symmetric", help="of our arrays")
    add("--algorithm", type=_words, default=[None], help="ours, separated by commas (default: what select chooses)")
    add("--plan", action="store_true", help="time calls through comm.plan as well")
    add("--backend", default="auto", help="ours (default auto)")
    add(
        "--against",
        type=_words,
        default=[],
        help="peers, separated by commas: gloo, mpi (all that are found), openmpi, mpich, impi; see mgpu bench peers",
    )
    add("--rounds", type=int, default=7, help="samples of each candidate and size, taken in turn (default 7)")
    add("--state", choices=[NEAR, FAR], help="compare with the cores in this state, and go on until there are enough")
    add("--timeout", type=float, default=120, help="seconds in which a rank must answer (default 120)")
    add("--json", type=Path, metavar="FILE", help="write rows and all samples")
    add("--csv", type=Path, metavar="FILE", help="write rows")
    add("--plot", type=Path, metavar="FILE.png", help="draw time and bus bandwidth against size")
    return flags


def plan_cases(arguments: argparse.Namespace) -> list[Case]:
    """Every size, dtype and operation, out of place and in place. Raises ValueError for what makes no sense."""
    if arguments.ranks < 1 or arguments.rounds < 1 or arguments.iters < 1 or arguments.warmup_iters < 0:
        raise ValueError("-n, --rounds and --iters are at least 1, -w at least 0")
    dtypes = _choose(arguments.datatype, _DTYPES, list(table.NCCL_NAMES), "datatype")
    ops = _choose(arguments.op, {op: op for op in OPERATIONS}, list(OPERATIONS), "op")
    swept = sizes.sweep(arguments.minbytes, arguments.maxbytes, factor=arguments.stepfactor, step=arguments.stepbytes)
    cases = []
    for nbytes, dtype, op in itertools.product(swept, dtypes, ops):
        itemsize = find(dtype).itemsize
        count = nbytes // itemsize
        cases += [Case(count * itemsize, count, dtype, op, in_place) for in_place in (False, True)]
    cases = [case for case in dict.fromkeys(cases) if case.count]
    if not cases:
        raise ValueError(f"no size from {arguments.minbytes} to {arguments.maxbytes} bytes holds an element")
    return cases


def variants(arguments: argparse.Namespace) -> list[Candidate]:
    """Ours: each kind of memory, with each algorithm, called and planned."""
    memories = ["symmetric", "ordinary"] if arguments.memory == "both" else [arguments.memory]
    ways = [False, True] if arguments.plan else [False]
    return [Candidate("mgpu", *chosen) for chosen in itertools.product(memories, arguments.algorithm, ways)]


def measure(measurement: Measurement, arguments: argparse.Namespace) -> None:
    """All rounds, with a progress bar where someone watches."""
    from tqdm import tqdm

    with tqdm(total=measurement.visits * arguments.rounds, unit="sample", disable=None, leave=False) as bar:
        measurement.run(
            arguments.rounds,
            calls=arguments.iters,
            warmups=arguments.warmup_iters,
            check=bool(arguments.check),
            wanted=arguments.state,
            progress=bar.update,
        )


def write(arguments: argparse.Namespace, crews: Mapping[str, Crew], rows: list[Row], measured: Measurement) -> None:
    """The files that were asked for."""
    about = {
        "benchmark": "all_reduce",
        "arguments": {name: _plain(value) for name, value in vars(arguments).items()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: crew.version for name, crew in crews.items()},
        "remarks": measured.remarks,
    }
    if arguments.json:
        write_json(arguments.json, about, rows, measured.samples)
    if arguments.csv:
        write_csv(arguments.csv, rows)
    if arguments.plot:
        plot.draw(rows, arguments.plot, f"all_reduce, {arguments.ranks} ranks, in place; {machine()}")


def verdict(rows: Sequence[Row]) -> int:
    """nccl-tests' closing lines for our rows, and the exit code."""
    ours = [row for row in rows if row.label.startswith("mgpu")]
    wrong = sum(row.wrong for row in ours)
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    print(f"# Avg bus bandwidth    : {sum(row.busbw for row in ours) / len(ours):.4f}")
    return 1 if wrong else 0


def describe(arguments: argparse.Namespace) -> str:
    """The first line: when, where, and with what numbers."""
    return (
        f"all_reduce: {arguments.ranks} ranks, {arguments.rounds} rounds of up to {arguments.iters} calls after "
        f"{arguments.warmup_iters}, inputs refilled before each; {datetime.now():%Y-%m-%d %H:%M}; {machine()}"
    )


def machine() -> str:
    """Processor, cores and Python, in a line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def launches(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Launch]:
    """How each crew is started: an MPI's by its own launcher, ours by `spawn`."""
    ranks = arguments.ranks
    code = f"from collectives import spawn; from bench.worker import sample_ours; spawn(sample_ours, {ranks}"
    found = {"mgpu": Launch([python(f"{code}, backend={arguments.backend!r})")], [{}])}
    for name in names:
        found[name] = Launch.each(ranks, [sys.executable, "-m", "bench.worker", name, str(ranks)])
    for name, mpi in peers.find_mpis().items():
        found[name] = Launch(
            [mpi.command(ranks, [sys.executable, "-m", "bench.worker", name, str(ranks)])], [mpi.environment()]
        )
    return {name: found[name] for name in ["mgpu", *names]}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _choose(text: str, known: Mapping[str, str], every: list[str], what: str) -> list[str]:
    if text == "all":
        return every
    unknown = [word for word in _words(text) if word not in known]
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}: choose from {', '.join(known)}")
    return [known[word] for word in _words(text)]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    sys.exit(main())
