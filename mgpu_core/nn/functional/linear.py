"""Matrix products with a bias, and look-up in a table (a product with one-hot rows)."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.autocast import narrowed, product
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.tape import Array
from mgpu_core.tensor import Tensor, record


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) times the transpose of weight (O, I), plus bias (O,): (..., O)."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: the last axis of x {x.shape} must be as long as that of the weight {weight.shape}")
    a, w, b = narrowed(x.data, weight.data, None if bias is None else bias.data)
    xp = array_namespace(a, w)
    shape, outputs = a.shape, w.shape[0]
    rows = xp.reshape(a, (math.prod(shape[:-1]), shape[-1]))
    y = product(rows, w.T)
    if b is not None:
        y += b
    count = rows.shape[0]
    return record(
        xp.reshape(y, (*shape[:-1], outputs)),
        (x, lambda g: xp.reshape(product(xp.reshape(g, (count, outputs)), w), shape)),
        (weight, lambda g: product(xp.reshape(g, (count, outputs)).T, rows)),
        (bias, lambda g: kernels_for(g).channel_sums(xp.reshape(g, (count, outputs)))),
    )


def embedding(indices: Any, weight: Tensor) -> Tensor:
    """Rows of weight (V, D) by integer indices of any shape: (..., D).

    Raises IndexError for an index below 0 or from V on; on a GPU its row is NaN instead (see `in_range`).
    """
    index = device.beside(Tensor(indices).data, weight.data)
    w = weight.data
    xp = array_namespace(w)
    valid = in_range(index, w.shape[0], "an index into the embedding's rows")
    flat = xp.reshape(index, (-1,))
    kernels, shape = kernels_for(w), w.shape
    rows = xp.take(w, flat, axis=0)
    if valid is not None:
        rows = nan_unless(xp.reshape(valid, (-1, 1)), rows)
    return record(
        xp.reshape(rows, (*index.shape, w.shape[1])),
        (weight, lambda g: kernels.add_rows(flat, xp.reshape(g, (flat.shape[0], shape[1])), shape[0])),
    )


def in_range(index: Array, count: int, what: str) -> Array | None:
    """Raises TypeError unless `index` is an integer array, IndexError unless its elements are in [0, count).

    Of an array on a GPU, where to look would be to wait for it, this returns which are instead, booleans, and what is
    computed from the others is to become NaN: a loss that is NaN ends a training as an error does.
    """
    xp = array_namespace(index)
    if not xp.isdtype(index.dtype, "integral"):
        raise TypeError(f"{what} must be an integer, not {index.dtype}")
    if device.of(index) == "cuda":
        return (index >= 0) & (index < count)
    if math.prod(index.shape) and not (0 <= int(xp.min(index)) and int(xp.max(index)) < count):
        raise IndexError(f"{what} must be from 0 to {count - 1}; these go from {xp.min(index)} to {xp.max(index)}")
    return None


def nan_unless(valid: Array, x: Array) -> Array:
    """x where `valid`, else NaN."""
    xp = array_namespace(x)
    return xp.where(valid, x, xp.full_like(x, math.nan))
