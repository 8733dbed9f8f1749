"""`mgpu bench speedup`: how much faster ranks train together than one alone, and where the rest goes.

One step of the image recipe's network on the same global batch, in four ways that take turns:

    one        a rank does the whole batch, the others sleep
    part       a rank does its part of the batch, the others sleep
    together   every rank does its part, and nothing is communicated
    all        every rank does its part, and gradients are summed: a step of data-parallel training

With p ranks the ideal is one / p. What `all` takes beyond it is made of: part - one / p, work that does not shrink with
the batch (the optimiser's step, overheads of each call, small matrices); together - part, in the mean over the ranks,
what they take from each other (memory bandwidth, caches, the clock); the slowest rank less the mean (imbalance); and
all - together, communication that nothing hides.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import record

WAYS = ("one", "part", "together", "all")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    flags = parser()
    options = flags.parse_args(argv)
    if options.ranks < 2 or options.rounds < 1 or options.batch < options.ranks:
        flags.error("-n is at least 2, --rounds at least 1, and --batch at least -n")
    import collectives

    by_rank = collectives.spawn(run, options.ranks, (options.batch, options.rounds))
    found = summarise(by_rank)
    for line in report(found, options.ranks, options.batch, options.rounds):
        print(line)
    if options.json:
        steps = {
            way: [max(times) for times in zip(*filter(None, (r[way] for r in by_rank)), strict=True)] for way in WAYS
        }
        rows = [{"label": way, "case": {}, "microseconds": 1e6 * median(steps[way])} for way in WAYS]
        samples = [sample for way in WAYS for sample in record.samples(way, {}, steps[way])]
        record.write(options.json, {**record.about("speedup", vars(options)), "seconds": found}, rows, samples)
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench speedup", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("--batch", type=int, default=128, help="images of a global batch (default 128)")
    add("--rounds", type=int, default=100, help="steps of each way (default 100)")
    add("--json", type=Path, metavar="FILE", help="write medians and all steps, for mgpu bench diff")
    return flags


def run(comm: Any, batch: int, rounds: int) -> dict[str, list[float]]:
    """One rank: by way, the seconds of each of its steps; none where it slept."""
    from mgpu_core.autograd.memory import keep_freed_memory
    from mgpu_core.data import split

    keep_freed_memory()
    rng = np.random.default_rng(comm.rank)
    mine = split(batch, [1] * comm.size)[comm.rank]
    whole = rng.standard_normal((batch, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, batch)
    part = whole[0][:mine].copy(), whole[1][:mine].copy()
    alone, together = step(None, batch), step(comm, batch)
    ways: dict[str, Callable[[], None]] = {
        "one": lambda: alone(whole),
        "part": lambda: alone(part),
        "together": lambda: alone(part),
        "all": lambda: together(part),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 2):
        for way, work in ways.items():
            comm.barrier()
            if way in ("one", "part") and comm.rank:
                continue
            began = time.perf_counter()
            work()
            if i >= 2:  # the first ones compile kernels
                taken[way].append(time.perf_counter() - began)
    return taken


def step(comm: Any, batch: int) -> Callable[[tuple[Any, Any]], None]:
    """A function that trains on some images of a batch."""
    from mgpu_core.optim import SGD
    from mgpu_core.parallel import DataParallel
    from mgpu_core.recipes import image_classification as recipe

    model = DataParallel(recipe.network(np.random.default_rng(0)), comm)
    optimizer = SGD(model.named_parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)

    def train(arrays: tuple[Any, Any]) -> None:
        optimizer.zero_grad()
        (recipe.loss(model, arrays) / batch).backward()
        model.synchronize()
        optimizer.step()

    return train


def summarise(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Seconds, medians over the rounds: of "one", of "part", of "together" in the "mean" and at the "slowest" rank's,
    and of "all"."""
    together = np.array([rank["together"] for rank in by_rank])
    return {
        "one": float(np.median(by_rank[0]["one"])),
        "part": float(np.median(by_rank[0]["part"])),
        "mean": float(np.median(together.mean(axis=0))),
        "slowest": float(np.median(together.max(axis=0))),
        "all": float(np.median(np.max([rank["all"] for rank in by_rank], axis=0))),
    }


def report(found: Mapping[str, float], ranks: int, batch: int, rounds: int) -> Iterator[str]:
    """The table."""
    ms = {key: 1e3 * seconds for key, seconds in found.items()}
    ideal = ms["one"] / ranks
    yield f"# speedup: the image recipe's network, batch {batch}, {ranks} ranks; ms, medians of {rounds} steps"
    yield f"  {'one rank, the whole batch':42} {ms['one']:8.2f}"
    yield f"  {f'{ranks} ranks, data-parallel':42} {ms['all']:8.2f}   speed-up {ms['one'] / ms['all']:.2f}"
    yield f"  {'ideal':42} {ideal:8.2f}   {float(ranks):.2f}"
    reasons = {
        "work that does not shrink with the batch": ms["part"] - ideal,
        "ranks in each other's way": ms["mean"] - ms["part"],
        "the slowest rank": ms["slowest"] - ms["mean"],
        "communication": ms["all"] - ms["slowest"],
    }
    for reason, lost in reasons.items():
        yield f"    {reason:40} {lost:+8.2f}   {lost / ms['all']:+.0%} of a step"


if __name__ == "__main__":
    sys.exit(main())
