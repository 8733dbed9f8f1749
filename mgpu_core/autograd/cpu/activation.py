"""Activation functions."""

from __future__ import annotations

import numpy as np

from mgpu_core.autograd.cpu.layout import Array


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def relu_gradient(g: Array, y: Array) -> Array:
    return g * (y > 0)
