"""NumPy arrays to block-scaled 8-bit numbers and back, by the compiled kernels of `kernels/quantize.py`."""

from __future__ import annotations

import numpy as np

from kernels import native
from kernels.quantize import CODES, SCALE_BYTES, Array


def pack(values: Array, block: int, code: str = "int8") -> Array:
    """float32 (n,) without gaps, n a multiple of `block`, which is one of 4, to uint8 (n / block, 4 + block)."""
    packed = np.empty((values.size // block, SCALE_BYTES + block), np.uint8)
    native.load("pack_blocks").call(packed.ctypes.data, values.ctypes.data, len(packed), block, CODES[code], 0, 1)
    return packed


def unpack(packed: Array, block: int, code: str = "int8") -> Array:
    """The float32 (n,) that such records, without gaps, stand for."""
    values = np.empty(packed.size // (SCALE_BYTES + block) * block, np.float32)
    blocks = values.size // block
    native.load("unpack_blocks").call(values.ctypes.data, packed.ctypes.data, blocks, block, CODES[code], 0, 1)
    return values
