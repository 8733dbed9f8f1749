"""The layers' kernels in terms of the array API alone: for any array library, and the reference for `cpu`.

Images are (N, C, H, W). A window of kh x kw elements moves by `stride` over an image with `padding` around it; both
are pairs, for rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array

Pair = tuple[int, int]


def relu(x: Array) -> Array:
    """max(x, 0)."""
    xp = array_namespace(x)
    return xp.maximum(x, xp.zeros_like(x))


def relu_gradient(g: Array, y: Array) -> Array:
    """`g` where relu's output `y` is positive."""
    xp = array_namespace(g)
    return xp.where(y > 0, g, xp.zeros_like(g))


def channel_sums(g: Array) -> Array:
    """The sum of g (N, C, ...) over all axes but the second: (C,), added up in float64."""
    return _over_samples(array_namespace(g).astype(g, array_namespace(g).float64))


def channel_moments(x: Array, center: Array) -> tuple[Array, Array]:
    """Sums of x - center, and of its square, over all axes but the second: float64 (C,), like `center`."""
    offset = _offset(x, center)
    return _over_samples(offset), _over_samples(offset * offset)


def channel_products(g: Array, x: Array, center: Array) -> tuple[Array, Array]:
    """Sums of g, and of g * (x - center), over all axes but the second: float64 (C,), like `center`."""
    return channel_sums(g), _over_samples(g * _offset(x, center))


def normalize_channels(x: Array, center: Array, scale: Array, shift: Array) -> Array:
    """(x - center) * scale + shift, where these are (C,); in the dtype of x (N, C, ...)."""
    return (x - _per_channel(center, x)) * _per_channel(scale, x) + _per_channel(shift, x)


def combine_channels(g: Array, x: Array, center: Array, a: Array, b: Array, c: Array) -> Array:
    """a * g + b * (x - center) + c, where these are (C,); in the dtype of g and x (N, C, ...)."""
    return _per_channel(a, x) * g + _per_channel(b, x) * (x - _per_channel(center, x)) + _per_channel(c, x)


def add_rows(indices: Array, rows: Array, count: int) -> Array:
    """(count, D): row i is the sum of `rows` (n, D) whose index, of `indices` (n,), is i."""
    xp = array_namespace(rows)
    total = xp.zeros((count, rows.shape[1]), dtype=rows.dtype)
    xp.add.at(total, indices, rows)
    return total


def softmax_minus_one_hot(log_p: Array, labels: Array, scale: Array) -> Array:
    """(exp(log_p) - 1 at the label) * scale, row by row: log_p (N, classes), labels and scale (N, 1)."""
    xp = array_namespace(log_p)
    one_hot = xp.astype(labels == xp.arange(log_p.shape[1]), log_p.dtype)
    return (xp.exp(log_p) - one_hot) * scale


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
    taps = xp.reshape(columns, (n, shape[1], weight.shape[2] * weight.shape[3], *g.shape[2:]))
    dx = xp.zeros(_padded(shape, padding), dtype=g.dtype)
    for tap, window in enumerate(_windows(g.shape[2:], weight.shape[2:], stride)):
        dx[window] += taps[:, :, tap, ...]
    return _cropped(dx, shape, padding)


