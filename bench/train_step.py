"""`mgpu bench train_step`: a data-parallel training step, ours beside PyTorch's DistributedDataParallel over Gloo.

Both train the network of the image-classification recipe from the same weights, on the same batch, with SGD with
momentum, one thread a rank; the learning rate is 0, so that every step does the same work. Steps of three kinds take
turns:

    train          forward, backward with gradients reduced meanwhile, optimiser
    compute        the same without communication
    communicate    forward and backward as in `compute`, then, timed by itself, the reduction of all gradients

From their medians, the share of communication that is hidden is 1 - (train - compute) / communicate.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

from bench import peers, record, states
from bench.crew import FOLDER, RANK, Crew, Launch, Message, python, start
from bench.pace import Pace
from bench.worker import Answer, serve

KINDS = ("train", "compute", "communicate")
_WARM_UPS = 3
_MOMENTUM = 0.9

Sample = dict[str, Any]  # as `bench.record` has them


class Stepper(Protocol):
    """One rank of a data-parallel training."""

    def backward(self, communicating: bool) -> float:
        """Forward and backward; the loss. With `communicating`, gradients are reduced by the time it returns."""

    def communicate(self) -> None:
        """Reduce the gradients that a backward without communication has left."""

    def update(self) -> None:
        """The optimiser's step, and gradients cleared."""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 where the two do not compute the same loss."""
    arguments = parser().parse_args(argv)
    ranks, batch = arguments.ranks, arguments.batch
    ours = "from collectives import spawn; from bench.train_step import train_ours; "
    launches = {"mgpu": Launch([python(f"{ours}spawn(train_ours, {ranks}, ({batch},))")], [{}])}
    if not arguments.alone:
        if not peers.has("torch"):
            parser().error("DistributedDataParallel comes with PyTorch: pip install torch, or measure ours --alone")
        theirs = f"from bench.train_step import train_torch; train_torch({ranks}, {batch})"
        launches["ddp"] = Launch.each(ranks, python(theirs))
    with ExitStack() as stack:
        crews, remarks = start(stack, launches, ranks, timeout=arguments.timeout, needed="mgpu")
        versions = {name: crew.version for name, crew in crews.items()}
        samples, losses = measure(crews, arguments.rounds, arguments.steps)
    medians = milliseconds(samples)
    for line in report(medians, versions, batch):
        print(line)
    for remark in remarks:
        print(f"# note: {remark}")
    if arguments.json:
        about = {**record.about("train_step", vars(arguments)), "losses": losses, "versions": versions}
        record.write(arguments.json, about, rows(medians), samples)
    if not np.allclose(list(losses.values()), losses["mgpu"], rtol=1e-4):
        print(f"# the losses differ: {losses}")
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench train_step", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("--batch", type=int, default=128, help="images of all ranks together in a step (default 128)")
    add("--steps", type=int, default=5, help="steps in a sample (default 5)")
    add("--rounds", type=int, default=9, help="samples of each kind, taken in turn (default 9)")
    add("--alone", action="store_true", help="without DistributedDataParallel")
    add("--timeout", type=float, default=120, help="seconds in which a rank must answer (default 120)")
    add("--json", type=Path, metavar="FILE", help="write medians and samples, for mgpu bench diff")
    return flags


def measure(crews: Mapping[str, Crew], rounds: int, steps: int) -> tuple[list[Sample], dict[str, float]]:
    """(a sample for each crew, kind and round; mean loss over the ranks by crew): all crews and kinds, round by round.

    A step takes as long as its slowest rank, and a sample is the median of `steps` of them.
    """
    samples: list[Sample] = []
    losses = {}
    for round in range(rounds + 1):
        for name, crew in list(crews.items())[:: 1 if round % 2 else -1]:
            for kind in KINDS:
                count = steps if round else _WARM_UPS
                request = {"kind": kind, "steps": count, "first": crew.track.take(2 * count)}
                answers = crew.ask({"do": "steps", "with": request})
                losses[name] = sum(answer["loss"] for answer in answers) / len(answers)
                if round:
                    taken = median(max(ns) / 1e3 for ns in zip(*(a["ns"] for a in answers), strict=True))
                    what = {"label": name, "case": {"kind": kind}, "round": round - 1}
                    samples.append({**what, "microseconds": taken, "state": states.UNKNOWN})
    return samples, losses


