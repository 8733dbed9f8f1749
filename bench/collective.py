"""`mgpu bench all_reduce` and every other collective: nccl-tests' benchmarks, ours beside peers in one run.

Every call is timed by itself: the input is written anew, as a program does that computes gradients, all ranks meet
at a start line, and the call's time is that of its slowest rank. Candidates take turns, each in processes of its own,
on the same cores, and a ping-pong beside every sample tells in which state the machine was (`bench.states`).

Flags are nccl-tests', but for `-n`, which is the number of ranks as in `mgpu run`; their `-n` is `--iters` here, which
is its long name there too. As there, every benchmark takes all of them, and ignores what says nothing to it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import collectives.algorithms  # noqa: F401  (registers those that --algorithm may name)
from bench import bandwidth, case, peers, plot, record, sizes, table
from bench.candidates import LIMIT, OURS, Candidate, is_ours
from bench.case import Case
from bench.crew import Crew, Launch, python, start
from bench.inputs import OPERATIONS
from bench.samples import LIMIT_FROM, Measurement, Row, summarise, write_csv, write_json
from bench.states import FAR, NEAR
from collectives.builder import algorithms, register_from
from collectives.initialise import BACKENDS
from collectives.wording import counted
from kernels.dtypes import find

_DTYPES = {**{nccl: name for name, nccl in table.NCCL_NAMES.items()}, **{name: name for name in table.NCCL_NAMES}}


def run(collective: str, argv: Sequence[str]) -> int:
    """Run the benchmark of this collective; 1 if one of our results was wrong."""
    flags = parser(collective)
    arguments = flags.parse_args(argv)
    for place in arguments.imports:
        register_from(place)
    try:
        cases = list(plan_cases(collective, arguments))
        against, remarks = peers.choose(arguments.against, arguments.ranks, len(os.sched_getaffinity(0)))
        limit = cases[-1].nbytes >= LIMIT_FROM and bandwidth.memory_traffic(collective, arguments.ranks) > 0
        names = [*against, *([LIMIT] if limit else [])]
        launched = launches(names, arguments)
    except (ValueError, peers.PeerError) as error:
        flags.error(str(error))
    print("# " + describe(collective, arguments))
    with ExitStack() as stack:
        crews, failures = start(stack, launched, arguments.ranks, timeout=arguments.timeout, needed=OURS)
        candidates = [*variants(arguments), *(Candidate(name) for name in names if name in crews)]
        for name, crew in crews.items():
            print(f"# {name:10} {crew.version}")
        print(f"# {table.LEGEND}")
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
    write(collective, arguments, crews, rows, measurement, remarks)
    return verdict(rows)


def parser(collective: str) -> argparse.ArgumentParser:
    """The flags; `--help` says what differs from nccl-tests."""
    flags = argparse.ArgumentParser(
        prog=f"mgpu bench {collective}",
        description=f"Time {collective}, with nccl-tests' flags and columns. Note that -n is the number of RANKS, as "
        "in `mgpu run`; nccl-tests' -n is --iters.",
    )
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    sizes.add_flags(flags, "8", "64M", 4)
    add("-i", "--stepbytes", type=sizes.parse_size, help="bytes from one size to the next, in place of a factor")
    add("--iters", type=int, default=20, help="timed calls in a sample, at most; long ones make fewer (default 20)")
    add("-w", "--warmup_iters", type=int, default=5, help="untimed calls before them, at most (default 5)")
    add("-c", "--check", type=int, default=1, metavar="0|1", help="check results (default 1)")
    add("-o", "--op", default="sum", help=f"reductions, separated by commas, or all: {', '.join(OPERATIONS)}")
    add("-d", "--datatype", default="float", help=f"dtypes, separated by commas, or all: {', '.join(_DTYPES)}")
    add("-r", "--root", default="0", help=f"root, or all; of {', '.join(case.ROOTED)} (default 0)")
    add("--memory", choices=["symmetric", "ordinary", "both"], default="symmetric", help="of our arrays")
    add("--algorithm", type=_words, default=[None], help="ours, separated by commas (default: what select chooses)")
    add(
        "--import",
        action="append",
        default=[],
        metavar="FILE.py|MODULE",
        dest="imports",
        help="where algorithms of your own are registered",
    )
    add("--plan", action="store_true", help="time calls through comm.plan as well")
    add("--backend", type=_words, default=["auto"], help="ours, separated by commas (default auto)")
    add(
        "--against",
        type=_words,
        default=[],
        help="peers, separated by commas: gloo, nccl, mpi (all that are found), openmpi, mpich, impi; those that are "
        "not here are left out; see mgpu bench peers",
    )
    add("--rounds", type=int, default=7, help="samples of each candidate and size, taken in turn (default 7)")
    add("--state", choices=[NEAR, FAR], help="compare with the cores in this state, and go on until there are enough")
    add("--timeout", type=float, default=120, help="seconds in which a rank must answer (default 120)")
    add("--json", type=Path, metavar="FILE", help="write rows and all samples, for mgpu bench diff")
    add("--csv", type=Path, metavar="FILE", help="write rows")
    add("--plot", type=Path, metavar="FILE.png", help="draw time and bus bandwidth against size")
    return flags


def plan_cases(collective: str, arguments: argparse.Namespace) -> list[Case]:
    """Every size, dtype, operation and root, out of place and in place. Raises ValueError for what makes no sense."""
    if arguments.ranks < 1 or arguments.rounds < 1 or arguments.iters < 1 or arguments.warmup_iters < 0:
        raise ValueError("-n, --rounds and --iters are at least 1, -w at least 0")
    if unknown := [name for name in arguments.backend if name not in BACKENDS]:
        raise ValueError(f"unknown backend {', '.join(unknown)}: choose from {', '.join(BACKENDS)}")
    known = algorithms(collective)
    if unknown := [name for name in arguments.algorithm if name is not None and name not in known]:
        raise ValueError(f"unknown algorithm {', '.join(unknown)}: choose from {', '.join(sorted(known))}")
    for file in (arguments.json, arguments.csv, arguments.plot):  # before minutes of work for it
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"there is no folder {file.parent} to write {file.name} into")
    dtypes = _choose(arguments.datatype, _DTYPES, list(table.NCCL_NAMES), "datatype")
    ops = _choose(arguments.op, {op: op for op in OPERATIONS}, list(OPERATIONS), "op")
    known_roots = {str(rank): str(rank) for rank in range(arguments.ranks)}
    roots = [int(root) for root in _choose(arguments.root, known_roots, list(known_roots), "root")]
    if collective == "barrier":
        if arguments.plot:
            raise ValueError("a barrier has no sizes to --plot its time against")
        return [Case(collective, 0, 0, "uint8", "none", -1, False)]
    swept = sizes.sweep(arguments.minbytes, arguments.maxbytes, factor=arguments.stepfactor, step=arguments.stepbytes)
    ops = ops if case.reduces(collective) else ["none"]
    roots = roots if collective in case.ROOTED else [-1]
    blocks = case.blocks(collective, arguments.ranks)
    cases = []
    for nbytes, dtype, op, root in itertools.product(swept, dtypes, ops, roots):
        itemsize = find(dtype).itemsize
        count = nbytes // itemsize // blocks
        for in_place in case.placements(collective):
            cases.append(Case(collective, count * blocks * itemsize, count, dtype, op, root, in_place))
    cases = [case for case in dict.fromkeys(cases) if case.count]
    if not cases:
        what = "an element" if blocks == 1 else f"an element for each of {counted(blocks, 'rank')}"
        raise ValueError(f"no size from {arguments.minbytes} to {arguments.maxbytes} bytes holds {what}")
    return cases


def variants(arguments: argparse.Namespace) -> list[Candidate]:
    """Ours: each backend, kind of memory and algorithm, called and planned."""
    memories = ["symmetric", "ordinary"] if arguments.memory == "both" else [arguments.memory]
    ways = [False, True] if arguments.plan else [False]
    crews = map(_crew, arguments.backend)
    return [Candidate(*chosen) for chosen in itertools.product(crews, memories, arguments.algorithm, ways)]


def measure(measurement: Measurement, arguments: argparse.Namespace) -> None:
    """All rounds, with a progress bar where someone watches."""
    from mgpu_core.bar import Bar

    with Bar(total=measurement.visits * arguments.rounds, unit="sample", disable=None, leave=False) as bar:
        measurement.run(
            arguments.rounds,
            calls=arguments.iters,
            warmups=arguments.warmup_iters,
            check=bool(arguments.check),
            wanted=arguments.state,
            progress=bar.update,
        )


def write(
    collective: str,
    arguments: argparse.Namespace,
    crews: Mapping[str, Crew],
    rows: list[Row],
    measured: Measurement,
    remarks: Sequence[str],
) -> None:
    """The files that were asked for."""
    about = {
        **record.about(collective, vars(arguments)),
        "versions": {name: crew.version for name, crew in crews.items()},
        "remarks": list(remarks),
    }
    if arguments.json:
        write_json(arguments.json, about, rows, measured.samples)
    if arguments.csv:
        write_csv(arguments.csv, rows)
    if arguments.plot:
        plot.draw(rows, arguments.plot, f"{collective}, {counted(arguments.ranks, 'rank')}; {record.machine()}")


def verdict(rows: Sequence[Row]) -> int:
    """nccl-tests' closing lines for our rows, and the exit code: 1 if something is wrong or nothing was timed."""
    ours = [row for row in rows if is_ours(row.label)]
    wrong = sum(row.wrong for row in ours)
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    print(f"# Avg bus bandwidth    : {sum(row.busbw for row in ours) / len(ours) if ours else 0:.4f}")
    return 1 if wrong or not ours else 0


