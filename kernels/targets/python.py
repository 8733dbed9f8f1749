"""Plain Python: what the kernels mean, in NumPy over raw addresses.

Slow, and the same bits as the CPU's (but for which NaN a NaN is). CUDA's simulator runs it, and tests hold the other
targets against it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import elementwise, lowlatency, optimizers, primitives, quantize
from kernels.dtypes import DType, find
from kernels.portable import bind

Array = npt.NDArray[Any]

PIECE_BYTES = 256  # of a group of few
PIECES = 4  # in a group of many


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `bind` compiles with: nothing."""
    return function


_COPIES = {
    "copy_vectors": elementwise.copy_vectors,
    "copy_vector": elementwise.copy_vector,
    "copy_word": elementwise.copy_word,
    "copy_byte": elementwise.copy_byte,
}

PRIMITIVES: dict[str, Any] = {
    "load_word": primitives.load_word,
    "store_word": primitives.store_word,
    "load_acquire": primitives.load_acquire,
    "raise_flag": primitives.raise_flag,
    "add_word": primitives.add_word,
    "compare_exchange": primitives.compare_exchange,
    "now": primitives.now,
    "doze": primitives.doze,
    "fetch_ahead": primitives.fetch_ahead,
    "sync": primitives.sync,
    "copy_past_caches": primitives.copy_past_caches,
    "copy_bytes": bind(elementwise.copy, _COPIES, as_it_is),
    "take_over": primitives.take_over,
    "block_bytes": primitives.block_bytes,
    "load_pair": lowlatency.load_pair,
    "store_pair": lowlatency.store_pair,
    "load_byte": quantize.load_byte,
    "store_byte": quantize.store_byte,
}


def bodies(dtype: DType, operation: str) -> dict[str, Any]:
    """The primitives of `kernels.executor`, its reductions those of one dtype and operation."""
    reduce = reduction(dtype, operation)
    return {**PRIMITIVES, "combine": lambda function, *arguments: reduce(*arguments)}


def reduction(dtype: DType, operation: str) -> Callable[..., int]:
    """`elementwise.reduce` for one dtype and operation."""
    few = PIECE_BYTES // dtype.itemsize
    constants = {"itemsize": dtype.itemsize, "alignment": 16, "many": PIECES * few, "few": few}
    bound: dict[str, Any] = {name: lambda value=value: value for name, value in constants.items()}
    bound["load_word"] = primitives.load_word
    for name, width, pieces in (("reduce_many", PIECES * few, PIECES), ("reduce_few", few, 1), ("reduce_one", 1, 1)):
        group = _Group(dtype, operation, width, pieces)
        names = ("load", "store", "apply", "premultiply", "finish")
        methods = {method: getattr(group, method) for method in names}
        bound[name] = bind(elementwise.reduce_groups, {**methods, "load_word": primitives.load_word}, as_it_is)
    reduce: Callable[..., int] = np.errstate(all="ignore")(bind(elementwise.reduce, bound, as_it_is))
    return reduce


def small(dtype: DType, operation: str) -> dict[str, Any]:
    """The primitives of `lowlatency.all_reduce` for one dtype and operation."""
    group = _Group(dtype, operation, lowlatency.elements(dtype), 1)
    names = ("widen", "narrow", "apply", "premultiply", "finish")
    methods: dict[str, Any] = {name: np.errstate(all="ignore")(getattr(group, name)) for name in names}
    return {**PRIMITIVES, **methods}


def optimizer(rule: str, dtype: DType) -> Callable[[int, int, int], int]:
    """`optimizers.update` for a rule and the gradients' dtype."""
    state = find(dtype.accumulator)
    constants = {"alignment": 1, "width": 8, "state_bytes": state.itemsize, "gradient_bytes": dtype.itemsize}
    bodies: dict[str, Any] = {name: lambda value=value: value for name, value in constants.items()}
    bodies["load_word"] = primitives.load_word
    for name in ("add", "subtract", "multiply", "divide", "root"):
        bodies[name] = getattr(optimizers, name)
    bodies["splat"] = lambda bits: np.int64(bits).view(np.float64).astype(state.numpy)
    for name, width in (("update_wide", 8), ("update_one", 1)):
        inner, outer = _Group(state, "sum", width, 1), _Group(dtype, "sum", width, 1)
        places = {
            "load": inner.load, "store": inner.store, "load_gradient": outer.load, "store_copy": outer.store,
        }  # fmt: skip
        inside = {**bodies, "width": lambda width=width: width, **places}
        bodies[name] = bind(getattr(optimizers, f"{rule}_groups"), inside, as_it_is)
    update: Callable[[int, int, int], int] = np.errstate(all="ignore")(bind(optimizers.update, bodies, as_it_is))
    return update


