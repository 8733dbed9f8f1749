"""Communication hooks: fewer bytes, the same bits on every rank, and a training that still gets there."""

import functools

import numpy as np
import pytest
from crew import crews

import collectives
from mgpu_core import nn, optim
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel
from mgpu_core.parallel.hooks import HOOKS, Bfloat16, BlockInt8, PowerSGD
from mgpu_core.tensor import Tensor

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 240)
INPUTS = (RNG.standard_normal((240, 40)) + LABELS[:, None]).astype(np.float32)
STEPS = 40
SHAPES = [(30, 20), (7,), (3, 5, 11), (1000,), (0,), ()]
COUNT = sum(int(np.prod(shape)) for shape in SHAPES)


def gradients(rank, step, low_rank=False):
    rng = np.random.default_rng([rank, step])
    if low_rank:
        return [rng.standard_normal((30, 1)).astype(np.float32) * np.linspace(1, 2, 20, dtype=np.float32)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def summed(comm, hook, steps, same=True, low_rank=False):
    """What comes of these gradients in each step, flattened; the same gradients in each, if `same`."""
    shapes = [g.shape for g in gradients(0, 0, low_rank)]
    bucketer = collectives.Bucketer(comm, [(shape, "float32") for shape in shapes], bucket_bytes=2500, hook=hook)
    results = []
    for step in range(steps):
        for i, gradient in enumerate(gradients(comm.rank, 0 if same else step, low_rank)):
            bucketer.views[i][...] = gradient
            bucketer.ready(i)
        bucketer.finish()
        results.append(np.concatenate([view.ravel() for view in bucketer.views]))
    return np.array(results), hook.bytes_sent


def train(comm, hook, steps=60):
    rng = np.random.default_rng(1)
    network = nn.Sequential(nn.Linear(40, 32, rng=rng), nn.Tanh(), nn.Linear(32, 4, rng=rng))
    model = DataParallel(network, comm, hook=hook)
    updates = optim.SGD(network.named_parameters(), 0.02, momentum=0.9)
    for step in range(steps):
        mine = np.array_split(np.arange(step * 24, step * 24 + 24) % 240, comm.size)[comm.rank]
        updates.zero_grad()
        (F.cross_entropy(model(Tensor(INPUTS[mine])), LABELS[mine], reduction="sum") / 24).backward()
        model.synchronize()
        updates.step()
    loss = F.cross_entropy(network(Tensor(INPUTS)), LABELS).item()
    return loss, np.concatenate([p.data.ravel() for p in network.parameters()])


def run(comm):
    found = {}
    for name, hook in HOOKS.items():
        found[name] = summed(comm, hook(), STEPS), train(comm, hook())
    found["exact rank"] = summed(comm, PowerSGD(rank=comm.size), 3, same=False, low_rank=True)
    found["not finite"] = not_finite(comm)
    return found


def not_finite(comm):
    found = []
    for hook in (Bfloat16(), BlockInt8()):
        bucketer = collectives.Bucketer(comm, [((300,), "float32")], hook=hook)
        bucketer.views[0][...] = 1
        if comm.rank == 1:
            bucketer.views[0][7] = np.nan
        bucketer.ready(0)
        bucketer.finish()
        found.append(np.isnan(bucketer.views[0]).tolist())
    return found


@functools.cache
def results(size):
    by_rank = crews(run, size)
    return {name: [result[name] for result in by_rank] for name in by_rank[0]}


sizes = pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
compressing = pytest.mark.parametrize("name", ["bf16", "int8", "powersgd"])


@sizes
@pytest.mark.parametrize("name", HOOKS)
def test_every_rank_has_the_same_bits(size, name):
    (first, trained), *others = results(size)[name]
    for sums, other in others:
        np.testing.assert_array_equal(sums[0], first[0])
        np.testing.assert_array_equal(other[1], trained[1])
        assert sums[1] == first[1]


def exact(size):
    return sum(np.concatenate([g.ravel() for g in gradients(rank, 0)]).astype(np.float64) for rank in range(size))


@sizes
def test_one_sum_is_as_exact_as_the_format_says(size):
    total, found = exact(size), {name: results(size)[name][0][0][0][0] for name in HOOKS}
    largest = abs(total).max()
    np.testing.assert_allclose(found["none"], total, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["bf16"], total, rtol=2**-7, atol=size * 2**-8 * 4)
    assert 0 < abs(found["int8"] - total).max() < 1.01 * (size * 5 + largest) / 254


@sizes
@compressing
def test_error_feedback_leaves_nothing_out_for_good(size, name):
    if name == "bf16":
        pytest.skip("bfloat16 rounds without feedback")
    total, (sums, _) = exact(size), results(size)[name][0][0]
    mean = sums[1:].astype(np.float64).mean(axis=0)  # the first step's remainder went into the second
    once = np.linalg.norm(sums[0] - total)
    assert np.linalg.norm(mean - total) < 0.5 * once
    assert np.linalg.norm(mean - total) < 0.35 * np.linalg.norm(total)


@sizes
def test_powersgd_is_exact_for_matrices_of_that_rank(size):
    sums, _ = results(size)["exact rank"][0]
    for step, found in enumerate(sums[1:], 1):
        total = sum(gradients(rank, step, low_rank=True)[0] for rank in range(size)).ravel()
        np.testing.assert_allclose(found, total, rtol=1e-3, atol=1e-3 * abs(total).max())


@sizes
def test_bytes_are_counted(size):
    sent = {name: results(size)[name][0][0][1] for name in HOOKS}
    plain = STEPS * 2 * (size - 1) / size * 4 * COUNT
    assert plain <= sent["none"] < 1.1 * plain  # gradients start on cache lines
    assert sent["bf16"] == pytest.approx(sent["none"] / 2, rel=0.01)
    assert plain / 4 < sent["int8"] < 0.5 * sent["none"]  # small buckets: whole blocks for each rank
    assert sent["powersgd"] < sent["none"]


@sizes
@compressing
def test_training_gets_there(size, name):
    loss, reference = (results(size)[hook][0][1][0] for hook in (name, "none"))
    print(f"{name} on {size} ranks: loss {loss:.4f}, all-reduced {reference:.4f}")
    assert loss < 1.15 * reference + 0.02


@sizes
def test_what_is_not_finite_is_not_hidden(size):
    for bf16, int8 in results(size)["not finite"]:
        assert bf16 == [i == 7 for i in range(300)]
        assert int8[7] and not all(int8)


def test_what_is_refused():
    with pytest.raises(ValueError, match="rank from 1"):
        PowerSGD(rank=0)
    with pytest.raises(ValueError, match="hooks sum"):
        collectives.Bucketer(None, [], op="avg", hook=Bfloat16())
