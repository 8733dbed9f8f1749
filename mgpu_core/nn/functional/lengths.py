"""Lengths of the sequences of a batch, which are padded to one length."""

from __future__ import annotations

from typing import Any

from mgpu_core.autograd.tape import Array
from mgpu_core.tensor import Tensor


def checked_lengths(xp: Any, lengths: Any, samples: int, longest: int) -> Array:
    """Lengths as int64 (N,), by default the longest for all. Raises ValueError where they do not fit."""
    if lengths is None:
        return xp.full((samples,), longest, dtype=xp.int64)
    array = xp.astype(xp.asarray(Tensor(lengths).data), xp.int64)
    if array.shape != (samples,) or xp.any(array < 0) or xp.any(array > longest):
        raise ValueError(f"lengths must be {samples} integers from 0 to {longest}, not {lengths}")
    return array
