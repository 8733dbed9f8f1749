"""Convolution as a matrix product: each place of the window is a column (im2col)."""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from mgpu_core.autograd.portable.windows import Pair, crop, padded_shape, places, taps
from mgpu_core.autograd.tape import Array


def conv2d(x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
    """Cross-correlation of x (N, C, H, W) with weight (O, C, kh, kw), plus bias (O,): (N, O, Ho, Wo)."""
    xp = array_namespace(x)
    columns, size = _columns(x, weight.shape[2:], stride, padding)
    y = xp.reshape(weight, (weight.shape[0], -1)) @ columns
    if bias is not None:
        y = y + xp.reshape(bias, (-1, 1))
    return xp.reshape(y, (x.shape[0], weight.shape[0], *size))


def conv2d_input_gradient(g: Array, weight: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    """The gradient of conv2d's x, of the given shape."""
    xp = array_namespace(g)
    n, o, *_ = g.shape
    columns = xp.matrix_transpose(xp.reshape(weight, (o, -1))) @ xp.reshape(g, (n, o, math.prod(g.shape[2:])))
    per_tap = xp.reshape(columns, (n, shape[1], weight.shape[2] * weight.shape[3], *g.shape[2:]))
    dx = xp.zeros(padded_shape(shape, padding), dtype=g.dtype)
    for tap, window in enumerate(places(g.shape[2:], weight.shape[2:], stride)):
        dx[window] += per_tap[:, :, tap, ...]
    return crop(dx, shape, padding)


def conv2d_weight_gradient(g: Array, x: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    """The gradient of conv2d's weight, of the given shape."""
    xp = array_namespace(g)
    columns, _ = _columns(x, shape[2:], stride, padding)
    n, o, *size = g.shape
    places = n * math.prod(size)  # of all images: one product, whose sums are the matrix unit's
    outputs = xp.reshape(xp.permute_dims(xp.reshape(g, (n, o, math.prod(size))), (1, 0, 2)), (o, places))
    inputs = xp.reshape(xp.permute_dims(columns, (0, 2, 1)), (places, columns.shape[1]))
    return xp.reshape(outputs @ inputs, shape)


def _columns(x: Array, window: tuple[int, ...], stride: Pair, padding: Pair) -> tuple[Array, Pair]:
    """(N, C * kh * kw, Ho * Wo): one column for each place of the window; and (Ho, Wo)."""
    seen = taps(x, window, stride, padding, 0)
    n, c, k, *size = seen.shape
    return array_namespace(x).reshape(seen, (n, c * k, math.prod(size))), (size[0], size[1])
