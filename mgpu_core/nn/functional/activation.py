"""Activation functions."""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array
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
    a = x.data
    xp = array_namespace(a)
    scale = math.sqrt(2 / math.pi)
    t = xp.tanh(scale * (a + 0.044715 * a * a * a))

    def vjp(g: Array) -> Array:
        return g * (0.5 * (1 + t) + 0.5 * a * (1 - t * t) * scale * (1 + 3 * 0.044715 * a * a))

    return record(0.5 * a * (1 + t), (x, vjp))


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) over its sum along `axis`."""
    xp = array_namespace(x.data)
    y = xp.exp(log_softmax_of(x.data, axis))
    return record(y, (x, lambda g: y * (g - xp.sum(g * y, axis=axis, keepdims=True))))


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of softmax, without its overflow and cancellation."""
    xp = array_namespace(x.data)
    y = log_softmax_of(x.data, axis)
    return record(y, (x, lambda g: g - xp.exp(y) * xp.sum(g, axis=axis, keepdims=True)))


def log_softmax_of(x: Array, axis: int) -> Array:
    """log_softmax of a plain array."""
    xp = array_namespace(x)
    shifted = x - xp.max(x, axis=axis, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))
