"""What one stage of a model hands to the next: a tensor, or a tuple of tensors (states, masks, lengths)."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from mgpu_core.tensor import Tensor

Value = Tensor | tuple[Tensor, ...]


def tensors(value: Value) -> tuple[Tensor, ...]:
    """The tensors that `value` is made of. Raises TypeError for anything else."""
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"a stage hands on a tensor or a tuple of tensors, not {type(part).__name__}")
    return parts


def like(value: Value, parts: list[Any]) -> Value:
    """Tensors of the arrays `parts` in the form of `value`: leaves, whose gradients are kept where there can be one."""
    made = tuple(Tensor(part, requires_grad=is_differentiable(part)) for part in parts)
    return made if isinstance(value, tuple) else made[0]


def is_differentiable(array: Any) -> bool:
    """Whether the array may have a gradient: its numbers are real, not integers."""
    return bool(array_namespace(array).isdtype(array.dtype, "real floating"))
