"""The order of the data knows nothing of ranks, and every sample counts exactly once an epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_core.data import Sampler, split
from mgpu_core.data.sampler import part

shares_of_ranks = st.lists(st.integers(0, 5) | st.floats(0, 5), min_size=1, max_size=9).filter(lambda s: sum(s) > 0)


@pytest.mark.parametrize(
    ("count", "shares", "parts"),
    [
        (64, [1, 1, 1], [22, 21, 21]),
        (64, [1, 1], [32, 32]),
        (2, [1, 1, 1], [1, 1, 0]),
        (0, [1, 1], [0, 0]),
        (64, [3, 1], [48, 16]),
        (10, [1, 0, 1], [5, 0, 5]),
        (7, [0.1, 0.2, 0.7], [1, 1, 5]),
    ],
)
def test_parts_of_a_batch(count, shares, parts):
    assert split(count, shares) == parts


@given(st.integers(0, 10_000), shares_of_ranks)
def test_parts_add_up_and_are_within_one_of_the_exact_share(count, shares):
    parts = split(count, shares)
    assert sum(parts) == count
    for got, share in zip(parts, shares):
        assert abs(got - count * share / sum(shares)) < 1 + 1e-9
        assert got == 0 or share > 0


@pytest.mark.parametrize("shares", [[], [0, 0], [1, -1, 3]])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares must be"):
        split(4, shares)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 70), st.integers(0, 2**64 - 1), st.integers(0, 5), shares_of_ranks)
def test_every_sample_once_an_epoch_whatever_the_ranks(count, batch, seed, epoch, shares):
    sampler = Sampler(count, batch, seed=seed)
    seen = []
    for step in range(sampler.steps):
        whole = sampler.global_batch(epoch, step)
        assert 1 <= len(whole) <= batch
        for rank in range(len(shares)):
            start, stop = part(len(whole), rank, shares)
            seen.extend(whole[start:stop])
    assert sorted(seen) == list(range(count))


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    orders = {
        (seed, epoch): tuple(Sampler(100, batch, seed=seed).order(epoch))
        for seed in (0, 1, 2**63)
        for epoch in (0, 1, 2)
        for batch in (1, 7, 100)
    }
    assert len(set(orders.values())) == 9
    # One order in numbers, so that a change of generator, which would break the resuming of old runs, is seen.
    assert Sampler(8, 1, seed=1).order(2).tolist() == [4, 3, 5, 0, 2, 1, 7, 6]


def test_epochs_may_be_asked_for_in_any_order():
    sampler = Sampler(50, 8, seed=3)
    there = [sampler.order(epoch).copy() for epoch in (0, 1, 2)]
    for epoch in (2, 0, 1):
        np.testing.assert_array_equal(sampler.order(epoch), there[epoch])


def test_unshuffled_is_the_data_s_own_order():
    sampler = Sampler(10, 4, shuffle=False)
    assert [sampler.global_batch(3, step).tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_is_handed_out_cannot_be_spoiled():
    with pytest.raises(ValueError, match="read-only"):
        Sampler(10, 4).order(0)[0] = 5


def test_wrong_arguments_are_refused():
    for arguments in ({"count": -1, "batch": 1}, {"count": 1, "batch": 0}, {"count": 1, "batch": 1, "seed": 2**64}):
        with pytest.raises(ValueError):
            Sampler(**arguments)
    with pytest.raises(IndexError, match="step 3 of an epoch of 3"):
        Sampler(10, 4).global_batch(0, 3)
