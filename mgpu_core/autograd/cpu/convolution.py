"""Convolution, by `direct` where it is the faster way, else by `columns`."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from mgpu_core.autograd.cpu import columns, direct
from mgpu_core.autograd.cpu.layout import Array
from mgpu_core.autograd.cpu.tile import LANES
from mgpu_core.autograd.portable.windows import Pair

_LEAST = 32  # places in an image: with fewer, the weight's gradient is read and written more often than added to


def conv2d(x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
    y: Array = _way(x.dtype, weight.shape[0], weight.shape, stride).conv2d(x, weight, bias, stride, padding)
    return y


def conv2d_input_gradient(g: Array, weight: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    way = _way(g.dtype, weight.shape[1], weight.shape, stride)
    dx: Array = way.conv2d_input_gradient(g, weight, shape, stride, padding)
    return dx


def conv2d_weight_gradient(g: Array, x: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    way = _way(g.dtype, shape[0], shape, stride) if math.prod(g.shape[2:]) >= _LEAST else columns
    dw: Array = way.conv2d_weight_gradient(g, x, shape, stride, padding)
    return dw


def _way(dtype: Any, outputs: int, weight: tuple[int, ...], stride: Pair) -> ModuleType:
    """`direct` where sums fill whole vectors of float32, and the images themselves are no column matrix already."""
    plain = weight[2:] == (1, 1) and stride == (1, 1)
    return direct if dtype == np.float32 and outputs % LANES == 0 and not plain else columns
