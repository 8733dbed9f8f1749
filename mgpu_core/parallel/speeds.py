"""A batch split by how fast each rank is, so that all finish a step at the same time.

    balance = Balance(loader, comm)  # or Balance(loader, comm, speeds=[3, 1])
    for batch in batches:
        began = time.perf_counter()
        ...  # forward, backward
        waited = model.synchronize()
        balance.step(batch, seconds=time.perf_counter() - began - waited)

The mathematics stays as it was: a rank's loss is the sum over its samples divided by the size of the global batch, and
dropout masks belong to samples. A rank may have no sample at all.

Speeds are measured again and again: samples a second of each rank's own work, without the time that it waited for the
others, in running means. All ranks exchange their measurements and compute the same new split from them. It is taken if
it makes the slowest rank's part of a step noticeably shorter, so that noise does not move samples to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu_core.data import Batch, Loader, split


def parse_speeds(text: str, ranks: int) -> list[float] | None:
    """What `--speeds` says: None for "auto", else a number for each rank, such as "3,1". Raises ValueError."""
    if text == "auto":
        return None
    try:
        speeds = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--speeds is auto, or a number for each rank, such as 3,1; got {text!r}") from None
    return _checked(speeds, ranks)


class Balance:
    """Keeps a loader's shares in proportion to the ranks' speeds.

    Args:
        loader: of this rank; the others have theirs, with the same sampler and depth. Its shares are what is changed.
        comm: the ranks; None or one rank alone: nothing to balance.
        speeds: a number for each rank, in any unit, to be kept to. None measures.
        every: steps between two exchanges of measurements.
        gain: how much shorter the slowest rank's part of a step must become for a new split to be taken.

    Attributes:
        shares: the latest, by rank; they hold from a few batches later on, as far as loaders read ahead.
        changes: how often a new split was taken.
    """

    def __init__(
        self,
        loader: Loader,
        comm: Any,
        speeds: Sequence[float] | None = None,
        *,
        every: int = 10,
        gain: float = 0.1,
    ) -> None:
        self.loader, self.comm, self.every, self.gain = loader, comm, every, gain
        self.measures = speeds is None and comm is not None and comm.size > 1
        self.changes = 0
        if speeds is not None:
            loader.shares = _checked(speeds, len(loader.shares))
        self.shares: list[float] = list(loader.shares)
        self._steps = 0
        self._recent = np.zeros(2)  # samples and seconds since the last exchange
        self._means = np.zeros((len(self.shares), 2))

    def step(self, batch: Batch, seconds: float) -> bool:
        """Note a step that has just been done, `seconds` of which this rank has worked; whether the split changes.

        All ranks call it after every step, and meet in every `every`-th.
        """
        if not self.measures:
            return False
        self._steps += 1
        if self._steps > 1:  # the first compiles kernels
            self._recent += len(batch.indices), seconds
        if self._steps % self.every:
            return False
        measured = self.comm.all_gather(self._recent[None])
        self._recent[:] = 0
        self._means = _MEMORY * self._means + measured
        better = rebalance(self.shares, self._means, batch.global_count, self.gain)
        if better is None:
            return False
        self.shares = better
        self.changes += 1
        self.loader.reshare(better, batch.epoch, batch.step)
        return True


def rebalance(shares: Sequence[float], work: Any, count: int, gain: float) -> list[float] | None:
    """Shares that are better than the present ones for batches of `count` samples, or None.

    `work` has for each rank the samples it has done and the seconds that took, (ranks, 2). Shares become proportional
    to samples a second; a rank that has done none keeps its share. They are better if the longest that a rank works is
    shorter by more than the part `gain`.

    >>> rebalance([1, 1], [(50, 1.0), (50, 3.0)], 100, 0.1)
    [1.5, 0.5]
    >>> rebalance([1.5, 0.5], [(75, 1.5), (25, 1.4)], 100, 0.1)
    """
    samples, seconds = np.asarray(work, np.float64).T
    known = (samples > 0) & (seconds > 0)
    if not known.any():
        return None
    speed = np.where(known, samples / np.where(known, seconds, 1.0), 0.0)
    present = np.asarray(shares, np.float64)
    new = np.where(known, speed / speed.sum() * present[known].sum(), present)

    def longest(weights: Any) -> float:
        return max(n / v for n, v in zip(split(count, weights.tolist()), speed.tolist()) if v)

    better = longest(new) < (1 - gain) * longest(present)
    return [round(share, 4) for share in new.tolist()] if better else None


def _checked(speeds: Sequence[float], ranks: int) -> list[float]:
    if len(speeds) != ranks:
        raise ValueError(f"{ranks} ranks need {ranks} speeds, got {list(speeds)}")
    if not all(0 <= speed < math.inf for speed in speeds) or not sum(speeds):
        raise ValueError(f"speeds are finite numbers from 0, and one of them more; got {list(speeds)}")
    return list(speeds)


_MEMORY = 0.5  # what an exchange leaves of earlier measurements' weight
