"""Matrices row by row."""

from __future__ import annotations

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array


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
