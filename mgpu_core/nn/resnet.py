"""Residual networks (He et al., "Deep residual learning for image recognition", 2015) for small images.

    model = resnet20(channels=1, classes=10, rng=rng)       # 28 x 28 or 32 x 32; 0.27 million parameters
    model = resnet18(channels=3, classes=10, rng=rng)       # 11.2 million

Both are a `Sequential` of blocks, so that a pipeline can cut them anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu_core.nn import functional as F
from mgpu_core.nn.layers import BatchNorm2d, Conv2d, Linear, ReLU
from mgpu_core.nn.module import Module, Sequential
from mgpu_core.tensor import Tensor


class ResidualBlock(Module):
    """relu(x + f(x)) with f two 3 x 3 convolutions and batch norms: (N, inputs, H, W) to (N, outputs, H / s, W / s).

    Where the shape changes, x goes through a 1 x 1 convolution and batch norm (the paper's option B).
    """

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, rng: np.random.Generator, dtype: Any = np.float32
    ) -> None:
        self.conv1 = convolution(inputs, outputs, 3, stride, rng, dtype)
        self.norm1 = BatchNorm2d(outputs, dtype=dtype)
        self.conv2 = convolution(outputs, outputs, 3, 1, rng, dtype)
        self.norm2 = BatchNorm2d(outputs, dtype=dtype)
        self.shortcut: Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = Sequential(
                convolution(inputs, outputs, 1, stride, rng, dtype), BatchNorm2d(outputs, dtype=dtype)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class GlobalAvgPool2d(Module):
    """(N, C, H, W) -> (N, C): the mean over all places."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet(
    widths: Sequence[int],
    blocks: Sequence[int],
    *,
    channels: int,
    classes: int,
    rng: np.random.Generator,
    dtype: Any = np.float32,
) -> Sequential:
    """A 3 x 3 convolution, then for each width so many residual blocks, the first of which halves the image from the
    second width on; then the mean over all places and a linear layer: (N, channels, H, W) to (N, classes)."""
    inputs = widths[0]
    layers: list[Module] = [convolution(channels, inputs, 3, 1, rng, dtype), BatchNorm2d(inputs, dtype=dtype), ReLU()]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(ResidualBlock(inputs, width, stride=stride, rng=rng, dtype=dtype))
            inputs = width
    return Sequential(*layers, GlobalAvgPool2d(), Linear(inputs, classes, rng=rng, dtype=dtype))


def resnet20(*, channels: int, classes: int, rng: np.random.Generator, dtype: Any = np.float32) -> Sequential:
    """The paper's network for CIFAR-10 with 20 weighted layers (section 4.2)."""
    return resnet((16, 32, 64), (3, 3, 3), channels=channels, classes=classes, rng=rng, dtype=dtype)


def resnet18(*, channels: int, classes: int, rng: np.random.Generator, dtype: Any = np.float32) -> Sequential:
    """The paper's 18-layer network, begun with a 3 x 3 convolution and no pooling, as is usual for small images."""
    return resnet((64, 128, 256, 512), (2, 2, 2, 2), channels=channels, classes=classes, rng=rng, dtype=dtype)


def convolution(
    inputs: int, outputs: int, kernel_size: int, stride: int, rng: np.random.Generator, dtype: Any
) -> Conv2d:
    """Without a bias, which the batch norm after it would cancel; its weights from N(0, 2 / (outputs k^2)).

    He et al., "Delving deep into rectifiers", 2015: what keeps gradients as large as they are through relu.
    """
    conv = Conv2d(
        inputs, outputs, kernel_size, stride=stride, padding=kernel_size // 2, bias=False, rng=rng, dtype=dtype
    )
    deviation = math.sqrt(2 / (outputs * kernel_size**2))
    conv.weight.data[...] = deviation * rng.standard_normal(conv.weight.shape)
    return conv
