"""Inputs for which the exact result is known, in every dtype and in whatever order the ranks' values are combined.

Arrays repeat a block of small whole numbers. Its length is prime, so a chunk that ends up in the wrong place does not
fall on its own like.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PERIOD = 4093
OPERATIONS = ("sum", "prod", "min", "max", "avg")

Array = npt.NDArray[Any]


def blocks(ranks: int, dtype: npt.DTypeLike, op: str) -> Array:
    """Every rank's block, shape (ranks, PERIOD), dtype `dtype`; op "none" for numbers that are only copied."""
    return _numbers(ranks, np.dtype(dtype), op).astype(dtype)


def expected(ranks: int, dtype: npt.DTypeLike, op: str) -> Array:
    """The block that `op` over all ranks gives, shape (PERIOD,)."""
    numbers = _numbers(ranks, np.dtype(dtype), op)
    result = getattr(numbers, "mean" if op == "avg" else op)(axis=0)
    return np.asarray(result).astype(dtype)


def fill(x: Array, block: Array) -> None:
    """Write the block over and over into the one-dimensional `x`, as a program would that computes new values."""
    whole = x.size // block.size * block.size
    x[:whole].reshape(-1, block.size)[:] = block
    x[whole:] = block[: x.size - whole]


def count_wrong(x: Array, block: Array) -> int:
    """How many elements of `x` are not the repeated block's."""
    whole = x.size // block.size * block.size
    wrong = np.count_nonzero(x[:whole].reshape(-1, block.size) != block)
    return int(wrong + np.count_nonzero(x[whole:] != block[: x.size - whole]))


def poison(x: Array) -> None:
    """Bytes that no result has, so that an output never written is seen."""
    x.view(np.uint8)[:] = 0xA5


def _numbers(ranks: int, dtype: np.dtype[Any], op: str) -> npt.NDArray[np.int64]:
    """Whole numbers, shape (ranks, PERIOD), whose partial results are all exact in `dtype`."""
    random = np.random.default_rng(PERIOD)  # the same on every rank
    limit = _largest_exact(dtype)
    if op in ("min", "max", "none"):
        return random.integers(0, limit + 1, (ranks, PERIOD))
    if op == "prod":
        numbers = np.ones((ranks, PERIOD), np.int64)
        numbers[random.integers(ranks, size=PERIOD), np.arange(PERIOD)] = random.integers(2, 4, PERIOD)
        return numbers
    # A total within the limit, handed out to the ranks: no partial sum can be larger.
    totals = random.integers(1, limit + 1, PERIOD)
    if op == "avg":
        totals = totals // ranks * ranks
    return random.multinomial(totals, [1 / ranks] * ranks).T


def _largest_exact(dtype: np.dtype[Any]) -> int:
    """Every whole number from 0 to this one is exact in `dtype`; kept small enough to be quick to draw."""
    if dtype.kind in "iu":
        return min(100, int(np.iinfo(dtype).max))
    digits = {"float8_e5m2": 3, "float8_e4m3fn": 4, "bfloat16": 8, "float16": 11}.get(dtype.name, 12)
    return int(min(1 << digits, 1000))
