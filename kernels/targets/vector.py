"""LLVM code for groups of elements, shared by the CPU and CUDA: load and widen, combine, round and store.

A group of `width` elements is one LLVM vector of the accumulator type (complex numbers: their real and imaginary
parts side by side). Only constructs that every LLVM since version 7 knows are used, because NVVM is that old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from llvmlite import ir

from kernels.dtypes import DType

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS = {2: ir.HalfType(), 4: ir.FloatType(), 8: ir.DoubleType()}


class _Format(NamedTuple):
    """A small float: its bits of fraction, its exponent's bias, its first pattern that is no number, and its NaN."""

    fraction: int
    bias: int
    special: int
    nan: int


_FORMATS = {
    "float16": _Format(10, 15, 0x7C00, 0x7E00),
    "float8_e5m2": _Format(2, 15, 0x7C, 0x7E),
    "float8_e4m3fn": _Format(3, 7, 0x7F, 0x7F),
}


@dataclass(frozen=True)
class Group:
    """`width` elements of one dtype under one operation."""

    dtype: DType
    operation: str
    width: int
    align: int  # bytes that an address is known to be a multiple of
    pieces: int = 1  # in memory the group lies in this many equal pieces
    half: bool = True  # whether the processor converts float16

    @property
    def floating(self) -> bool:
        """Whether the accumulator is a float, or a pair of them."""
        return self.dtype.kind in ("float", "complex")

    @property
    def lanes(self) -> int:
        """Numbers in the LLVM vector."""
        return self.width * (2 if self.dtype.kind == "complex" else 1)

    @property
    def bytes(self) -> int:
        """Bytes of one number in memory."""
        return self.dtype.itemsize // (2 if self.dtype.kind == "complex" else 1)

    @property
    def type(self) -> ir.Type:
        """The group in registers."""
        if self.floating:
            return self._vector(_FLOATS[max(4, self.bytes)])
        return self._vector(ir.IntType(8 * self.bytes))

    @property
    def stored(self) -> ir.Type:
        """The group in memory: as in registers, or as words to be widened."""
        return self.type if self.dtype.accumulator == self.dtype.name else self._vector(ir.IntType(8 * self.bytes))

    def _vector(self, scalar: ir.Type) -> ir.VectorType:
        return ir.VectorType(scalar, self.lanes)

    def _all(self, scalar: ir.Type, value: int | float) -> ir.Constant:
        return ir.Constant(self._vector(scalar), [ir.Constant(scalar, value)] * self.lanes)

    def _splat(self, b: ir.IRBuilder, value: ir.Value) -> ir.Value:
        vector = self._vector(value.type)
        single = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
        return self._pick(b, single, [0] * self.lanes)

    # Memory

    def read(self, b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        """The words at `address`."""
        return b.load(b.inttoptr(address, self.stored.as_pointer()), align=self.align)

    def write(self, b: ir.IRBuilder, address: ir.Value, words: ir.Value) -> None:
        """Put words at `address`."""
        b.store(words, b.inttoptr(address, self.stored.as_pointer()), align=self.align)

    def load(self, b: ir.IRBuilder, address: ir.Value, stride: ir.Value) -> ir.Value:
        """Read the group at `address`, its pieces `stride` bytes apart, and widen it."""
        piece = replace(self, width=self.width // self.pieces, pieces=1)
        read = [piece.read(b, self._at(b, address, stride, i)) for i in range(self.pieces)]
        return self._join(b, [piece._widen(b, words) for words in read])

    def store(self, b: ir.IRBuilder, address: ir.Value, group: ir.Value, stride: ir.Value) -> None:
        """Round the group to nearest even and write it to `address`, its pieces `stride` bytes apart."""
        piece = replace(self, width=self.width // self.pieces, pieces=1)
        for i in range(self.pieces):
            words = piece._round(b, self._pick(b, group, range(i * piece.lanes, (i + 1) * piece.lanes)))
            piece.write(b, self._at(b, address, stride, i), words)

    def _at(self, b: ir.IRBuilder, address: ir.Value, stride: ir.Value, piece: int) -> ir.Value:
        return b.add(address, b.mul(stride, ir.Constant(_I64, piece))) if piece else address

    def _pick(self, b: ir.IRBuilder, group: ir.Value, lanes: Sequence[int], other: ir.Value | None = None) -> ir.Value:
        """A vector of some lanes of `group`, or of `group` and `other` behind it."""
        other = other or ir.Constant(group.type, ir.Undefined)
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [ir.Constant(_I32, i) for i in lanes])
        return b.shuffle_vector(group, other, mask)

    def _join(self, b: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
        """One vector out of a power of two of equal ones."""
        while len(parts) > 1:
            lanes = range(2 * parts[0].type.count)
            parts = [self._pick(b, one, lanes, two) for one, two in zip(parts[::2], parts[1::2])]
        return parts[0]

    def _widen(self, b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
        name = self.dtype.name
        if self.dtype.accumulator == name:
            return bits
        i16, f32 = ir.IntType(16), ir.FloatType()
        if name == "float16" and self.half:
            return b.fpext(b.bitcast(bits, self._vector(ir.HalfType())), self._vector(f32))
        if name == "float8_e5m2" and self.half:  # the upper byte of a float16
            half = b.shl(b.zext(bits, self._vector(i16)), self._all(i16, 8))
            return b.fpext(b.bitcast(half, self._vector(ir.HalfType())), self._vector(f32))
        if name == "bfloat16":
            return b.bitcast(b.shl(b.zext(bits, self._vector(_I32)), self._all(_I32, 16)), self._vector(f32))
        return self._widen_bits(b, bits, _FORMATS[name])

    def _widen_bits(self, b: ir.IRBuilder, bits: ir.Value, format: _Format) -> ir.Value:
        """Exponent and fraction put where float32 has them, then the exponent's bias corrected."""
        floats, top = self._vector(ir.FloatType()), 1 << (8 * self.bytes - 1)
        wide = b.zext(bits, self._vector(_I32))
        magnitude = b.and_(wide, self._all(_I32, top - 1))
        moved = b.shl(magnitude, self._all(_I32, 23 - format.fraction))
        value = b.fmul(b.bitcast(moved, floats), self._all(ir.FloatType(), 2.0 ** (127 - format.bias)))
        special = b.icmp_unsigned(">=", magnitude, self._all(_I32, format.special))
        number = b.select(special, b.or_(moved, self._all(_I32, 0x7F800000)), b.bitcast(value, self._vector(_I32)))
        sign = b.shl(b.and_(wide, self._all(_I32, top)), self._all(_I32, 32 - 8 * self.bytes))
        return b.bitcast(b.or_(number, sign), floats)

    def _round(self, b: ir.IRBuilder, group: ir.Value) -> ir.Value:
        name = self.dtype.name
        if self.dtype.accumulator == name:
            return group
        if name == "float16" and self.half:
            return b.bitcast(b.fptrunc(group, self._vector(ir.HalfType())), self.stored)
        if name == "bfloat16":
            return self._round_bfloat16(b, group)
        return self._round_bits(b, group, _FORMATS[name])

    def _round_bfloat16(self, b: ir.IRBuilder, group: ir.Value) -> ir.Value:
        i16, i32 = ir.IntType(16), ir.IntType(32)
        bits = b.bitcast(group, self._vector(i32))
        upper = b.lshr(bits, self._all(i32, 16))
        rounded = b.add(bits, b.add(self._all(i32, 0x7FFF), b.and_(upper, self._all(i32, 1))))
        nan = b.fcmp_unordered("uno", group, group)
        quiet = b.or_(upper, self._all(i32, 0x40))
        return b.trunc(b.select(nan, quiet, b.lshr(rounded, self._all(i32, 16))), self._vector(i16))

    def _round_bits(self, b: ir.IRBuilder, group: ir.Value, format: _Format) -> ir.Value:
        """As ml_dtypes does: what would round to more than the largest number becomes infinity, or NaN without one."""
        floats, ints = self._vector(ir.FloatType()), self._vector(_I32)
        bits = b.bitcast(group, ints)
        magnitude = b.and_(bits, self._all(_I32, 0x7FFFFFFF))
        size = b.bitcast(magnitude, floats)
        drop = 23 - format.fraction
        odd = b.and_(b.lshr(magnitude, self._all(_I32, drop)), self._all(_I32, 1))
        normal = b.add(magnitude, b.add(self._all(_I32, (1 << (drop - 1)) - 1), odd))
        normal = b.sub(b.lshr(normal, self._all(_I32, drop)), self._all(_I32, (127 - format.bias) << format.fraction))
        # Below the smallest normal number, float32's own addition rounds at the last place of this constant.
        anchor = self._all(ir.FloatType(), 2.0 ** (1 - format.bias + drop))
        tiny = b.sub(b.bitcast(b.fadd(size, anchor), ints), b.bitcast(anchor, ints))
        small = b.fcmp_ordered("<", size, self._all(ir.FloatType(), 2.0 ** (1 - format.bias)))
        result = b.select(small, tiny, normal)
        limit = self._all(_I32, format.special)
        result = b.select(b.icmp_signed(">", result, limit), limit, result)
        result = b.select(b.fcmp_unordered("uno", group, group), self._all(_I32, format.nan), result)
        width = 8 * self.bytes
        sign = b.and_(b.lshr(bits, self._all(_I32, 32 - width)), self._all(_I32, 1 << (width - 1)))
        return b.trunc(b.or_(result, sign), self.stored)

    def widen(self, b: ir.IRBuilder, data: ir.Value) -> ir.Value:
        """The group that an integer as wide as its elements holds."""
        return self._widen(b, b.bitcast(data, self.stored))

    def narrow(self, b: ir.IRBuilder, group: ir.Value) -> ir.Value:
        """The integer that holds the group, rounded to nearest even."""
        return b.bitcast(self._round(b, group), ir.IntType(8 * self.bytes * self.lanes))

    # Arithmetic

    def apply(self, b: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
        """left op right."""
        op = "sum" if self.operation in ("avg", "premul_sum") else self.operation
        if self.dtype.kind == "bool":
            return b.or_(left, right) if op in ("sum", "max") else b.and_(left, right)
        if op == "sum":
            return b.fadd(left, right) if self.floating else b.add(left, right)
        if op == "prod":
            if self.dtype.kind == "complex":
                return self._complex_product(b, left, right)
            return b.fmul(left, right) if self.floating else b.mul(left, right)
        if not self.floating:
            compare = b.icmp_signed if self.dtype.kind == "int" else b.icmp_unsigned
            return b.select(compare("<" if op == "min" else ">", left, right), left, right)
        return self._float_extremum(b, op, left, right)

    def _float_extremum(self, b: ir.IRBuilder, op: str, left: ir.Value, right: ir.Value) -> ir.Value:
        ints = self._vector(ir.IntType(8 * max(4, self.bytes)))
        chosen = b.select(b.fcmp_ordered("<" if op == "min" else ">", left, right), left, right)
        # Equal values have equal bits but for the sign of zero: min keeps a minus, max drops it.
        merge = b.or_ if op == "min" else b.and_
        same = b.bitcast(merge(b.bitcast(left, ints), b.bitcast(right, ints)), self.type)
        chosen = b.select(b.fcmp_ordered("==", left, right), same, chosen)
        return b.select(b.fcmp_unordered("uno", left, right), b.fadd(left, right), chosen)

    def _complex_product(self, b: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
        real = self._pick(b, left, [i - i % 2 for i in range(self.lanes)])
        imaginary = self._pick(b, left, [i - i % 2 + 1 for i in range(self.lanes)])
        swapped = self._pick(b, right, [i ^ 1 for i in range(self.lanes)])
        scalar = _FLOATS[self.bytes]
        signs = ir.Constant(self.type, [ir.Constant(scalar, -1.0 if i % 2 == 0 else 1.0) for i in range(self.lanes)])
        return b.fadd(b.fmul(real, right), b.fmul(b.fmul(imaginary, swapped), signs))

    def premultiply(self, b: ir.IRBuilder, group: ir.Value, scale: ir.Value) -> ir.Value:
        """The group times `scale`: an i64 that holds the bits of a double, or an integer."""
        if self.operation != "premul_sum":
            return group
        if self.floating:
            return b.fmul(group, self.splat(b, scale))
        return b.mul(group, self._splat(b, scale if self.type.element == _I64 else b.trunc(scale, self.type.element)))

    def splat(self, b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
        """A group of one float: a double, given by its bits as an i64."""
        return self._splat(b, self._double(b, b.bitcast(bits, ir.DoubleType())))

    def root(self, b: ir.IRBuilder, group: ir.Value) -> ir.Value:
        """Square roots of floats."""
        name = f"llvm.sqrt.v{self.lanes}f{8 * max(4, self.bytes)}"
        function = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(self.type, [self.type]), name)
        return b.call(function, [group])

    def finish(self, b: ir.IRBuilder, group: ir.Value, ranks: ir.Value) -> ir.Value:
        """The group divided by `ranks`, an i64."""
        if self.operation != "avg":
            return group
        if self.floating:
            return b.fdiv(group, self._splat(b, b.sitofp(ranks, self.type.element)))
        # In at least 32 bits, where the number of ranks fits.
        wide = self._vector(ir.IntType(max(32, 8 * self.bytes)))
        divisor = self._splat(b, ranks if wide.element == _I64 else b.trunc(ranks, wide.element))
        if self.dtype.kind == "int":
            return b.trunc(b.sdiv(b.sext(group, wide), divisor), self.type)
        return b.trunc(b.udiv(b.zext(group, wide), divisor), self.type)

    def _double(self, b: ir.IRBuilder, value: ir.Value) -> ir.Value:
        return value if self.type.element == value.type else b.fptrunc(value, self.type.element)
