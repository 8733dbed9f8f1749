"""A small convolutional network learns Fashion-MNIST, data-parallel: `mgpu train image-classification -n 2`.

This file is also the tutorial. What it takes to train with several processes:

1. Every rank builds the same network from the same seed (`network`).
2. A `Loader` gives each rank its own part of every batch. `--batch` is the *global* batch: with more ranks each
   does less work, and the mathematics stays the same.
3. `DataParallel` sums the gradients over the ranks, in buckets, while backward still runs.
4. The loss of a rank is the sum over its samples, divided by the global batch's count: unequal parts average right.
5. All ranks then take the same optimiser step, and stay alike to the last bit.

`Trainer` holds the loop; `train` below is all that a rank does, and `main` starts the ranks. The same file also runs
under other launchers, which start the ranks themselves:

    mgpu run -n 4 -m mgpu_core.recipes.image_classification --epochs 2
    torchrun --nproc-per-node 4 -m mgpu_core.recipes.image_classification
    mpirun -n 4 python -m mgpu_core.recipes.image_classification
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from collectives.environment import standing
from collectives.threads import here
from mgpu_core import Tensor, checkpoint, data, metrics, nn, optim, schedule
from mgpu_core.autograd import no_grad
from mgpu_core.data import ImageSet, Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel
from mgpu_core.recipes.pictures import draw_predictions
from mgpu_core.trainer import CHECKPOINT, METRICS, Trainer

BASE_LR, BASE_BATCH = 0.1, 128  # go well together; the rate for another batch is scaled from these
DEFAULTS = {"epochs": 4, "batch": 128, "lr": None, "seed": 0, "dtype": "float32"}


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


def loss(model: DataParallel, arrays: tuple[Any, ...]) -> Tensor:
    """The sum of the samples' cross-entropies."""
    images, labels = arrays
    return F.cross_entropy(model(Tensor(images)), labels, reduction="sum")


def score(model: DataParallel, arrays: tuple[Any, ...]) -> dict[str, Any]:
    """For each sample its cross-entropy, and whether the likeliest class is the right one."""
    images, labels = arrays
    logits = model(Tensor(images))
    log_likelihoods = F.log_softmax(logits).data[np.arange(len(labels)), labels]
    return {"test_loss": -log_likelihoods, "test_accuracy": logits.data.argmax(axis=1) == labels}


