"""Functions that put tensors together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import VJP
from mgpu_core.tensor import Tensor, record


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Joins tensors along an existing axis; their other axes must agree."""
    arrays = [tensor.data for tensor in tensors]
    edges: list[tuple[Tensor, VJP]] = []
    start = 0
    for tensor in tensors:
        stop = start + tensor.shape[axis]
        edges.append((tensor, _slicer(axis % tensor.ndim, slice(start, stop))))
        start = stop
    return record(array_namespace(*arrays).concat(arrays, axis=axis), *edges)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Joins tensors of one shape along a new axis."""
    arrays = [tensor.data for tensor in tensors]
    axis %= arrays[0].ndim + 1
    edges = [(tensor, _slicer(axis, i)) for i, tensor in enumerate(tensors)]
    return record(array_namespace(*arrays).stack(arrays, axis=axis), *edges)


def pad(x: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Puts `value` around x: `widths` has (before, after) for each axis."""
    if len(widths) != x.ndim:
        raise ValueError(f"pad needs (before, after) for each of {x.ndim} axes, not {len(widths)} pairs")
    a = x.data
    shape = tuple(before + n + after for n, (before, after) in zip(a.shape, widths))
    inside = tuple(slice(before, before + n) for n, (before, _) in zip(a.shape, widths))
    padded = array_namespace(a).full(shape, value, dtype=a.dtype)
    padded[inside] = a
    return record(padded, (x, lambda g: g[inside]))


def _slicer(axis: int, part: Any) -> VJP:
    index = (slice(None),) * axis + (part, ...)
    return lambda g: g[index]
