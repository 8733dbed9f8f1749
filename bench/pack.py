"""`mgpu bench pack`: many tensors into one flat bucket and back, beside one copy of as many bytes.

    pack      what comm.all_reduce does with a list of arrays first
    unpack    and last
    copy      np.copyto of one array of the same size: the limit

On the CPU; the kernel for GPUs is timed by `python -m bench.gpu_check`. Sizes are all tensors' together; a tensor is a
multiple of 64 bytes, and the largest is a few hundred times the smallest. Each way has a process of its own, and they
take turns on one core. Nothing is packed where a bucket's views are the gradients: `collectives.Bucketer` does that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench import record, sizes, table
from bench.candidates import Candidate, InHostMemory
from bench.case import Case
from bench.crew import Launch, python, start
from bench.inputs import Array
from bench.samples import Measurement, Row, summarise, write_json
from bench.worker import sample_with
from collectives import arrays
from collectives.wording import counted

WAYS = ("pack", "unpack", "copy")
_UNIT = 16  # elements: 64 bytes of float32


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a result was wrong."""
    flags = parser()
    arguments = flags.parse_args(argv)
    if min(arguments.tensors, arguments.rounds, arguments.iters) < 1:
        flags.error("--tensors, --rounds and --iters are at least 1")
    try:
        swept = list(sizes.sweep(arguments.minbytes, arguments.maxbytes, factor=arguments.stepfactor))
    except ValueError as error:
        flags.error(str(error))
    if not swept or swept[0] < 4 * _UNIT * arguments.tensors:
        flags.error(
            f"{counted(arguments.tensors, 'tensor')} of 64 bytes at least need {4 * _UNIT * arguments.tensors} bytes"
        )
    counts = [nbytes // (4 * _UNIT) * _UNIT for nbytes in swept]
    cases = [Case("pack", 4 * count, count, "float32", "none", -1, False) for count in counts]
    launches = {
        way: Launch.each(1, python(f"from bench.pack import work; work({way!r}, {arguments.tensors})")) for way in WAYS
    }
    with ExitStack() as stack:
        crews, _ = start(stack, launches, 1, timeout=arguments.timeout, needed="")
        measurement = Measurement(crews, [Candidate(way) for way in WAYS], cases)
        measurement.allocate(cases[-1].nbytes)
        measurement.run(arguments.rounds, calls=arguments.iters, warmups=3, check=True)
    rows = summarise(measurement.samples, 1, WAYS, ["copy"])
    print(
        f"# pack: {counted(arguments.tensors, 'tensor')} of float32, "
        f"{counted(arguments.rounds, 'round')}; {record.machine()}"
    )
    for line in report(rows):
        print(line)
    if arguments.json:
        write_json(arguments.json, record.about("pack", vars(arguments)), rows, measurement.samples)
    return int(any(row.wrong for row in rows))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench pack", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    sizes.add_flags(flags, "64K", "16M", 16)
    add("--tensors", type=int, default=64, help="in a bucket (default 64)")
    add("--iters", type=int, default=20, help="timed calls in a sample, at most (default 20)")
    add("--rounds", type=int, default=7, help="samples of each way and size, taken in turn (default 7)")
    add("--timeout", type=float, default=120, help="seconds in which a process must answer (default 120)")
    add("--json", type=Path, metavar="FILE", help="write rows and all samples, for mgpu bench diff")
    return flags


def work(way: str, tensors: int) -> None:
    """The process of one way."""
    sample_with(Packing(way, tensors))


class Packing(InHostMemory):
    """One process, which packs."""

    rank = 0

    def __init__(self, way: str, tensors: int) -> None:
        self._way, self._tensors = way, tensors
        self.version = f"NumPy {np.__version__}"

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """From x, which is cut into tensors or is the bucket, to `out`, which is the bucket or the tensors."""
        ends = cut(case.count, self._tensors)
        starts = [0, *ends[:-1]]
        given, wanted = ([array[a:b] for a, b in zip(starts, ends)] for array in (x, out))
        calls: dict[str, Callable[[], object]] = {
            "pack": partial(arrays.join, given, out),
            "unpack": partial(arrays.part, x, wanted),
            "copy": partial(np.copyto, out, x),
        }
        return calls[self._way]


def cut(count: int, tensors: int) -> list[int]:
    """Where each of so many tensors ends that fill `count` elements: multiples of _UNIT, sizes log-uniform, the same in
    every process."""
    units = count // _UNIT
    weights = np.exp(np.random.default_rng(0).uniform(0, 6, tensors))
    spare = np.floor(np.cumsum(weights / weights.sum()) * (units - tensors)).astype(int)
    ends = _UNIT * (spare + np.arange(1, tensors + 1))
    return [*ends[:-1].tolist(), count]


def report(rows: Sequence[Row]) -> Iterator[str]:
    """A line per size and way."""
    lines = []
    for row in rows:
        (limit,) = row.ratios.values()
        times = [table.significant(row.microseconds), f"{row.algbw:.2f}", f"{limit:.0%}"]
        lines.append([row.label, sizes.format_size(row.case.nbytes), *times, str(row.wrong)])
    yield from table.columns(["way", "size", "time (us)", "GB/s", "of a copy", "#wrong"], lines)


if __name__ == "__main__":
    sys.exit(main())
