"""How arrays lie in memory: channels last; and as vectors or matrices that loops run over."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def channels_last(x: Array) -> Array:
    """x (N, C, ...) as a contiguous array (N, ..., C); usually a view."""
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


def channels_first(x: Array) -> Array:
    return np.moveaxis(x, -1, 1)


def as_rows(x: Array) -> Array:
    """x (N, C, ...) as a contiguous matrix with one row per sample and place, one column per channel."""
    rows = channels_last(x)
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def like_rows(rows: Array, x: Array) -> Array:
    """The inverse of `as_rows`."""
    return channels_first(rows.reshape(x.shape[0], *x.shape[2:], x.shape[1]))


def vectors(out: Array, *others: Array) -> list[Array]:
    """A dense array, and others of its shape, as vectors in the order in which `out` lies in memory.

    That of `out` is a view. So are those of arrays that lie as it does; the others are copied.
    """
    outer_to_inner = sorted(range(out.ndim), key=lambda axis: -out.strides[axis])
    return [np.ascontiguousarray(x.transpose(outer_to_inner)).reshape(-1) for x in (out, *others)]
