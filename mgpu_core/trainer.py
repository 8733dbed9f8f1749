"""The training loop, for one process or many ranks.

    trainer = Trainer(model, optimizer, schedule, train, test, loss=..., score=..., folder="runs/mine")
    trainer.resume("runs/mine/checkpoint.safetensors")      # to go on with an earlier run
    trainer.fit(epochs=4)

Rank 0 writes metrics.jsonl and checkpoint.safetensors into `folder`. A checkpoint holds the model, the optimiser and
the position in the data. All else (the order of the data, augmentation, dropout, the learning rate) is a function of
the seed and the position, so a resumed run repeats, bit for bit, what the uninterrupted one does on as many ranks,
and within rounding on any other number.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from collectives.timeline import span
from mgpu_core import checkpoint, random
from mgpu_core.autograd import no_grad
from mgpu_core.data import Batch, Loader
from mgpu_core.metrics import Metrics
from mgpu_core.nn import Module
from mgpu_core.optim import Optimizer
from mgpu_core.schedule import Schedule
from mgpu_core.tensor import Tensor

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"

Arrays = tuple[Any, ...]


class Strategy(Protocol):
    """What stands between a model and its trainer: how the ranks share the work. `DataParallel` is one.

    Attributes:
        model: what this rank holds of the model.
        comm: all ranks that train it; None for a single one.
    """

    model: Module
    comm: Any

    def __call__(self, *inputs: Any) -> Tensor:
        """The outputs for this rank's samples."""

    def synchronize(self) -> float:
        """Wait until the gradients are those of the whole batch; the seconds that took."""

    def average_buffers(self) -> None:
        """Make alike what ranks keep apart in training: before a test, and before a checkpoint."""


