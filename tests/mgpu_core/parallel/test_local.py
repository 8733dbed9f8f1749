"""Local SGD is synchronous training where mathematics says so, and by hand where it does not."""

import functools
from functools import partial

import numpy as np
import pytest
from crew import crews

from mgpu_core import nn, optim
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel.local import LocalSGD
from mgpu_core.tensor import Tensor

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 200)
IMAGES = RNG.standard_normal((200, 12)) + 4 * np.eye(12)[LABELS]
BATCH = 16  # does not divide by 3
SHARES = {2: [3, 1], 3: [1, 0, 2]}
NESTEROV = partial(optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def network(seed=0):
    rng = np.random.default_rng(seed)
    return nn.Sequential(nn.Linear(12, 7, rng=rng, dtype="float64"), nn.ReLU(),
                         nn.Linear(7, 4, rng=rng, dtype="float64"))  # fmt: skip


def mean_loss(model, images, labels):
    return F.cross_entropy(model(Tensor(images)), labels, reduction="sum") / len(labels)


def loader(rank, size, shares=None):
    return Loader((IMAGES, LABELS), Sampler(200, BATCH, seed=7), rank=rank, size=size, shares=shares)


def local(comm, inner, steps=20, shares=None, **options):
    """Parameters after some steps."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    module = network(seed=rank)
    model = LocalSGD(module, comm, inner(module.named_parameters()), **options)
    reader = loader(rank, size, shares)
    for step in range(steps):
        images, labels = reader.read(*divmod(step, reader.sampler.steps)).arrays
        model.zero_grad()
        if len(labels):
            mean_loss(model, images, labels).backward()
        model.step(len(labels))
    model.synchronize()
    assert model.steps == 0
    return [p.data.copy() for p in module.parameters()]


def by_hand(size, inner, steps, every, outer, shares=None):
    """The same in one process: copies of the network in turn."""
    models = [network() for _ in range(size)]
    inners = [inner(model.named_parameters()) for model in models]
    start = [Tensor(p.data.copy(), requires_grad=True) for p in models[0].parameters()]
    outer = outer([(str(i), tensor) for i, tensor in enumerate(start)])
    counts = np.zeros(size)
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inners)):
            images, labels = loader(rank, size, shares).read(*divmod(step, 13)).arrays
            counts[rank] += len(labels)
            if len(labels):
                optimizer.zero_grad()
                mean_loss(model, images, labels).backward()
                optimizer.step()
        if (step + 1) % every and step + 1 < steps:
            continue
        for i, tensor in enumerate(start):
            now = [list(model.parameters())[i].data for model in models]
            tensor.grad = sum(n * (tensor.data - x) for n, x in zip(counts, now)) / counts.sum()
        outer.step()
        for model in models:
            for tensor, p in zip(start, model.parameters()):
                p.data[...] = tensor.data
        counts[:] = 0
    return [tensor.data for tensor in start]


SGD = partial(optim.SGD, lr=0.1)
ADAMW = partial(optim.AdamW, lr=0.01)
CASES = {
    "every step": (SGD, {"every": 1}),
    "local": (SGD, {"every": 5}),
    "a round that ends early": (SGD, {"every": 7}),
    "DiLoCo": (ADAMW, {"every": 4, "outer": NESTEROV}),
}


def every_case(comm):
    return {
        (name, cut): local(comm, inner, shares=SHARES[comm.size] if cut == "uneven" else None, **options)
        for name, (inner, options) in CASES.items()
        for cut in ("even", "uneven")
    }


@functools.cache
def results(size):
    return crews(every_case, size)


def check(by_rank, wanted, tolerance=1e-10):
    for parameters in by_rank:
        for got, want, first in zip(parameters, wanted, by_rank[0], strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.max(abs(want)))
            np.testing.assert_array_equal(got, first)  # ranks are alike to the last bit


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_do_what_copies_in_one_process_do(name, cut, size):
    inner, options = CASES[name]
    arguments = {"outer": partial(optim.SGD, lr=1.0), **options}
    wanted = by_hand(size, inner, 20, shares=SHARES[size] if cut == "uneven" else None, **arguments)
    check([result[name, cut] for result in results(size)], wanted)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("cut", ["even", "uneven"])
def test_meeting_after_every_step_is_synchronous_training(size, cut):
    module = network()
    optimizer = SGD(module.named_parameters())
    for step in range(20):
        images, labels = loader(0, 1).read(*divmod(step, 13)).arrays
        optimizer.zero_grad()
        mean_loss(module, images, labels).backward()
        optimizer.step()
    check([result["every step", cut] for result in results(size)], [p.data for p in module.parameters()])


def test_one_rank_moves_where_its_own_steps_led():
    alone = local(None, SGD, every=3)
    check([alone], by_hand(1, SGD, 20, 3, partial(optim.SGD, lr=1.0)))


def test_a_round_has_a_step():
    module = network()
    with pytest.raises(ValueError, match="at least one step; got every=0"):
        LocalSGD(module, None, SGD(module.named_parameters()), every=0)