def describe(collective: str, arguments: argparse.Namespace) -> str:
    """The first line: when, where, and with what numbers."""
    return (
        f"{collective}: {counted(arguments.ranks, 'rank')}, {counted(arguments.rounds, 'round')} of up to "
        f"{counted(arguments.iters, 'call')} after {arguments.warmup_iters}, inputs refilled before each; "
        f"{datetime.now():%Y-%m-%d %H:%M}; {record.machine()}"
    )


def launches(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Launch]:
    """How each crew is started: an MPI's, and ours over MPI, by MPI's own launcher, others of ours by `spawn`.

    Raises PeerError for a backend over MPI where there is none.
    """
    ranks = arguments.ranks
    mpis = peers.find_mpis() if peers.has("mpi4py") else {}
    found = {}
    for backend in arguments.backend:
        if "mpi" in backend.split("+"):
            if not mpis:
                raise peers.PeerError(f"backend {backend} needs an MPI. {peers.no_mpi()}")
            code = _OVER_MPI.format(backend=backend, imports=arguments.imports)
            found[_crew(backend)] = next(iter(mpis.values())).launch(ranks, python(code))
        else:
            found[_crew(backend)] = _spawned(ranks, backend, arguments.imports)
    for name in names:
        worker = [sys.executable, "-m", "bench.worker", name, str(ranks)]
        if name == "nccl":
            found[name] = _spawned(ranks, name, arguments.imports)
        else:
            found[name] = mpis[name].launch(ranks, worker) if name in mpis else Launch.each(ranks, worker)
    return found


_OVER_MPI = """
import collectives
from bench.worker import sample_ours
with collectives.init(backend={backend!r}) as comm:
    sample_ours(comm, {imports!r})
"""


def _spawned(ranks: int, backend: str, imports: Sequence[str]) -> Launch:
    call = f"spawn(sample_ours, {ranks}, ({imports!r},), backend={backend!r})"
    return Launch([python(f"from collectives import spawn; from bench.worker import sample_ours; {call}")], [{}])


def _crew(backend: str) -> str:
    return OURS if backend == "auto" else f"{OURS} {backend}"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _choose(text: str, known: Mapping[str, str], every: list[str], what: str) -> list[str]:
    if text == "all":
        return every
    unknown = [word for word in _words(text) if word not in known]
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}: choose from {', '.join(known)}")
    return [known[word] for word in _words(text)]
