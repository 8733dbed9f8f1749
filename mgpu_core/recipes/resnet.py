"""A residual network learns Fashion-MNIST from images that never look the same twice: `mgpu train resnet -n 2`.

ResNet-20 (He et al., "Deep residual learning for image recognition", 2015, section 4.2), 0.27 million parameters. What
this has beyond `image_classification`, which is the place to begin:

- Augmentation: each time an image is used it is moved by up to two pixels, and mirrored half of the time. How is a
  function of the seed, the step and the image's place in the global batch, whatever the number of ranks.
- A learning rate that rises over a fifth of the run to a height that could not be borne for long, and then falls
  to zero ("super-convergence": Smith and Topin 2017), so that ten epochs do what takes step schedules many more.
- Nesterov momentum and label smoothing (Szegedy et al. 2015).
- Batch norm: each rank normalises with its own part of the batch, and the running statistics, which the test uses,
  are averaged over the ranks.

`--depth 18` trains ResNet-18 instead, with 40 times the parameters and 14 times the arithmetic: on a CPU, for patience.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collectives.wording import counted
from mgpu_core import Tensor, nn, optim, schedule
from mgpu_core.data import Loader, Sampler, augment
from mgpu_core.nn import functional as F
from mgpu_core.recipes import command, parallel
from mgpu_core.recipes.image_classification import PICTURES, find, normalisation, predict, read, score, show
from mgpu_core.trainer import CHECKPOINT, METRICS, Trainer

NETWORKS = {20: nn.resnet20, 18: nn.resnet18}
BASE_LR, BASE_BATCH = 0.2, 128  # go well together; the rate for another batch is scaled from these
DEFAULTS = {  # by data set
    "Fashion-MNIST": {"depth": 20, "epochs": 10, "batch": 128, "lr": None, "seed": 0, "dtype": "float32"},
    "handwritten digits": {"depth": 20, "epochs": 10, "batch": 32, "lr": None, "seed": 0, "dtype": "float32"},
}
MIRRORED = ("Fashion-MNIST",)  # where a mirror image is as good: not a digit's
PADDING, SMOOTHING = 2, 0.1


def loss(model: Any, arrays: tuple[Any, ...]) -> Tensor:
    """The sum of the samples' cross-entropies with smoothed labels: a tenth of the probability goes to all classes."""
    images, labels = arrays
    logits = model(Tensor(images))
    uniform = F.log_softmax(logits).sum() * (-1 / logits.shape[1])
    return F.cross_entropy(logits, labels, reduction="sum") * (1 - SMOOTHING) + uniform * SMOOTHING


def train(comm: Any, options: argparse.Namespace, name: str) -> dict[str, Any]:
    """What every rank does; see `image_classification.train`."""
    rank, size, say = command.position(comm)
    began = time.perf_counter()
    settings = command.settle(options, DEFAULTS[name])
    dtype = np.dtype(options.dtype)

    images = read(name, options.data)
    say(f"{images.name}: {len(images.train_labels):,} training images, from {images.origin}; {counted(size, 'rank')}")
    prepare = normalisation(images, dtype)

    def change(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        pictures, labels = arrays
        pictures = augment.crop(pictures, PADDING)
        return prepare((augment.mirror(pictures) if name in MIRRORED else pictures, labels))

    order = Sampler(len(images.train_labels), options.batch, seed=options.seed)
    unshuffled = Sampler(len(images.test_labels), 500, shuffle=False)
    peak = options.lr or schedule.linear_scaling(BASE_LR, BASE_BATCH, options.batch)
    steps = options.epochs * order.steps
    rate = schedule.cosine(peak, steps=steps, warmup=steps // 5)

    rng, classes = np.random.default_rng(options.seed), len(images.classes)
    build = partial(NETWORKS[options.depth], channels=1, classes=classes, rng=rng, dtype=dtype)
    network = build()
    parameters = sum(parameter.size for parameter in network.parameters())
    say(f"ResNet-{options.depth}: {parameters:,} parameters; learning rate up to {peak:g}")
    strategy = parallel.strategy(
        comm,
        options,
        network,
        partial(optim.SGD, lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4),
        sample=lambda count: prepare((images.train_images[:count], images.train_labels[:count]))[0],
        say=say,
    )
    training = Loader((images.train_images, images.train_labels), order, transform=change, **strategy.part)
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
        network = command.trained(build(), options)
        pictures = prepare((images.test_images, images.test_labels))[0]
        probabilities = predict(network, pictures, options.device)
        show(images, probabilities, options.out, size)
        say(f"test accuracy {trainer.scores['test_accuracy']:.2%}, after {trainer.seconds:.0f} s of training steps")
        if name in MIRRORED:
            both = probabilities + predict(network, np.ascontiguousarray(pictures[..., ::-1]), options.device)
            right = (both.argmax(axis=1) == images.test_labels).mean()
            say(f"{right:.2%} when what is predicted for an image and for its mirror image is averaged")
        say(f"{time.perf_counter() - began:.0f} s in all. Look at:")
        for file in (*PICTURES, METRICS, CHECKPOINT):
            say(f"  {options.out / file}")
    return command.outcome(trainer)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = command.parser("resnet", __doc__, DEFAULTS["Fashion-MNIST"], samples="images", seed="their order and changes")
    it.add_argument("--depth", type=int, choices=NETWORKS, help="layers with weights (20)")
    it.add_argument("--data", type=Path, help="folder in which to look for Fashion-MNIST first ($MGPU_DATA)")
    return it


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code: 130 after Ctrl-C."""
    return command.run(parser(), argv, find, train)


if __name__ == "__main__":
    sys.exit(main())
