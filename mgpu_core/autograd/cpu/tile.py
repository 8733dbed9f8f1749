"""A tile of sums that stays in vector registers while a compiled loop adds products to it.

A tile is `rows` times `vectors` LLVM vectors of 16 float32, which the compiler splits into what the processor has: one
register with AVX-512, two with AVX2, four with NEON. Both numbers are constants of the code that is compiled. Addresses
and distances are in bytes, as `x.ctypes.data` and `x.strides`.

Numba's cache does not see that kernels in other files contain this code: after a change here, remove `__pycache__`.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core.cgutils import get_or_insert_function
from numba.core.datamodel import PrimitiveModel
from numba.core.extending import intrinsic, register_model

LANES = 16
WIDE = "+avx512f" in (config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()).split(",")  # 32 registers of 16
SUMS = 16 if WIDE else 6  # vectors in a tile, else of two registers each, of 16: some are left for what is multiplied

_I64, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


class Tile(types.Type):
    """`rows` of `vectors` vectors each."""

    def __init__(self, rows: int, vectors: int) -> None:
        self.rows, self.vectors = rows, vectors
        super().__init__(name=f"tile of {rows} x {vectors}")


@register_model(Tile)
class _Model(PrimitiveModel):
    def __init__(self, manager: Any, tile: Tile) -> None:
        super().__init__(manager, tile, ir.ArrayType(_VECTOR, tile.rows * tile.vectors))


@intrinsic(prefer_literal=True)
def load(typing, rows, vectors, address, distance):  # type: ignore[no-untyped-def]
    """A tile whose rows lie `distance` apart in memory; with 0 they are all the same."""
    tile = Tile(rows.literal_value, vectors.literal_value)

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        value = ir.Constant(ir.ArrayType(_VECTOR, tile.rows * tile.vectors), ir.Undefined)
        for row in range(tile.rows):
            for v in range(tile.vectors):
                vector = b.load(_place(b, args[2], args[3], row, v), align=4)
                value = b.insert_value(value, vector, row * tile.vectors + v)
        return value

    return tile(rows, vectors, types.int64, types.int64), codegen


@intrinsic
def load_some(typing, address, count):  # type: ignore[no-untyped-def]
    """A tile of one vector: the first `count` numbers from memory, which alone are touched, then zeros."""
    tile = Tile(1, 1)

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        counts = ir.VectorType(_I64, LANES)
        lanes = ir.Constant(counts, [ir.Constant(_I64, i) for i in range(LANES)])
        mask = b.icmp_signed("<", lanes, _splat(b, args[1], counts))
        pointer, i32 = _VECTOR.as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(_VECTOR, [pointer, i32, mask.type, _VECTOR])
        function = get_or_insert_function(b.module, kind, "llvm.masked.load.v16f32.p0")
        zeros = ir.Constant(_VECTOR, [ir.Constant(_FLOAT, 0.0)] * LANES)
        vector = b.call(function, [b.inttoptr(args[0], pointer), ir.Constant(i32, 4), mask, zeros])
        return b.insert_value(ir.Constant(ir.ArrayType(_VECTOR, 1), ir.Undefined), vector, 0)

    return tile(types.int64, types.int64), codegen


@intrinsic
def store(typing, tile, address, distance):  # type: ignore[no-untyped-def]
    """Write a tile so that its rows lie `distance` apart."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        for row in range(tile.rows):
            for v in range(tile.vectors):
                vector = b.extract_value(args[0], row * tile.vectors + v)
                b.store(vector, _place(b, args[1], args[2], row, v), align=4)
        return context.get_dummy_value()

    return types.none(tile, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def add_products(typing, tile, factors, distance, vectors):  # type: ignore[no-untyped-def]
    """tile[r] + factors[r] * vectors: the factors lie a constant `distance` apart, the vectors are as long as a row."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        value, factors, _, address = args
        function = get_or_insert_function(b.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.fmuladd.v16f32")
        zero = ir.Constant(_I64, 0)
        row = [b.load(_place(b, address, zero, 0, v), align=4) for v in range(tile.vectors)]
        for r in range(tile.rows):
            place = b.add(factors, ir.Constant(_I64, r * distance.literal_value))
            factor = _splat(b, b.load(b.inttoptr(place, _FLOAT.as_pointer()), align=4), _VECTOR)
            for v in range(tile.vectors):
                at = r * tile.vectors + v
                value = b.insert_value(value, b.call(function, [factor, row[v], b.extract_value(value, at)]), at)
        return value

    return tile(tile, types.int64, distance, types.int64), codegen


def _place(b: ir.IRBuilder, address: ir.Value, distance: ir.Value, row: int, vector: int) -> ir.Value:
    offset = b.add(b.mul(distance, ir.Constant(_I64, row)), ir.Constant(_I64, vector * LANES * 4))
    return b.inttoptr(b.add(address, offset), _VECTOR.as_pointer())


def _splat(b: ir.IRBuilder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    single = b.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return b.shuffle_vector(single, single, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
