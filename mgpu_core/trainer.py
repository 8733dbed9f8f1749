"""The training loop, for one process or many ranks.

    trainer = Trainer(strategy, schedule, train, test, loss=..., score=..., folder="runs/mine")
    trainer.resume("runs/mine/checkpoint.safetensors")      # to go on with an earlier run
    trainer.fit(epochs=4)

How the ranks share the work is the strategy's business: see `mgpu_core.parallel.strategies`. Rank 0 writes
metrics.jsonl and checkpoint.safetensors into `folder`; a new run replaces what an earlier one has left there. A
checkpoint holds the model, the optimiser and the position in the data. All else (the order of the data, augmentation,
dropout, the learning rate) is a function of the seed and the position, so where ranks train in step a resumed run
repeats, bit for bit, what the uninterrupted one does on as many ranks, and within rounding on any other number and with
any other strategy that trains in step. What ranks keep apart is made alike for a checkpoint or left out of it: batch
norm's running statistics are the uninterrupted run's within rounding, and what a communication hook has not sent yet
is forgotten.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from mgpu_core import checkpoint, random
from mgpu_core.autograd import no_grad
from mgpu_core.bar import Bar
from mgpu_core.data import Batch, Loader
from mgpu_core.metrics import Metrics
from mgpu_core.parallel.strategies import Done, Loss, Score, Strategy, never
from mgpu_core.schedule import Schedule

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"


class Trainer:
    """Trains a model and measures it; can stop after any step, and go on from there.

    Args:
        strategy: the model and its optimiser, and how the ranks share the work.
        schedule: the learning rate as a function of the number of steps done.
        train, test: loaders, made with `strategy.part` and `strategy.test_part`.
        loss: of a model and a batch's arrays, the first of which it gives to the model: the sum of its samples' losses,
            a tensor of one element.
        score: of a model and a batch's arrays: by name, a value for each sample, (n,); their means over the test set
            are the test results. For instance {"test_loss": losses, "test_accuracy": predicted == labels}.
        folder: where to put metrics and checkpoints; None keeps none.
        settings: what else is worth keeping in metrics and checkpoints, as JSON values.
        unit: what a sample is called when speed is shown.
        tests: how often to test in an epoch.

    Attributes:
        epoch, step: the position: the next step to do is number `step` of `epoch`.
        seconds: spent in training steps since the run's beginning.
        scores: the latest test results.
        interrupted: whether `fit` ended early because it was asked to.
    """

    def __init__(
        self,
        strategy: Strategy,
        schedule: Schedule,
        train: Loader,
        test: Loader,
        *,
        loss: Loss,
        score: Score,
        folder: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        unit: str = "samples",
        tests: int = 1,
    ) -> None:
        self.strategy = strategy
        self.schedule = schedule
        self.train = train
        self.test = test
        self.loss = loss
        self.score = score
        self.size = 1 if strategy.comm is None else strategy.comm.size
        self.leads = strategy.comm is None or strategy.comm.rank == 0
        self.folder = Path(folder) if folder is not None and self.leads else None
        self._writer = None if folder is None else checkpoint.Writer(Path(folder) / CHECKPOINT, strategy.comm)
        self.settings = dict(settings or {})
        self.unit = unit
        self.tests = tests
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
        if self.folder is not None and not self.steps_done:  # or ranks that start again would go on with another run
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        with stop_request() as stop, _Report(self, epochs) as report, self._writer or nullcontext():
            while self.epoch < epochs and self.steps_done < limit and not self.interrupted:
                tested_at = self._next_test()
                last = int(min(tested_at, self.step + limit - self.steps_done))
                with closing(self.strategy.batches(self.train, self.epoch, self.step, last)) as batches:
                    began = time.perf_counter()
                    for batch in batches:
                        done = self.training_step(batch, stop)
                        began, seconds = time.perf_counter(), time.perf_counter() - began
                        self.seconds += seconds
                        report.step(batch, done, seconds)
                    self.seconds += time.perf_counter() - began
                self.step, self.interrupted = self.strategy.reached, self.strategy.stopped
                if self.step == tested_at:
                    self.scores = self.evaluate()
                    report.test()
                    if self.step == self.train.sampler.steps:
                        self.epoch, self.step = self.epoch + 1, 0
                if self.step == 0 or self.interrupted or self.steps_done >= limit:
                    self.save()

    def training_step(self, batch: Batch, stop: threading.Event | None = None) -> Done:
        """Train on one batch, of which this rank holds a part; ask all to stop if `stop` is set."""
        at = batch.epoch * self.train.sampler.steps + batch.step
        self.step = batch.step
        places = range(batch.start, batch.start + len(batch.indices))
        lr = self.schedule(at)
        randomness = random.batch(seed=self.train.sampler.seed, step=at, samples=places)
        with randomness, self.strategy.precision.autocast():
            done = self.strategy.step(batch, self.loss, lr, stop=never if stop is None else stop.is_set)
        if not math.isfinite(done.loss):
            raise FloatingPointError(
                f"the loss is {done.loss} at step {batch.step} of epoch {batch.epoch}, with a learning rate of "
                f"{lr:.3g}; a lower rate or a longer warm-up is the usual cure"
            )
        self.step += 1
        return done

    def evaluate(self) -> dict[str, float]:
        """The mean of each score over the test set, all ranks together."""
        totals: dict[str, float] = {}
        self.strategy.settle()
        self.strategy.module.eval()
        with no_grad(), self.strategy.precision.autocast(), self.test.epoch(0) as batches:
            for batch in batches:
                for name, value in self.strategy.score(self.score, batch.arrays).items():
                    totals[name] = totals.get(name, 0.0) + value
        self.strategy.module.train()
        sums = self.strategy.sum(list(totals.values()))
        return {name: total / self.test.sampler.count for name, total in zip(totals, sums)} | self.strategy.told()

    def _next_test(self) -> int:
        """The step of this epoch before which the next test is, after `step`."""
        steps = self.train.sampler.steps
        return next(end for i in range(self.tests) if (end := (i + 1) * steps // self.tests) > self.step)

    def save(self) -> None:
        """Write the checkpoint, in the background (rank 0 does; all ranks must call)."""
        self.strategy.settle()
        if self._writer is not None:
            position = {"epoch": self.epoch, "step": self.step, "seconds": self.seconds, "scores": self.scores}
            precision = self.strategy.precision.state()
            meta = {"settings": self.settings, "data": self._data(), "precision": precision, **position}
            self._writer.save(self.strategy.parts(), meta)

    def resume(self, path: str | Path) -> None:
        """Go on where a checkpoint was written, by any number of ranks. All ranks must call, and can read the file.

        Raises:
            FileNotFoundError: if there is none.
            CheckpointError: if it is of another model or optimiser, or its position is in another order of the data.
        """
        meta = checkpoint.read_meta(path)
        if (data := meta.get("data")) != self._data():
            raise checkpoint.CheckpointError(f"{path} is from a run with {data}, but this one has {self._data()}")
        self.strategy.load(path)
        self.strategy.precision.load_state(meta.get("precision", {}))
        self.epoch, self.step = meta["epoch"], meta["step"]
        self.seconds, self.scores = meta["seconds"], meta["scores"]

    def _data(self) -> dict[str, int]:
        """What a position in the data refers to."""
        sampler = self.train.sampler
        return {"samples": sampler.count, "batch": sampler.batch, "seed": sampler.seed}


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
        self.reported = trainer.samples_done
        self.pace = np.zeros(3)  # samples, seconds, seconds waited: recent steps count most

    def __enter__(self) -> _Report:
        trainer = self.trainer
        if trainer.folder is not None:
            resume_at = trainer.samples_done if trainer.steps_done else None
            self.metrics = Metrics(trainer.folder / METRICS, resume_at=resume_at)
            self.metrics.write("run", samples=trainer.samples_done, ranks=trainer.size, settings=trainer.settings)
        self.bar = Bar(
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

    def step(self, batch: Batch, done: Done, seconds: float) -> None:
        trainer = self.trainer
        samples = trainer.samples_done - self.reported
        self.reported = trainer.samples_done
        self.pace = 0.95 * self.pace + (samples, seconds, done.waited)
        self.bar.set_description(f"epoch {batch.epoch + 1}/{self.epochs}", refresh=False)
        self.bar.set_postfix_str(f"loss {done.loss:.3f}, {self._pace()}", refresh=False)
        self.bar.update(trainer.steps_done - self.bar.n)
        self._record(
            "step",
            step=batch.step,
            loss=done.loss,
            learning_rate=trainer.schedule(trainer.steps_done - 1),
            samples_per_second=samples / seconds,
            waiting=done.waited / seconds,
        )

    def test(self) -> None:
        trainer = self.trainer
        ends = trainer.step == trainer.train.sampler.steps
        self.reported = trainer.samples_done
        if trainer.leads:
            shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in trainer.scores.items())
            position = trainer.epoch + trainer.step / trainer.train.sampler.steps
            self.bar.write(f"epoch {position:.{0 if ends else 2}f}/{self.epochs}: {shown}; {self._pace()}")
        self._record("epoch" if ends else "test", **trainer.scores)

    def _record(self, event: str, **values: Any) -> None:
        trainer = self.trainer
        if self.metrics is not None:
            self.metrics.write(
                event, epoch=trainer.epoch, samples=trainer.samples_done, seconds=trainer.seconds, **values
            )

    def _pace(self) -> str:
        samples, seconds, waited = self.pace
        if not seconds:
            return "no step taken"
        return f"{samples / seconds:,.0f} {self.trainer.unit}/s, {waited / seconds:.0%} waiting for communication"
