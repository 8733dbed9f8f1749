"""Random numbers that belong to a sample, whichever rank handles it.

A stateful generator would give a sample other numbers on another number of ranks. A counter-based one needs no
state: the numbers are a function of (seed, epoch, sample, draw). Here that function is Philox4x32-10 (Salmon,
Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11), computed for a whole batch at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: NDArray[np.uint64], key: tuple[int, int], rounds: int = 10) -> NDArray[np.uint64]:
    """Philox4x32: (..., 4) counter words to (..., 4) random words, each 32 bits held in a uint64."""
    a, b, c, d = (counter[..., i] for i in range(4))
    k0, k1 = key
    for _ in range(rounds):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            (right >> _HALF) ^ b ^ np.uint64(k0),
            right & _LOW,
            (left >> _HALF) ^ d ^ np.uint64(k1),
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d], axis=-1)


class SampleStreams:
    """One random stream for each sample of a batch.

    Results have the samples on their first axis; successive calls give fresh numbers. Row i depends on
    (seed, epoch, indices[i]) and on the calls before, never on the other rows.

    Args:
        seed, epoch: whole numbers from 0, below 2**64 and 2**32.
        indices: (n,) global sample numbers.
    """

    def __init__(self, seed: int, epoch: int, indices: NDArray[np.integer]) -> None:
        self._key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
        self._epoch = epoch
        self._samples = np.asarray(indices, dtype=np.uint64)
        self._drawn = 0

    def uniform(self, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Numbers in [0, 1): (n, *shape) float64, each with 32 random bits."""
        each = math.prod(shape)
        blocks = -(-each // 4)
        counter = np.empty((len(self._samples), blocks, 4), dtype=np.uint64)
        counter[..., 0] = np.arange(self._drawn, self._drawn + blocks, dtype=np.uint64)
        counter[..., 1] = self._samples[:, None] & _LOW
        counter[..., 2] = self._samples[:, None] >> _HALF
        counter[..., 3] = self._epoch
        self._drawn += blocks
        words = philox(counter, self._key).reshape(len(self._samples), 4 * blocks)[:, :each]
        return (words * np.float64(2.0**-32)).reshape(len(self._samples), *shape)

    def integers(self, low: int, high: int, shape: tuple[int, ...] = ()) -> NDArray[np.int64]:
        """Whole numbers in [low, high): (n, *shape) int64."""
        if high <= low:
            raise ValueError(f"no whole number lies in [{low}, {high})")
        return low + np.floor(self.uniform(shape) * (high - low)).astype(np.int64)
