"""The layers.

Layers with parameters draw them from `rng`, a NumPy generator, in float64 before they are rounded to `dtype`: the same
seed gives the same network on every rank and, but for rounding, in every dtype. `numpy.random.default_rng(seed)`,
made once and given to every layer in turn, makes a network. Initial weights and biases are PyTorch's:
uniform in +-1 / sqrt(inputs of one output).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mgpu_core.autograd.portable.windows import Pair
from mgpu_core.nn import functional as F
from mgpu_core.nn.functional.convolution import pair
from mgpu_core.nn.functional.normalization import Reduce
from mgpu_core.nn.module import Module, Parameter
from mgpu_core.tensor import Tensor


class Linear(Module):
    """(..., inputs) -> (..., outputs): times the transpose of `weight` (outputs, inputs), plus `bias` (outputs,)."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = True, rng: np.random.Generator, dtype: Any = np.float32
    ) -> None:
        self.weight = uniform(rng, inputs, (outputs, inputs), dtype)
        self.bias = uniform(rng, inputs, (outputs,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Conv2d(Module):
    """(N, inputs, H, W) -> (N, outputs, Ho, Wo); see `functional.conv2d`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel_size: int | Pair,
        *,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = True,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        if inputs % groups or outputs % groups:
            raise ValueError(f"{inputs} input and {outputs} output channels cannot be cut into {groups} equal groups")
        shape = (outputs, inputs // groups, *pair(kernel_size))
        fan_in = math.prod(shape[1:])
        self.weight = uniform(rng, fan_in, shape, dtype)
        self.bias = uniform(rng, fan_in, (outputs,), dtype) if bias else None
        self.stride, self.padding, self.groups = stride, padding, groups

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding, groups=self.groups)


class Embedding(Module):
    """Integer indices (...) below `count` -> rows (..., size) of `weight` (count, size), drawn from N(0, 1)."""

    def __init__(self, count: int, size: int, *, rng: np.random.Generator, dtype: Any = np.float32) -> None:
        self.weight = Parameter(rng.standard_normal((count, size)), dtype=dtype)

    def forward(self, indices: Any) -> Tensor:
        return F.embedding(indices, self.weight)


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class GELU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Tanh(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(x)


class Sigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.sigmoid(x)


class MaxPool2d(Module):
    """See `functional.max_pool2d`."""

    def __init__(self, kernel_size: int | Pair, *, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AvgPool2d(Module):
    """See `functional.avg_pool2d`."""

    def __init__(self, kernel_size: int | Pair, *, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class Flatten(Module):
    """(N, ...) -> (N, product of the others)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Dropout(Module):
    """Drops elements with probability p in training; see `functional.dropout` for what the masks depend on.

    `rng` gives this layer its number: built from the same seed, a model has the same masks on every rank.
    """

    def __init__(self, p: float = 0.5, *, rng: np.random.Generator) -> None:
        self.p = p
        self.layer = int(rng.integers(2**63))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.layer) if self.training else x


class _BatchNorm(Module):
    """Normalises channels over the batch; see `functional.batch_norm`.

    Set `reduce` (or use `synchronize_batch_norm`) to make the batch in training that of all ranks.
    """

    axes: str

    def __init__(self, channels: int, *, momentum: float = 0.1, eps: float = 1e-5, dtype: Any = np.float32) -> None:
        self.weight = Parameter(np.ones(channels, dtype))
        self.bias = Parameter(np.zeros(channels, dtype))
        self.running_mean = Tensor(np.zeros(channels, dtype))
        self.running_var = Tensor(np.ones(channels, dtype))
        self.momentum, self.eps = momentum, eps
        self.reduce: Reduce | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != len(self.axes) or x.shape[1] != self.weight.size:
            expected = f"({', '.join(self.axes)}) with C = {self.weight.size}"
            raise ValueError(f"{type(self).__name__} takes {expected}, not {x.shape}")
        return F.batch_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
            reduce=self.reduce,
        )


class BatchNorm1d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    axes = "NC"


class BatchNorm2d(_BatchNorm):
    __doc__ = _BatchNorm.__doc__
    axes = "NCHW"


def synchronize_batch_norm(model: Module, reduce: Reduce | None) -> None:
    """Lets every batch norm of `model` use the mean and variance of all ranks' samples in training.

    `reduce` takes a float64 vector and returns its sum over the ranks; None makes them local again.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.reduce = reduce


class LayerNorm(Module):
    """Normalises the last axis, of length `size`; see `functional.layer_norm`."""

    def __init__(self, size: int, *, eps: float = 1e-5, dtype: Any = np.float32) -> None:
        self.weight = Parameter(np.ones(size, dtype))
        self.bias = Parameter(np.zeros(size, dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, eps=self.eps)


def uniform(rng: np.random.Generator, fan_in: int, shape: tuple[int, ...], dtype: Any) -> Parameter:
    """Uniform in +-1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    return Parameter(rng.uniform(-bound, bound, shape), dtype=dtype)
