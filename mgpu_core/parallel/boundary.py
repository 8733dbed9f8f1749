"""What one stage of a model hands to the next: a tensor, or a tuple of tensors (states, masks, lengths)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from kernels.dtypes import DTYPES, find
from mgpu_core.autograd.tape import Array
from mgpu_core.tensor import Tensor

Value = Tensor | tuple[Tensor, ...]


def tensors(value: Value) -> tuple[Tensor, ...]:
    """The tensors that `value` is made of. Raises TypeError for anything else."""
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"a stage hands on a tensor or a tuple of tensors, not {type(part).__name__}")
    return parts


def leaves(value: Value) -> Value:
    """The same data without history; where a gradient can be, it will be kept."""
    return Form.of(value).wrap([tensor.data for tensor in tensors(value)])


def is_real(dtype: Any) -> bool:
    """Whether arrays of this dtype can have gradients: real numbers, not integers."""
    return find(dtype).kind == "float"


@dataclass(frozen=True)
class Form:
    """The shapes and dtypes of a value, as one stage tells them to the next."""

    is_tuple: bool
    parts: tuple[tuple[tuple[int, ...], Any], ...]

    HEADER_WORDS = 64

    @classmethod
    def of(cls, value: Value) -> Form:
        """That of a value."""
        return cls(isinstance(value, tuple), tuple((part.shape, part.dtype) for part in tensors(value)))

    @property
    def nbytes(self) -> int:
        """Bytes of a message with such a value."""
        return sum(self._sizes())

    def gradients(self) -> Form:
        """The form of what goes back: the gradients of those parts that can have one."""
        return Form(True, tuple((shape, dtype) for shape, dtype in self.parts if is_real(dtype)))

    def room(self, xp: Any) -> tuple[Array, list[Array]]:
        """Memory for one message, and the arrays in it that a value of this form is made of."""
        if len(self.parts) == 1:
            ((shape, dtype),) = self.parts
            array = xp.empty(shape, dtype=dtype)
            return array, [array]
        sizes = self._sizes()
        memory = xp.empty(sum(sizes), dtype=xp.uint8)
        arrays = []
        for (shape, dtype), end in zip(self.parts, accumulate(sizes)):
            nbytes = math.prod(shape) * dtype.itemsize
            start = end - _padded(nbytes)
            arrays.append(memory[start : start + nbytes].view(dtype).reshape(shape))
        return memory, arrays

    def message(self, arrays: Sequence[Array], xp: Any) -> Array:
        """The arrays as one message."""
        if len(arrays) == 1:
            return arrays[0]
        memory, places = self.room(xp)
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        return memory

    def _sizes(self) -> list[int]:
        return [_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in self.parts]

    def wrap(self, arrays: Sequence[Array]) -> Value:
        """The value of this form that `arrays` make: leaves, which keep gradients where there can be one."""
        made = tuple(Tensor(array, requires_grad=is_real(array.dtype)) for array in arrays)
        return made if self.is_tuple else made[0]

    def header(self) -> np.ndarray:
        """The form as int64 (HEADER_WORDS,): whether it is a tuple, how many parts; of each its dtype and shape.

        Raises ValueError for a form that has too many parts and axes.
        """
        words = [int(self.is_tuple), len(self.parts)]
        for shape, dtype in self.parts:
            words += [find(dtype).code, len(shape), *shape]
        if len(words) > self.HEADER_WORDS:
            raise ValueError(f"{len(self.parts)} tensors are too many to hand from one stage to the next")
        return np.array(words + [0] * (self.HEADER_WORDS - len(words)), np.int64)

    @classmethod
    def from_header(cls, header: np.ndarray) -> Form:
        """The inverse of `header`."""
        is_tuple, count, *words = header.tolist()
        parts = []
        for _ in range(count):
            code, ndim, *words = words
            parts.append((tuple(words[:ndim]), DTYPES[code].numpy))
            words = words[ndim:]
        return cls(bool(is_tuple), tuple(parts))


def _padded(nbytes: int) -> int:
    """So that every array starts on a cache line."""
    return -(-nbytes // 64) * 64
