"""Sums over samples and affine maps per channel, of arrays (N, C, ...): what batch norm is made of."""

from __future__ import annotations

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array, as_rows, like_rows


def channel_sums(g: Array) -> Array:
    total = np.zeros(g.shape[1])
    _sum_rows(as_rows(g), total)
    return total


def channel_moments(x: Array, center: Array) -> tuple[Array, Array]:
    first, second = np.zeros_like(center), np.zeros_like(center)
    _moments(as_rows(x), center, first, second)
    return first, second


def channel_products(g: Array, x: Array, center: Array) -> tuple[Array, Array]:
    total, product = np.zeros_like(center), np.zeros_like(center)
    _products(as_rows(g), as_rows(x), center, total, product)
    return total, product


def normalize_channels(x: Array, center: Array, scale: Array, shift: Array) -> Array:
    rows = as_rows(x)
    out = np.empty_like(rows)
    _normalize(rows, *(value.astype(x.dtype) for value in (center, scale, shift)), out)
    return like_rows(out, x)


def combine_channels(g: Array, x: Array, center: Array, a: Array, b: Array, c: Array) -> Array:
    rows = as_rows(g)
    out = np.empty_like(rows)
    _combine(rows, as_rows(x), *(value.astype(g.dtype) for value in (center, a, b, c)), out)
    return like_rows(out, g)


@jit
def _sum_rows(g: Array, total: Array) -> None:
    for r in range(g.shape[0]):
        for c in range(g.shape[1]):
            total[c] += g[r, c]


@jit
def _moments(x: Array, center: Array, first: Array, second: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            offset = x[r, c] - center[c]
            first[c] += offset
            second[c] += offset * offset


@jit
def _products(g: Array, x: Array, center: Array, total: Array, product: Array) -> None:
    for r in range(x.shape[0]):
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
