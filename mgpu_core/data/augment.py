"""Random changes of training samples that leave what they show: for a `Loader`'s transform.

They draw from `mgpu_core.random.sample_words`, so a sample changes alike whatever rank it is on, and alike again when a
run is resumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mgpu_core import random

_CROP, _MIRROR = 1, 2  # the streams' numbers


def crop(images: NDArray[Any], padding: int) -> NDArray[Any]:
    """Images (n, H, W), each moved by up to `padding` along both axes at random; zeros come in at the edges."""
    count, height, width = images.shape
    shifts = random.sample_words((_CROP, padding), count, 2) % (2 * padding + 1)
    padded = np.pad(images, ((0, 0), (padding, padding), (padding, padding)))
    windows = sliding_window_view(padded, (height, width), axis=(1, 2))
    return windows[np.arange(count), shifts[:, 0], shifts[:, 1]]


def mirror(images: NDArray[Any]) -> NDArray[Any]:
    """Images (n, H, W), half of them at random with left and right exchanged."""
    mirrored = random.sample_words(_MIRROR, len(images), 1) % 2 == 1
    return np.where(mirrored[:, :, None], images[:, :, ::-1], images)
