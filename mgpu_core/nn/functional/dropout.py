"""Dropout with masks that do not depend on how the batch is split."""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from mgpu_core import random
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.tensor import Tensor, record


def dropout(x: Tensor, p: float, layer: int, *, start: int = 0, length: int | None = None) -> Tensor:
    """Zeroes each element with probability p, and divides the others by 1 - p (Srivastava et al. 2014).

    The mask of a sample (a row of axis 0) is a function of the seed, the step and the sample's place in the global
    batch, which the surrounding `mgpu_core.random.batch` gives, and of `layer`, a number that tells one
    use of dropout from another. So it is the same whichever rank the sample is on. Where ranks hold different parts of
    axis 1, of `length` in all, `start` is where this part begins, and the mask is the part of the whole one.
    Raises RuntimeError outside of `random.batch`.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout's p must be at least 0 and less than 1, not {p}")
    if p == 0:
        return x
    if length is None:
        words = random.sample_words(layer, x.shape[0], math.prod(x.shape[1:]))
    else:
        inner = math.prod(x.shape[2:])
        part = start * inner, (start + x.shape[1]) * inner
        words = random.sample_words(layer, x.shape[0], length * inner, part)
    kept = array_namespace(x.data).asarray((words >= p * 2**32).reshape(x.shape))
    kernels = kernels_for(x.data)
    scale = 1 / (1 - p)
    return record(kernels.keep(x.data, kept, scale), (x, lambda g: kernels.keep(g, kept, scale)))
