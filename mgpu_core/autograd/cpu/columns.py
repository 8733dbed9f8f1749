"""Convolution: rows of a column matrix (im2col), one for each place of the window, times the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array, channels_first, channels_last
from mgpu_core.autograd.cpu.threads import share_products
from mgpu_core.autograd.portable.windows import Pair, output_size

_BLOCK = 1 << 17  # elements of the column matrix at a time: in float32, what a second-level cache of 512 KB holds


def conv2d(x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
    window = weight.shape[2:]
    images, matrix = channels_last(x), _matrix(weight)
    y = np.empty((len(x), *output_size(x.shape[2:], window, stride, padding), weight.shape[0]), dtype=x.dtype)

    def work(part: slice) -> None:
        places = y[part].reshape(-1, y.shape[3])
        for block, columns in _gathered(images[part], window, y.shape[1:3], stride, padding):
            np.matmul(columns, matrix, out=places[block])
            if bias is not None:
                _add_to_rows(places[block], bias)

    share_products(work, len(x), y.size * len(matrix))
    return channels_first(y)


def conv2d_input_gradient(g: Array, weight: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    n, c, h, w = shape
    gradients, matrix = channels_last(g), _matrix(weight).T
    dx = np.zeros((n, h, w, c), dtype=g.dtype)

    def work(part: slice) -> None:
        places = gradients[part].reshape(-1, g.shape[1])
        for block, first, columns in _blocks(len(dx[part]), g.shape[2:], matrix.shape[1], g.dtype):
            np.matmul(places[block], matrix, out=columns)
            _scatter_columns(dx[part], columns, first, g.shape[2:], weight.shape[2:], stride, padding)

    share_products(work, n, g.size * matrix.shape[1])
    return channels_first(dx)


def conv2d_weight_gradient(g: Array, x: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    o, c, kh, kw = shape
    images, gradients = channels_last(x), channels_last(g)

    def work(part: slice) -> Array:
        places = gradients[part].reshape(-1, o)
        total = np.zeros((kh * kw * c, o), dtype=g.dtype)
        for block, columns in _gathered(images[part], (kh, kw), g.shape[2:], stride, padding):
            total += columns.T @ places[block]
        return total

    total = np.sum(share_products(work, len(x), g.size * kh * kw * c), axis=0)
    return total.reshape(kh, kw, c, o).transpose(3, 2, 0, 1)


def _matrix(weight: Array) -> Array:
    """Weight (O, C, kh, kw) as a matrix (kh * kw * C, O)."""
    return np.ascontiguousarray(weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0]))


def _gathered(
    images: Array, window: tuple[int, ...], size: tuple[int, ...], stride: Pair, padding: Pair
) -> Iterator[tuple[slice, Array]]:
    """The column matrix of images, block by block, each with the rows that it holds."""
    if window == (1, 1) and stride == (1, 1) and padding == (0, 0):
        yield slice(None), images.reshape(-1, images.shape[3])
        return
    for block, first, columns in _blocks(len(images), size, window[0] * window[1] * images.shape[3], images.dtype):
        _gather_columns(images, columns, first, size, window, stride, padding)
        yield block, columns


def _blocks(images: int, size: tuple[int, ...], width: int, dtype: Any) -> Iterator[tuple[slice, int, Array]]:
    """Cuts the column matrix between lines of places; of each block its rows, its first line, and memory for it."""
    lines, across = images * size[0], size[1]
    step = max(1, min(lines, _BLOCK // (across * width)))
    memory = np.empty((step * across, width), dtype=dtype)
    for first in range(0, lines, step):
        last = min(first + step, lines)
        yield slice(first * across, last * across), first, memory[: (last - first) * across]


@jit
def _add_to_rows(x: Array, row: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[r, c] += row[c]


@jit
def _gather(pixels: Array, cells: Array, before: int) -> None:
    if len(pixels) < len(cells):
        cells[:] = 0
    to = cells[before : before + len(pixels)]
    for q in range(len(pixels)):
        to[q] = pixels[q]


@jit
def _scatter(pixels: Array, cells: Array, before: int) -> None:
    source = cells[before : before + len(pixels)]
    for q in range(len(pixels)):
        pixels[q] += source[q]


def _over_columns(gather: bool) -> Callable[..., None]:
    """The kernel that copies images into their columns, or adds columns to the images. A row of a window is contiguous
    in both: its cells, of which `before` ones lie over the image's edge, and then those that stand for its pixels."""

    @jit
    def kernel(
        images: Array, columns: Array, first: int, size: Pair, window: Pair, stride: Pair, padding: Pair
    ) -> None:
        _, height, width, channels = images.shape
        pixels, cells = images.reshape(images.size), columns.reshape(columns.size)
        whole = window[1] * channels
        cell = 0
        for line in range(first, first + columns.shape[0] // size[1]):
            n, top = line // size[0], line % size[0] * stride[0] - padding[0]
            for j in range(size[1]):
                left = j * stride[1] - padding[1]
                begin, end = max(left, 0), min(left + window[1], width)
                before, span = (begin - left) * channels, max(end - begin, 0) * channels
                for row in range(top, top + window[0]):
                    pixel = ((n * height + row) * width + begin) * channels
                    inside = span if 0 <= row < height else 0
                    if gather:
                        _gather(pixels[pixel : pixel + inside], cells[cell : cell + whole], before)
                    else:
                        _scatter(pixels[pixel : pixel + inside], cells[cell : cell + whole], before)
                    cell += whole

    return kernel


_gather_columns, _scatter_columns = _over_columns(True), _over_columns(False)
