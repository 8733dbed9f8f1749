"""`mgpu bench quantized`: all-reduces that send less, through communication hooks: time, bytes, and what is lost.

The hooks of `mgpu_core.parallel.hooks` sum buckets in symmetric memory, in place: `none` sends float32 as they are.
Times are measured as those of `mgpu bench all_reduce` are. The error is that of the sum of normally distributed
gradients, relative to its length (Euclidean norm); and that of ten such sums together, of the same gradients, which
shows what error feedback makes good.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from bench import record, sizes, table
from bench.candidates import OURS, Candidate, Collectives
from bench.case import Case
from bench.crew import Launch, python, start
from bench.inputs import Array
from bench.samples import Measurement, Row, summarise, write_json
from bench.worker import sample_with
from collectives.bucket import Bucket
from collectives.wording import counted
from mgpu_core.parallel.hooks import HOOKS

NAMES = ("none", "bf16", "int8")  # PowerSGD is for matrices: see `mgpu bench hooks`
REPEATED = 10


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    flags = parser()
    arguments = flags.parse_args(argv)
    if arguments.ranks < 2 or arguments.rounds < 1 or arguments.iters < 1:
        flags.error("-n is at least 2, --rounds and --iters at least 1")
    try:
        swept = list(sizes.sweep(arguments.minbytes, arguments.maxbytes, factor=arguments.stepfactor))
    except ValueError as error:
        flags.error(str(error))
    cases = [Case("all_reduce", n // 4 * 4, n // 4, "float32", "sum", -1, True) for n in swept if n >= 4]
    if not cases:
        flags.error(f"no size from {arguments.minbytes} to {arguments.maxbytes} bytes holds an element")
    found = collectives.spawn(losses, arguments.ranks, ([case.count for case in cases],))[0]
    code = f"from collectives import spawn; from bench.quantized import sample; spawn(sample, {arguments.ranks})"
    with ExitStack() as stack:
        launch = {OURS: Launch([python(code)], [{}])}
        crews, _ = start(stack, launch, arguments.ranks, timeout=arguments.timeout, needed=OURS)
        measurement = Measurement(crews, [Candidate(OURS, "symmetric", name) for name in NAMES], cases)
        measurement.allocate(cases[-1].nbytes)
        measurement.run(arguments.rounds, calls=arguments.iters, warmups=3, check=False)
    labels = [Candidate(OURS, "symmetric", name).label for name in NAMES]
    rows = summarise(measurement.samples, arguments.ranks, labels, [labels[0]])
    print(f"# quantized: {counted(arguments.ranks, 'rank')}, {counted(arguments.rounds, 'round')}; {record.machine()}")
    for line in report(rows, found):
        print(line)
    if arguments.json:
        about = {**record.about("quantized", vars(arguments)), "losses": found}
        write_json(arguments.json, about, rows, measurement.samples)
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench quantized", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    sizes.add_flags(flags, "64K", "16M", 16)
    add("--iters", type=int, default=20, help="timed calls in a sample, at most (default 20)")
    add("--rounds", type=int, default=7, help="samples of each hook and size, taken in turn (default 7)")
    add("--timeout", type=float, default=120, help="seconds in which a rank must answer (default 120)")
    add("--json", type=Path, metavar="FILE", help="write rows and all samples, for mgpu bench diff")
    return flags


class Hooked(Collectives):
    """Our ranks, which sum through the hook that a candidate has in place of an algorithm."""

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """All of `out`, which is x, in one bucket."""
        hook, bucket = HOOKS[candidate.algorithm or "none"](), Bucket(out, [0], [out.shape], [0])
        return lambda: hook.start(self.comm, bucket)()


def sample(comm: Any) -> None:
    """What `collectives.spawn` runs in each rank."""
    sample_with(Hooked(comm))


def losses(comm: Any, counts: Sequence[int]) -> dict[str, list[dict[str, float]]]:
    """One rank: for each hook and number of gradients, the `bytes` it sends, and the `error` and `repeated` error."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for count in counts:
        given = [np.random.default_rng([count, rank]).standard_normal(count, np.float32) for rank in range(comm.size)]
        exact = np.sum(given, axis=0, dtype=np.float64)
        flat = comm.empty(count, np.float32)
        for name in NAMES:
            hook, bucket, sums = HOOKS[name](), Bucket(flat, [0], [flat.shape], [0]), []
            for _ in range(REPEATED):
                flat[...] = given[comm.rank]
                hook.start(comm, bucket)()
                sums.append(flat.astype(np.float64))
            errors = {"error": sums[0] - exact, "repeated": np.mean(sums, axis=0) - exact}
            relative = {kind: float(np.linalg.norm(e) / np.linalg.norm(exact)) for kind, e in errors.items()}
            found[name].append({"count": count, "bytes": hook.bytes_sent / REPEATED, **relative})
    return found


def report(rows: Sequence[Row], found: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """A line per size and hook."""
    titles = ["hook", "size", "time (us)", "none/this", "bytes sent", "of none", "error", f"of {REPEATED}", "state"]
    lost = {(name, each["count"]): each for name, several in found.items() for each in several}
    lines = []
    for row in rows:
        name, count = row.label.split()[-1], row.case.count
        this, plain = lost[name, count], lost[NAMES[0], count]
        (faster,) = row.ratios.values()
        times = [table.significant(row.microseconds), f"{faster:.2f}x"]
        sent = [f"{this['bytes']:.0f}", f"{this['bytes'] / plain['bytes']:.0%}"]
        errors = [f"{this[kind]:.1e}" for kind in ("error", "repeated")]
        size = sizes.format_size(row.case.nbytes)
        lines.append([name, size, *times, *sent, *errors, f"{row.state}:{row.samples}"])
    yield from table.columns(titles, lines)


if __name__ == "__main__":
    sys.exit(main())
