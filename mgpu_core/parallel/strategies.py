"""What a trainer asks of a way to share the work, and the ways, each as an answer to it.

A trainer says: give me batches, do a step with this one, bring the ranks together, what is there to save. It need not
know who holds what:

    strategy         who holds the model               who works on what
    `Synchronous`    every rank, or parts of it        parts of a batch, in step (`DataParallel`, `Sharded`, tensor)
    `Pipelined`      a rank has some of its layers     micro-batches that pass through the ranks (`Pipeline`)
    `Workers`        every rank a copy that may lag    whole batches, each at its own pace (`Asynchronous`)
    `Rounds`         every rank one of its own         parts of a batch, and they meet now and then (`LocalSGD`)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.timeline import span
from mgpu_core import checkpoint, device
from mgpu_core.data import Batch, Loader
from mgpu_core.nn import Module
from mgpu_core.optim import Optimizer
from mgpu_core.parallel.asynchronous import Asynchronous, MakeOptimizer
from mgpu_core.parallel.data import DataParallel
from mgpu_core.parallel.local import LocalSGD
from mgpu_core.parallel.mesh import Mesh
from mgpu_core.parallel.pipeline import Pipeline
from mgpu_core.parallel.speeds import Balance
from mgpu_core.precision import Precision
from mgpu_core.tensor import Tensor

Arrays = tuple[Any, ...]
Loss = Callable[[Any, Arrays], Tensor]
Score = Callable[[Any, Arrays], Mapping[str, Any]]
Stop = Callable[[], bool]


def never() -> bool:
    """Nobody asks to stop."""
    return False


class StrategyError(ValueError):
    """A way to share the work that does not fit the ranks or the model: the message says what would."""


class Done(NamedTuple):
    """A step: the mean loss (of the global batch, or of what this rank did of it), and the mean over the ranks of the
    seconds they waited."""

    loss: float
    waited: float


class Strategy(ABC):
    """How the ranks share the training of a model. All ranks call the methods together, but for `step` of `Workers`.

    Attributes:
        comm: all the ranks; None for a single one.
        module: what this rank holds of the model.
        part, test_part: options of a `Loader` that gives this rank its part of training, and of test batches.
        reached: the step before which the latest `batches` ended.
        stopped: whether that was because a rank was asked to.
        precision: what is computed in; may be assigned before the training begins. StrategyError for one that scales
            the loss where ranks take no steps together.
    """

    comm: Any
    module: Module
    counts = True  # whether this rank's scores are counted: of equal copies only one is
    in_step = False  # whether all ranks take each of the optimiser's steps together

    def __init__(self, comm: Any, data: Any) -> None:
        self.comm = comm if comm is not None and comm.size > 1 else None
        self.part, self.test_part = _part(data), _part(data)
        self.reached, self.stopped = 0, False
        self.precision = Precision()

    @property
    def precision(self) -> Precision:
        return self._precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        if precision.scales and not self.in_step:
            raise StrategyError(
                f"{precision.name} scales the loss by a factor that all ranks find together, in steps that they take "
                f"together, and {type(self).__name__} has none; use bfloat16, which needs no scale"
            )
        self._precision = precision

    def batches(self, loader: Loader, epoch: int, first: int, last: int) -> Generator[Batch, None, None]:
        """This rank's share of the steps from `first` to before `last`, or to where a rank was asked to stop."""
        self.reached, self.stopped = first, False
        with loader.epoch(epoch, steps=range(first, last)) as batches:
            for batch in batches:
                yield batch
                self.reached = batch.step + 1
                if self.stopped:
                    break

    @abstractmethod
    def step(self, batch: Batch, loss: Loss, lr: float, *, stop: Stop = never) -> Done:
        """Train on what this rank has of a batch; `stop` says whether all ranks are to end soon, after the same step.

        `loss` is of a model and a batch's arrays, of which the first is what it gives to the model: the sum over the
        samples.
        """

    @abstractmethod
    def settle(self) -> None:
        """Make alike what ranks keep apart in training: before a test, and before a checkpoint."""

    def score(self, score: Score, arrays: Arrays) -> dict[str, float]:
        """The sums over the samples of a test batch, of which this rank has a part."""
        return _sums(score(self.module, arrays))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in which copies count once."""
        return self._reduced(values if self.counts else [0.0] * len(values))

    def told(self) -> dict[str, float]:
        """What else is worth noting of the training so far."""
        if not self.precision.scales:
            return {}
        return {"loss_scale": self.precision.scale, "steps_left_out": float(self.precision.skipped)}

    @abstractmethod
    def parts(self) -> dict[str, checkpoint.Part]:
        """What this rank holds of a checkpoint."""

    @abstractmethod
    def load(self, path: str | Path) -> None:
        """Take on what a checkpoint has, by whatever strategy and number of ranks it was saved."""

    def _reduced(self, values: Sequence[float]) -> list[float]:
        mine = np.array(values, np.float64)
        return mine.tolist() if self.comm is None else self.comm.all_reduce(mine).tolist()

    def _agree(self, loss: float, waited: float, stop: Stop) -> Done:
        """The ranks' shares of the loss added up, and whether any is asked to stop."""
        loss, waited, stops = self._reduced([loss, waited, stop()])
        self.stopped = stops > 0
        return Done(loss, waited / (1 if self.comm is None else self.comm.size))


