"""Activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.elementary import exp, sigmoid
from mgpu_core.autograd.cpu.layout import Array, vectors
from mgpu_core.autograd.cpu.threads import share

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def relu(x: Array) -> Array:
    y = np.empty_like(x)
    into, values = vectors(y, x)
    share(lambda part: _relu(values[part], into[part]), x.size, x.size)
    return y


def relu_gradient(g: Array, y: Array) -> Array:
    dx = np.empty_like(y)
    into, gradients, values = vectors(dx, g, y)
    share(lambda part: _relu_gradient(gradients[part], values[part], into[part]), y.size, y.size)
    return dx


def gelu(x: Array) -> Array:  # (1 + tanh u) / 2 = sigmoid(2 u)
    y = np.empty_like(x)
    into, values = vectors(y, x)
    share(lambda part: _gelu(values[part], into[part]), x.size, x.size)
    return y


def gelu_gradient(g: Array, x: Array) -> Array:
    dx = np.empty_like(x)
    into, gradients, values = vectors(dx, g, x)
    share(lambda part: _gelu_gradient(gradients[part], values[part], into[part]), x.size, x.size)
    return dx


def softmax(x: Array, axis: int) -> Array:
    return _along(axis, _softmax, x)


def softmax_gradient(g: Array, y: Array, axis: int) -> Array:
    return _along(axis, _softmax_gradient, g, y)


def log_softmax(x: Array, axis: int) -> Array:
    return _along(axis, _log_softmax, x)


def log_softmax_gradient(g: Array, y: Array, axis: int) -> Array:
    return _along(axis, _log_softmax_gradient, g, y)


def keep(x: Array, kept: Array, scale: float) -> Array:
    y = np.empty_like(x)
    into, values, flags = vectors(y, x, kept)
    factor = x.dtype.type(scale)
    share(lambda part: _keep(values[part], flags[part], factor, into[part]), x.size, x.size)
    return y


@jit
def _relu(x: Array, y: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(x.size):
        y[i] = zero if x[i] < zero else x[i]  # NaN stays NaN


@jit
def _relu_gradient(g: Array, y: Array, dx: Array) -> None:
    zero = g.dtype.type(0)
    for i in range(g.size):
        dx[i] = g[i] if y[i] > zero else zero


@jit
def _gelu(x: Array, y: Array) -> None:
    linear, cubic = x.dtype.type(_LINEAR), x.dtype.type(_CUBIC)
    for i in range(x.size):
        y[i] = x[i] * sigmoid(x[i] * (linear + cubic * x[i] * x[i]))


@jit
def _gelu_gradient(g: Array, x: Array, dx: Array) -> None:
    linear, cubic = x.dtype.type(_LINEAR), x.dtype.type(_CUBIC)
    one, three = x.dtype.type(1), x.dtype.type(3)
    for i in range(x.size):
        square = x[i] * x[i]
        s = sigmoid(x[i] * (linear + cubic * square))
        dx[i] = g[i] * (s + s * (one - s) * x[i] * (linear + three * cubic * square))


@jit
def _keep(x: Array, kept: Array, scale: float, y: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(x.size):
        y[i] = x[i] * scale if kept[i] else zero


# Along one axis: kernels are given matrices, and work along their rows


def _along(axis: int, kernel: Callable[..., None], *arrays: Array) -> Array:
    moved = [np.ascontiguousarray(np.moveaxis(x, axis, -1)) for x in arrays]
    out = np.empty_like(moved[0])
    shape = (math.prod(out.shape[:-1]), out.shape[-1])
    matrices = [x.reshape(shape) for x in (*moved, out)]
    share(lambda part: kernel(*(matrix[part] for matrix in matrices)), shape[0], out.size)
    return np.moveaxis(out, -1, axis)


def _softmax(x: Array, y: Array) -> None:
    _exp_over_sum(x, x.max(axis=1), y)


def _log_softmax(x: Array, y: Array) -> None:
    _minus_log_sum(x, x.max(axis=1), y)


@jit
def _exp_over_sum(x: Array, largest: Array, y: Array) -> None:
    for r in range(x.shape[0]):
        total = x.dtype.type(0)
        for c in range(x.shape[1]):
            power = exp(x[r, c] - largest[r])
            y[r, c] = power
            total += power
        scale = x.dtype.type(1) / total
        for c in range(x.shape[1]):
            y[r, c] *= scale


@jit
def _minus_log_sum(x: Array, largest: Array, y: Array) -> None:
    for r in range(x.shape[0]):
        total = x.dtype.type(0)
        for c in range(x.shape[1]):
            total += exp(x[r, c] - largest[r])
        log_sum = largest[r] + np.log(total)
        for c in range(x.shape[1]):
            y[r, c] = x[r, c] - log_sum


@jit
def _softmax_gradient(g: Array, y: Array, dx: Array) -> None:
    for r in range(y.shape[0]):
        along = y.dtype.type(0)
        for c in range(y.shape[1]):
            along += g[r, c] * y[r, c]
        for c in range(y.shape[1]):
            dx[r, c] = y[r, c] * (g[r, c] - along)


@jit
def _log_softmax_gradient(g: Array, y: Array, dx: Array) -> None:
    for r in range(y.shape[0]):
        total = y.dtype.type(0)
        for c in range(y.shape[1]):
            total += g[r, c]
        for c in range(y.shape[1]):
            dx[r, c] = g[r, c] - exp(y[r, c]) * total
