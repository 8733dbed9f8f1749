"""Hyper-parameters from the hardware: measured, with the reason for each, and every one may be given instead.

    advice = advise(step, read, comm=comm, samples=60_000, epochs=4, base_lr=0.1, base_batch=128)
    print(advice)
    loader = Loader(..., workers=advice.workers.value, depth=advice.prefetch.value)

`step(n)` trains on n samples, and `read(n)` reads and prepares n of them; both are called several times, on all ranks
at the same time, since that is how they will run. Ranks exchange what they measure, the slowest one's counts, and all
come to the same advice.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from collectives.memory import available
from mgpu_core.schedule import linear_scaling

_ENOUGH = 0.95  # of the best speed
_REPEATS = 3
_WARM_UP = 5 / 90  # Goyal et al. 2017: 5 of 90 epochs
_MOST_READERS, _MOST_READY = 8, 16


@dataclass(frozen=True)
class Choice:
    """A hyper-parameter, and why it is what it is."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Advice:
    """What `advise` chose. As a string: a line for each.

    Attributes:
        batch: samples of a rank in a step, int.
        learning_rate: the highest, after the warm-up, float.
        warmup: steps in which the rate rises, int.
        workers: threads of a rank that read, int.
        prefetch: batches that a rank holds ready, int.
    """

    batch: Choice
    learning_rate: Choice
    warmup: Choice
    workers: Choice
    prefetch: Choice

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for field in fields(self):
            choice: Choice = getattr(self, field.name)
            shown = f"{choice.value:g}" if isinstance(choice.value, float) else str(choice.value)
            yield f"{field.name.replace('_', ' ')} {shown}: {choice.reason}"


class Measured(NamedTuple):
    """What a step costs the rank that it costs most."""

    samples: int
    seconds: float
    nbytes: int  # beyond what lives on after it


def advise(
    step: Callable[[int], object],
    read: Callable[[int], object],
    *,
    samples: int,
    epochs: int,
    base_lr: float,
    base_batch: int,
    comm: Any = None,
    batch: int | None = None,
    learning_rate: float | None = None,
    warmup: int | None = None,
    workers: int | None = None,
    prefetch: int | None = None,
    memory: int | None = None,
) -> Advice:
    """Hyper-parameters for training on `samples` samples for `epochs` epochs. All ranks call it together.

    Args:
        step, read: see the module's docstring.
        base_lr, base_batch: a learning rate known to be good for a global batch of so many samples.
        comm: the ranks, on one host; None for one.
        batch, learning_rate, warmup, workers, prefetch: what is given is taken, and "as given" is its reason.
        memory: bytes that a rank may use; None: half of its share of what the host, or the container, has left.
    """
    ranks = 1 if comm is None else comm.size
    agree = _agreement(comm)
    room = memory if memory is not None else int(-agree(-available() // (2 * ranks)))
    table = measure_steps(step, agree, room, 1 if batch is None else batch, max(1, samples // ranks), batch is None)
    size = _batch(table, room) if batch is None else Choice(batch, "as given")
    seconds = next(row.seconds for row in table if row.samples == size.value)
    slowest = agree(max(_seconds(read, size.value, _REPEATS)))

    whole = size.value * ranks
    rate = linear_scaling(base_lr, base_batch, whole)
    total = epochs * -(-samples // whole)
    warm = round(_WARM_UP * total)
    readers = min(_MOST_READERS, max(1, math.ceil(slowest / seconds)))
    ready = min(_MOST_READY, readers + 1)
    pace = f"reading a batch takes up to {slowest * 1e3:.1f} ms, a step {seconds * 1e3:.1f} ms"
    return Advice(
        batch=size,
        learning_rate=_given(learning_rate)
        or Choice(rate, f"{base_lr:g} for {base_batch} samples, times {whole} for {ranks} ranks (linear rule)"),
        warmup=_given(warmup)
        or Choice(warm, f"5 of 90 parts of {total} steps, as Goyal et al. 2017 pair with that rule"),
        workers=_given(workers) or Choice(readers, f"{pace}: so many keep ahead of it"),
        prefetch=_given(prefetch) or Choice(ready, f"a batch for each reading thread ({readers}) and one in hand"),
    )


def measure_steps(
    step: Callable[[int], object],
    agree: Callable[[float], float],
    room: int,
    first: int,
    most: int,
    grow: bool = True,
) -> list[Measured]:
    """Steps of `first` samples, and if `grow` of twice as many again and again: to `most` of them, or while the next
    one should need less than `room` bytes and doubling still makes samples at least 5% cheaper.

    `agree` makes a number the largest of all ranks', so that they stop together.
    """
    table: list[Measured] = []
    samples = first
    while True:
        seconds = agree(median(_seconds(step, samples, _REPEATS)))
        table.append(Measured(samples, seconds, int(agree(_peak(step, samples)))))
        slack = len(table) > 2 and seconds / samples > _ENOUGH * table[-3].seconds / table[-3].samples
        if not grow or 2 * samples > most or 2 * table[-1].nbytes > room or slack:
            return table
        samples *= 2


def _batch(table: list[Measured], room: int) -> Choice:
    """The smallest batch that is nearly as fast, for each sample, as the fastest."""
    fits = [row for row in table if row.nbytes <= room] or table[:1]
    best = max(row.samples / row.seconds for row in fits)
    row = next(row for row in fits if row.samples / row.seconds >= _ENOUGH * best)
    return Choice(
        row.samples,
        f"the smallest with {_ENOUGH:.0%} of the best speed: {row.samples / row.seconds:,.0f} of {best:,.0f} a second, "
        f"up to {table[-1].samples} tried; a step takes {_megabytes(row.nbytes)} of {_megabytes(room)} MB",
    )


def _given(value: Any) -> Choice | None:
    return None if value is None else Choice(value, "as given")


def _agreement(comm: Any) -> Callable[[float], float]:
    """The largest of all ranks' numbers."""
    if comm is None:
        return float
    return lambda value: float(comm.all_reduce(np.array([value], np.float64), "max")[0])


def _seconds(work: Callable[[int], object], samples: int, repeats: int) -> list[float]:
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work(samples)
        taken.append(time.perf_counter() - began)
    return taken[1:]  # the first compiles kernels


def _peak(work: Callable[[int], object], samples: int) -> int:
    """Bytes that `work` has at most beyond those that were there before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work(samples)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}" if nbytes < 2**24 else f"{nbytes / 2**20:,.0f}"
