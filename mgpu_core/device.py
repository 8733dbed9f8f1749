"""Where arrays live: on the "cpu", in NumPy's memory, or on "cuda", in a GPU's, as CuPy arrays.

    model.to("cuda")
    loss = cross_entropy(model(Tensor(images).to("cuda")), labels)

A tensor is where its array is, and what is computed from it is there too. Nothing is copied between the two by itself:
mixing them is a TypeError. "cuda" is the GPU that is current in CuPy, one for each process; `select` chooses it.
"""

from __future__ import annotations

import glob
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from array_api_compat import is_cupy_array

Array = Any  # as in `mgpu_core.autograd.tape`, which need not be imported for this
DEVICES = ("cpu", "cuda")
_INSTALL = "pip install 'mgpu-core[cuda12]', or [cuda13] for CUDA 13"


class DeviceError(RuntimeError):
    """A device that cannot be used here; the message says what is missing."""


def gpus() -> int:
    """How many GPUs this process may use, by what the system shows. Starts neither CUDA nor CuPy, so it may fork."""
    shown = len(glob.glob("/dev/nvidia[0-9]*")) or int(os.path.exists("/dev/dxg"))  # the latter is Windows'
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return shown
    return min(shown, sum(name.strip() not in ("", "-1") for name in allowed.split(",")))


def missing() -> str:
    """What "cuda" lacks here, by what the system shows; empty if nothing."""
    if not gpus():
        return "the system shows this process no NVIDIA GPU"
    return "" if find_spec("cupy") is not None else f"CuPy is not installed: {_INSTALL}"


def default() -> str:
    """ "cuda" where there are GPUs and CuPy, else "cpu"."""
    return "cpu" if missing() else "cuda"


@cache
def cuda() -> Any:
    """CuPy. Raises DeviceError where it, or a GPU, is missing."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f'device "cuda" needs CuPy, which cannot be imported ({error}): {_INSTALL}') from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own, of which there are several
        raise DeviceError(f'device "cuda" needs an NVIDIA GPU and its driver, and CUDA says: {error}') from error
    if not count:
        raise DeviceError('device "cuda" needs an NVIDIA GPU, and CUDA shows this process none')
    return cupy


def select(device: str, rank: int = 0) -> None:
    """Make a GPU this thread's, where `device` is "cuda": rank by rank, counted round, as `collectives.init` does."""
    if checked(device) == "cuda":
        count = cuda().cuda.runtime.getDeviceCount()
        cuda().cuda.Device(rank % count).use()


def checked(device: str) -> str:
    """The device. Raises ValueError for what is none."""
    if device not in DEVICES:
        raise ValueError(
            f'there are the devices "cpu" and "cuda" (the GPU that is current in CuPy), not {device!r}; '
            "cupy.cuda.Device(number).use() makes another GPU the current one"
        )
    return device


def of(array: Array) -> str:
    """Where an array is."""
    return "cuda" if is_cupy_array(array) else "cpu"


def move(array: Array, device: str) -> Array:
    """The array, or its copy on another device. To a GPU the host only begins the copy; from one it waits for it."""
    if of(array) == checked(device):
        return array
    return cuda().asnumpy(array) if device == "cpu" else cuda().array(array)


def beside(array: Array, other: Array) -> Array:
    """The array, or its copy where `other` is."""
    return move(array, of(other))


def to_host(array: Array) -> np.ndarray:
    """As a NumPy array."""
    return np.asarray(move(array, "cpu"))


def synchronize(array: Array) -> None:
    """Wait until an array's GPU has done what it was given so far; the CPU always has."""
    if of(array) == "cuda":
        cuda().cuda.get_current_stream().synchronize()
