"""`mgpu bench pipeline`: the bubble and the memory of each pipeline schedule, beside what the formulas say.

The stages are equally large, so that the formulas hold. With `--work compute` they multiply matrices, one thread a
rank, which needs as many cores as ranks; with `--work sleep` they sleep as long, and the bubble is measured on any
number of cores. Schedules take turns, step by step, and medians are reported:

    bubble    the time of a step beyond that in which the busiest rank works, as a part of the latter
    kept      the most micro-batches whose activations each rank keeps at once, from rank 0 on. What is found is the
              peak of a step's memory, in units of what one micro-batch takes between its forward and its backward pass;
              so the working memory of a pass comes on top, and with the zero-bubble schedule, for each weight half
              that was put off, gradients as large as the activations
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import record as records
from mgpu_core import Tensor, nn
from mgpu_core.nn import functional as F
from mgpu_core.parallel.pipeline import Pipeline
from mgpu_core.parallel.pipeline_schedules import SCHEDULES
from mgpu_core.tensor import record

_ROWS, _WIDTH = 512, 128  # of a micro-batch's activations: 256 KiB
_FORWARD, _BACKWARD = 2e-3, 4e-3  # seconds that a layer sleeps


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    arguments = parser().parse_args(argv)
    ranks, microbatches = arguments.ranks, arguments.microbatches
    if ranks < 2 or microbatches < 1 or arguments.rounds < 1 or arguments.layers < 1:
        parser().error("-n is at least 2, -m, --rounds and --layers at least 1")
    if microbatches % ranks:
        parser().error(f"interleaving needs a multiple of {ranks} micro-batches for {ranks} ranks, not {microbatches}")
    work = arguments.work or ("compute" if ranks <= len(os.sched_getaffinity(0)) else "sleep")
    import collectives

    by_rank = collectives.spawn(run, ranks, (work, microbatches, 2 * arguments.layers, arguments.rounds))
    found = summarise(by_rank)
    for line in report(found, ranks, microbatches, work):
        print(line)
    if arguments.json:
        case = {"work": work, "ranks": ranks, "microbatches": microbatches}
        rows = [
            {"label": name, "case": case, "microseconds": 1e3 * row.pop("milliseconds"), **row}
            for name, row in found.items()
        ]
        samples = [s for name in found for s in records.samples(name, case, slowest(by_rank, name, "seconds"))]
        records.write(arguments.json, records.about("pipeline", vars(arguments)), rows, samples)
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench pipeline", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host, a part of the model each (default 2)")
    add("-m", "--microbatches", type=int, default=8, help="parts of a batch, a multiple of the ranks (default 8)")
    add("--work", choices=("compute", "sleep"), help="what stages do (default: compute, if there is a core for each)")
    add("--layers", type=int, default=4, help="layers in half a rank's part of the model (default 4)")
    add("--rounds", type=int, default=9, help="timed steps of each schedule (default 9)")
    add("--json", type=Path, metavar="FILE", help="write medians and all steps, for mgpu bench diff")
    return flags


def run(comm: Any, work: str, microbatches: int, layers: int, rounds: int) -> dict[str, dict[str, Any]]:
    """One rank. By schedule: `seconds` of each step, of which it was `busy`, and `kept` micro-batches."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "busy": []} for name in SCHEDULES}
    inputs, labels = batch(microbatches)
    if work == "sleep":
        inputs = inputs[:, :2].copy()  # messages that take next to no time either
    timed = pipelines(comm, matrix if work == "compute" else Sleep, microbatches, layers)
    for round in range(rounds + 1):
        for name, pipeline in timed.items():
            comm.barrier()
            begin = time.perf_counter()
            pipeline.forward_backward(inputs, labels, count=len(inputs))
            taken = time.perf_counter() - begin
            if round:  # the first is a warm-up
                found[name]["seconds"].append(taken)
                found[name]["busy"].append(taken - pipeline.waited)
    for name, pipeline in pipelines(comm, matrix, microbatches, layers).items():
        found[name]["kept"] = kept(pipeline, *batch(microbatches))
    return found


def batch(microbatches: int) -> tuple[Any, Any]:
    """Made-up inputs (n, width) float32 and labels (n,) int64."""
    inputs = np.random.default_rng(0).standard_normal((_ROWS * microbatches, _WIDTH), np.float32)
    return inputs, np.zeros(len(inputs), np.int64)


