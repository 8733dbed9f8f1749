"""Backward in halves gives the gradients of backward in one, to the last bit and at the right time."""

import numpy as np
import pytest

from mgpu_core import nn
from mgpu_core.nn import functional as F
from mgpu_core.parallel.weight_gradients import WeightGradients
from mgpu_core.tensor import Tensor, backward

RNG = np.random.default_rng(0)


def networks():
    """(name, module, input) of several kinds."""
    shared = nn.Linear(4, 4, rng=RNG)
    yield "linear", nn.Linear(4, 3, rng=RNG), RNG.standard_normal((5, 4), np.float32)
    yield "a layer used twice", nn.Sequential(shared, nn.Tanh(), shared), RNG.standard_normal((5, 4), np.float32)
    yield "norms", nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)), RNG.standard_normal((5, 4), np.float32)
    yield "convolution", nn.Conv2d(2, 3, 3, rng=RNG), RNG.standard_normal((2, 2, 5, 5), np.float32)
    yield "nothing to train", nn.ReLU(), RNG.standard_normal((5, 4), np.float32)


@pytest.mark.parametrize("name, module, x", list(networks()), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("needed", [True, False], ids=["input needs gradient", "input needs none"])
def test_both_halves_make_the_whole(name, module, x, needed):
    if name == "nothing to train" and not needed:
        return
    whole, halves = Tensor(x, requires_grad=needed), Tensor(x, requires_grad=needed)
    output = module(whole)
    gradient = RNG.standard_normal(output.shape).astype(np.float32)
    module.zero_grad()
    backward([output], [gradient])
    expected = {key: p.grad.copy() for key, p in module.named_parameters()}

    module.zero_grad()
    output = module(halves)
    later = WeightGradients([output], [halves])
    backward([output], [gradient])
    if needed:
        np.testing.assert_array_equal(halves.grad, whole.grad)
    assert not any(p.grad.any() for p in module.parameters())  # nothing yet
    later.backward()
    for key, p in module.named_parameters():
        np.testing.assert_array_equal(p.grad, expected[key], err_msg=key)


def test_parameters_announce_their_gradients_in_the_second_half_once():
    layer = nn.Linear(3, 3, rng=RNG)
    announced = []
    for name, parameter in layer.named_parameters():
        parameter.on_grad_ready(lambda _, name=name: announced.append(name))
    x = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    y = layer(layer(x))
    later = WeightGradients([y], [x])
    backward([y], [np.ones((2, 3))])
    assert announced == []
    later.backward()
    assert sorted(announced) == ["bias", "weight"]


def test_several_outputs_and_an_output_that_is_the_input():
    layer = nn.Linear(3, 3, rng=RNG)
    x = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    y = layer(x)
    outputs = [y, F.relu(layer(x)), x]
    gradients = [RNG.standard_normal((2, 3)).astype(np.float32) for _ in outputs]
    later = WeightGradients(outputs, [x])
    backward(outputs, gradients)
    later.backward()
    to_y = gradients[0] + gradients[1] * (y.data > 0)
    np.testing.assert_allclose(x.grad, to_y @ layer.weight.data + gradients[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.bias.grad, to_y.sum(0), rtol=1e-5, atol=1e-6)
