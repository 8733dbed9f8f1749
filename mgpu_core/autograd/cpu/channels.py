"""Sums over samples and affine maps per channel, of arrays (N, C, ...): what batch norm is made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array, as_rows, like_rows
from mgpu_core.autograd.cpu.threads import share


def channel_sums(g: Array) -> Array:
    return _sums(lambda rows, sums: _sum_rows(rows, sums[0]), 1, g)[0]


def channel_moments(x: Array, center: Array) -> tuple[Array, Array]:
    first, second = _sums(lambda rows, sums: _moments(rows, center, sums[0], sums[1]), 2, x)
    return first, second


def channel_products(g: Array, x: Array, center: Array) -> tuple[Array, Array]:
    total, product = _sums(lambda g, x, sums: _products(g, x, center, sums[0], sums[1]), 2, g, x)
    return total, product


def normalize_channels(x: Array, center: Array, scale: Array, shift: Array) -> Array:
    rows = as_rows(x)
    out = np.empty_like(rows)
    values = [value.astype(x.dtype) for value in (center, scale, shift)]
    share(lambda part: _normalize(rows[part], *values, out[part]), len(rows), rows.size)
    return like_rows(out, x)


def combine_channels(g: Array, x: Array, center: Array, a: Array, b: Array, c: Array) -> Array:
    g_rows, x_rows = as_rows(g), as_rows(x)
    out = np.empty_like(g_rows)
    values = [value.astype(g.dtype) for value in (center, a, b, c)]
    share(lambda part: _combine(g_rows[part], x_rows[part], *values, out[part]), len(out), out.size)
    return like_rows(out, g)


def _sums(kernel: Callable[..., None], count: int, *arrays: Array) -> Array:
    """(count, C) float64: what `kernel`, given some rows of the arrays, adds to; over all rows."""
    matrices = [as_rows(x) for x in arrays]

    def work(part: slice) -> Array:
        sums = np.zeros((count, arrays[0].shape[1]))
        kernel(*(matrix[part] for matrix in matrices), sums)
        return sums

    return np.sum(share(work, len(matrices[0]), matrices[0].size), axis=0)


@jit
def _sum_rows(g: Array, total: Array) -> None:
    for r in range(g.shape[0]):
        for c in range(g.shape[1]):
            total[c] += g[r, c]


# Four rows at a time: a loop over few channels waits for what it has stored a moment ago.


@jit
def _moments(x: Array, center: Array, first: Array, second: Array) -> None:
    fours = x.shape[0] // 4 * 4
    for r in range(0, fours, 4):
        for c in range(x.shape[1]):
            p, q = x[r, c] - center[c], x[r + 1, c] - center[c]
            s, t = x[r + 2, c] - center[c], x[r + 3, c] - center[c]
            first[c] += (p + q) + (s + t)
            second[c] += (p * p + q * q) + (s * s + t * t)
    for r in range(fours, x.shape[0]):
        for c in range(x.shape[1]):
            offset = x[r, c] - center[c]
            first[c] += offset
            second[c] += offset * offset


@jit
def _products(g: Array, x: Array, center: Array, total: Array, product: Array) -> None:
    fours = x.shape[0] // 4 * 4
    for r in range(0, fours, 4):
        for c in range(x.shape[1]):
            p, q = g[r, c] * (x[r, c] - center[c]), g[r + 1, c] * (x[r + 1, c] - center[c])
            s, t = g[r + 2, c] * (x[r + 2, c] - center[c]), g[r + 3, c] * (x[r + 3, c] - center[c])
            total[c] += (np.float64(g[r, c]) + g[r + 1, c]) + (np.float64(g[r + 2, c]) + g[r + 3, c])
            product[c] += (p + q) + (s + t)
    for r in range(fours, x.shape[0]):
        for c in range(x.shape[1]):
            total[c] += g[r, c]
            product[c] += g[r, c] * (x[r, c] - center[c])


@jit
def _normalize(x: Array, center: Array, scale: Array, shift: Array, out: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            out[r, c] = (x[r, c] - center[c]) * scale[c] + shift[c]


@jit
def _combine(g: Array, x: Array, center: Array, a: Array, b: Array, c: Array, out: Array) -> None:
    for r in range(g.shape[0]):
        for k in range(g.shape[1]):
            out[r, k] = a[k] * g[r, k] + b[k] * (x[r, k] - center[k]) + c[k]
