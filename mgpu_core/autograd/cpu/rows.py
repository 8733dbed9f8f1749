"""Matrices row by row: normalisation, cross-entropy, tables."""

from __future__ import annotations

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.elementary import exp
from mgpu_core.autograd.cpu.layout import Array
from mgpu_core.autograd.cpu.threads import share


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    y, center, inverse = np.empty_like(x), np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)

    def work(part: slice) -> None:
        _layer_norm(x[part], weight, bias, eps, y[part], center[part], inverse[part])

    x = np.ascontiguousarray(x)
    share(work, len(x), x.size)
    return y, center, inverse


def layer_norm_gradient(g: Array, x: Array, weight: Array, center: Array, inverse: Array) -> tuple[Array, Array, Array]:
    dx = np.empty_like(x)

    def work(part: slice) -> Array:
        sums = np.zeros((2, len(weight)))
        _layer_norm_gradient(g[part], x[part], weight, center[part], inverse[part], dx[part], *sums)
        return sums

    g, x = np.ascontiguousarray(g), np.ascontiguousarray(x)
    dweight, dbias = np.sum(share(work, len(x), x.size), axis=0)
    return dx, dweight, dbias


def cross_entropy(x: Array, labels: Array) -> tuple[Array, Array]:
    x = np.ascontiguousarray(x)
    losses, log_sums = np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)

    def work(part: slice) -> None:
        _cross_entropy(x[part], labels[part], x[part].max(axis=1), losses[part], log_sums[part])

    share(work, len(x), x.size)
    return losses, log_sums


def cross_entropy_gradient(x: Array, labels: Array, log_sums: Array, scale: Array) -> Array:
    x = np.ascontiguousarray(x)
    dx = np.empty_like(x)

    def work(part: slice) -> None:
        _cross_entropy_gradient(x[part], labels[part], log_sums[part], scale[part], dx[part])

    share(work, len(x), x.size)
    return dx


def add_rows(indices: Array, rows: Array, count: int) -> Array:
    total = np.zeros((count, rows.shape[1]), dtype=rows.dtype)
    _add_rows(indices, np.ascontiguousarray(rows), total)
    return total


@jit
def _layer_norm(x: Array, weight: Array, bias: Array, eps: float, y: Array, center: Array, inverse: Array) -> None:
    real = x.dtype.type
    size = real(x.shape[1])
    for r in range(x.shape[0]):
        total = real(0)
        for c in range(x.shape[1]):
            total += x[r, c]
        mean = total / size
        squares = real(0)
        for c in range(x.shape[1]):
            squares += (x[r, c] - mean) * (x[r, c] - mean)
        scale = real(1) / np.sqrt(squares / size + real(eps))
        for c in range(x.shape[1]):
            y[r, c] = (x[r, c] - mean) * scale * weight[c] + bias[c]
        center[r], inverse[r] = mean, scale


@jit
def _layer_norm_gradient(
    g: Array, x: Array, weight: Array, center: Array, inverse: Array, dx: Array, dweight: Array, dbias: Array
) -> None:
    real = x.dtype.type
    size = real(x.shape[1])
    for r in range(x.shape[0]):
        mean, scale = center[r], inverse[r]
        total, product = real(0), real(0)
        for c in range(x.shape[1]):
            normal = (x[r, c] - mean) * scale
            total += g[r, c] * weight[c]
            product += g[r, c] * weight[c] * normal
            dweight[c] += g[r, c] * normal
            dbias[c] += g[r, c]
        total, product = total / size, product / size
        for c in range(x.shape[1]):
            dx[r, c] = scale * (g[r, c] * weight[c] - total - (x[r, c] - mean) * scale * product)


@jit
def _cross_entropy(x: Array, labels: Array, largest: Array, losses: Array, log_sums: Array) -> None:
    for r in range(x.shape[0]):
        total = x.dtype.type(0)
        for c in range(x.shape[1]):
            total += exp(x[r, c] - largest[r])
        log_sums[r] = largest[r] + np.log(total)
        losses[r] = log_sums[r] - x[r, labels[r]]


@jit
def _cross_entropy_gradient(x: Array, labels: Array, log_sums: Array, scale: Array, dx: Array) -> None:
    for r in range(x.shape[0]):
        for c in range(x.shape[1]):
            dx[r, c] = exp(x[r, c] - log_sums[r]) * scale[r]
        dx[r, labels[r]] -= scale[r]


@jit
def _add_rows(indices: Array, rows: Array, total: Array) -> None:
    for r in range(rows.shape[0]):
        row = total[indices[r]]
        for c in range(rows.shape[1]):
            row[c] += rows[r, c]
