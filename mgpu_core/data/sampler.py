"""Which samples make up which batch, and which part of a batch is a rank's.

The order of an epoch is a function of (seed, epoch) alone, and step s takes the s-th slice of it. Ranks
then cut each *batch* among them, not the data set. So any number of ranks, with equal or unequal shares, walks
through the same batches; a run can stop after any step and go on with other ranks; and each sample
counts exactly once an epoch, with no padding and nothing dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from mgpu_core import random

Indices = NDArray[np.int64]


def split(count: int, shares: Sequence[float]) -> list[int]:
    """Cut `count` things into whole parts as near to `shares` as can be (the largest-remainder method).

    Every rank computes the same parts: the arithmetic is exact, and of equal remainders the lower rank's wins.

    >>> split(64, [1, 1, 1])
    [22, 21, 21]
    >>> split(64, [3, 1])
    [48, 16]
    >>> split(1, [1, 1])
    [1, 0]
    """
    weights = [Fraction(share) for share in shares]
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise ValueError(f"shares must be at least 0, and one of them more; got {list(shares)}")
    quotas = [count * weight / total for weight in weights]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(parts)), key=lambda rank: (parts[rank] - quotas[rank], rank))
    for rank in by_remainder[: count - sum(parts)]:
        parts[rank] += 1
    return parts


def part(count: int, rank: int, shares: Sequence[float]) -> tuple[int, int]:
    """Where `rank`'s part of a batch of `count` samples starts and stops; it may be empty."""
    parts = split(count, shares)
    start = sum(parts[:rank])
    return start, start + parts[rank]


class Sampler:
    """Cuts `count` samples into global batches of `batch`, in a new order each epoch.

    Args:
        count: number of samples in the data set.
        batch: samples in a global batch, over all ranks; the last batch of an epoch may be shorter.
        seed: with the epoch it decides the order, and nothing else does.
        shuffle: False leaves the samples in their own order (for a test set).
    """

    def __init__(self, count: int, batch: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if count < 0 or batch < 1:
            raise ValueError(f"need count >= 0 and batch >= 1, got count={count}, batch={batch}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"the seed must be a whole number from 0, below 2**64; got {seed}")
        self.count = count
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self._latest: tuple[int, Indices] = (-1, np.arange(count, dtype=np.int64))

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-self.count // self.batch)

    def order(self, epoch: int) -> Indices:
        """The samples in the order of `epoch`: (count,) int64, read-only."""
        latest, order = self._latest  # read at once: the loader's thread may be an epoch ahead
        if self.shuffle and epoch != latest:
            order = random.generator(self.seed, epoch).permutation(self.count)
            self._latest = epoch, order
        order.flags.writeable = False
        return order

    def global_batch(self, epoch: int, step: int) -> Indices:
        """The samples that all ranks together handle in `step`; at most `batch` of them."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of an epoch of {self.steps} steps")
        return self.order(epoch)[step * self.batch : (step + 1) * self.batch]
