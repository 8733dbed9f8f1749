"""`mgpu bench asynchronous`: synchronous and asynchronous training of the image recipe's network, with a slow rank.

Every mode goes through the same images in batches of the same size, from the same weights, at the same learning rates:

    sync      a batch is cut among the ranks, evenly; gradients are summed (`DataParallel`)
    balanced  the same, cut by the measured speed of each rank (`Balance`)
    async     every rank takes whole batches, pulls and pushes without waiting (`Asynchronous`)
    dc        the same with delay compensation
    ssp       the same, but nobody may be more than --bound pushes ahead of the slowest
    local     a batch is cut among the ranks, which meet after every --every steps (`LocalSGD`)

With `--slow 3` the last rank does the computation of each of its steps three times over. Each mode trains in parts, and
is tested after each of them, outside of its time. The last column is the accuracy at the time at which the fastest mode
had finished, interpolated. One thread a rank, which needs as many cores as ranks for the figures to mean anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

MODES = ("sync", "balanced", "async", "dc", "ssp", "local")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    flags = parser()
    arguments = flags.parse_args(argv)
    modes = arguments.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        flags.error(f"there is no mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    if min(arguments.ranks, arguments.slow, arguments.batch, arguments.epochs, arguments.parts, arguments.images) < 1:
        flags.error("-n, --slow, --batch, --epochs, --parts and --images are at least 1")
    import collectives
    from mgpu_core.data import images

    name = images(say=lambda line: None).name
    by_rank = collectives.spawn(run, arguments.ranks, (modes, vars(arguments), name))
    found = summarise(by_rank)
    for line in report(found, arguments, name):
        print(line)
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "plot")}
        content = {"benchmark": "asynchronous", **settings, "data": name, "modes": found}
        arguments.json.write_text(json.dumps(content) + "\n")
    if arguments.plot:
        draw(found, arguments.plot, f"{name}, {arguments.ranks} ranks, the last one {arguments.slow} times slower")
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench asynchronous", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("--modes", default=",".join(MODES), help="which, in this order (default %(default)s)")
    add("--slow", type=int, default=3, help="how often the last rank does its computation; 1 for once (default 3)")
    add("--batch", type=int, default=128, help="images of a batch (default 128)")
    add("--lr", type=float, default=0.05, help="highest learning rate; momentum is 0.9 (default 0.05)")
    add("--epochs", type=int, default=2, help="times that the images are gone through (default 2)")
    add("--images", type=int, default=60000, help="training images, at most (default 60000)")
    add("--parts", type=int, default=4, help="parts of an epoch, after each of which is a test (default 4)")
    add("--bound", type=int, default=4, help="of ssp: pushes (default 4)")
    add("--every", type=int, default=8, help="of local: steps (default 8)")
    add("--compensation", type=float, default=2.0, help="lambda_0 of dc (default 2)")
    add("--seed", type=int, default=0, help="of weights and order (default 0)")
    add("--json", type=Path, metavar="FILE", help="write what was found")
    add("--plot", type=Path, metavar="FILE", help="draw accuracy against images and against time")
    return flags


def run(comm: Any, modes: Sequence[str], settings: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """One rank. By mode: `seconds` of each part, `images` and `accuracy` after it, all beginning with what is before
    the first part, and what the mode tells of itself."""
    from mgpu_core.autograd.memory import keep_freed_memory

    keep_freed_memory()
    found = {}
    for mode in modes:
        training = Training(comm, settings, name)
        step: Callable[..., Any] = {"sync": training.sync, "balanced": training.sync, "local": training.local}.get(
            mode, training.asynchronous
        )
        found[mode] = training.go(step(mode))
    return found


class Training:
    """One rank's training in one mode.

    A mode is a generator that trains on the next part whenever it is asked to, and yields what it tells of itself.
    """

    def __init__(self, comm: Any, settings: Mapping[str, Any], name: str) -> None:
        from mgpu_core import schedule
        from mgpu_core.data import Loader, Sampler
        from mgpu_core.recipes import image_classification as recipe

        self.comm, self.settings, self.recipe = comm, settings, recipe
        images = recipe.read(name, None)
        count = min(settings["images"], len(images.train_labels))
        self.prepare = recipe.normalisation(images, np.dtype(np.float32))
        self.order = Sampler(count, settings["batch"], seed=settings["seed"])
        self.loader = partial(Loader, (images.train_images[:count], images.train_labels[:count]), self.order)
        test = len(images.test_labels) * np.arange(comm.rank, comm.rank + 2) // comm.size
        self.test = images.test_images[slice(*test)], images.test_labels[slice(*test)]
        self.tests = len(images.test_labels)
        self.network = recipe.network(np.random.default_rng(settings["seed"]))
        self.twin = recipe.network(np.random.default_rng(0))  # what a slow rank wastes its time with
        self.repeats = settings["slow"] - 1 if comm.rank == comm.size - 1 else 0
        steps = settings["epochs"] * self.order.steps
        self.rate = schedule.cosine(settings["lr"], steps=steps, warmup=max(1, steps // 20))
        self.momentum = 0.9

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(epoch, first step, step after the last) of each part."""
        bounds = [self.order.steps * part // self.settings["parts"] for part in range(self.settings["parts"] + 1)]
        for epoch in range(self.settings["epochs"]):
            for first, last in zip(bounds, bounds[1:]):
                yield epoch, first, last

    def lr(self, batch: Any) -> float:
        """The same for a batch in every mode."""
        return self.rate(batch.epoch * self.order.steps + batch.step)

    def backward(self, model: Any, batch: Any, count: int) -> None:
        """Forward and backward, of which a slow rank does more than it must."""
        for _ in range(self.repeats if len(batch.indices) else 0):
            self.recipe.loss(self.twin, batch.arrays).backward()
        (self.recipe.loss(model, batch.arrays) / count).backward()

    def sync(self, mode: str) -> Iterator[dict[str, Any]]:
        """Data-parallel, evenly cut or balanced."""
        from mgpu_core.optim import SGD
        from mgpu_core.parallel import DataParallel
        from mgpu_core.parallel.speeds import Balance

        model = DataParallel(self.network, self.comm)
        optimizer = SGD(self.network.parameters(), self.settings["lr"], momentum=self.momentum)
        loader = self.loader(rank=self.comm.rank, size=self.comm.size, transform=self.prepare)
        balance = Balance(loader, self.comm, None if mode == "balanced" else [1] * self.comm.size)
        for epoch, first, last in self.parts():
            with loader.epoch(epoch, steps=range(first, last)) as batches:
                for batch in batches:
                    began = time.perf_counter()
                    optimizer.lr = self.lr(batch)
                    optimizer.zero_grad()
                    self.backward(model, batch, batch.global_count)
                    waited = model.synchronize()
                    optimizer.step()
                    balance.step(batch, time.perf_counter() - began - waited)
            yield {"shares": list(balance.shares)}

    def local(self, mode: str) -> Iterator[dict[str, Any]]:
        """Local SGD."""
        from mgpu_core.optim import SGD
        from mgpu_core.parallel.local import LocalSGD

        inner = SGD(self.network.named_parameters(), self.settings["lr"], momentum=self.momentum)
        model = LocalSGD(self.network, self.comm, inner, every=self.settings["every"])
        loader = self.loader(rank=self.comm.rank, size=self.comm.size, transform=self.prepare)
        for epoch, first, last in self.parts():
            with loader.epoch(epoch, steps=range(first, last)) as batches:
                for batch in batches:
                    inner.lr = self.lr(batch)
                    model.zero_grad()
                    if len(batch.indices):
                        self.backward(model, batch, len(batch.indices))
                    model.step(len(batch.indices))
            model.synchronize()
            yield {}

    def asynchronous(self, mode: str) -> Iterator[dict[str, Any]]:
        """Pull and push."""
        from mgpu_core.optim import SGD
        from mgpu_core.parallel.asynchronous import Asynchronous

        model = Asynchronous(
            self.network,
            self.comm,
            partial(SGD, lr=self.settings["lr"], momentum=self.momentum),
            bound=self.settings["bound"] if mode == "ssp" else None,
            delay_compensation=self.settings["compensation"] if mode == "dc" else 0.0,
        )
        loader = self.loader(transform=self.prepare, depth=1)
        for epoch, first, last in self.parts():
            for batch in model.batches(loader, epoch, first, last):
                model.pull()
                self.backward(model, batch, len(batch.indices))
                model.push(self.lr(batch))
            yield {"staleness": dict(model.staleness.counts)}

    def go(self, mode: Iterator[dict[str, Any]]) -> dict[str, Any]:
        """Train to the end. Times are from all ranks' start of a part to this rank's end of it."""
        found: dict[str, Any] = {"seconds": [0.0], "accuracy": [self.accuracy()], "images": [0]}
        for epoch, _, last in self.parts():
            self.comm.barrier()
            began = time.perf_counter()
            told = next(mode)
            found["seconds"].append(time.perf_counter() - began)
            found["images"].append(epoch * self.order.count + min(last * self.order.batch, self.order.count))
            found["accuracy"].append(self.accuracy())
            found.update(told)
        return found

    def accuracy(self) -> float:
        """Over the test images, which all ranks test together."""
        from mgpu_core.autograd import no_grad

        right = 0.0
        with no_grad():
            for start in range(0, len(self.test[1]), 1000):
                arrays = self.prepare((self.test[0][start : start + 1000], self.test[1][start : start + 1000]))
                right += float(np.sum(self.recipe.score(self.network, arrays)["test_accuracy"]))
        return float(self.comm.all_reduce(np.array([right]))[0]) / self.tests


def summarise(by_rank: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By mode: `seconds` since its beginning, `images` and `accuracy` there and at the end of each part, images a
    second, the staleness of all pushes, the last shares, and the accuracy when the fastest mode had finished.
    """
    found: dict[str, dict[str, Any]] = {}
    for mode, first in by_rank[0].items():
        taken = np.max([rank[mode]["seconds"] for rank in by_rank], axis=0)
        row = {"seconds": np.cumsum(taken).tolist(), "images": first["images"], "accuracy": first["accuracy"]}
        # Before the first part there is no time; and it compiles kernels, and is left out where there is another.
        some = slice(2 if len(taken) > 2 else 1, None)
        row["images_per_second"] = float(np.diff(row["images"], prepend=0)[some].sum() / taken[some].sum())
        row["shares"] = first.get("shares")
        counts: dict[int, int] = {}
        for rank in by_rank:
            for stale, pushes in rank[mode].get("staleness", {}).items():
                counts[int(stale)] = counts.get(int(stale), 0) + pushes
        row["staleness"] = dict(sorted(counts.items())) or None
        found[mode] = row
    soonest = min(row["seconds"][-1] for row in found.values())
    for row in found.values():
        row["accuracy_then"] = float(np.interp(soonest, row["seconds"], row["accuracy"]))
    return found


def report(found: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace, name: str) -> Iterator[str]:
    """The table."""
    soonest = min(row["seconds"][-1] for row in found.values())
    slow = f"the last computes {arguments.slow} times over" if arguments.slow > 1 else "none slowed"
    yield f"# asynchronous: {name}, {arguments.ranks} ranks, {slow}, batch {arguments.batch}, {arguments.epochs} epochs"
    yield f"# {'':8} {'images/s':>8} {'times':>6} {'staleness':>13} {'accuracy (%)':>13} {'at':>9}   split"
    yield f"# {'mode':8} {'':8} {'sync':>6} {'mean':>8} {'max':>4} {'all images':>13} {soonest:7.1f} s"
    base = found["sync"]["images_per_second"] if "sync" in found else None
    for mode, row in found.items():
        pushes = row["staleness"] or {}
        mean = f"{sum(s * n for s, n in pushes.items()) / sum(pushes.values()):8.2f}" if pushes else ""
        most = str(max(pushes)) if pushes else ""
        ratio = f"{row['images_per_second'] / base:6.2f}" if base else ""
        shares = " : ".join(f"{share:.2f}" for share in row["shares"] or ())
        yield (
            f"  {mode:8} {row['images_per_second']:8.0f} {ratio:>6} {mean:>8} {most:>4} "
            f"{100 * row['accuracy'][-1]:13.2f} {100 * row['accuracy_then']:9.2f}   {shares}".rstrip()
        )


def draw(found: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Accuracy against images and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (samples, clock) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    for axes, key, label in ((samples, "images", "images trained on"), (clock, "seconds", "seconds of training")):
        for mode, row in found.items():
            axes.plot(row[key], [100 * accuracy for accuracy in row["accuracy"]], marker=".", label=mode)
        axes.set_xlabel(label)
        axes.grid(True, alpha=0.3)
    samples.set_ylabel("test accuracy (%)")
    samples.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