class Trainer:
    """Trains a model and measures it; can stop after any step, and go on from there.

    Args:
        model: the model, in a strategy that knows the ranks.
        optimizer: of the model's parameters.
        schedule: the learning rate as a function of the number of steps done.
        train, test: loaders, set up for this rank.
        loss: of the model and a batch's arrays: the sum of its samples' losses, a tensor of one element.
        score: of the model and a batch's arrays: by name, a value for each sample, (n,); their means over the test set
            are the test results. For instance {"test_loss": losses, "test_accuracy": predicted == labels}.
        folder: where to put metrics and checkpoints; None keeps none.
        settings: what else is worth keeping in metrics and checkpoints, as JSON values.
        unit: what a sample is called when speed is shown.

    Attributes:
        epoch, step: the position: the next step to do is number `step` of `epoch`.
        seconds: spent in training steps since the run's beginning.
        scores: the latest test results.
        interrupted: whether `fit` ended early because it was asked to.
    """

    def __init__(
        self,
        model: Strategy,
        optimizer: Optimizer,
        schedule: Schedule,
        train: Loader,
        test: Loader,
        *,
        loss: Callable[[Any, Arrays], Tensor],
        score: Callable[[Any, Arrays], Mapping[str, Any]],
        folder: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        unit: str = "samples",
    ) -> None:
        self.model = model
        self.comm = model.comm
        self.optimizer = optimizer
        self.schedule = schedule
        self.train = train
        self.test = test
        self.loss = loss
        self.score = score
        self.size = 1 if self.comm is None else self.comm.size
        self.leads = self.comm is None or self.comm.rank == 0
        self.folder = Path(folder) if folder is not None and self.leads else None
        self._writer = None if folder is None else checkpoint.Writer(Path(folder) / CHECKPOINT, self.comm)
        self.settings = dict(settings or {})
        self.unit = unit
        self.epoch = 0
        self.step = 0
        self.seconds = 0.0
        self.scores: dict[str, float] = {}
        self.interrupted = False

    @property
    def steps_done(self) -> int:
        """Steps since the run's beginning."""
        return self.epoch * self.train.sampler.steps + self.step

    @property
    def samples_done(self) -> int:
        """Samples that all ranks together have trained on since the run's beginning."""
        sampler = self.train.sampler
        return self.epoch * sampler.count + min(self.step * sampler.batch, sampler.count)

    def fit(self, epochs: int, *, steps: int | None = None) -> None:
        """Train until `epochs` are done in all, for `steps` more steps at most, or until SIGINT or SIGTERM.

        A checkpoint is written after each epoch and at the end. When any one rank has received a signal, all ranks end
        after the same step, with a checkpoint; a second signal ends its process at once.

        Raises:
            FloatingPointError: when the loss is not a finite number; the last checkpoint is from before.
        """
        limit = math.inf if steps is None else self.steps_done + steps
        self.interrupted = False
        with stop_request() as stop, _Report(self, epochs) as report, self._writer or nullcontext():
            while self.epoch < epochs and self.steps_done < limit and not self.interrupted:
                with self.train.epoch(self.epoch, self.step) as batches:
                    began = time.perf_counter()
                    for batch in batches:
                        loss, waited, self.interrupted = self.training_step(batch, stop)
                        seconds = time.perf_counter() - began
                        began += seconds
                        self.seconds += seconds
                        self.step += 1
                        report.step(batch, loss, seconds, waited)
                        if self.interrupted or self.steps_done >= limit:
                            break
                if self.step == self.train.sampler.steps:
                    self.scores = self.evaluate()
                    report.epoch(self.epoch)
                    self.epoch, self.step = self.epoch + 1, 0
                self.save()

    def training_step(self, batch: Batch, stop: threading.Event | None = None) -> tuple[float, float, bool]:
        """Train on one batch, of which this rank holds a part.

        Returns: the mean loss over the global batch; the mean over the ranks of the seconds they waited for
        communication; and whether `stop` is set on any rank.
        """
        self.optimizer.lr = self.schedule(self.steps_done)
        self.optimizer.zero_grad()
        places = range(batch.start, batch.start + len(batch.indices))
        with random.batch(seed=self.train.sampler.seed, step=self.steps_done, samples=places), span("forward"):
            loss = self.loss(self.model, batch.arrays) / batch.global_count
        with span("backward"):
            loss.backward()
        with span("wait for gradients", "wait"):
            waited = self.model.synchronize()
        with span("optimizer"):
            self.optimizer.step()

        mean_loss, waited, stops = self._sum_over_ranks([float(loss), waited, stop is not None and stop.is_set()])
        if not math.isfinite(mean_loss):
            raise FloatingPointError(
                f"the loss is {mean_loss} at step {self.step} of epoch {self.epoch}, with a learning rate of "
                f"{self.optimizer.lr:.3g}; a lower rate or a longer warm-up is the usual cure"
            )
        return mean_loss, waited / self.size, stops > 0

    def evaluate(self) -> dict[str, float]:
        """The mean of each score over the test set, all ranks together."""
        totals: dict[str, float] = {}
        self.model.average_buffers()
        self.model.model.eval()
        with no_grad(), self.test.epoch(0) as batches:
            for batch in batches:
                for name, values in self.score(self.model, batch.arrays).items():
                    totals[name] = totals.get(name, 0.0) + float(np.sum(values, dtype=np.float64))
        self.model.model.train()
        sums = self._sum_over_ranks(list(totals.values()))
        return {name: total / self.test.sampler.count for name, total in zip(totals, sums)}

    def save(self) -> None:
        """Write the checkpoint, in the background (rank 0 does; all ranks must call)."""
        self.model.average_buffers()
        if self._writer is not None:
            position = {"epoch": self.epoch, "step": self.step, "seconds": self.seconds, "scores": self.scores}
            meta = {"settings": self.settings, "data": self._data(), **position}
            self._writer.save(checkpoint.parts(self.model, self.optimizer), meta)

    def resume(self, path: str | Path) -> None:
        """Go on where a checkpoint was written, by any number of ranks. All ranks must call, and can read the file.

        Raises:
            FileNotFoundError: if there is none.
            CheckpointError: if it is of another model or optimiser, or its position is in another order of the data.
        """
        meta = checkpoint.read_meta(path)
        if meta["data"] != self._data():
            raise checkpoint.CheckpointError(
                f"{path} is from a run with {meta['data']}, but this one has {self._data()}"
            )
        checkpoint.restore(path, checkpoint.parts(self.model, self.optimizer), self.comm)
        if hasattr(self.model, "refresh"):
            self.model.refresh()
        self.epoch, self.step = meta["epoch"], meta["step"]
        self.seconds, self.scores = meta["seconds"], meta["scores"]

    def _data(self) -> dict[str, int]:
        """What a position in the data refers to."""
        sampler = self.train.sampler
        return {"samples": sampler.count, "batch": sampler.batch, "seed": sampler.seed}

    def _sum_over_ranks(self, values: list[float]) -> list[float]:
        if self.comm is None:
            return values
        return self.comm.all_reduce(np.array(values, dtype=np.float64)).tolist()


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one raises KeyboardInterrupt.

    Other threads than the main one, which cannot catch signals, get an event that nobody sets.
    """
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Report:
    """What rank 0 shows of a run, and writes down."""

    def __init__(self, trainer: Trainer, epochs: int) -> None:
        self.trainer = trainer
        self.epochs = epochs
        self.metrics: Metrics | None = None
        self.pace = np.zeros(3)  # samples, seconds, seconds waited: recent steps count most

    def __enter__(self) -> _Report:
        trainer = self.trainer
        if trainer.folder is not None:
            resume_at = trainer.samples_done if trainer.steps_done else None
            self.metrics = Metrics(trainer.folder / METRICS, resume_at=resume_at)
            self.metrics.write("run", samples=trainer.samples_done, ranks=trainer.size, settings=trainer.settings)
        self.bar = tqdm(
            total=self.epochs * trainer.train.sampler.steps,
            initial=trainer.steps_done,
            disable=None if trainer.leads else True,  # None: shown on a terminal only
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            dynamic_ncols=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.metrics is not None:
            self.metrics.close()

    def step(self, batch: Batch, loss: float, seconds: float, waited: float) -> None:
        self.pace = 0.95 * self.pace + (batch.global_count, seconds, waited)
        self.bar.set_description(f"epoch {batch.epoch + 1}/{self.epochs}", refresh=False)
        self.bar.set_postfix_str(f"loss {loss:.3f}, {self._pace()}", refresh=False)
        self.bar.update()
        self._record(
            "step",
            batch.epoch,
            step=batch.step,
            loss=loss,
            learning_rate=self.trainer.optimizer.lr,
            samples_per_second=batch.global_count / seconds,
            waiting=waited / seconds,
        )

    def epoch(self, epoch: int) -> None:
        scores = self.trainer.scores
        if self.trainer.leads:
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
            self.bar.write(f"epoch {epoch + 1}/{self.epochs}: {shown}; {self._pace()}")
        self._record("epoch", epoch, **scores)

    def _record(self, event: str, epoch: int, **values: Any) -> None:
        trainer = self.trainer
        if self.metrics is not None:
            self.metrics.write(event, epoch=epoch, samples=trainer.samples_done, seconds=trainer.seconds, **values)

    def _pace(self) -> str:
        samples, seconds, waited = self.pace
        if not seconds:
            return "no step taken"
        return f"{samples / seconds:,.0f} {self.trainer.unit}/s, {waited / seconds:.0%} waiting for communication"
