"""The primitives of `elementwise.reduce_group` as intrinsics, for either of Numba's targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kernels.targets.vector import Group


class Vector(types.Type):
    """A group of elements in registers. Each target registers its data model."""

    def __init__(self, llvm_type: ir.Type) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=f"vector {llvm_type}")


def group_bodies(group: Group, intrinsic: Callable[..., Any]) -> dict[str, Any]:
    """`load`, `store`, `apply`, `premultiply` and `finish`, made with a target's `intrinsic`."""
    vector = Vector(group.type)

    @intrinsic
    def load(typing, address, stride):  # type: ignore[no-untyped-def]
        return vector(types.int64, types.int64), lambda context, b, signature, args: group.load(b, *args)

    @intrinsic
    def store(typing, address, value, stride):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
            group.store(b, *args)
            return context.get_dummy_value()

        return types.none(types.int64, vector, types.int64), codegen

    @intrinsic
    def apply(typing, left, right):  # type: ignore[no-untyped-def]
        return vector(vector, vector), lambda context, b, signature, args: group.apply(b, *args)

    @intrinsic
    def premultiply(typing, value, scale):  # type: ignore[no-untyped-def]
        return vector(vector, types.int64), lambda context, b, signature, args: group.premultiply(b, *args)

    @intrinsic
    def finish(typing, value, ranks):  # type: ignore[no-untyped-def]
        return vector(vector, types.int64), lambda context, b, signature, args: group.finish(b, *args)

    return {"load": load, "store": store, "apply": apply, "premultiply": premultiply, "finish": finish}
