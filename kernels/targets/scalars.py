"""The primitives of `kernels.quantize` as intrinsics, for either of Numba's targets: float32 as bits in an integer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

_I64 = ir.IntType(64)


def scalar_bodies(intrinsic: Callable[..., Any]) -> dict[str, Any]:
    """Loads and stores of 8 and 32 bits, and float32 arithmetic, made with a target's `intrinsic`."""

    def loads(width: int) -> Any:
        @intrinsic
        def load(typing, address):  # type: ignore[no-untyped-def]
            def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
                return b.zext(b.load(b.inttoptr(args[0], ir.IntType(width).as_pointer())), _I64)

            return types.int64(types.int64), codegen

        return load

    def stores(width: int) -> Any:
        @intrinsic
        def store(typing, address, value):  # type: ignore[no-untyped-def]
            def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
                number = ir.IntType(width)
                b.store(b.trunc(args[1], number), b.inttoptr(args[0], number.as_pointer()))
                return context.get_dummy_value()

            return types.none(types.int64, types.int64), codegen

        return store

    def arithmetic(operation: str) -> Any:
        @intrinsic
        def compute(typing, left, right):  # type: ignore[no-untyped-def]
            def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
                numbers = [b.bitcast(b.trunc(bits, ir.IntType(32)), ir.FloatType()) for bits in args]
                return b.zext(b.bitcast(getattr(b, operation)(*numbers), ir.IntType(32)), _I64)

            return types.int64(types.int64, types.int64), codegen

        return compute

    return {
        "load_bits": loads(32),
        "store_bits": stores(32),
        "load_byte": loads(8),
        "store_byte": stores(8),
        "add_floats": arithmetic("fadd"),
        "multiply_floats": arithmetic("fmul"),
        "divide_floats": arithmetic("fdiv"),
    }
