"""The largest element, or the mean, of each window."""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from mgpu_core.autograd.portable.windows import Pair, crop, padded_shape, places, taps
from mgpu_core.autograd.tape import Array


def max_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> tuple[Array, Array]:
    """The largest element in each window, and its number among the window's elements (int32)."""
    xp = array_namespace(x)
    seen = taps(x, window, stride, padding, -math.inf)
    return xp.max(seen, axis=2), xp.astype(xp.argmax(seen, axis=2), xp.int32)


def max_pool2d_gradient(
    g: Array, taken: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair
) -> Array:
    """The gradient of max_pool2d's x, of the given shape; `taken` is its second result."""
    xp = array_namespace(g)
    dx = xp.zeros(padded_shape(shape, padding), dtype=g.dtype)
    for tap, place in enumerate(places(g.shape[2:], window, stride)):
        dx[place] += xp.where(taken == tap, g, xp.zeros_like(g))
    return crop(dx, shape, padding)


def avg_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> Array:
    """The mean of each window, in which padding counts as zeros."""
    return array_namespace(x).mean(taps(x, window, stride, padding, 0), axis=2)


def avg_pool2d_gradient(g: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair) -> Array:
    """The gradient of avg_pool2d's x, of the given shape."""
    dx = array_namespace(g).zeros(padded_shape(shape, padding), dtype=g.dtype)
    for place in places(g.shape[2:], window, stride):
        dx[place] += g / math.prod(window)
    return crop(dx, shape, padding)
