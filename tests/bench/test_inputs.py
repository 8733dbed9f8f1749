"""Inputs whose result is exact in every dtype, whatever the order, and a check that sees each kind of mistake."""

import numpy as np
import pytest

from bench.inputs import OPERATIONS, PERIOD, blocks, count_wrong, expected, fill, poison
from bench.table import NCCL_NAMES
from kernels.dtypes import find

DTYPES = [find(name).numpy for name in NCCL_NAMES]
RANKS = (1, 2, 3, 4, 7, 16, 64)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_result_is_exact_in_any_order_of_the_ranks(dtype: np.dtype, op: str) -> None:
    combine = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    random = np.random.default_rng()
    for ranks in RANKS:
        inputs = blocks(ranks, dtype, op)
        total = inputs[order := random.permutation(ranks)][0]
        for rank in order[1:]:
            total = combine(total, inputs[rank]).astype(dtype)  # rounded at every step, as the worst algorithm would
        if op == "avg":
            total = (total.astype(np.float64) / ranks).astype(dtype)
        assert np.array_equal(total, expected(ranks, dtype, op)), (ranks, op)


@pytest.mark.parametrize("size", [0, 1, 17, PERIOD - 1, PERIOD, PERIOD + 1, 3 * PERIOD + 5, 100_000])
def test_what_was_filled_is_right_and_every_wrong_element_is_counted(size: int) -> None:
    random = np.random.default_rng()
    block = blocks(2, np.float32, "sum")[1]
    x = np.empty(size, np.float32)
    fill(x, block)
    assert np.array_equal(x, np.resize(block, size))
    assert count_wrong(x, block) == 0
    wrong = random.choice(size, min(size, 5), replace=False)
    x[wrong] += 1
    assert count_wrong(x, block) == len(wrong)


def test_nan_is_wrong_and_so_is_an_output_never_written() -> None:
    for dtype in DTYPES:
        block = expected(2, dtype, "sum")
        x = np.empty(1000, dtype)
        poison(x)
        assert count_wrong(x, block) == x.size, dtype
    x = np.full(3, np.nan, np.float32)
    assert count_wrong(x, expected(2, np.float32, "sum")) == 3


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_mistakes_of_collectives_are_seen(op: str, ranks: int) -> None:
    inputs, right = blocks(ranks, np.float32, op), expected(ranks, np.float32, op)
    size = 1 << 15
    x, y = np.empty(size, np.float32), np.empty(size, np.float32)
    fill(x, right)
    assert count_wrong(np.roll(x, size // ranks), right)  # a chunk in another one's place
    if op in ("sum", "prod"):
        fill(y, inputs[0])
        assert count_wrong(x + y if op == "sum" else x * y, right)  # a contribution counted twice
        fill(x, inputs[0])
        assert count_wrong(x, right)  # one left out
