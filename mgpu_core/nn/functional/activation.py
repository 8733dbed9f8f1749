"""Activation functions."""

from __future__ import annotations

from mgpu_core.autograd.autocast import widened
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.tensor import Tensor, record


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.relu()


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return x.tanh()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return x.sigmoid()


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) in its tanh form, the one of GPT-2 (Hendrycks and Gimpel 2016; within 0.001 of the exact one)."""
    kernels, a = kernels_for(x.data), x.data
    return record(kernels.gelu(a), (x, lambda g: kernels.gelu_gradient(g, a)))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) over its sum along `axis`."""
    a = widened(x.data)
    kernels = kernels_for(a)
    y = kernels.softmax(a, axis)
    return record(y, (x, lambda g: kernels.softmax_gradient(g, y, axis)))


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of softmax, without its overflow and cancellation."""
    a = widened(x.data)
    kernels = kernels_for(a)
    y = kernels.log_softmax(a, axis)
    return record(y, (x, lambda g: kernels.log_softmax_gradient(g, y, axis)))
