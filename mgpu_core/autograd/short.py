"""The layers' kernels for arrays of 16-bit floats: the wider ones, of which the result is rounded once.

What a kernel returns beside its result (denominators, means, sums) keeps the wider type. On a GPU the products of
convolutions go to the matrix units in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mgpu_core.autograd import cpu, portable
from mgpu_core.autograd.autocast import cast, is_short, widen

_IN_PLACE = ("adamw", "gru_step", "gru_step_gradient", "lstm_step", "lstm_step_gradient", "sgd")
_PRODUCTS = ("conv2d", "conv2d_input_gradient", "conv2d_weight_gradient")

__all__ = list(portable.__all__)


def _is_short(x: Any) -> bool:
    return is_short(getattr(x, "dtype", None))


def _rounded(name: str) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        like = next(x for x in arguments if _is_short(x))
        on_cpu = isinstance(like, np.ndarray)
        if not on_cpu and name in _PRODUCTS:
            return getattr(portable, name)(*arguments)
        results = getattr(cpu if on_cpu else portable, name)(*(widen(x) if _is_short(x) else x for x in arguments))
        first, *others = results if isinstance(results, tuple) else (results,)
        first = cast(first, like.dtype) if first.dtype == np.float32 else first
        return (first, *others) if others else first

    return kernel


globals().update({name: getattr(portable, name) if name in _IN_PLACE else _rounded(name) for name in __all__})