class Synchronous(Strategy):
    """Ranks work on their parts of a batch, or of the model, and take each step together.

    Args:
        model: `DataParallel`, or `Sharded`; of a model that may be cut by `parallelize`.
        optimizer: of `model.named_parameters()`.
        mesh: the ranks, where they are more than the model's `comm`.
        speeds: of the ranks, by which a batch is cut, or "auto" to measure them; None cuts evenly. See `Balance`.
    """

    in_step = True

    def __init__(
        self,
        model: DataParallel,
        optimizer: Optimizer,
        *,
        mesh: Mesh | None = None,
        speeds: Sequence[float] | str | None = None,
    ) -> None:
        super().__init__(model.comm if mesh is None else mesh.comm, model.comm)
        self.model, self.module, self.optimizer = model, model.model, optimizer
        self.counts = mesh is None or mesh.index("tensor") == 0
        self._balances = _Balances(model, speeds)

    def batches(self, loader: Loader, epoch: int, first: int, last: int) -> Generator[Batch, None, None]:
        self._balances.of(loader)
        yield from super().batches(loader, epoch, first, last)

    def step(self, batch: Batch, loss: Loss, lr: float, *, stop: Stop = never) -> Done:
        began = time.perf_counter()
        self.optimizer.lr = lr
        self.optimizer.zero_grad()
        with span("forward"):
            mean = loss(self.model, batch.arrays) / batch.global_count
        with span("backward"):
            self.precision.backward(mean)
        with span("wait for gradients", "wait"):
            waited = self.model.synchronize()
        with span("optimizer"):
            self.precision.step(self.optimizer, self.comm)
        self._balances.step(batch, time.perf_counter() - began - waited)
        return self._agree(float(mean) if self.counts else 0.0, waited, stop)

    def settle(self) -> None:
        self.model.average_buffers()

    def score(self, score: Score, arrays: Arrays) -> dict[str, float]:
        return _sums(score(self.model, arrays))

    def told(self) -> dict[str, float]:
        return super().told() | self._balances.told()

    def parts(self) -> dict[str, checkpoint.Part]:
        return checkpoint.parts(self.model, self.optimizer)

    def load(self, path: str | Path) -> None:
        checkpoint.restore(path, self.parts(), self.comm)
        self.model.refresh()


class Pipelined(Strategy):
    """Ranks hold consecutive layers; see `Pipeline`, which takes `options`. `optimizer` is made for this rank's."""

    in_step = True

    def __init__(self, model: Any, optimizer: MakeOptimizer, mesh: Mesh, **options: Any) -> None:
        super().__init__(mesh.comm, mesh.data)
        self.mesh = mesh
        self.pipeline = Pipeline(model, mesh.pipeline, loss=self._loss_of, data=mesh.data, **options)
        self.module = self.pipeline.module
        self.optimizer = optimizer(self.module.named_parameters())
        self.counts = mesh.index("tensor") == mesh.index("pipeline") == 0
        self._loss: Loss

    def step(self, batch: Batch, loss: Loss, lr: float, *, stop: Stop = never) -> Done:
        self._loss, scale = loss, self.precision.scale
        self.optimizer.lr = lr
        self.optimizer.zero_grad()
        with span("pipeline"):
            mean = self.pipeline.forward_backward(batch.arrays[0], *batch.arrays, count=batch.global_count)
        mean /= scale
        with span("optimizer"):
            self.precision.step(self.optimizer, self.comm)
        return self._agree(mean if self.mesh.index("tensor") == 0 else 0.0, self.pipeline.waited, stop)

    def _loss_of(self, outputs: Tensor, *arrays: Any) -> Tensor:
        """The loss where the model has run already, in other ranks."""
        return self._loss(lambda *inputs: outputs, arrays) * self.precision.scale

    def settle(self) -> None:
        self.pipeline.replicas.average_buffers()

    def score(self, score: Score, arrays: Arrays) -> dict[str, float]:
        outputs = self.pipeline(arrays[0])
        sums = None if outputs is None else _sums(score(lambda *inputs: outputs, arrays))
        comm = self.pipeline.comm  # whose last rank has the outputs
        return sums or {} if comm is None else comm.broadcast_object(sums, root=comm.size - 1)

    def parts(self) -> dict[str, checkpoint.Part]:
        return checkpoint.parts(self.module, self.optimizer)

    def load(self, path: str | Path) -> None:
        checkpoint.restore(path, self.parts(), self.comm)


