"""Which kernels an operation uses: compiled ones for NumPy's float32 and float64, array-API ones for the rest.

`short` stands in front of both for 16-bit floats. All three hold the same functions, with the same arguments and
results.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from mgpu_core.autograd import cpu, portable, short
from mgpu_core.autograd.autocast import is_short
from mgpu_core.autograd.tape import Array


def kernels_for(x: Array) -> ModuleType:
    """The module with the kernels for arrays like `x`."""
    if isinstance(x, np.ndarray) and x.dtype.char in "fd":
        return cpu
    return short if is_short(x.dtype) else portable
