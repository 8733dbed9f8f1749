"""The layers' kernels for NumPy arrays of float32 and float64: compiled loops around BLAS's matrix product.

The same functions as in `portable`, which says what they compute. Images are (N, C, H, W) outside, and channels last
in memory (what PyTorch calls channels_last): results are transposed views of (N, H, W, C) arrays, so that a chain
of image layers never reorders, loops over channels are contiguous, and a convolution is a plain matrix product.
An input laid out otherwise is copied once.

Everything runs on the calling thread, in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np

from mgpu_core.autograd.portable import Pair, output_size

Array = np.ndarray

_BLOCK = 1 << 16  # elements of the column matrix at a time, so that it stays in the second-level cache


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles on first use, for each dtype, and keeps the machine code on disk where that is possible."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return numba.njit(**options)(function)


# Layout


def _channels_last(x: Array) -> Array:
    """x (N, C, ...) as a contiguous array (N, ..., C); usually a view."""
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


def _channels_first(x: Array) -> Array:
    return np.moveaxis(x, -1, 1)


def _rows(x: Array) -> Array:
    """x (N, C, ...) as a contiguous matrix with one row per sample and place, one column per channel."""
    return _channels_last(x).reshape(-1, x.shape[1])


def _like_rows(rows: Array, x: Array) -> Array:
    """The inverse of `_rows`."""
    return _channels_first(rows.reshape(x.shape[0], *x.shape[2:], x.shape[1]))


# Activations


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def relu_gradient(g: Array, y: Array) -> Array:
    return g * (y > 0)


# Channels


def channel_sums(g: Array) -> Array:
    total = np.zeros(g.shape[1])
    _sum_rows(_rows(g), total)
    return total


def channel_moments(x: Array, center: Array) -> tuple[Array, Array]:
    first, second = np.zeros_like(center), np.zeros_like(center)
    _moments(_rows(x), center, first, second)
    return first, second


def channel_products(g: Array, x: Array, center: Array) -> tuple[Array, Array]:
    total, product = np.zeros_like(center), np.zeros_like(center)
    _products(_rows(g), _rows(x), center, total, product)
    return total, product


def normalize_channels(x: Array, center: Array, scale: Array, shift: Array) -> Array:
    rows = _rows(x)
    out = np.empty_like(rows)
    _normalize(rows, *(value.astype(x.dtype) for value in (center, scale, shift)), out)
    return _like_rows(out, x)


def combine_channels(g: Array, x: Array, center: Array, a: Array, b: Array, c: Array) -> Array:
    rows = _rows(g)
    out = np.empty_like(rows)
    _combine(rows, _rows(x), *(value.astype(g.dtype) for value in (center, a, b, c)), out)
    return _like_rows(out, g)


@_jit
def _sum_rows(g: Array, total: Array) -> None:
    for r in range(g.shape[0]):
        for c in range(g.shape[1]):
            total[c] += g[r, c]


@_jit
def _moments(x: Array, center: Array, first: Array, second: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            offset = x[r, c] - center[c]
            first[c] += offset
            second[c] += offset * offset


@_jit
def _products(g: Array, x: Array, center: Array, total: Array, product: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            total[c] += g[r, c]
            product[c] += g[r, c] * (x[r, c] - center[c])


@_jit
def _normalize(x: Array, center: Array, scale: Array, shift: Array, out: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[r, c] = (x[r, c] - center[c]) * scale[c] + shift[c]


@_jit
def _combine(g: Array, x: Array, center: Array, a: Array, b: Array, c: Array, out: Array) -> None:
    for r in range(g.shape[0]):
        for k in range(g.shape[1]):
            out[r, k] = a[k] * g[r, k] + b[k] * (x[r, k] - center[k]) + c[k]


# Classes


def softmax_minus_one_hot(log_p: Array, labels: Array, scale: Array) -> Array:
    p = np.exp(log_p)
    p[np.arange(len(p)), labels[:, 0]] -= 1
    p *= scale
    return p


# Rows of a table


def add_rows(indices: Array, rows: Array, count: int) -> Array:
    total = np.zeros((count, rows.shape[1]), dtype=rows.dtype)
    _add_rows(indices, np.ascontiguousarray(rows), total)
    return total


@_jit
def _add_rows(indices: Array, rows: Array, total: Array) -> None:
    for r in range(rows.shape[0]):
        row = total[indices[r]]
        for c in range(rows.shape[1]):
            row[c] += rows[r, c]


# Windows


def _padded(x: Array, padding: Pair, fill: float = 0) -> Array:
    """x (N, C, H, W) with `padding` around it, channels last."""
    image = _channels_last(x)
    if padding == (0, 0):
        return image
    n, h, w, c = image.shape
    padded = np.full((n, h + 2 * padding[0], w + 2 * padding[1], c), fill, dtype=x.dtype)
    padded[:, padding[0] : padding[0] + h, padding[1] : padding[1] + w] = image
    return padded


def _padded_zeros(shape: tuple[int, ...], padding: Pair, dtype: Any) -> Array:
    """Zeros for an image of the given shape (N, C, H, W) with `padding` around it, channels last."""
    return np.zeros((shape[0], shape[2] + 2 * padding[0], shape[3] + 2 * padding[1], shape[1]), dtype=dtype)


def _cropped(padded: Array, shape: tuple[int, ...], padding: Pair) -> Array:
    """The inverse of `_padded`."""
    image = padded[:, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]
    return _channels_first(np.ascontiguousarray(image))


# Convolution: rows of a column matrix (im2col), one for each place of the window, times the weights


def conv2d(x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
    size = output_size(x.shape[2:], weight.shape[2:], stride, padding)
    y = np.empty((x.shape[0], *size, weight.shape[0]), dtype=x.dtype)
    places = y.reshape(-1, weight.shape[0])
    matrix = _matrix(weight)
    for block, columns in _gathered(_padded(x, padding), weight.shape[2:], size, stride):
        np.matmul(columns, matrix, out=places[block])
        if bias is not None:
            _add_to_rows(places[block], bias)
    return _channels_first(y)


def conv2d_input_gradient(g: Array, weight: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    places = _rows(g)
    matrix = _matrix(weight).T
    dx = _padded_zeros(shape, padding, g.dtype)
    for block, first, columns in _blocks(g.shape[0], g.shape[2:], matrix.shape[1], g.dtype):
        np.matmul(places[block], matrix, out=columns)
        _scatter_columns(columns, dx, first, g.shape[2:], weight.shape[2:], stride)
    return _cropped(dx, shape, padding)


def conv2d_weight_gradient(g: Array, x: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    o, c, kh, kw = shape
    places = _rows(g)
    total = np.zeros((kh * kw * c, o), dtype=g.dtype)
    for block, columns in _gathered(_padded(x, padding), (kh, kw), g.shape[2:], stride):
        total += columns.T @ places[block]
    return total.reshape(kh, kw, c, o).transpose(3, 2, 0, 1)


def _matrix(weight: Array) -> Array:
    """Weight (O, C, kh, kw) as a matrix (kh * kw * C, O)."""
    return np.ascontiguousarray(weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0]))


def _gathered(
    image: Array, window: tuple[int, ...], size: tuple[int, ...], stride: Pair
) -> Iterator[tuple[slice, Array]]:
    """The column matrix of a padded image, block by block, each with the rows that it holds."""
    for block, first, columns in _blocks(len(image), size, window[0] * window[1] * image.shape[3], image.dtype):
        _gather_columns(image, columns, first, size, window, stride)
        yield block, columns


def _blocks(images: int, size: tuple[int, ...], width: int, dtype: Any) -> Iterator[tuple[slice, int, Array]]:
    """Cuts the column matrix between lines of places; of each block its rows, its first line, and memory for it."""
    lines, across = images * size[0], size[1]
    step = max(1, min(lines, _BLOCK // (across * width)))
    memory = np.empty((step * across, width), dtype=dtype)
    for first in range(0, lines, step):
        last = min(first + step, lines)
        yield slice(first * across, last * across), first, memory[: (last - first) * across]


@_jit
def _add_to_rows(x: Array, row: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[r, c] += row[c]


@_jit
def _gather_columns(image: Array, columns: Array, first: int, size: Pair, window: Pair, stride: Pair) -> None:
    _, height, width, channels = image.shape
    span = window[1] * channels  # one row of the window is contiguous in the image
    pixels, cells = image.reshape(image.size), columns.reshape(columns.size)
    cell = 0
    for line in range(first, first + columns.shape[0] // size[1]):
        n, i = line // size[0], line % size[0]
        for j in range(size[1]):
            pixel = ((n * height + i * stride[0]) * width + j * stride[1]) * channels
            for _ in range(window[0]):
                to, source = cells[cell : cell + span], pixels[pixel : pixel + span]
                for q in range(span):
                    to[q] = source[q]
                cell += span
                pixel += width * channels


@_jit
def _scatter_columns(columns: Array, image: Array, first: int, size: Pair, window: Pair, stride: Pair) -> None:
    _, height, width, channels = image.shape
    span = window[1] * channels
    pixels, cells = image.reshape(image.size), columns.reshape(columns.size)
    cell = 0
    for line in range(first, first + columns.shape[0] // size[1]):
        n, i = line // size[0], line % size[0]
        for j in range(size[1]):
            pixel = ((n * height + i * stride[0]) * width + j * stride[1]) * channels
            for _ in range(window[0]):
                to, source = pixels[pixel : pixel + span], cells[cell : cell + span]
                for q in range(span):
                    to[q] += source[q]
                cell += span
                pixel += width * channels


# Pooling


def max_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> tuple[Array, Array]:
    shape = (x.shape[0], *output_size(x.shape[2:], window, stride, padding), x.shape[1])
    y, taken = np.empty(shape, dtype=x.dtype), np.empty(shape, dtype=np.int32)
    _max_pool(*window)(_padded(x, padding, -np.inf), y, taken, stride)
    return _channels_first(y), _channels_first(taken)


def max_pool2d_gradient(
    g: Array, taken: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair
) -> Array:
    dx = _padded_zeros(shape, padding, g.dtype)
    _max_pool_gradient(*window)(_channels_last(g), _channels_last(taken), dx, stride)
    return _cropped(dx, shape, padding)


def avg_pool2d(x: Array, window: Pair, stride: Pair, padding: Pair) -> Array:
    y = np.zeros((x.shape[0], *output_size(x.shape[2:], window, stride, padding), x.shape[1]), dtype=x.dtype)
    _avg_pool(_padded(x, padding), y, window, stride)
    y /= window[0] * window[1]
    return _channels_first(y)


def avg_pool2d_gradient(g: Array, shape: tuple[int, ...], window: Pair, stride: Pair, padding: Pair) -> Array:
    dx = _padded_zeros(shape, padding, g.dtype)
    _avg_pool_gradient(_channels_last(g / (window[0] * window[1])), dx, window, stride)
    return _cropped(dx, shape, padding)


@functools.cache
def _max_pool(kh: int, kw: int) -> Callable[..., None]:
    """The kernel for one size of window: with a fixed size, loops over channels become vector instructions."""

    @_jit
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
    @_jit
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


@_jit
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


@_jit
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


# Optimisers


def sgd(
    p: Array, g: Array, momentum_buffer: Array | None, *, lr: float, momentum: float, dampening: float,
    weight_decay: float, nesterov: bool, first: bool,
) -> None:  # fmt: skip
    number = p.dtype.type
    fresh = number(1 if first else 1 - dampening)
    buffer = np.empty(0, p.dtype) if momentum_buffer is None else _flat(momentum_buffer)
    _sgd(_flat(p), _flat(g), buffer, number(lr), number(momentum), fresh, number(weight_decay), nesterov)


def adamw(
    p: Array, g: Array, m: Array, v: Array, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int,
) -> None:  # fmt: skip
    number = p.dtype.type
    rate, decay = number(lr / (1 - beta1**step)), number(1 - lr * weight_decay)
    scale = number(1 / np.sqrt(1 - beta2**step))
    _adamw(_flat(p), _flat(g), _flat(m), _flat(v), rate, number(beta1), number(beta2), scale, number(eps), decay)


def _flat(x: Array) -> Array:
    """A contiguous array as a vector over the same memory."""
    if not x.flags.c_contiguous:
        raise ValueError(f"parameters, their gradients and optimiser state must be C-contiguous; strides {x.strides}")
    return x.reshape(-1)


@_jit
def _sgd(
    p: Array, g: Array, buffer: Array, lr: Any, momentum: Any, fresh: Any, weight_decay: Any, nesterov: bool
) -> None:
    for i in range(p.size):
        step = g[i] + weight_decay * p[i]
        if buffer.size:
            buffer[i] = momentum * buffer[i] + fresh * step
            step = step + momentum * buffer[i] if nesterov else buffer[i]
        p[i] -= lr * step


@_jit
def _adamw(
    p: Array, g: Array, m: Array, v: Array, rate: Any, beta1: Any, beta2: Any, scale: Any, eps: Any, decay: Any
) -> None:
    one = p.dtype.type(1)
    for i in range(p.size):
        m[i] = beta1 * m[i] + (one - beta1) * g[i]
        v[i] = beta2 * v[i] + (one - beta2) * g[i] * g[i]
        p[i] = decay * p[i] - rate * m[i] / (np.sqrt(v[i]) * scale + eps)
