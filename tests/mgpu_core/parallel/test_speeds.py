"""A batch split by speed: faster, settled soon, the same mathematics."""

import functools
import time

import numpy as np
import pytest
from crew import crews
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core import nn, optim, random
from mgpu_core.data import Loader, Sampler, split
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel
from mgpu_core.parallel.speeds import Balance, parse_speeds, rebalance
from mgpu_core.tensor import Tensor

BATCH, COUNT = 32, 480
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, COUNT)
IMAGES = RNG.standard_normal((COUNT, 12)) + 2 * np.eye(12)[LABELS]


def simulated(speeds, *, shares, exchanges, noise=0.0, count=64, overhead=0.0, seed=0):
    """The shares after each exchange of ranks that do so many samples a second, with some noise."""
    rng, means, seen = np.random.default_rng(seed), np.zeros((len(speeds), 2)), []
    for _ in range(exchanges):
        parts = np.array(split(count, shares), float)
        seconds = np.where(parts > 0, overhead + parts / speeds, 0.0) * (1 + noise * rng.uniform(-1, 1, len(speeds)))
        means = 0.5 * means + np.stack([parts, seconds], axis=1)
        shares = rebalance(shares, means, count, 0.1) or shares
        seen.append(split(count, shares))
    return seen


speeds_of_ranks = st.lists(st.floats(0.2, 5), min_size=1, max_size=6)


@given(speeds_of_ranks, st.floats(0, 1))
def test_shares_come_near_the_best_and_stay_there(speeds, overhead):
    count = 600
    seen = simulated(np.array(speeds), shares=[1] * len(speeds), exchanges=12, count=count, overhead=overhead)
    assert seen[-1] == seen[-4]
    longest = max(overhead + n / v for n, v in zip(seen[-1], speeds))
    best = overhead + count / sum(speeds)
    assert longest < 1.25 * best + 1 / min(speeds)


def test_noise_moves_no_samples():
    seen = simulated(np.array([3.0, 1.0]), shares=[1, 1], exchanges=40, noise=0.04)
    assert len({tuple(parts) for parts in seen}) <= 2
    assert all(abs(parts[0] - 48) <= 3 for parts in seen[2:])


def test_a_rank_without_samples_keeps_its_share():
    assert rebalance([1, 0, 1], [(10, 1.0), (0, 0.0), (10, 3.0)], 60, 0.1) == [1.5, 0, 0.5]
    assert rebalance([1, 1], [(0, 0.0), (0, 0.0)], 60, 0.1) is None


def test_speeds_are_written_as_numbers_or_auto():
    assert parse_speeds("auto", 3) is None
    assert parse_speeds("3,1.5, 0", 3) == [3, 1.5, 0]
    for text, told in [("3", "2 ranks need 2 speeds"), ("fast,slow", "auto, or a number"), ("0,0", "one of them more"),
                       ("1,-1", "from 0"), ("1,nan", "from 0"), ("inf,1", "from 0")]:  # fmt: skip
        with pytest.raises(ValueError, match=told):
            parse_speeds(text, 2)


def network():
    rng = np.random.default_rng(1)
    return nn.Sequential(nn.Linear(12, 8, rng=rng, dtype="float64"), nn.ReLU(), nn.Dropout(0.2, rng=rng),
                         nn.Linear(8, 4, rng=rng, dtype="float64"))  # fmt: skip


def train(comm, speeds=(), slow=0.0, epochs=3):
    """Losses, the parts that this rank had, and what the balance did. `slow`: seconds a sample on the last rank."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    model = DataParallel(network(), comm)
    optimizer = optim.SGD(model.model.parameters(), lr=0.05, momentum=0.9)
    loader = Loader((IMAGES, LABELS), Sampler(COUNT, BATCH, seed=7), rank=rank, size=size)
    balance = Balance(loader, comm, None if speeds == "auto" else speeds or [1] * size, every=4)
    losses, parts = [], []
    for epoch in range(epochs):
        with loader.epoch(epoch) as batches:
            for batch in batches:
                images, labels = batch.arrays
                optimizer.zero_grad()
                places = range(batch.start, batch.start + len(labels))
                began = time.perf_counter()
                with random.batch(seed=7, step=epoch * loader.sampler.steps + batch.step, samples=places):
                    loss = F.cross_entropy(model(Tensor(images)), labels, reduction="sum") / batch.global_count
                loss.backward()
                per_sample = 0.001 + slow * (rank == size - 1)
                time.sleep(per_sample * len(labels) if size > 1 else 0)
                seconds = time.perf_counter() - began
                model.synchronize()
                optimizer.step()
                balance.step(batch, seconds)
                share = np.array(float(loss))
                losses.append(float(share if comm is None else comm.all_reduce(share)))
                parts.append(len(labels))
    return losses, parts, balance.changes, balance.shares


def every_way(comm):
    return {
        "auto": train(comm, "auto", slow=0.002),
        "given": train(comm, [3, 1, 0][: comm.size]),
    }


@functools.cache
def results(size):
    return crews(every_way, size)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["auto", "given"])
def test_losses_are_those_of_one_process_and_every_sample_is_used_once(size, way):
    wanted = train(None)[0]
    for losses, *_ in (result[way] for result in results(size)):
        np.testing.assert_allclose(losses, wanted, rtol=1e-10)
    assert (np.sum([result[way][1] for result in results(size)], axis=0) == BATCH).all()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_slow_rank_gets_less(size):
    by_rank = [result["auto"] for result in results(size)]
    assert all(result[2:] == by_rank[0][2:] for result in by_rank)  # all ranks have computed the same
    even = split(BATCH, [1] * size)
    last = by_rank[-1][1]
    assert last[0] == even[-1] and last[-1] < 0.7 * even[-1]


def test_a_given_split_is_kept_to():
    (_, first, changes, shares), (_, second, *_) = (result["given"] for result in results(2))
    assert set(first) == {24} and set(second) == {8} and changes == 0 and shares == [3, 1]
    assert set(results(3)[2]["given"][1]) == {0}


def test_speeds_must_suit_the_ranks():
    loader = Loader((IMAGES,), Sampler(COUNT, BATCH), size=2)
    with pytest.raises(ValueError, match="2 ranks need 2 speeds"):
        Balance(loader, None, [1, 2, 3])