class Workers(Strategy):
    """Ranks take whole batches, pull and push without waiting. Steps, losses and speed are those that a rank sees.

    The workers' optimisers' states become their mean in `settle`.
    """

    def __init__(self, model: Asynchronous) -> None:
        super().__init__(model.comm, model.comm)
        self.model, self.module = model, model.model
        self.part = {"rank": 0, "size": 1, "depth": 1}

    def batches(self, loader: Loader, epoch: int, first: int, last: int) -> Generator[Batch, None, None]:
        self.reached, self.stopped = first, False
        yield from self.model.batches(loader, epoch, first, last)
        self.reached, self.stopped = self.model.reached, self.model.halted

    def step(self, batch: Batch, loss: Loss, lr: float, *, stop: Stop = never) -> Done:
        began = time.perf_counter()
        with span("pull", "wait"):
            self.model.pull()
        waited = time.perf_counter() - began
        with span("forward"):
            mean = loss(self.model, batch.arrays) / batch.global_count
        with span("backward"):
            mean.backward()
        with span("push"):
            self.model.push(lr)
        if stop():
            self.model.halt()
        return Done(float(mean), waited)

    def settle(self) -> None:
        self.model.average_buffers()
        self.model.store.average_state()

    def told(self) -> dict[str, float]:
        counts = self.model.staleness.counts
        pushes, stale = self._reduced([counts.total(), sum(s * n for s, n in counts.items())])
        return {"staleness": stale / max(1.0, pushes)}

    def parts(self) -> dict[str, checkpoint.Part]:
        return checkpoint.parts(self.model, self.model.store)

    def load(self, path: str | Path) -> None:
        parts = self.parts()
        checkpoint.restore(path, parts, self.comm)
        prefix = "optimizer."
        state = {name.removeprefix(prefix): part.array for name, part in parts.items() if name.startswith(prefix)}
        self.model.store.load_state_dict(state)


class Rounds(Strategy):
    """Ranks train by themselves on parts of a batch and meet after every round, where they also agree to stop.

    In between a rank knows its own loss only. The inner optimisers' states become their mean in `settle`; an outer
    one's momentum is not part of a checkpoint.
    """

    def __init__(self, model: LocalSGD, *, speeds: Sequence[float] | str | None = None) -> None:
        super().__init__(model.comm, model.comm)
        self.model, self.module = model, model.model
        self._balances = _Balances(model, speeds)
        self._stop: Stop = never

    def batches(self, loader: Loader, epoch: int, first: int, last: int) -> Generator[Batch, None, None]:
        self._balances.of(loader)
        yield from super().batches(loader, epoch, first, last)
        if self.model.steps:  # of a round that ends here
            self.model.synchronize()
            self._agree(0.0, 0.0, self._stop)

    def step(self, batch: Batch, loss: Loss, lr: float, *, stop: Stop = never) -> Done:
        began, samples, self._stop = time.perf_counter(), len(batch.indices), stop
        self.model.inner.lr = lr
        self.model.zero_grad()
        mean = loss(self.model, batch.arrays) / max(1, samples)
        mean.backward()
        worked = time.perf_counter() - began
        met = self.model.step(samples)
        self._balances.step(batch, worked)
        if not met:
            return Done(float(mean), 0.0)
        return self._agree(float(mean) * samples / batch.global_count, time.perf_counter() - began - worked, stop)

    def settle(self) -> None:
        self.model.synchronize()
        self.model.average_buffers()
        if self.comm is not None:
            for arrays in self.model.inner.state.values():
                for array in arrays.values():
                    self.comm.all_reduce(array, "avg", out=array)

    def told(self) -> dict[str, float]:
        return self._balances.told()

    def parts(self) -> dict[str, checkpoint.Part]:
        return checkpoint.parts(self.model, self.model.inner)

    def load(self, path: str | Path) -> None:
        checkpoint.restore(path, self.parts(), self.comm)
        self.model.refresh()


class _Balances:
    """The `Balance` of the loader in use, where there is one."""

    def __init__(self, model: DataParallel | LocalSGD, speeds: Sequence[float] | str | None) -> None:
        if isinstance(speeds, str) and any(parameter.device != "cpu" for parameter in model.model.parameters()):
            raise StrategyError(
                f'speeds="{speeds}" measures by the host\'s clock, which sees nothing of a GPU: give numbers, as [3, 1]'
            )
        self._comm, self._speeds = model.comm, speeds
        self._balance: Balance | None = None

    def of(self, loader: Loader) -> None:
        if self._speeds is not None and self._balance is None:
            speeds = None if isinstance(self._speeds, str) else self._speeds
            self._balance = Balance(loader, self._comm, speeds)

    def step(self, batch: Batch, seconds: float) -> None:
        if self._balance is not None:
            self._balance.step(batch, seconds)

    def told(self) -> dict[str, float]:
        if self._balance is None:
            return {}
        total = sum(self._balance.shares)
        return {f"share_of_rank_{rank}": share / total for rank, share in enumerate(self._balance.shares)}


def _part(comm: Any) -> dict[str, Any]:
    return {"rank": 0, "size": 1} if comm is None else {"rank": comm.rank, "size": comm.size}


def _sums(scores: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(np.sum(device.to_host(values), dtype=np.float64)) for name, values in scores.items()}
