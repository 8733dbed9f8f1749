"""The cut is the best there is; measuring leaves no trace."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core import nn
from mgpu_core.parallel import balance
from mgpu_core.parallel.balance import cut, measure
from mgpu_core.tensor import Tensor, record


def sums(costs, parts):
    return [sum(costs[part]) for part in parts]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=9).flatmap(
        lambda c: st.tuples(st.just(c), st.integers(1, len(c)))
    )
)
def test_no_contiguous_partition_is_better(case):
    costs, stages = case
    parts = cut(costs, stages)
    assert [i for part in parts for i in range(len(costs))[part]] == list(range(len(costs)))
    assert len(parts) == stages and all(part.start < part.stop for part in parts)

    def badness(sizes):
        return max(sizes), sum(size**2 for size in sizes)

    others = itertools.combinations(range(1, len(costs)), stages - 1)
    edges = [[0, *inner, len(costs)] for inner in others]
    best = min(badness([sum(costs[a:b]) for a, b in itertools.pairwise(e)]) for e in edges)
    assert badness(sums(costs, parts)) == best


def test_examples():
    assert sums([1] * 8, cut([1] * 8, 4)) == [2, 2, 2, 2]
    assert sums([1, 1, 1, 5, 2, 2], cut([1, 1, 1, 5, 2, 2], 3)) == [3, 5, 4]
    assert sums([1, 1, 1, 1, 10], cut([1, 1, 1, 1, 10], 3)) == [2, 2, 10]  # not [1, 3, 10]
    assert cut([0.0, 0.0], 2) == [slice(0, 1), slice(1, 2)]
    assert cut([0.3, 0.1, 0.2], 1) == [slice(0, 3)]


def test_a_large_model_is_cut_in_no_time():
    costs = np.random.default_rng(0).exponential(size=200).tolist()
    assert max(sums(costs, cut(costs, 16))) >= sum(costs) / 16


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_stages_without_a_layer_are_refused(stages):
    with pytest.raises(ValueError, match=f"3 layers cannot be cut into {stages} stages"):
        cut([1, 2, 3], stages)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(cost):
    with pytest.raises(ValueError, match="finite and not negative"):
        cut([1.0, cost], 2)


class Split(nn.Module):
    """(N, D) to a pair, for `Join` to add."""

    def forward(self, x):
        return x, x * 2.0


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


def test_measuring_leaves_nothing_behind():
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Embedding(9, 4, rng=rng), nn.Flatten(), nn.BatchNorm1d(12), Split(), Join(), nn.Dropout(0.5, rng=rng),
        nn.Linear(12, 2, rng=rng),
    )  # fmt: skip
    model[6].bias.grad = np.ones(2, np.float32)
    before = {name: array.copy() for name, array in model.state_dict().items()}
    costs = measure(model, Tensor(rng.integers(0, 9, (5, 3))), repeats=2)
    assert len(costs) == len(model) and all(cost > 0 for cost in costs)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert model[6].bias.grad.tolist() == [1, 1]
    assert model[6].weight.grad is None


class Takes(nn.Module):
    """Takes some seconds of a clock that only such layers move, and once a thousand more."""

    def __init__(self, clock, forward, backward):
        self.clock, self.times, self.delay = clock, (forward, backward), 1000.0

    def forward(self, x):
        self.clock.now += self.times[0] + self.delay
        self.delay = 0.0

        def vjp(gradient):
            self.clock.now += self.times[1]
            return gradient

        return record(x.data + 0.0, (x, vjp))


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize("repeats", [1, 4])
def test_costs_are_the_usual_seconds_of_forward_and_backward(monkeypatch, repeats):
    """Not those of the first time, when kernels are compiled."""
    clock = Clock()
    monkeypatch.setattr(balance, "time", clock)
    model = nn.Sequential(
        nn.Linear(2, 2, rng=np.random.default_rng(0)), Takes(clock, 1.0, 2.5), Takes(clock, 0.5, 0.25)
    )
    assert measure(model, Tensor(np.ones((3, 2), np.float32)), repeats=repeats) == [0.0, 3.5, 0.75]
