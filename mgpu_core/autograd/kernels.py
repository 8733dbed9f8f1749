"""Which kernels an operation uses: compiled ones for NumPy's float32 and float64, array-API ones for the rest.

`cpu` and `portable` hold the same functions, with the same arguments and results.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from mgpu_core.autograd import cpu, portable
from mgpu_core.autograd.tape import Array


def kernels_for(x: Array) -> ModuleType:
    """The module with the kernels for arrays like `x`."""
    return cpu if isinstance(x, np.ndarray) and x.dtype.char in "fd" else portable
