"""Activation functions."""

from __future__ import annotations

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array


def relu(x: Array) -> Array:
    """max(x, 0)."""
    xp = array_namespace(x)
    return xp.maximum(x, xp.zeros_like(x))


def relu_gradient(g: Array, y: Array) -> Array:
    """`g` where relu's output `y` is positive."""
    xp = array_namespace(g)
    return xp.where(y > 0, g, xp.zeros_like(g))
