"""Data parallel training on any number of ranks is the training of one process."""

import functools
import re

import numpy as np
import pytest
from crew import crews

import collectives
from mgpu_core import nn, optim, random
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel
from mgpu_core.tensor import Tensor

BATCH = 16  # does not divide by 3
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 200)
IMAGES = 0.5 * RNG.standard_normal((200, 1, 8, 8)) + LABELS[:, None, None, None]


def network(dtype, *, norm=False, dropout=0.0, seed=1):
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1, rng=rng, dtype=dtype),
        *([nn.BatchNorm2d(5, dtype=dtype)] if norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *([nn.Dropout(dropout, rng=rng)] if dropout else []),
        nn.Linear(80, 4, rng=rng, dtype=dtype),
    )


def train(comm, dtype, *, steps=10, shares=None, order=None, **options):
    """Losses of `steps` steps, and the parameters and buffers after them."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    module = network(dtype, **options)
    if options.get("norm") and comm is not None:
        nn.synchronize_batch_norm(module, comm.all_reduce)
    model = DataParallel(module, comm)
    optimizer = optim.SGD(module.named_parameters(), lr=0.05, momentum=0.9)
    loader = Loader((IMAGES.astype(dtype), LABELS), Sampler(200, BATCH, seed=7), rank=rank, size=size, shares=shares)
    losses = []
    for step in range(steps):
        batch = loader.read(*divmod(step, loader.sampler.steps))
        images, labels = batch.arrays
        if order is not None:  # another order of the samples: the same sums, rounded otherwise
            shuffled = np.random.default_rng(order + step).permutation(len(labels))
            images, labels = images[shuffled], labels[shuffled]
        optimizer.zero_grad()
        with random.batch(seed=7, step=step, samples=range(batch.start, batch.start + len(labels))):
            loss = F.cross_entropy(model(Tensor(images)), labels, reduction="sum") / batch.global_count
        loss.backward()
        model.synchronize()
        optimizer.step()
        share = np.array(float(loss))
        losses.append(float(share if comm is None else comm.all_reduce(share)))
    return np.array(losses), {name: array.copy() for name, array in module.state_dict().items()}


def distance(one, other):
    """The largest difference of losses and of parameters, relative to the largest value of each."""
    pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in one[1])]
    return max(float(np.max(abs(a.astype(float) - b)) / np.max(abs(b.astype(float)))) for a, b in pairs)


NETWORKS = {"plain": {}, "batch norm": {"norm": True}, "dropout": {"dropout": 0.3}}
SHARES = {2: [[1, 1], [3, 1]], 3: [[1, 1, 1], [1, 0, 2]]}
SCENARIOS = []


def scenario(function):
    """What all ranks do once, for as many tests as look at the results."""
    SCENARIOS.append(function)
    return function


def every_scenario(comm):
    return {function.__name__: function(comm) for function in SCENARIOS}


@functools.cache
def results(size):
    """Of every scenario by name, each a list by rank."""
    by_rank = crews(every_scenario, size)
    return {name: [result[name] for result in by_rank] for name in by_rank[0]}


@scenario
def trained(comm):
    even, uneven = SHARES[comm.size]
    float64 = {
        (name, cut): train(comm, "float64", shares=shares, **options)
        for name, options in NETWORKS.items()
        for cut, shares in (("even", even), ("uneven", uneven))
    }
    return float64 | {"float32": train(comm, "float32", shares=even)}


def fifty_steps(comm):
    return [train(comm, dtype, steps=50, shares=SHARES[comm.size][0]) for dtype in ("float64", "float32")]


def check_alike(by_rank, reference):
    first, *others = by_rank
    assert distance(first, reference) < 1e-10
    for other in others:
        for name, array in first[1].items():
            np.testing.assert_array_equal(other[1][name], array)  # ranks stay alike to the last bit


@functools.cache
def drift(**options):
    """One process's float32 results, and how far others come from them that sum in other orders."""
    reference = train(None, "float32", **options)
    return reference, max(distance(train(None, "float32", order=n, **options), reference) for n in (10, 20, 30))


def check_drift(by_rank, **options):
    reference, permuted = drift(**options)
    for result in by_rank:
        assert distance(result, reference) <= 3 * permuted


@pytest.mark.parametrize("size", [2, 3])
def test_float32_drifts_no_more_than_another_order_of_summation(size):
    check_drift([result["float32"] for result in results(size)["trained"]])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_fifty_steps_follow_one_process(size):
    reference = train(None, "float64", steps=50)
    assert reference[0][-5:].mean() < 0.5 * reference[0][0]  # it learns
    in_float64, in_float32 = zip(*collectives.spawn(fifty_steps, size))
    check_alike(in_float64, reference)
    check_drift(in_float32, steps=50)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("cut", ["even", "uneven"])