def conv2d_weight_gradient(g: Array, x: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    """The gradient of conv2d's weight, of the given shape."""
    xp = array_namespace(g)
    columns, _ = _columns(x, shape[2:], stride, padding)
    per_image = xp.reshape(g, (*g.shape[:2], math.prod(g.shape[2:]))) @ xp.matrix_transpose(columns)
    return xp.reshape(xp.sum(per_image, axis=0), shape)


def max_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> tuple[Array, Array]:
    """The largest element in each window, and its number among the window's elements (int32)."""
    xp = array_namespace(x)
    taps = _taps(x, window, stride, padding, -math.inf)
    return xp.max(taps, axis=2), xp.astype(xp.argmax(taps, axis=2), xp.int32)


def max_pool2d_gradient(
    g: Array, taken: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair
) -> Array:
    """The gradient of max_pool2d's x, of the given shape; `taken` is its second result."""
    xp = array_namespace(g)
    dx = xp.zeros(_padded(shape, padding), dtype=g.dtype)
    for tap, place in enumerate(_windows(g.shape[2:], window, stride)):
        dx[place] += xp.where(taken == tap, g, xp.zeros_like(g))
    return _cropped(dx, shape, padding)


def avg_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> Array:
    """The mean of each window, in which padding counts as zeros."""
    return array_namespace(x).mean(_taps(x, window, stride, padding, 0), axis=2)


def avg_pool2d_gradient(g: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair) -> Array:
    """The gradient of avg_pool2d's x, of the given shape."""
    dx = array_namespace(g).zeros(_padded(shape, padding), dtype=g.dtype)
    for place in _windows(g.shape[2:], window, stride):
        dx[place] += g / math.prod(window)
    return _cropped(dx, shape, padding)


def sgd(
    p: Array, g: Array, momentum_buffer: Array | None, *, lr: float, momentum: float, dampening: float,
    weight_decay: float, nesterov: bool, first: bool,
) -> None:  # fmt: skip
    """One step of SGD on parameter p and its momentum, in place; see `optim.SGD`."""
    if weight_decay:
        g = g + weight_decay * p
    if momentum_buffer is not None:
        if first:
            momentum_buffer[...] = g
        else:
            momentum_buffer *= momentum
            momentum_buffer += (1 - dampening) * g
        g = g + momentum * momentum_buffer if nesterov else momentum_buffer
    p -= lr * g


def adamw(
    p: Array, g: Array, m: Array, v: Array, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int,
) -> None:  # fmt: skip
    """Step number `step` (from 1) of AdamW on parameter p and its moments, in place; see `optim.AdamW`."""
    p *= 1 - lr * weight_decay
    m *= beta1
    m += (1 - beta1) * g
    v *= beta2
    v += (1 - beta2) * g * g
    p -= lr / (1 - beta1**step) * m / (v**0.5 / math.sqrt(1 - beta2**step) + eps)


def _over_samples(x: Array) -> Array:
    return array_namespace(x).sum(x, axis=tuple(i for i in range(x.ndim) if i != 1))


def _per_channel(values: Array, x: Array, dtype: Any = None) -> Array:
    """Values (C,) in the dtype of x (N, C, ...), or in `dtype`, so that they broadcast against it."""
    xp = array_namespace(x)
    return xp.reshape(xp.astype(values, dtype or x.dtype), (-1,) + (1,) * (x.ndim - 2))


def _offset(x: Array, center: Array) -> Array:
    """x - center per channel, in float64."""
    xp = array_namespace(x)
    return xp.astype(x, xp.float64) - _per_channel(center, x, xp.float64)


def output_size(size: tuple[int, ...], window: tuple[int, ...], stride: Pair, padding: Pair) -> Pair:
    """How many places the window has, in rows and columns."""
    rows, columns = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, window, stride, padding))
    return rows, columns


def _padded(shape: tuple[int, ...], padding: Pair) -> tuple[int, ...]:
    return (*shape[:2], shape[2] + 2 * padding[0], shape[3] + 2 * padding[1])


def _cropped(padded: Array, shape: tuple[int, ...], padding: Pair) -> Array:
    return padded[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]


def _windows(size: tuple[int, ...], window: tuple[int, ...], stride: Pair) -> Iterator[tuple[slice, ...]]:
    """For each element of the window, where it lies on the padded image in all of its places."""
    for a in range(window[0]):
        for b in range(window[1]):
            rows = slice(a, a + stride[0] * (size[0] - 1) + 1, stride[0])
            columns = slice(b, b + stride[1] * (size[1] - 1) + 1, stride[1])
            yield slice(None), slice(None), rows, columns


def _taps(x: Array, window: tuple[int, ...], stride: Pair, padding: Pair, fill: float) -> Array:
    """(N, C, kh * kw, Ho, Wo): what each element of the window sees in each of its places."""
    xp = array_namespace(x)
    padded = xp.full(_padded(x.shape, padding), fill, dtype=x.dtype)
    padded[:, :, padding[0] : padding[0] + x.shape[2], padding[1] : padding[1] + x.shape[3]] = x
    size = output_size(x.shape[2:], window, stride, padding)
    return xp.stack([padded[place] for place in _windows(size, window, stride)], axis=2)


def _columns(x: Array, window: tuple[int, ...], stride: Pair, padding: Pair) -> tuple[Array, Pair]:
    """(N, C * kh * kw, Ho * Wo): one column for each place of the window; and (Ho, Wo)."""
    taps = _taps(x, window, stride, padding, 0)
    n, c, k, *size = taps.shape
    return array_namespace(x).reshape(taps, (n, c * k, math.prod(size))), (size[0], size[1])
