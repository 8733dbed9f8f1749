"""What the recipes' commands share: options, the settings of a run that is resumed, starting ranks, and reporting."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import collectives
from collectives import timeline
from collectives.environment import restarts, standing
from collectives.threads import here
from collectives.wording import counted
from mgpu_core import checkpoint, device, hardware
from mgpu_core.autograd import is_recording
from mgpu_core.autograd.memory import keep_freed_memory
from mgpu_core.nn import Module
from mgpu_core.parallel import StrategyError
from mgpu_core.parallel.strategies import Arrays, Loss
from mgpu_core.precision import PRECISIONS
from mgpu_core.recipes import parallel
from mgpu_core.tensor import Tensor
from mgpu_core.trainer import CHECKPOINT, Trainer

Say = Callable[[str], Any]
M = TypeVar("M", bound=Module)


def parser(
    name: str, description: str | None, defaults: Mapping[str, Any], *, samples: str, seed: str
) -> argparse.ArgumentParser:
    """A recipe's command line with the options that all have; a recipe adds its own.

    An option that is left out is None, and `settle` gives it its value; `defaults` are for the help text. `samples`
    says what a batch is made of, `seed` what else than the weights the seed decides.
    """
    it = argparse.ArgumentParser(f"mgpu train {name}", description=(description or "").split("\n")[0])
    add = it.add_argument
    add("-n", "--ranks", type=positive, help="processes to train with (the GPUs; or the cores, from 2 to 8)")
    add("--epochs", type=positive, help=f"passes over the training {samples} ({defaults['epochs']})")
    add("--batch", type=positive, help=f"{samples} in a step, over all ranks ({defaults['batch']})")
    add("--lr", type=rate, help=f"highest learning rate ({defaults['lr'] or 'in proportion to the batch'})")
    add("--seed", type=seed_number, help=f"of the weights and of {seed} (0)")
    add("--dtype", choices=("float32", "float64"), help="(float32)")
    add("--precision", choices=PRECISIONS, help="of products; parameters and optimisers are --dtype's (float32)")
    add("--out", type=Path, default=Path("runs") / name, help="folder for the results (%(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out, with its settings")
    add("--steps", type=positive, help="stop after so many steps")
    add("--tests", type=positive, default=1, help="how often to test in an epoch (%(default)s)")
    add("--slow-rank", type=int, metavar="RANK", help="let this rank compute more than it must, to see what that does")
    add("--slow-factor", type=positive, help="how often it computes each step (3)")
    add("--workers", type=positive, help="threads of a rank that read (1)")
    add("--prefetch", type=positive, help="batches that a rank holds ready (2)")
    add("--timeline", metavar="FILE", help="write a timeline of all ranks, for Perfetto and mgpu timeline")
    add("--device", choices=device.DEVICES, help="where to compute (cuda where there are GPUs and CuPy, else cpu)")
    add("--backend", default="auto", help="of collectives.init (%(default)s)")
    parallel.add_options(it, positive)
    return it


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def rate(text: str) -> float:
    """A finite number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")


def seed_number(text: str) -> int:
    """A whole number from 0, below 2**64."""
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0, below 2**64")
    return int(text)


def run(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    find: Callable[[argparse.Namespace, Say], Any],
    train: Callable[[Any, argparse.Namespace, Any], dict[str, Any]],
) -> int:
    """Train, and return the exit code: 130 after Ctrl-C. Starts the ranks, unless a launcher has.

    Args:
        find: looks for the data once, before any rank needs it; what it returns is given to all of them.
        train: what every rank does: train(comm, options, found), with None for `comm` where there is one rank. It
            returns what `outcome` does.
    """
    options = parser.parse_args(argv)
    if options.timeline:
        os.environ["MGPU_TIMELINE"] = options.timeline
    place = standing()
    say: Say = print if place.rank == 0 else lambda line: None
    options.resume = options.resume or restarts() > 0
    choose_device(options, say)
    if options.device == "cuda" and (missing := device.missing()):
        parser.error(f"--device cuda cannot be: {missing}")
    if options.resume:
        try:
            saved = checkpoint.read_meta(options.out / CHECKPOINT).get("settings", {})
        except FileNotFoundError:
            say(f"there is no {options.out / CHECKPOINT} to go on from: starting from the beginning")
            options.resume, saved = False, {}
        if options.parallel not in (None, saved.get("parallel")):  # another way, with options of its own
            saved = {name: value for name, value in saved.items() if name not in parallel.BELONGS}
        for name, value in saved.items():
            if getattr(options, name) is None:
                setattr(options, name, value)

    if place.launcher != "none":
        if options.ranks:
            parser.error(f"{place.launcher} has started the ranks; leave -n out")
        check(parser, options, place.size)
        found = find(options, say) if place.rank == 0 else None
        with collectives.init(options.backend) as comm:
            options.device = comm.broadcast_object(options.device)
            result = train(comm, options, comm.broadcast_object(found))
    else:
        ranks = options.ranks or default_ranks(options.device)
        check(parser, options, ranks)
        found = find(options, say)
        if ranks == 1:
            timeline.begin(0)
            result = train(None, options, found)
        else:
            try:
                result = collectives.spawn(train, ranks, (options, found), backend=options.backend)[0]
            except KeyboardInterrupt:  # which it has passed on: the ranks have stopped, and said where
                return 130
    return 130 if result["interrupted"] else 0


