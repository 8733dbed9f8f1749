"""Residual networks: the paper's sizes, gradients through a block, learning."""

import numpy as np
import pytest

from mgpu_core import Tensor, nn, optim
from mgpu_core.nn import functional as F


def generator():
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    "make, channels, layers, parameters",
    [(nn.resnet20, 1, 20, 272_186), (nn.resnet20, 3, 20, 272_474), (nn.resnet18, 3, 18, 11_173_962)],
)
def test_sizes(make, channels, layers, parameters):
    model = make(channels=channels, classes=10, rng=generator())
    assert sum(p.size for p in model.parameters()) == parameters
    weighted = [
        m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in name
    ]
    assert len(weighted) == layers


@pytest.mark.parametrize("size", [28, 32])
def test_images_shrink_at_each_new_width(size):
    model = nn.resnet20(channels=2, classes=5, rng=generator())
    x, shapes = Tensor(np.ones((1, 2, size, size), np.float32)), []
    for layer in model:
        x = layer(x)
        shapes.append(x.shape)
    assert shapes[2] == (1, 16, size, size)
    assert shapes[-3:] == [(1, 64, size // 4, size // 4), (1, 64), (1, 5)]


@pytest.mark.parametrize("inputs, outputs, stride", [(2, 2, 1), (2, 3, 1), (2, 4, 2)])
def test_a_block_in_shape_and_gradient(inputs, outputs, stride, check_gradients):
    block = nn.ResidualBlock(inputs, outputs, stride=stride, rng=generator(), dtype=np.float64)
    x = np.random.default_rng(1).standard_normal((2, inputs, 4, 6))
    assert block(Tensor(x)).shape == (2, outputs, 4 // stride, 6 // stride)
    assert (block.shortcut is None) == (inputs == outputs and stride == 1)
    check_gradients(block, x)


def test_initial_weights_keep_gradients_large():
    """He's: deviations sqrt(2 / (outputs k^2))."""
    conv = nn.ResidualBlock(32, 64, stride=2, rng=generator()).conv1
    assert conv.bias is None
    assert abs(conv.weight.data.std() / np.sqrt(2 / (64 * 9)) - 1) < 0.05


def test_a_residual_network_learns():
    rng = generator()
    labels = np.arange(48) % 4
    images = rng.standard_normal((48, 1, 8, 8)).astype(np.float32) * 0.3
    for n, label in enumerate(labels):  # a bright quarter
        images[n, 0, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1
    model = nn.resnet.resnet((4, 8), (1, 1), channels=1, classes=4, rng=rng)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(Tensor(images)), labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
