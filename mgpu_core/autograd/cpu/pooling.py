"""The largest element, or the mean, of each window."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array, channels_first, channels_last
from mgpu_core.autograd.cpu.windows import crop, pad, padded_zeros
from mgpu_core.autograd.portable.windows import Pair, output_size


def max_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> tuple[Array, Array]:
    shape = (x.shape[0], *output_size(x.shape[2:], window, stride, padding), x.shape[1])
    y, taken = np.empty(shape, dtype=x.dtype), np.empty(shape, dtype=np.int32)
    _max_pool(*window)(pad(x, padding, -np.inf), y, taken, stride)
    return channels_first(y), channels_first(taken)


def max_pool2d_gradient(
    g: Array, taken: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair
) -> Array:
    dx = padded_zeros(shape, padding, g.dtype)
    _max_pool_gradient(*window)(channels_last(g), channels_last(taken), dx, stride)
    return crop(dx, shape, padding)


def avg_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> Array:
    y = np.zeros((x.shape[0], *output_size(x.shape[2:], window, stride, padding), x.shape[1]), dtype=x.dtype)
    _avg_pool(pad(x, padding), y, window, stride)
    y /= window[0] * window[1]
    return channels_first(y)


def avg_pool2d_gradient(g: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair) -> Array:
    dx = padded_zeros(shape, padding, g.dtype)
    _avg_pool_gradient(channels_last(g / (window[0] * window[1])), dx, window, stride)
    return crop(dx, shape, padding)


@functools.cache
def _max_pool(kh: int, kw: int) -> Callable[..., None]:
    """The kernel for one size of window: with a fixed size, loops over channels become vector instructions."""

    @jit
    def kernel(x: Array, y: Array, taken: Array, stride: Pair) -> None:
        for n in range(y.shape[0]):
            for i in range(y.shape[1]):
                for j in range(y.shape[2]):
                    for c in range(y.shape[3]):
                        best = x[n, i * stride[0], j * stride[1], c]
                        number = np.int32(0)
                        for a in range(kh):
                            for b in range(kw):
                                seen = x[n, i * stride[0] + a, j * stride[1] + b, c]
                                larger = (seen > best) | (seen != seen)  # NaN wins
                                best = seen if larger else best
                                number = np.int32(a * kw + b) if larger else number
                        y[n, i, j, c] = best
                        taken[n, i, j, c] = number

    return kernel


@functools.cache
def _max_pool_gradient(kh: int, kw: int) -> Callable[..., None]:
    @jit
    def kernel(g: Array, taken: Array, dx: Array, stride: Pair) -> None:
        zero = g.dtype.type(0)
        for n in range(g.shape[0]):
            for i in range(g.shape[1]):
                for j in range(g.shape[2]):
                    for c in range(g.shape[3]):
                        gradient, number = g[n, i, j, c], taken[n, i, j, c]
                        for a in range(kh):
                            for b in range(kw):
                                into = gradient if number == a * kw + b else zero
                                dx[n, i * stride[0] + a, j * stride[1] + b, c] += into

    return kernel


@jit
def _avg_pool(x: Array, y: Array, window: Pair, stride: Pair) -> None:
    for n in range(y.shape[0]):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                total = y[n, i, j]
                for a in range(window[0]):
                    for b in range(window[1]):
                        seen = x[n, i * stride[0] + a, j * stride[1] + b]
                        for c in range(seen.size):
                            total[c] += seen[c]


@jit
def _avg_pool_gradient(g: Array, dx: Array, window: Pair, stride: Pair) -> None:
    for n in range(g.shape[0]):
        for i in range(g.shape[1]):
            for j in range(g.shape[2]):
                gradient = g[n, i, j]
                for a in range(window[0]):
                    for b in range(window[1]):
                        to = dx[n, i * stride[0] + a, j * stride[1] + b]
                        for c in range(to.size):
                            to[c] += gradient[c]
