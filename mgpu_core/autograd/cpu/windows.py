"""Images with padding around them, channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from mgpu_core.autograd.cpu.layout import Array, channels_first, channels_last
from mgpu_core.autograd.portable.windows import Pair


def pad(x: Array, padding: Pair, fill: float = 0) -> Array:
    """x (N, C, H, W) with `padding` around it, channels last."""
    image = channels_last(x)
    if padding == (0, 0):
        return image
    n, h, w, c = image.shape
    padded = np.full((n, h + 2 * padding[0], w + 2 * padding[1], c), fill, dtype=x.dtype)
    padded[:, padding[0] : padding[0] + h, padding[1] : padding[1] + w] = image
    return padded


def padded_zeros(shape: tuple[int, ...], padding: Pair, dtype: Any) -> Array:
    """Zeros for an image of the given shape (N, C, H, W) with `padding` around it, channels last."""
    return np.zeros((shape[0], shape[2] + 2 * padding[0], shape[3] + 2 * padding[1], shape[1]), dtype=dtype)


def crop(padded: Array, shape: tuple[int, ...], padding: Pair) -> Array:
    """The inverse of `pad`."""
    image = padded[:, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]
    return channels_first(np.ascontiguousarray(image))
