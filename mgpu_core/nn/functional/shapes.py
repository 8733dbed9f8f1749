"""Shapes of parameters."""

from __future__ import annotations

from mgpu_core.tensor import Tensor


def check_shapes(function: str, shape: tuple[int, ...], **parameters: Tensor | None) -> None:
    """Raises ValueError unless the parameters, but for those that are None, have this shape. A compiled loop would go
    past the end of one that is too short."""
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != shape:
            raise ValueError(f"{function}: {name} must have the shape {shape}, not {parameter.shape}")
