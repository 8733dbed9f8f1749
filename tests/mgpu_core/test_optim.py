"""Optimisers against the papers' formulas, spelled out again in float64, and against PyTorch where it is installed."""

import numpy as np
import pytest

from mgpu_core import Tensor, optim
from mgpu_core.autograd import cpu, portable
from mgpu_core.nn import Parameter

SGD_OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.3},
    {"weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
]
ADAMW_OPTIONS = [{}, {"weight_decay": 0.0}, {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.3}]


def sgd(p, gradients, rates, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    v = None
    for g, lr in zip(gradients, rates):
        g = g + weight_decay * p
        v = g if v is None else momentum * v + (1 - dampening) * g
        p = p - lr * (g + momentum * v if nesterov else v if momentum else g)
    return p


def adamw(p, gradients, rates, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates), start=1):
        p = p - lr * weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


def lars(p, gradients, rates, momentum=0.9, weight_decay=0.0, trust=0.001):
    v = np.zeros_like(p)
    for g, lr in zip(gradients, rates):
        rate, decay = 1.0, 0.0
        if p.ndim > 1:
            decay = weight_decay
            size, slope = np.sqrt((p**2).sum()), np.sqrt((g**2).sum())
            rate = trust * size / (slope + decay * size) if size * slope else 1.0
        v = momentum * v + lr * rate * (g + decay * p)
        p = p - v
    return p


CASES = [(optim.SGD, sgd, options) for options in SGD_OPTIONS] + [
    (optim.AdamW, adamw, options) for options in ADAMW_OPTIONS
]
CASES += [(optim.LARS, lars, options) for options in ({}, {"momentum": 0.5, "weight_decay": 0.1, "trust": 0.02})]
RATES = [0.1, 0.1, 0.05, 0.2, 0.01]


def name(value):
    """How a case is called in the list of tests: the same in every process."""
    return getattr(value, "__name__", str(value))


def run(kind, options, start, gradients, dtype):
    parameters = [Tensor(array.astype(dtype), requires_grad=True) for array in start]
    optimizer = kind(parameters, RATES[0], **options)
    for step, lr in enumerate(RATES):
        optimizer.lr = lr
        for parameter, per_step in zip(parameters, gradients):
            parameter.grad = per_step[step].astype(dtype)
        optimizer.step()
    return [parameter.data for parameter in parameters]


def problem():
    rng = np.random.default_rng(0)
    start = [rng.standard_normal(shape) for shape in [(3, 4), (5,), (), (0, 2)]]
    return start, [rng.standard_normal((len(RATES), *array.shape)) for array in start]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind, reference, options", CASES, ids=name)
def test_the_formulas(kind, reference, options, dtype):
    start, gradients = problem()
    for array, per_step, result in zip(start, gradients, run(kind, options, start, gradients, dtype)):
        expected = reference(array, per_step, RATES, **options)
        assert result.dtype == dtype
        tolerance = 1e-12 if dtype == np.float64 else 1e-5
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind, reference, options", CASES, ids=name)
def test_the_portable_kernels_do_the_same(kind, reference, options, monkeypatch):
    start, gradients = problem()
    compiled = run(kind, options, start, gradients, np.float64)
    monkeypatch.setattr(cpu, "sgd", portable.sgd)
    monkeypatch.setattr(cpu, "adamw", portable.adamw)
    for one, other in zip(run(kind, options, start, gradients, np.float64), compiled):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind, reference, options", [case for case in CASES if case[0] is not optim.LARS], ids=name)