def choose_device(options: argparse.Namespace, say: Say) -> None:
    """The default device, where none is given; the CPU where the options are for that alone."""
    if options.device is None:
        options.device = device.default()
        if options.device == "cuda" and (reason := parallel.needs_host(options)):
            options.device = "cpu"
            say(f"on the CPU, since {reason}")


def default_ranks(on: str = "cpu") -> int:
    """The GPUs; or the cores, from 2 to 8."""
    return max(1, device.gpus()) if on == "cuda" else max(2, min(8, here(1)))


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: int) -> None:
    """Refuse, before anything is started, what cannot work on so many ranks."""
    try:
        parallel.check(options, ranks)
    except StrategyError as error:
        parser.error(str(error))


def settle(options: argparse.Namespace, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Give the options that neither the user nor the run that is resumed has set their defaults.

    Returns all settings that `defaults` names, and how the ranks share the work, for the checkpoint.
    """
    defaults = {"precision": "float32", **defaults}
    for name, default in {**defaults, **parallel.SETTINGS, "slow_factor": 3, "device": device.default()}.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    chosen = [name for name in parallel.SETTINGS if getattr(options, name) is not None]
    if options.slow_rank is not None:
        chosen += ["slow_rank", "slow_factor"]
    return {name: getattr(options, name) for name in (*defaults, *chosen)}


def position(comm: Any) -> tuple[int, int, Say]:
    """This rank, of how many, and what it says things with: one rank speaks for all."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    return rank, size, print if rank == 0 else lambda line: None


def fit(trainer: Trainer, options: argparse.Namespace, say: Say) -> bool:
    """Train to the end, from the checkpoint where that is asked for; False if stopped before."""
    keep_freed_memory()
    if options.resume:
        trainer.resume(options.out / CHECKPOINT)
        say(f"going on after {counted(trainer.steps_done, 'step')}")
    trainer.fit(options.epochs, steps=options.steps)
    if trainer.epoch < options.epochs:
        say(f"stopped after {counted(trainer.steps_done, 'step')}; --resume goes on from {options.out / CHECKPOINT}")
    return trainer.epoch >= options.epochs


def advise(
    comm: Any,
    options: argparse.Namespace,
    step: Callable[[int], object],
    read: Callable[[int], object],
    *,
    samples: int,
    base: tuple[float, int],
    say: Say,
) -> None:
    """Measure this machine, and set --batch, --workers and --prefetch where they are not given; says why.

    `step`, `read` and `samples` are those of `hardware.advise`; `base` are a rate and a batch that go well together.
    """
    asynchronous = options.parallel in ("async", "ssp")  # where each rank takes whole batches
    sharing = 1 if comm is None or asynchronous else comm.size
    advice = hardware.advise(
        step,
        read,
        samples=samples,
        epochs=options.epochs or 1,
        base_lr=base[0],
        base_batch=base[1],
        comm=comm,
        batch=None if options.batch is None else -(-options.batch // sharing),
        workers=options.workers,
        prefetch=options.prefetch,
    )
    if options.batch is None:
        options.batch = advice.batch.value * sharing
        say(f"batch {options.batch}: {advice.batch.value} for each rank is {advice.batch.reason}")
    options.workers, options.prefetch = advice.workers.value, advice.prefetch.value
    say(f"workers {options.workers}: {advice.workers.reason}")
    say(f"prefetch {options.prefetch}: {advice.prefetch.reason}")


def trained(network: M, options: argparse.Namespace) -> M:
    """The network, with the parameters of a run's checkpoint: whole, whatever the ranks held of it; on its device."""
    checkpoint.restore(options.out / CHECKPOINT, checkpoint.parts(network))
    return network.to(options.device)


def slowed(loss: Loss, options: argparse.Namespace, rank: int, network: Callable[[], Module]) -> Loss:
    """`loss`; on the rank that `--slow-rank` names one that trains another network too, as large, to no end."""
    if rank != options.slow_rank:
        return loss
    twin = network().to(options.device)

    def slow(model: Any, arrays: Arrays) -> Tensor:
        for _ in range(options.slow_factor - 1 if is_recording() else 0):
            loss(twin, arrays).backward()
        return loss(model, arrays)

    return slow


def outcome(trainer: Trainer) -> dict[str, Any]:
    """The test results, which are the same on all ranks, and how the run ended."""
    return {**trainer.scores, "steps": trainer.steps_done, "interrupted": trainer.interrupted}
