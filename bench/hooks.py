"""`mgpu bench hooks`: what data-parallel training gains and loses by sending less: bytes, time and accuracy.

The image recipe's network learns for a fixed number of steps with each communication hook, from the same weights and on
the same batches. Bytes are those that each rank has to send in a step at least; seconds are the median step's, with
the hooks taking turns from step to step, so that they meet the same moods of the machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import collectives
from bench import record
from mgpu_core import data, nn, optim, schedule
from mgpu_core.autograd import no_grad
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel
from mgpu_core.parallel.hooks import HOOKS
from mgpu_core.recipes.image_classification import network
from mgpu_core.tensor import Tensor

_BATCH, _LR, _TESTED = 128, 0.1, 2000


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    flags = argparse.ArgumentParser(prog="mgpu bench hooks", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("--steps", type=int, default=300, help="training steps with each hook (default 300)")
    add("--data", type=Path, help="folder in which to look for Fashion-MNIST first ($MGPU_DATA)")
    add("--json", type=Path, metavar="FILE", help="write figures and all steps, for mgpu bench diff")
    options = flags.parse_args(argv)
    if options.ranks < 2 or options.steps < 2:
        flags.error("-n and --steps are at least 2")
    images = data.images(options.data)
    found = collectives.spawn(run, options.ranks, (images, options.steps))[0]
    for line in report(found, images.name, options.ranks, options.steps):
        print(line)
    if options.json:
        about = {**record.about("hooks", vars(options)), "images": images.name}
        steps = {name: row.pop("seconds") for name, row in found.items()}
        rows = [{"label": name, "case": {}, "microseconds": 1e6 * median(steps[name]), **found[name]} for name in found]
        samples = [sample for name in found for sample in record.samples(name, {}, steps[name])]
        record.write(options.json, about, rows, samples)
    return 0


def run(comm: Any, images: data.ImageSet, steps: int) -> dict[str, dict[str, Any]]:
    """One rank: by hook, `bytes` it sends in a step, `seconds` of each step but the first, and the `loss` and
    `accuracy` in the test."""
    pictures, tests = (prepared(images, kept) for kept in (images.train_images, images.test_images[:_TESTED]))
    rate = schedule.cosine(_LR, steps=steps, warmup=steps // 10)
    runs = {}
    for name, hook in HOOKS.items():
        counter = hook()
        model = DataParallel(network(np.random.default_rng(0)), comm, hook=counter)
        runs[name] = model, optim.SGD(model.named_parameters(), _LR, momentum=0.9, weight_decay=5e-4), counter
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = np.random.default_rng(1)
    for step in range(steps):
        batch = order.choice(len(pictures), _BATCH, replace=False)
        mine = np.array_split(batch, comm.size)[comm.rank]
        for name, (model, optimizer, _) in runs.items():
            comm.barrier()
            began = time.perf_counter()
            optimizer.lr = rate(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(Tensor(pictures[mine])), images.train_labels[mine], reduction="sum") / _BATCH
            loss.backward()
            model.synchronize()
            optimizer.step()
            seconds[name].append(time.perf_counter() - began)
    found = {}
    for name, (model, _, hook) in runs.items():
        test_loss, accuracy = tested(model.model, tests, images.test_labels[:_TESTED])
        found[name] = {
            "bytes": hook.bytes_sent / steps,
            "seconds": seconds[name][1:],
            "loss": test_loss,
            "accuracy": accuracy,
        }
    return found


def prepared(images: data.ImageSet, kept: Any) -> Any:
    """(n, 28, 28) uint8 to (n, 1, 28, 28) float32 of mean 0 and variance 1 over the training set."""
    return ((kept - images.train_images.mean()) / images.train_images.std()).astype(np.float32)[:, None]


def tested(model: nn.Module, pictures: Any, labels: Any) -> tuple[float, float]:
    """The mean cross-entropy, and the part that is classified right."""
    model.eval()
    with no_grad():
        logits = model(Tensor(pictures))
        return F.cross_entropy(logits, labels).item(), float(np.mean(logits.data.argmax(axis=1) == labels))


def report(found: Mapping[str, Mapping[str, Any]], name: str, ranks: int, steps: int) -> Iterator[str]:
    """The table."""
    yield f"# hooks: {name}, {ranks} ranks, {steps} steps of {_BATCH} images; bytes that a rank sends in a step"
    yield f"# {'hook':>10} {'bytes':>10} {'of none':>8} {'ms/step':>8} {'loss':>8} {'accuracy':>9}"
    for hook, row in found.items():
        part = row["bytes"] / found["none"]["bytes"]
        numbers = f"{row['bytes']:10.0f} {part:8.1%} {1e3 * median(row['seconds']):8.2f} {row['loss']:8.4f}"
        yield f"  {hook:>10} {numbers} {row['accuracy']:9.2%}"


if __name__ == "__main__":
    sys.exit(main())