def pipelines(comm: Any, layer: Callable[[], nn.Module], microbatches: int, layers: int) -> dict[str, Pipeline]:
    """One of each schedule, for a model with so many layers a rank."""
    model = nn.Sequential(*(layer() for _ in range(layers * comm.size)))
    return {
        name: Pipeline(model, comm, loss=loss, schedule=schedule, microbatches=microbatches)
        for name, schedule in SCHEDULES.items()
    }


def kept(pipeline: Pipeline, inputs: Any, labels: Any) -> float:
    """The peak of a step's memory in units of what a stage keeps of a micro-batch."""
    pipeline.forward_backward(inputs, labels, count=len(inputs))  # gradients get their memory
    tracemalloc.start()
    traced = tracemalloc.get_traced_memory
    before, _ = traced()
    alive = []
    for stage, layers in pipeline.stages.items():
        own = Tensor(inputs[:_ROWS]) if stage == 0 else Tensor(inputs[:_ROWS].copy(), requires_grad=True)
        outputs = layers(own)
        outputs.data = np.broadcast_to(np.float32(0), outputs.shape)  # as after it was sent
        alive.append(outputs)
    one = (traced()[0] - before) / len(alive)
    del own, outputs, alive
    before, _ = traced()
    tracemalloc.reset_peak()
    pipeline.forward_backward(inputs, labels, count=len(inputs))
    peak = traced()[1] - before
    tracemalloc.stop()
    return peak / one


def loss(outputs: Tensor, labels: Any) -> Tensor:
    """Cross-entropy: a little work for the last stage."""
    return F.cross_entropy(outputs, labels, reduction="sum")


def matrix() -> nn.Module:
    """A layer that computes."""
    return nn.Linear(_WIDTH, _WIDTH, bias=False, rng=np.random.default_rng(0))


class Sleep(nn.Module):
    """A layer that takes its time and no core: backward half for its input, half for its weight."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(np.zeros(1, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_FORWARD)
        share = 0.5 if x.requires_grad else 1.0

        def to_input(gradient: Any) -> Any:
            time.sleep(_BACKWARD / 2)
            return gradient

        def to_weight(gradient: Any) -> Any:
            time.sleep(_BACKWARD * share)
            return np.zeros(1, np.float32)

        return record(x.data, (x, to_input), (self.weight, to_weight))


def summarise(by_rank: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By schedule: median `milliseconds` of a step, the median `bubble`, and `kept` of each rank."""
    found = {}
    for name in by_rank[0]:
        seconds, busy = slowest(by_rank, name, "seconds"), slowest(by_rank, name, "busy")
        found[name] = {
            "milliseconds": median(seconds) * 1e3,
            "bubble": median(whole / part - 1 for whole, part in zip(seconds, busy, strict=True)),
            "kept": [rank[name]["kept"] for rank in by_rank],
        }
    return found


def slowest(by_rank: Sequence[Mapping[str, Mapping[str, Any]]], name: str, what: str) -> list[float]:
    """Seconds of each step of a schedule, on the rank that had most."""
    return [max(times) for times in zip(*(rank[name][what] for rank in by_rank), strict=True)]


def report(found: Mapping[str, Mapping[str, Any]], ranks: int, microbatches: int, work: str) -> Iterator[str]:
    """The table."""
    yield f"# pipeline: {ranks} ranks, {microbatches} micro-batches, stages that {work}"
    yield f"# {'':12} {'step':>8} {'bubble':>15} {'kept by each rank':>17}"
    yield f"# {'schedule':12} {'(ms)':>8} {'formula':>7} {'found':>7} {'formula':>17}   found"
    for name, row in found.items():
        schedule = SCHEDULES[name]
        peaks = [schedule.peak(rank, ranks, microbatches) for rank in range(ranks)]
        yield (
            f"  {name:12} {row['milliseconds']:8.1f} {schedule.bubble(ranks, microbatches):7.3f} {row['bubble']:7.3f} "
            f"{' '.join(map(str, peaks)):>17}   {' '.join(f'{kept:.1f}' for kept in row['kept'])}"
        )
    yield "# the interleaved schedule's ranks have two stages half as large each, which count by themselves"


if __name__ == "__main__":
    sys.exit(main())