def train(comm: Any, options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What every rank does. Returns the test results, which are the same on all ranks, and how it ended.

    `name` says which data set to use; None for `comm` trains in this process alone.
    """
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    say: Callable[[str], Any] = print if rank == 0 else lambda line: None
    began = time.perf_counter()

    images = read(name, options.data)
    say(f"{images.name}: {len(images.train_labels):,} training images, from {images.origin}; {size} ranks")
    prepare = normalisation(images, np.dtype(options.dtype))
    order = Sampler(len(images.train_labels), options.batch, seed=options.seed)
    training = Loader((images.train_images, images.train_labels), order, rank=rank, size=size, transform=prepare)
    unshuffled = Sampler(len(images.test_labels), 1000, shuffle=False)
    test = Loader((images.test_images, images.test_labels), unshuffled, rank=rank, size=size, transform=prepare)

    model = DataParallel(network(np.random.default_rng(options.seed), np.dtype(options.dtype)), comm)
    peak = options.lr or schedule.linear_scaling(BASE_LR, BASE_BATCH, options.batch)
    warmup = order.steps // 4
    optimizer = optim.SGD(model.model.named_parameters(), peak, momentum=0.9, weight_decay=5e-4)
    rate = schedule.cosine(peak, steps=options.epochs * order.steps, warmup=warmup)
    reason = "as given" if options.lr else f"{BASE_LR} per {BASE_BATCH} images, times {options.batch} (linear scaling)"
    say(f"learning rate {peak:g}: {reason}; rising over {warmup} steps, then falling along a cosine")

    trainer = Trainer(
        model,
        optimizer,
        rate,
        training,
        test,
        loss=loss,
        score=score,
        folder=options.out,
        settings={setting: getattr(options, setting) for setting in DEFAULTS},
        unit="images",
    )
    if options.resume:
        trainer.resume(options.out / CHECKPOINT)
        say(f"going on after {trainer.steps_done:,} steps")
    trainer.fit(options.epochs, steps=options.steps)

    if trainer.epoch < options.epochs:
        say(f"stopped after {trainer.steps_done:,} steps; --resume goes on from {options.out / CHECKPOINT}")
    elif rank == 0:
        show(images, predict(model, prepare((images.test_images, images.test_labels))[0]), options.out, size)
        say(f"test accuracy {trainer.scores['test_accuracy']:.2%}, after {time.perf_counter() - began:.0f} s. Look at:")
        for file in ("curves.png", "predictions.png", METRICS, CHECKPOINT):
            say(f"  {options.out / file}")
    return {**trainer.scores, "steps": trainer.steps_done, "interrupted": trainer.interrupted}


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


def predict(model: DataParallel, pictures: Any) -> Any:
    """The probabilities of the classes, (n, classes), for prepared images."""
    model.model.eval()
    with no_grad():
        pieces = np.array_split(pictures, -(-len(pictures) // 1000))
        return np.concatenate([F.softmax(model(Tensor(piece))).data for piece in pieces])


def show(images: ImageSet, probabilities: Any, folder: Path, size: int) -> None:
    """Draw the pictures that a finished run leaves."""
    metrics.draw_curves(folder / METRICS, folder / "curves.png", f"{images.name}, {size} ranks")
    draw_predictions(images.test_images, images.test_labels, probabilities, images.classes, folder / "predictions.png")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = argparse.ArgumentParser("mgpu train image-classification", description=(__doc__ or "").split("\n")[0])
    add = it.add_argument
    add("-n", "--ranks", type=positive, help="processes to train with (the cores, from 2 to 8)")
    add("--epochs", type=positive, help="passes over the training images (4)")
    add("--batch", type=positive, help="images in a step, over all ranks (128)")
    add("--lr", type=float, help=f"highest learning rate ({BASE_LR} for {BASE_BATCH} images, scaled to the batch)")
    add("--seed", type=int, help="of the weights and of the order of the images (0)")
    add("--dtype", choices=("float32", "float64"), help="(float32)")
    add("--data", type=Path, help="folder in which to look for Fashion-MNIST first ($MGPU_DATA)")
    add("--out", type=Path, default=Path("runs/image-classification"), help="folder for the results (%(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, with its settings")
    add("--steps", type=positive, help="stop after so many steps")
    add("--backend", default="auto", help="of collectives.init (%(default)s)")
    return it


def positive(text: str) -> int:
    """A whole number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code: 130 after Ctrl-C. Starts the ranks, unless a launcher has."""
    options = parser().parse_args(argv)
    place = standing()
    say: Callable[[str], Any] = print if place.rank == 0 else lambda line: None
    saved: dict[str, Any] = {}
    if options.resume:
        try:
            saved = checkpoint.load(options.out / CHECKPOINT)[1]["settings"]
        except FileNotFoundError:
            say(f"there is no {options.out / CHECKPOINT} to go on from: starting from the beginning")
            options.resume = False
    for name, default in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, saved.get(name, default))

    if place.launcher != "none":
        if options.ranks:
            parser().error(f"{place.launcher} has started the ranks; leave -n out")
        found = data.images(options.data, say=say).name if place.rank == 0 else None
        with collectives.init(options.backend) as comm:
            result = train(comm, options, comm.broadcast_object(found))
    else:
        found = data.images(options.data).name
        ranks = options.ranks or max(2, min(8, here(1)))
        if ranks == 1:
            result = train(None, options, found)
        else:
            try:
                result = collectives.spawn(train, ranks, (options, found), backend=options.backend)[0]
            except KeyboardInterrupt:  # which it has passed on: the ranks have stopped, and said where
                return 130
    return 130 if result["interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
