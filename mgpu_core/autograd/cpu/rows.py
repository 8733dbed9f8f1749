"""Matrices row by row."""

from __future__ import annotations

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array


def softmax_minus_one_hot(log_p: Array, labels: Array, scale: Array) -> Array:
    p = np.exp(log_p)
    p[np.arange(len(p)), labels[:, 0]] -= 1
    p *= scale
    return p


def add_rows(indices: Array, rows: Array, count: int) -> Array:
    total = np.zeros((count, rows.shape[1]), dtype=rows.dtype)
    _add_rows(indices, np.ascontiguousarray(rows), total)
    return total


@jit
def _add_rows(indices: Array, rows: Array, total: Array) -> None:
    for r in range(rows.shape[0]):
        row = total[indices[r]]
        for c in range(rows.shape[1]):
            row[c] += rows[r, c]
