"""Block-scaled 8-bit numbers: a float32 scale for each block, and 8 bits for each of its elements.

Packed, a block is a record of 4 + `block` bytes: the scale, then the codes. An element is its code times the scale, and
the scale makes the block's largest magnitude the largest code: 127 (int8) or 448 (float8 e4m3). Such formats are known
from optimisers' state (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022).

A block with a NaN or an infinity becomes NaN as a whole, so that what is not finite is not hidden.

`pack_blocks`, `unpack_blocks` and `reduce_blocks` are the kernels, one source for every target; `pack`, `unpack` and
`reduce` say the same in NumPy, bit for bit.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernels.portable import portable, primitive

Array = npt.NDArray[Any]

SCALE_BYTES = 4
INT8, E4M3 = 0, 1
CODES = {"int8": INT8, "float8_e4m3fn": E4M3}
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # of the codes
_NAN, _INFINITY = 0x7FC00000, 0x7F800000  # float32


def pack(values: Array, block: int, code: str = "int8") -> Array:
    """Quantises float32 (n,), n a multiple of `block`, to nearest even: uint8 (n / block, 4 + block)."""
    rows = values.reshape(-1, block)
    packed = np.empty((len(rows), SCALE_BYTES + block), np.uint8)
    with np.errstate(all="ignore"):
        scale = np.abs(rows).max(axis=1, initial=0) / np.float32(LARGEST[code])
        scale[~np.isfinite(scale)] = np.nan
        scaled = np.where(scale[:, None] > 0, rows / scale[:, None], np.float32(0))
        scaled = np.clip(scaled, -LARGEST[code], LARGEST[code])  # where the scale is a subnormal number, and coarse
        codes = np.rint(scaled).astype(np.int8) if code == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn)
    packed[:, :SCALE_BYTES] = scale.astype(np.float32)[:, None].view(np.uint8)
    packed[:, SCALE_BYTES:] = codes.view(np.uint8)
    return packed


def unpack(packed: Array, block: int, code: str = "int8") -> Array:
    """The float32 (n,) that such records stand for."""
    records = packed.reshape(-1, SCALE_BYTES + block)
    scale = np.ascontiguousarray(records[:, :SCALE_BYTES]).view(np.float32)
    codes = records[:, SCALE_BYTES:].view(np.int8 if code == "int8" else ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float32) * scale).reshape(-1)


def reduce(packed: Array, block: int, code: str = "int8") -> Array:
    """The float32 sum of `senders` packed arrays, in order, packed again: uint8 (senders, n / block, 4 + block) to
    (n / block, 4 + block)."""
    total = unpack(packed[0], block, code)
    with np.errstate(all="ignore"):
        for part in packed[1:]:
            total = total + unpack(part, block, code)
    return pack(total, block, code)


# The kernels. A float32 is passed as its bits, a non-negative integer, so that all that is passed are integers.


@primitive
def load_bits(address: int) -> int:
    """The 32 bits at `address`, a multiple of 4."""
    return ctypes.c_uint32.from_address(address).value


@primitive
def store_bits(address: int, bits: int) -> None:
    """Write 32 bits."""
    ctypes.c_uint32.from_address(address).value = bits


@primitive
def load_byte(address: int) -> int:
    """The byte at `address`: 0 to 255."""
    return ctypes.c_uint8.from_address(address).value


@primitive
def store_byte(address: int, byte: int) -> None:
    """Write the lowest 8 bits of an integer."""
    ctypes.c_uint8.from_address(address).value = byte & 0xFF


@primitive
def add_floats(left: int, right: int) -> int:
    """left + right, float32, to nearest even."""
    return _bits(_float(left) + _float(right))


@primitive
def multiply_floats(left: int, right: int) -> int:
    """left * right."""
    return _bits(_float(left) * _float(right))


@primitive
def divide_floats(left: int, right: int) -> int:
    """left / right."""
    return _bits(_float(left) / _float(right))


def _float(bits: int) -> Any:
    return np.uint32(bits).view(np.float32)


def _bits(value: Any) -> int:
    return int(value.view(np.uint32))


@portable
def largest_code(code: int) -> int:
    """127 or 448, as float32."""
    return 0x42FE0000 if code == INT8 else 0x43E00000


@portable
def encode(value: int, code: int) -> int:
    """The code nearest to a float32 that is a number."""
    limit = largest_code(code)
    if (value & 0x7FFFFFFF) > limit:
        value = (value & 0x80000000) | limit
    if code == INT8:
        return add_floats(value, 0x4B400000) & 0xFF  # 1.5 * 2**23, whose last place is 1
    magnitude = value & 0x7FFFFFFF
    if magnitude < 0x3C800000:  # 2**-6, the smallest normal number: float32 rounds at the last place of 2**14
        small = add_floats(magnitude, 0x46800000) - 0x46800000
    else:
        small = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    return small | ((value >> 24) & 0x80)


@portable
def decode(byte: int, code: int) -> int:
    """The float32 that a code stands for."""
    if code == INT8:
        return add_floats(0x4B400000 + byte - ((byte & 0x80) << 1), 0xCB400000)
    magnitude = byte & 0x7F
    number = _NAN if magnitude == 0x7F else multiply_floats(magnitude << 20, 0x7B800000)  # times 2**120
    return number | ((byte & 0x80) << 24)


@portable
def scale_for(largest: int, code: int) -> int:
    """The scale of a block by its largest magnitude, as float32; NaN if that is not finite."""
    if largest < _INFINITY:
        return divide_floats(largest, largest_code(code))
    return _NAN


@portable
def pack_blocks(dst: int, src: int, blocks: int, block: int, code: int, lane: int, lanes: int) -> int:
    """`pack` at addresses, with `block` a multiple of 4; lane by lane a block. Returns 0."""
    b = lane
    while b < blocks:
        values, record = src + 4 * block * b, dst + (4 + block) * b
        largest = 0
        for i in range(block):
            largest = max(largest, load_bits(values + 4 * i) & 0x7FFFFFFF)  # NaN is the largest of all
        scale = scale_for(largest, code)
        store_bits(record, scale)
        codes = record + SCALE_BYTES
        if 0 < scale < _INFINITY:
            for i in range(block):
                store_byte(codes + i, encode(divide_floats(load_bits(values + 4 * i), scale), code))
        else:
            for i in range(block):
                store_byte(codes + i, 0)
        b += lanes
    return 0


@portable
def unpack_blocks(dst: int, src: int, blocks: int, block: int, code: int, lane: int, lanes: int) -> int:
    """`unpack` at addresses, likewise. Returns 0."""
    b = lane
    while b < blocks:
        values, record = dst + 4 * block * b, src + (4 + block) * b
        scale = load_bits(record)
        for i in range(block):
            store_bits(values + 4 * i, multiply_floats(decode(load_byte(record + 4 + i), code), scale))
        b += lanes
    return 0


@portable
def sum_codes(src: int, senders: int, stride: int, at: int, i: int, code: int) -> int:
    """The float32 sum, in order, of every sender's element i of the record that lies `at` bytes into its part."""
    total = 0
    for s in range(senders):
        record = src + s * stride + at
        value = multiply_floats(decode(load_byte(record + SCALE_BYTES + i), code), load_bits(record))
        total = value if s == 0 else add_floats(total, value)
    return total


@portable
def reduce_blocks(
    dst: int, src: int, senders: int, blocks: int, block: int, code: int, lane: int, lanes: int
) -> int:  # fmt: skip
    """`reduce` at addresses, with `block` a multiple of 4; lane by lane a block. Returns 0.

    It adds a block up twice, once for its scale and once for its codes, and so needs no room for the sums.
    """
    stride = (SCALE_BYTES + block) * blocks
    b = lane
    while b < blocks:
        at = (SCALE_BYTES + block) * b
        largest = 0
        for i in range(block):
            largest = max(largest, sum_codes(src, senders, stride, at, i, code) & 0x7FFFFFFF)
        scale = scale_for(largest, code)
        store_bits(dst + at, scale)
        for i in range(block):
            byte = 0
            if 0 < scale < _INFINITY:
                byte = encode(divide_floats(sum_codes(src, senders, stride, at, i, code), scale), code)
            store_byte(dst + at + SCALE_BYTES + i, byte)
        b += lanes
    return 0
