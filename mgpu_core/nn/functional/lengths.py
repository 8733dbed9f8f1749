"""Lengths of the sequences of a batch, which are padded to one length."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.tape import Array
from mgpu_core.tensor import Tensor


def checked_lengths(xp: Any, lengths: Any, samples: int, longest: int) -> Array:
    """Lengths as int64 (N,) of the library `xp`, by default the longest for all.

    Raises ValueError where they do not fit; of those on a GPU, where to look would be to wait for it, the nearest that
    fit are taken.
    """
    if lengths is None:
        return xp.full((samples,), longest, dtype=xp.int64)
    given = Tensor(lengths).data
    fits = given.shape == (samples,)
    if fits and device.of(given) == "cuda":
        return xp.minimum(xp.maximum(xp.astype(given, xp.int64), 0), longest)
    its = array_namespace(given)
    if not fits or its.any(given < 0) or its.any(given > longest):
        raise ValueError(f"lengths must be {samples} integers from 0 to {longest}, not {lengths}")
    return xp.astype(xp.asarray(given), xp.int64)
