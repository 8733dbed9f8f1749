"""The primitives of kernels that work on groups of elements as intrinsics, for either of Numba's targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from kernels import optimizers
from kernels.portable import bind
from kernels.targets.vector import Group


class Vector(types.Type):
    """A group of elements in registers. Each target registers its data model."""

    def __init__(self, llvm_type: ir.Type) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=f"vector {llvm_type}")


def group_bodies(group: Group, intrinsic: Callable[..., Any]) -> dict[str, Any]:
    """`load`, `store`, `widen`, `narrow`, `apply`, `premultiply` and `finish`, made with a target's `intrinsic`."""
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

    @intrinsic
    def widen(typing, data):  # type: ignore[no-untyped-def]
        return vector(types.int64), lambda context, b, signature, args: group.widen(b, *args)

    @intrinsic
    def narrow(typing, value):  # type: ignore[no-untyped-def]
        return types.int64(vector), lambda context, b, signature, args: group.narrow(b, *args)

    arithmetic = {"apply": apply, "premultiply": premultiply, "finish": finish}
    return {"load": load, "store": store, "widen": widen, "narrow": narrow, **arithmetic}


def arithmetic_bodies(group: Group, intrinsic: Callable[..., Any]) -> dict[str, Any]:
    """`add`, `subtract`, `multiply`, `divide`, `root` and `splat` of `kernels.optimizers`, likewise."""
    vector = Vector(group.type)

    def two(operation: str) -> Any:
        @intrinsic
        def compute(typing, left, right):  # type: ignore[no-untyped-def]
            return vector(vector, vector), lambda context, b, signature, args: getattr(b, operation)(*args)

        return compute

    @intrinsic
    def root(typing, value):  # type: ignore[no-untyped-def]
        return vector(vector), lambda context, b, signature, args: group.root(b, *args)

    @intrinsic
    def splat(typing, bits):  # type: ignore[no-untyped-def]
        return vector(types.int64), lambda context, b, signature, args: group.splat(b, *args)

    operations = {"add": "fadd", "subtract": "fsub", "multiply": "fmul", "divide": "fdiv"}
    return {"root": root, "splat": splat, **{name: two(operation) for name, operation in operations.items()}}


def optimizer_bodies(
    rule: str, pairs: Sequence[Sequence[Group]], alignment: int, load_word: Any, jit: Callable[..., Any],
    intrinsic: Callable[..., Any],
) -> dict[str, Any]:  # fmt: skip
    """The primitives of `optimizers.update`; `pairs` are groups of the gradient and of the state, wide and single."""

    def constant(value: int) -> Any:
        return jit(lambda: value)

    bodies = {"load_word": load_word, "alignment": constant(alignment), "width": constant(pairs[0][1].width)}
    for name, (gradient, state) in zip(("update_wide", "update_one"), pairs):
        outer, inner = group_bodies(gradient, intrinsic), group_bodies(state, intrinsic)
        inside = {
            "load_word": load_word,
            "width": constant(state.width),
            "state_bytes": constant(state.bytes),
            "gradient_bytes": constant(gradient.bytes),
            "load": inner["load"],
            "store": inner["store"],
            "load_gradient": outer["load"],
            "store_copy": outer["store"],
            **arithmetic_bodies(state, intrinsic),
        }
        bodies[name] = bind(getattr(optimizers, f"{rule}_groups"), inside, jit)
    return bodies
