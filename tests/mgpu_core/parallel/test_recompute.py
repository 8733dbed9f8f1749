"""Recomputation changes the memory a step needs, and not one bit of what it computes."""

import tracemalloc

import numpy as np
import pytest

from mgpu_core import nn, optim, random
from mgpu_core.autograd import no_grad
from mgpu_core.nn import functional as F
from mgpu_core.parallel.recompute import recompute
from mgpu_core.parallel.weight_gradients import WeightGradients
from mgpu_core.tensor import Tensor, backward

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((6, 2, 6, 6))
LABELS = RNG.integers(0, 3, 6)


class Network(nn.Module):
    """Two convolutional blocks with batch norm and dropout, the second of them used twice; then a linear layer."""

    def __init__(self, dtype, again):
        rng = np.random.default_rng(1)
        self.blocks = [
            nn.Sequential(
                nn.Conv2d(2, 2, 3, padding=1, rng=rng, dtype=dtype),
                nn.BatchNorm2d(2, dtype=dtype),
                nn.ReLU(),
                nn.Dropout(0.3, rng=rng),
            )
            for _ in range(2)
        ]
        self.head = nn.Linear(72, 3, rng=rng, dtype=dtype)
        self.again = again

    def run(self, function, x):
        return recompute(function, x) if self.again == "each" else function(x)

    def body(self, x):
        for block in (self.blocks[0], self.blocks[1], self.blocks[1]):
            x = self.run(block, x)
        return x

    def forward(self, x):
        nested = recompute(self.body, x) if self.again in ("all", "nested") else self.body(x)
        return self.head(nested.flatten(1))


def train(dtype, again, steps=4):
    network = Network(dtype, again)
    if again == "nested":
        network.run = recompute
    announced = []
    for name, parameter in network.named_parameters():
        parameter.on_grad_ready(lambda _, name=name: announced.append(name))
    optimizer = optim.SGD(network.named_parameters(), 0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with random.batch(seed=3, step=step, samples=range(6)):
            loss = F.cross_entropy(network(Tensor(IMAGES.astype(dtype))), LABELS)
        loss.backward()  # outside of random.batch, as in a trainer
        optimizer.step()
        losses.append(loss.item())
    assert sorted(announced) == sorted(name for name, _ in network.named_parameters() for _ in range(steps))
    return losses, network.state_dict()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("again", ["each", "all", "nested"])
def test_losses_parameters_and_running_statistics_have_the_same_bits(dtype, again):
    losses, state = train(dtype, again)
    expected, reference = train(dtype, "never")
    assert losses == expected
    for name, array in reference.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


def test_gradients_of_inputs_of_what_is_closed_over_and_of_several_outputs(check_gradients):
    def function(x, y, z):
        inner = y * 2.0

        def segment(x):
            product = x * inner
            return product + z, product.exp(), x * 1.5

        first, second, _ = recompute(segment, x)
        return first * second + inner

    check_gradients(function, RNG.standard_normal((3, 4)), RNG.standard_normal((3, 4)), RNG.standard_normal(4))


def test_outputs_that_are_inputs_or_need_no_gradient_pass_through():
    x, constant = Tensor(np.ones(3), requires_grad=True), Tensor(np.arange(3.0))
    same, square, plain = recompute(lambda x: (x, x * x, constant * 2.0), x)
    assert same is x and not plain.requires_grad
    (same + square + plain).sum().backward()
    np.testing.assert_array_equal(x.grad, [3, 3, 3])
    with no_grad():
        assert not recompute(lambda x: x * x, x).requires_grad
    assert not recompute(lambda x: x + 1.0, constant).requires_grad


def test_part_of_the_outputs_suffices():
    x, unused = (Tensor(np.ones(3), requires_grad=True) for _ in range(2))
    first, _ = recompute(lambda x: (x * 2.0, unused * 3.0), x)
    first.sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 2, 2])
    np.testing.assert_array_equal(unused.grad, [0, 0, 0])


def test_errors_of_the_second_run_arrive_and_the_state_is_as_before():
    runs = []

    def once_only(x):
        runs.append(1)
        if len(runs) > 1:
            raise ValueError("not twice")
        return x * x

    x = Tensor(np.ones(3), requires_grad=True)
    with pytest.raises(ValueError, match="not twice"):
        recompute(once_only, x).sum().backward()
    assert random.current() is None
    train("float32", "each", steps=1)


def test_a_backward_pass_in_two_halves_runs_it_once():
    runs = []
    layer = nn.Linear(4, 4, rng=np.random.default_rng(2), dtype=np.float64)

    def counted(x):
        runs.append(1)
        return layer(x)

    x = Tensor(RNG.standard_normal((3, 4)), requires_grad=True)
    y = recompute(counted, x)
    halves = WeightGradients([y], [x])
    backward([y], [np.ones((3, 4))])
    np.testing.assert_allclose(x.grad, np.ones((3, 4)) @ layer.weight.data)
    halves.backward()
    np.testing.assert_allclose(layer.weight.grad, np.ones((4, 3)) @ x.data)
    assert len(runs) == 2


def test_a_deep_model_needs_the_memory_of_one_part_at_a_time():
    rng = np.random.default_rng(4)
    layers = [nn.Sequential(nn.Linear(32, 32, rng=rng), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(16)]
    x = np.ones((2000, 32), np.float32)

    def peak(run):
        tracemalloc.start()
        y = Tensor(x, requires_grad=True)
        for layer in layers:
            y = run(layer, y)
        y.sum().backward()
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top / x.nbytes

    everything, parts = peak(lambda layer, x: layer(x)), peak(recompute)
    print(f"{everything:.1f} activations at once without recomputation, {parts:.1f} with it")
    assert everything > 16 * 3 and parts < 16 + 3 + 4  # parts' inputs; one part's layers; gradients on their way
