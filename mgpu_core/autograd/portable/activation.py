"""Activation functions."""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array

_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def relu(x: Array) -> Array:
    """max(x, 0)."""
    xp = array_namespace(x)
    return xp.maximum(x, xp.zeros_like(x))


def relu_gradient(g: Array, y: Array) -> Array:
    """`g` where relu's output `y` is positive."""
    xp = array_namespace(g)
    return xp.where(y > 0, g, xp.zeros_like(g))


def gelu(x: Array) -> Array:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    return 0.5 * x * (1 + array_namespace(x).tanh(_SCALE * (x + _CUBIC * x * x * x)))


def gelu_gradient(g: Array, x: Array) -> Array:
    """The gradient of gelu's x."""
    t = array_namespace(x).tanh(_SCALE * (x + _CUBIC * x * x * x))
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SCALE * (1 + 3 * _CUBIC * x * x))


def softmax(x: Array, axis: int) -> Array:
    """exp(x) over its sum along `axis`."""
    xp = array_namespace(x)
    powers = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return powers / xp.sum(powers, axis=axis, keepdims=True)


def softmax_gradient(g: Array, y: Array, axis: int) -> Array:
    """The gradient of softmax's x; `y` is its result."""
    return y * (g - array_namespace(g).sum(g * y, axis=axis, keepdims=True))


def log_softmax(x: Array, axis: int) -> Array:
    """The logarithm of softmax."""
    xp = array_namespace(x)
    shifted = x - xp.max(x, axis=axis, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))


def log_softmax_gradient(g: Array, y: Array, axis: int) -> Array:
    """The gradient of log_softmax's x; `y` is its result."""
    xp = array_namespace(g)
    return g - xp.exp(y) * xp.sum(g, axis=axis, keepdims=True)


def keep(x: Array, kept: Array, scale: float) -> Array:
    """x * scale where `kept`, a mask, else 0."""
    xp = array_namespace(x)
    return xp.where(kept, x * scale, xp.zeros_like(x))