@dataclass(frozen=True)
class _Group:
    """The primitives of `elementwise.reduce_groups`. A group is an array of accumulators; complex numbers are pairs."""

    dtype: DType
    operation: str
    width: int
    pieces: int

    def _pieces(self, address: int, stride: int) -> list[Array]:
        nbytes = self.width // self.pieces * self.dtype.itemsize
        memory = [(ctypes.c_char * nbytes).from_address(address + i * stride) for i in range(self.pieces)]
        return [np.frombuffer(memoryview(piece), self.dtype.numpy) for piece in memory]

    def load(self, address: int, stride: int) -> Array:
        group = np.concatenate(self._pieces(address, stride))
        if self.dtype.kind == "complex":
            return group.view(group.real.dtype)
        return group.astype(self.dtype.accumulator)

    def store(self, address: int, group: Array, stride: int) -> None:
        rounded = group.view(self.dtype.numpy) if self.dtype.kind == "complex" else group.astype(self.dtype.numpy)
        for piece, values in zip(self._pieces(address, stride), np.split(rounded, self.pieces)):
            piece[:] = values

    def widen(self, data: int) -> Array:
        words = np.array([data & (2**64 - 1)], np.uint64).view(self.dtype.numpy)
        return words.view(words.real.dtype) if self.dtype.kind == "complex" else words.astype(self.dtype.accumulator)

    def narrow(self, group: Array) -> int:
        rounded = group.view(self.dtype.numpy) if self.dtype.kind == "complex" else group.astype(self.dtype.numpy)
        return int(rounded.view(np.int64)[0])

    def apply(self, left: Array, right: Array) -> Array:
        op = "sum" if self.operation in ("avg", "premul_sum") else self.operation
        if self.dtype.kind == "bool":
            return left | right if op in ("sum", "max") else left & right
        if op == "sum":
            return left + right
        if op == "prod":
            return _complex_product(left, right) if self.dtype.kind == "complex" else left * right
        if self.dtype.kind == "float":
            return _float_extremum(op, left, right)
        return np.minimum(left, right) if op == "min" else np.maximum(left, right)

    def premultiply(self, group: Array, scale: int) -> Array:
        if self.operation != "premul_sum":
            return group
        if group.dtype.kind == "f":
            return group * np.int64(scale).view(np.float64).astype(group.dtype)
        return group * np.int64(scale).astype(group.dtype)

    def finish(self, group: Array, ranks: int) -> Array:
        if self.operation != "avg":
            return group
        if group.dtype.kind == "f":
            return group / group.dtype.type(ranks)
        wide = group.astype(np.promote_types(group.dtype, f"{group.dtype.kind}4"))
        quotient, rest = np.divmod(wide, wide.dtype.type(ranks))
        return (quotient + ((rest != 0) & (wide < 0))).astype(group.dtype)


def _float_extremum(op: str, left: Array, right: Array) -> Array:
    first = left < right if op == "min" else left > right
    chosen = np.where(first, left, right)
    zero = (left == 0) & (right == 0)
    negative = np.signbit(left) | np.signbit(right) if op == "min" else np.signbit(left) & np.signbit(right)
    chosen = np.where(zero, np.where(negative, -0.0, 0.0).astype(left.dtype), chosen)
    return np.where(np.isnan(left) | np.isnan(right), left + right, chosen)


def _complex_product(left: Array, right: Array) -> Array:
    real, imaginary = left[0::2].repeat(2), left[1::2].repeat(2)
    swapped = right.reshape(-1, 2)[:, ::-1].ravel()
    signs = np.tile(np.array([-1, 1], left.dtype), left.size // 2)
    product: Array = real * right + imaginary * swapped * signs
    return product