def test_pytorch(kind, reference, options):
    torch = pytest.importorskip("torch")
    start, gradients = problem()
    theirs = [torch.tensor(array, requires_grad=True) for array in start]
    optimizer = getattr(torch.optim, kind.__name__)(theirs, RATES[0], **options)
    for step, lr in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = lr
        for parameter, per_step in zip(theirs, gradients):
            parameter.grad = torch.tensor(per_step[step])
        optimizer.step()
    for own, other in zip(run(kind, options, start, gradients, np.float64), theirs):
        np.testing.assert_allclose(own, other.detach().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind, reference, options", CASES, ids=name)
def test_a_run_goes_on_from_its_state(kind, reference, options):
    start, gradients = problem()
    parameters = [(f"p{i}", Tensor(array.copy(), requires_grad=True)) for i, array in enumerate(start)]

    def steps(optimizer, which):
        for step in which:
            optimizer.lr = RATES[step]
            for (_, parameter), per_step in zip(parameters, gradients):
                parameter.grad = per_step[step]
            optimizer.step()

    first = kind(parameters, 0.0, **options)
    steps(first, range(2))
    saved = {name: array.copy() for name, array in first.state_dict().items()}
    kinds = set(first.state)
    assert kinds == {"m", "v"} if kind is optim.AdamW else kinds <= {"momentum"}
    assert set(saved) == {"steps"} | {f"{k}.p{i}" for k in kinds for i in range(4)}
    second = kind(parameters, 0.0, **options)
    second.load_state_dict(saved)
    assert second.steps == 2
    steps(second, range(2, 5))
    for (_, parameter), expected in zip(parameters, run(kind, options, start, gradients, np.float64)):
        np.testing.assert_array_equal(parameter.data, expected)


def test_parameters_are_changed_where_they_are():
    flat = np.ones(6)
    p = Tensor(np.zeros((2, 3)), requires_grad=True)
    p.data = flat.reshape(2, 3)
    optimizer = optim.SGD([p], 0.5)
    p.sum().backward()
    optimizer.step()
    np.testing.assert_array_equal(flat, 0.5)
    optimizer.zero_grad()
    np.testing.assert_array_equal(p.grad, 0)


def test_a_parameter_without_a_gradient_has_gradient_zero_and_a_frozen_one_stays():
    used, unused, frozen = (Tensor(np.ones(2), requires_grad=True) for _ in range(3))
    frozen.requires_grad = False
    optimizer = optim.SGD([used, unused, frozen], 0.1, weight_decay=0.5)
    used.sum().backward()
    optimizer.step()
    np.testing.assert_allclose(used.data, 1 - 0.1 * 1.5)
    np.testing.assert_allclose(unused.data, 1 - 0.1 * 0.5)
    np.testing.assert_array_equal(frozen.data, 1)


def test_there_may_be_nothing_to_train():
    for optimizer in (optim.SGD([], 0.1, momentum=0.9), optim.AdamW([])):
        optimizer.zero_grad()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.steps == 1


def test_lars_treats_a_layer_alike_at_every_scale():
    """Weights and gradients of any size move by the same share of the weights' norm."""
    for size, slope in [(1.0, 1.0), (1e-3, 10.0), (50.0, 1e-6)]:
        p = Tensor(np.full((2, 3), size), requires_grad=True)
        p.grad = np.full((2, 3), slope)
        optim.LARS([p], 2.0, trust=0.01).step()
        np.testing.assert_allclose(p.data, 0.98 * size)


def test_lars_refuses_a_part_of_a_parameter():
    whole, part = Parameter(np.ones((2, 2))), Parameter(np.ones((2, 2)), sharded_over=("tensor",))
    with pytest.raises(ValueError, match="sharded over 'tensor'"):
        optim.LARS([("whole", whole), ("part", part)], 0.1)


def test_what_is_refused():
    p = Tensor(np.zeros(2), requires_grad=True)
    with pytest.raises(ValueError, match="Nesterov"):
        optim.SGD([p], 0.1, nesterov=True)
    optimizer = optim.AdamW([p])
    state = optimizer.state_dict()
    with pytest.raises(KeyError, match=r"missing \['m.0'\]"):
        optimizer.load_state_dict({name: array for name, array in state.items() if name != "m.0"})
    with pytest.raises(ValueError, match=r"v.0 has shape \(3,\)"):
        optimizer.load_state_dict({**state, "v.0": np.zeros(3)})
    p.data = np.zeros((4, 4)).T[::2, 0]
    p.grad = np.zeros(2)
    with pytest.raises(ValueError, match="C-contiguous"):
        optim.SGD([p], 0.1).step()
