"""Convolution: rows of a column matrix (im2col), one for each place of the window, times the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array, as_rows, channels_first
from mgpu_core.autograd.cpu.windows import crop, pad, padded_zeros
from mgpu_core.autograd.portable.windows import Pair, output_size

_BLOCK = 1 << 16  # elements of the column matrix at a time, so that it stays in the second-level cache


def conv2d(x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
    size = output_size(x.shape[2:], weight.shape[2:], stride, padding)
    y = np.empty((x.shape[0], *size, weight.shape[0]), dtype=x.dtype)
    places = y.reshape(-1, weight.shape[0])
    matrix = _matrix(weight)
    for block, columns in _gathered(pad(x, padding), weight.shape[2:], size, stride):
        np.matmul(columns, matrix, out=places[block])
        if bias is not None:
            _add_to_rows(places[block], bias)
    return channels_first(y)


def conv2d_input_gradient(g: Array, weight: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    places = as_rows(g)
    matrix = _matrix(weight).T
    dx = padded_zeros(shape, padding, g.dtype)
    for block, first, columns in _blocks(g.shape[0], g.shape[2:], matrix.shape[1], g.dtype):
        np.matmul(places[block], matrix, out=columns)
        _scatter_columns(columns, dx, first, g.shape[2:], weight.shape[2:], stride)
    return crop(dx, shape, padding)


def conv2d_weight_gradient(g: Array, x: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    o, c, kh, kw = shape
    places = as_rows(g)
    total = np.zeros((kh * kw * c, o), dtype=g.dtype)
    for block, columns in _gathered(pad(x, padding), (kh, kw), g.shape[2:], stride):
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


@jit
def _add_to_rows(x: Array, row: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[r, c] += row[c]


@jit
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


@jit
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