def milliseconds(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by crew and kind."""
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        taken[sample["label"]][sample["case"]["kind"]].append(sample["microseconds"] / 1e3)
    return {name: {kind: median(ms) for kind, ms in kinds.items()} for name, kinds in taken.items()}


def rows(medians: Mapping[str, Mapping[str, float]]) -> list[Sample]:
    """The same as a record has them."""
    return [
        {"label": name, "case": {"kind": kind}, "microseconds": 1e3 * ms}
        for name, kinds in medians.items()
        for kind, ms in kinds.items()
    ]


def hidden_share(medians: Mapping[str, float]) -> float:
    """What part of the time that communication takes by itself does not lengthen a training step; from 0 to 1."""
    exposed = medians["train"] - medians["compute"]
    return float(np.clip(1 - exposed / medians["communicate"], 0, 1))


def report(medians: Mapping[str, Mapping[str, float]], versions: Mapping[str, str], batch: int) -> Iterator[str]:
    """The table."""
    yield f"# {'':6} {'train':>9} {'compute':>9} {'communicate':>11} {'hidden':>7} {'images/s':>9} {'time/mgpu':>9}"
    yield f"# {'':6} {'(ms)':>9} {'(ms)':>9} {'(ms)':>11}"
    for name, kinds in medians.items():
        yield (
            f"  {name:6} {kinds['train']:9.2f} {kinds['compute']:9.2f} {kinds['communicate']:11.3f} "
            f"{hidden_share(kinds):7.0%} {batch / kinds['train'] * 1e3:9.0f} "
            f"{kinds['train'] / medians['mgpu']['train']:8.2f}x"
        )
    for name, version in versions.items():
        yield f"# {name}: {version}"


def train_ours(comm: Any, batch: int) -> None:
    """What `collectives.spawn` runs in each of our ranks."""
    import mgpu_core

    images, labels = data(batch, comm.rank, comm.size)
    stepper = Ours(comm, network(), images, labels, batch)
    serve(comm.rank, f"mgpu {mgpu_core.__version__}, backend {comm.backend}", answering(stepper))


def train_torch(ranks: int, batch: int) -> None:
    """One of DistributedDataParallel's ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    rank = int(os.environ[RANK])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ[FOLDER]}/ddp", rank=rank, world_size=ranks)
    stepper = Torch(*data(batch, rank, ranks))
    serve(rank, f"DistributedDataParallel, Gloo, torch {torch.__version__}", answering(stepper))
    dist.destroy_process_group()


def answering(stepper: Stepper) -> Callable[[Pace, int], Answer]:
    """What `serve` needs: answers to requests for some steps of one kind, timed one by one in ns."""

    def prepare(pace: Pace, ranks: int) -> Answer:
        def answer(request: Message) -> Message:
            kind, steps, first = (request["with"][name] for name in ("kind", "steps", "first"))
            taken = []
            for number in range(first, first + 2 * steps, 2):
                pace.start_line(number)
                begin = time.perf_counter_ns()
                loss = stepper.backward(communicating=kind == "train")
                if kind == "communicate":
                    pace.start_line(number + 1)
                    begin = time.perf_counter_ns()
                    stepper.communicate()
                    taken.append(time.perf_counter_ns() - begin)
                stepper.update()
                if kind != "communicate":
                    taken.append(time.perf_counter_ns() - begin)
            return {"ns": taken, "loss": loss}

        return answer

    return prepare


class Ours:
    """mgpu_core's data-parallel training."""

    def __init__(self, comm: Any, model: Any, images: Any, labels: Any, batch: int) -> None:
        from mgpu_core import Tensor, optim
        from mgpu_core.parallel.data import DataParallel

        self._model = DataParallel(model, comm)
        self._optimizer = optim.SGD(self._model.model.parameters(), lr=0.0, momentum=_MOMENTUM)
        self._images, self._labels, self._batch = Tensor(images), labels, batch

    def backward(self, communicating: bool) -> float:
        """Buckets are reduced while backward runs, and waited for at its end."""
        if not communicating:
            with self._model.no_sync():
                return self.forward_and_backward()
        loss = self.forward_and_backward()
        self._model.synchronize()
        return loss

    def communicate(self) -> None:
        """`synchronize` waits for the gradients on their way, and reduces those that backward has not announced."""
        self._model.synchronize()

    def update(self) -> None:
        """SGD with momentum."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def forward_and_backward(self) -> float:
        """The loss. Buckets are on their way when it returns, or through."""
        from mgpu_core.nn.functional import cross_entropy

        loss = cross_entropy(self._model(self._images), self._labels, reduction="sum") / self._batch
        loss.backward()
        return float(loss.data) * self._batch / len(self._labels)


class Torch:
    """DistributedDataParallel, with its default buckets."""

    def __init__(self, images: Any, labels: Any) -> None:
        import torch

        module = as_torch(network())
        self._model = torch.nn.parallel.DistributedDataParallel(module)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=_MOMENTUM)
        self._images, self._labels = torch.from_numpy(images), torch.from_numpy(labels)
        self._flat = torch.zeros(sum(p.numel() for p in module.parameters()))

    def backward(self, communicating: bool) -> float:
        """DistributedDataParallel averages gradients while backward runs."""
        if communicating:
            return self._loss()
        with self._model.no_sync():
            return self._loss()

    def communicate(self) -> None:
        """One all-reduce of as many bytes: the network fits into one bucket."""
        import torch.distributed as dist

        dist.all_reduce(self._flat)

    def update(self) -> None:
        """SGD with momentum; gradients are kept and zeroed, as ours are."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def _loss(self) -> float:
        import torch

        loss = torch.nn.functional.cross_entropy(self._model(self._images), self._labels)
        loss.backward()
        return loss.item()


def network() -> Any:
    """The recipe's network, with the same weights in every process."""
    from mgpu_core.recipes.image_classification import network as recipe

    return recipe(np.random.default_rng(0))


def data(batch: int, rank: int, ranks: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A rank's part of a made-up batch: images (n, 1, 28, 28) float32, labels (n,) int64."""
    random = np.random.default_rng(1)
    images = random.standard_normal((batch, 1, 28, 28), dtype=np.float32)
    labels = random.integers(0, 10, batch)
    return np.array_split(images, ranks)[rank], np.array_split(labels, ranks)[rank]


def as_torch(layer: Any) -> Any:
    """A PyTorch module that computes what `layer`, of `mgpu_core.nn`, computes, with a copy of its weights.

    Raises TypeError for a layer that the recipes do not use.
    """
    import torch

    from mgpu_core import nn

    made: Any
    match layer:
        case nn.Sequential():
            return torch.nn.Sequential(*map(as_torch, layer))
        case nn.Conv2d():
            outputs, inputs, *kernel = layer.weight.shape
            sizes = {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups}
            made = torch.nn.Conv2d(inputs * layer.groups, outputs, tuple(kernel), bias=layer.bias is not None, **sizes)
        case nn.Linear():
            outputs, inputs = layer.weight.shape
            made = torch.nn.Linear(inputs, outputs, bias=layer.bias is not None)
        case nn.ReLU():
            return torch.nn.ReLU()
        case nn.MaxPool2d():
            return torch.nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding)
        case nn.Flatten():
            return torch.nn.Flatten()
        case _:
            raise TypeError(f"no PyTorch counterpart is known for {type(layer).__name__}")
    with torch.no_grad():
        for name in ("weight", "bias"):
            if getattr(layer, name) is not None:
                getattr(made, name).copy_(torch.from_numpy(np.array(getattr(layer, name).data)))
    return made


if __name__ == "__main__":
    sys.exit(main())
