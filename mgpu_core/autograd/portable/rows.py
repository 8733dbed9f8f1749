"""Matrices row by row: normalisation, cross-entropy, tables."""

from __future__ import annotations

from array_api_compat import array_namespace

from mgpu_core.autograd.portable.activation import log_softmax
from mgpu_core.autograd.tape import Array


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Rows of x (R, C) with mean 0 and variance 1, times weight (C,), plus bias (C,); and each row's mean and inverse
    deviation, (R,)."""
    xp = array_namespace(x)
    center = xp.mean(x, axis=1, keepdims=True)
    offset = x - center
    inverse = 1 / xp.sqrt(xp.mean(offset * offset, axis=1, keepdims=True) + eps)
    return offset * inverse * weight + bias, center[:, 0], inverse[:, 0]


def layer_norm_gradient(g: Array, x: Array, weight: Array, center: Array, inverse: Array) -> tuple[Array, Array, Array]:
    """The gradients of layer_norm's x, and, in float64, of its weight and bias."""
    xp = array_namespace(x)
    inverse = inverse[:, None]
    normal = (x - center[:, None]) * inverse
    weighted = g * weight
    along = xp.mean(weighted * normal, axis=1, keepdims=True)
    dx = inverse * (weighted - xp.mean(weighted, axis=1, keepdims=True) - normal * along)
    return dx, xp.sum(g * normal, axis=0, dtype=xp.float64), xp.sum(g, axis=0, dtype=xp.float64)


def cross_entropy(x: Array, labels: Array) -> tuple[Array, Array]:
    """Of x (R, C) and labels (R,): minus the logarithm of softmax at each row's label, and log sum exp(x), (R,)."""
    xp = array_namespace(x)
    labels = labels[:, None]
    losses = -xp.take_along_axis(log_softmax(x, 1), labels, axis=1)
    return losses[:, 0], (losses + xp.take_along_axis(x, labels, axis=1))[:, 0]


def cross_entropy_gradient(x: Array, labels: Array, log_sums: Array, scale: Array) -> Array:
    """(softmax(x) - 1 at the label) * scale (R,), where `log_sums` is the second result of cross_entropy."""
    xp = array_namespace(x)
    one_hot = xp.astype(labels[:, None] == xp.arange(x.shape[1]), x.dtype)
    return (xp.exp(x - log_sums[:, None]) - one_hot) * scale[:, None]


def add_rows(indices: Array, rows: Array, count: int) -> Array:
    """(count, D): row i is the sum of `rows` (n, D) whose index, of `indices` (n,), is i."""
    xp = array_namespace(rows)
    total = xp.zeros((count, rows.shape[1]), dtype=rows.dtype)
    xp.add.at(total, indices, rows)
    return total
