"""A small convolutional network learns Fashion-MNIST, on several ranks: `mgpu train image-classification -n 2`.

This file is also the tutorial. What it takes to train with several processes:

1. Every rank builds the same network from the same seed (`network`).
2. A *strategy* says how they share the work. `--parallel dp`, the default, is `DataParallel`: it sums the gradients
   over the ranks, in buckets, while backward still runs. For the others see `mgpu_core/recipes/parallel.py`.
3. A `Loader` gives each rank its part of every batch. `--batch` is the *global* batch: with more ranks each
   does less work, and the mathematics stays the same.
4. The loss of a rank is the sum over its samples, divided by the global batch's count: unequal parts average right.
5. All ranks then take the same optimiser step, and stay alike to the last bit.

`Trainer` holds the loop; `train` below is all that a rank does, and `command.run` starts the ranks. The same file also
runs under other launchers, which start the ranks themselves:

    mgpu run -n 4 -m mgpu_core.recipes.image_classification --epochs 2
    torchrun --nproc-per-node 4 -m mgpu_core.recipes.image_classification
    mpirun -n 4 python -m mgpu_core.recipes.image_classification
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from collectives.wording import counted
from mgpu_core import Tensor, data, metrics, nn, optim, schedule
from mgpu_core.autograd import no_grad
from mgpu_core.data import ImageSet, Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.recipes import command, parallel
from mgpu_core.recipes.command import Say
from mgpu_core.recipes.pictures import draw_confusion, draw_predictions
from mgpu_core.trainer import CHECKPOINT, METRICS, Trainer

BASE_LR, BASE_BATCH = 0.1, 128  # go well together; the rate for another batch is scaled from these
DEFAULTS = {  # by data set; the digits are few, and want small batches
    "Fashion-MNIST": {"epochs": 4, "batch": 128, "lr": None, "seed": 0, "dtype": "float32"},
    "handwritten digits": {"epochs": 8, "batch": 32, "lr": None, "seed": 0, "dtype": "float32"},
}
PICTURES = ("curves.png", "predictions.png", "confusion.png")


def network(rng: np.random.Generator, dtype: Any = np.float32) -> nn.Sequential:
    """(n, 1, 28, 28) images to (n, 10) logits; 206,922 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, rng=rng, dtype=dtype),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, rng=rng, dtype=dtype),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128, rng=rng, dtype=dtype),
        nn.ReLU(),
        nn.Linear(128, 10, rng=rng, dtype=dtype),
    )


def loss(model: Any, arrays: tuple[Any, ...]) -> Tensor:
    """The sum of the samples' cross-entropies."""
    images, labels = arrays
    return F.cross_entropy(model(Tensor(images)), labels, reduction="sum")


