"""The element types that move through collectives, and how each is summed.

Types that NumPy lacks (bfloat16, float8) come from `ml_dtypes`. A 16- or 8-bit float is widened to
float32 for arithmetic and rounded once, to nearest even, when it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

OPERATIONS = ("sum", "prod", "min", "max", "avg", "premul_sum")


@dataclass(frozen=True)
class DType:
    """One element type. `code` is its number in call descriptors; `kind` is float, int, uint, bool or complex."""

    name: str
    code: int
    numpy: np.dtype
    kind: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.numpy.itemsize

    @property
    def accumulator(self) -> str:
        """The name of the type that arithmetic is done in."""
        return "float32" if self.kind == "float" and self.itemsize < 4 else self.name

    def operations(self) -> tuple[str, ...]:
        """The reductions that make sense for this type: no order among complex numbers, no average of truth values."""
        if self.kind == "complex":
            return ("sum", "prod", "avg", "premul_sum")
        if self.kind == "bool":
            return ("sum", "prod", "min", "max")
        return OPERATIONS


_ALL = (
    ("float64", np.float64, "float"),
    ("float32", np.float32, "float"),
    ("float16", np.float16, "float"),
    ("bfloat16", ml_dtypes.bfloat16, "float"),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "float"),
    ("float8_e5m2", ml_dtypes.float8_e5m2, "float"),
    ("int64", np.int64, "int"),
    ("int32", np.int32, "int"),
    ("int16", np.int16, "int"),
    ("int8", np.int8, "int"),
    ("uint64", np.uint64, "uint"),
    ("uint32", np.uint32, "uint"),
    ("uint16", np.uint16, "uint"),
    ("uint8", np.uint8, "uint"),
    ("bool", np.bool_, "bool"),
    ("complex64", np.complex64, "complex"),
    ("complex128", np.complex128, "complex"),
)

DTYPES: tuple[DType, ...] = tuple(
    DType(name, code, np.dtype(numpy), kind) for code, (name, numpy, kind) in enumerate(_ALL)
)
_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES}
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


@cache
def find(dtype: object) -> DType:
    """The `DType` for a NumPy dtype, a scalar type or a name. Raises TypeError for a type that cannot be moved."""
    if isinstance(dtype, str) and dtype in _BY_NAME:
        return _BY_NAME[dtype]
    try:
        known = _BY_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]
    except TypeError:
        known = None
    if known is None:
        raise TypeError(f"dtype {dtype} cannot be moved or reduced; use one of {', '.join(_BY_NAME)}")
    return known