def test_every_network_and_cut_of_the_batch_follows_one_process(size, name, cut):
    reference = train(None, "float64", **NETWORKS[name])
    check_alike([result[name, cut] for result in results(size)["trained"]], reference)


def test_without_ranks_nothing_is_communicated():
    for comm in (None, type("Alone", (), {"size": 1})()):
        model = DataParallel(network("float64"), comm)
        model(Tensor(IMAGES[:3])).sum().backward()
        assert model.synchronize() == 0.0
        model.average_buffers()


@scenario
def starts(comm):
    module = network("float32", norm=True, seed=comm.rank)
    module[1].running_mean.data[...] = comm.rank
    before = {name: array.copy() for name, array in module.state_dict().items()}
    DataParallel(module, comm)
    return before, module.state_dict()


@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_start_from_rank_0s_model(size):
    wanted = results(size)["starts"][0][0]
    for _, state in results(size)["starts"]:
        for name, array in wanted.items():
            np.testing.assert_array_equal(state[name], array)


def gradients(comm, mine, pieces):
    """Of the summed loss over the samples `mine`, taken in several pieces."""
    module = network("float64")
    model = DataParallel(module, comm)
    *early, last = np.array_split(mine, pieces)
    for _ in range(2):  # the second step has the buckets in their final order
        module.zero_grad()
        with model.no_sync():
            for piece in early:
                F.cross_entropy(model(Tensor(IMAGES[piece])), LABELS[piece], reduction="sum").backward()
        F.cross_entropy(model(Tensor(IMAGES[last])), LABELS[last], reduction="sum").backward()
        model.synchronize()
    return {name: p.grad.copy() for name, p in module.named_parameters()}


@scenario
def accumulated(comm):
    return gradients(comm, np.array_split(np.arange(48), comm.size)[comm.rank], 3)


@pytest.mark.parametrize("size", [2, 3])
def test_accumulated_pieces_are_the_whole_batch(size):
    whole = gradients(None, np.arange(48), 1)
    for result in results(size)["accumulated"]:
        for name in whole:
            np.testing.assert_allclose(result[name], whole[name], rtol=1e-12, atol=1e-12)


@scenario
def twice(comm):
    model = DataParallel(network("float32"), comm)
    try:
        for _ in range(2):
            model(Tensor(IMAGES[:2].astype(np.float32))).sum().backward()
    except RuntimeError as error:
        model.synchronize()
        return str(error)


def test_a_second_backward_without_no_sync_is_refused_by_name():
    for message in results(2)["twice"]:
        assert re.search(r"layers\.4\.\w+ .*no_sync", message)


class TwoHeads(nn.Module):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.heads = [nn.Linear(3, 2, rng=rng, dtype=np.float64) for _ in range(2)]

    def forward(self, x, head):
        return self.heads[head](x)


def head_gradients(comm, uses):
    """After steps in which the ranks use these heads: [for each step (head of rank 0, head of rank 1, ...)]."""
    module = TwoHeads()
    model = DataParallel(module, comm)
    for use in uses:
        module.zero_grad()
        model(Tensor(np.full((1, 3), 1.0 + comm.rank)), use[comm.rank]).sum().backward()
        model.synchronize()
    return [layer.weight.grad[0, 0] for layer in module.heads], model.unused


@scenario
def unused(comm):
    return [head_gradients(comm, [(1, 1, 1), last]) for last in [(0, 1, 1), (0, 0, 0)]]


def test_parameters_that_some_ranks_or_none_use_count_as_zero():
    names = [["heads.0.weight", "heads.0.bias"], ["heads.1.weight", "heads.1.bias"]]
    for rank, (some, none) in enumerate(results(2)["unused"]):
        assert some == ([1, 2], names[1 - rank])
        assert none == ([3, 0], names[1])


@scenario
def frozen(comm):
    module = TwoHeads()
    module.heads[0].weight.requires_grad = False
    model = DataParallel(module, comm)
    model(Tensor(np.ones((1, 3))), 0).sum().backward()
    model.synchronize()
    return module.heads[0].weight.grad, module.heads[0].bias.grad.tolist()


def test_frozen_parameters_are_left_alone():
    assert results(2)["frozen"] == [(None, [2, 2])] * 2


@scenario
def averaged(comm):
    module = network("float64", norm=True)
    model = DataParallel(module, comm)
    model(Tensor(IMAGES[comm.rank * 10 : comm.rank * 10 + 10]))
    own = module[1].running_mean.data.copy()
    model.average_buffers()
    return own, module[1].running_mean.data


@pytest.mark.parametrize("size", [2, 3])
def test_local_batch_norm_statistics_can_be_averaged(size):
    mean = np.mean([own for own, _ in results(size)["averaged"]], axis=0)
    for _, average in results(size)["averaged"]:
        np.testing.assert_allclose(average, mean, rtol=1e-14)