def score(model: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
    """For each sample its cross-entropy, and whether the likeliest class is the right one."""
    images, labels = arrays
    logits = model(Tensor(images))
    xp = array_namespace(logits.data)
    log_likelihoods = xp.take_along_axis(F.log_softmax(logits).data, labels[:, None], axis=1)[:, 0]
    return {"test_loss": -log_likelihoods, "test_accuracy": logits.data.argmax(axis=1) == labels}


def train(comm: Any, options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What every rank does. Returns the test results, which are the same on all ranks, and how it ended.

    `name` says which data set to use; None for `comm` trains in this process alone.
    """
    rank, size, say = command.position(comm)
    began = time.perf_counter()
    images = read(name, options.data)
    say(f"{images.name}: {len(images.train_labels):,} training images, from {images.origin}; {counted(size, 'rank')}")
    if options.auto:
        advise(comm, options, images, say)
    settings = command.settle(options, DEFAULTS[name])
    dtype = np.dtype(options.dtype)
    prepare = normalisation(images, dtype)
    order = Sampler(len(images.train_labels), options.batch, seed=options.seed)
    unshuffled = Sampler(len(images.test_labels), 1000, shuffle=False)

    peak = options.lr or schedule.linear_scaling(BASE_LR, BASE_BATCH, options.batch)
    warmup = order.steps // 4
    rate = schedule.cosine(peak, steps=options.epochs * order.steps, warmup=warmup)
    reason = "as given" if options.lr else f"{BASE_LR} per {BASE_BATCH} images, times {options.batch} (linear scaling)"
    say(f"learning rate {peak:g}: {reason}; rising over {warmup} steps, then falling along a cosine")

    build = partial(network, np.random.default_rng(options.seed), dtype)
    strategy = parallel.strategy(
        comm,
        options,
        build(),
        partial(optim.SGD, lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4),
        sample=lambda count: prepare((images.train_images[:count], images.train_labels[:count]))[0],
        say=say,
    )
    training = Loader((images.train_images, images.train_labels), order, transform=prepare, **strategy.part)
    test = Loader((images.test_images, images.test_labels), unshuffled, transform=prepare, **strategy.test_part)
    trainer = Trainer(
        strategy,
        rate,
        training,
        test,
        loss=command.slowed(loss, options, rank, build),
        score=score,
        folder=options.out,
        settings=settings,
        unit="images",
        tests=options.tests,
    )
    if command.fit(trainer, options, say) and rank == 0:
        trained = command.trained(build(), options)
        pictures = prepare((images.test_images, images.test_labels))[0]
        show(images, predict(trained, pictures, options.device), options.out, size)
        say(f"test accuracy {trainer.scores['test_accuracy']:.2%}, after {time.perf_counter() - began:.0f} s. Look at:")
        for file in (*PICTURES, METRICS, CHECKPOINT):
            say(f"  {options.out / file}")
    return command.outcome(trainer)


def advise(comm: Any, options: argparse.Namespace, images: ImageSet, say: Say) -> None:
    """Choose by measuring, on all ranks at the same time as they will work."""
    prepare, model = normalisation(images, np.dtype("float32")), network(np.random.default_rng(0))

    def prepared(count: int) -> tuple[Any, ...]:
        return prepare((images.train_images[:count], images.train_labels[:count]))

    ready = lru_cache(maxsize=1)(prepared)
    command.advise(
        comm,
        options,
        lambda count: loss(model, ready(count)).backward(),
        prepared,
        samples=len(images.train_labels),
        base=(BASE_LR, BASE_BATCH),
        say=say,
    )


def find(options: argparse.Namespace, say: Say) -> str:
    """The name of the data set that can be had, found or fetched once for all ranks."""
    return data.images(options.data, say=say).name


def read(name: str, folder: Path | None) -> ImageSet:
    """The data set that was found before the ranks were started."""
    if name == "Fashion-MNIST":
        return data.fashion_mnist(folder, say=lambda line: None)
    return data.handwritten_digits()


def normalisation(images: ImageSet, dtype: np.dtype[Any]) -> data.Transform:
    """(n, 28, 28) uint8 to (n, 1, 28, 28) of `dtype`, of mean 0 and variance 1 over the training set."""
    mean, deviation = images.train_images.mean(), images.train_images.std()

    def prepare(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        pictures, labels = arrays
        return ((pictures - mean) / deviation).astype(dtype)[:, None], labels

    return prepare


def predict(model: nn.Module, pictures: Any, device: str = "cpu") -> NDArray[Any]:
    """The probabilities of the classes, (n, classes), for prepared images, by a model on a device."""
    model.eval()
    with no_grad():
        pieces = np.array_split(pictures, -(-len(pictures) // 1000))
        found = [F.softmax(model(Tensor(piece).to(device))) for piece in pieces]
        return np.concatenate([probabilities.to("cpu").data for probabilities in found])


def show(images: ImageSet, probabilities: NDArray[Any], folder: Path, size: int) -> None:
    """Draw the pictures that a finished run leaves."""
    metrics.draw_curves(folder / METRICS, folder / "curves.png", f"{images.name}, {counted(size, 'rank')}")
    draw_predictions(images.test_images, images.test_labels, probabilities, images.classes, folder / "predictions.png")
    draw_confusion(images.test_labels, probabilities.argmax(axis=1), images.classes, folder / "confusion.png")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = command.parser(
        "image-classification", __doc__, DEFAULTS["Fashion-MNIST"], samples="images", seed="their order"
    )
    it.add_argument("--data", type=Path, help="folder in which to look for Fashion-MNIST first ($MGPU_DATA)")
    it.add_argument("--auto", action="store_true", help="measure first, to choose --batch, --workers and --prefetch")
    return it


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code: 130 after Ctrl-C."""
    return command.run(parser(), argv, find, train)


if __name__ == "__main__":
    sys.exit(main())
