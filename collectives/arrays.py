"""Arrays of any kind as NumPy sees them, without copying: NumPy, PyTorch (CPU), JAX (CPU), and whatever offers
`__array_interface__` or DLPack.

Collectives work on the NumPy view and hand the caller an array of the caller's own kind. PyTorch and JAX are
recognised by their types' names, so neither is imported unless the caller already has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from collectives.device_arrays import DeviceArray
from kernels import dtypes, native

Array = npt.NDArray[Any]
_plain_address = native.address_function()


def view(x: Any, role: str = "the array", writable: bool = False) -> Array:
    """`x` as a NumPy array over the same memory.

    Raises TypeError for what is no array, has a dtype that cannot be moved or lies on a GPU, and ValueError where
    `writable` memory is asked for and cannot be had.
    """
    array = x if type(x) is np.ndarray else _foreign(x, role, writable)
    try:
        dtypes.find(array.dtype)
    except TypeError as error:
        raise TypeError(f"{role}: {error}") from None
    if writable:
        if not array.flags.writeable:
            raise ValueError(f"{role} is read-only, and would have to be written to; pass a writable copy")
        if not array.flags.carray:
            raise ValueError(
                f"{role} (shape {array.shape}, strides {array.strides} bytes) is not C-contiguous and aligned, and "
                f"would have to be written to; pass a contiguous array and copy it back"
            )
    return array


def same_kind(like: Any, result: Array) -> Any:
    """`result` as an array of the kind that `like` is: sharing memory, except for JAX, whose arrays are immutable."""
    kind = _kind(like)
    if kind == "torch":
        return _to_torch(result)
    if kind == "jax":
        import jax.numpy as jnp

        return jnp.asarray(result)
    if kind == "numba":  # a device array of CUDA's simulator, which wraps NumPy's
        return type(like)(result)
    return result


def is_immutable(x: Any) -> bool:
    """Whether x is an array that cannot be written: a JAX array."""
    return _kind(x) == "jax"


def address(array: Any) -> int:
    """Where a C-contiguous array's data begins."""
    if isinstance(array, DeviceArray):
        return array.address
    try:
        return _plain_address(array)
    except ValueError:  # not aligned, say
        return int(array.__array_interface__["data"][0])


def join(arrays: Sequence[Array], flat: Array) -> None:
    """Copy arrays into a flat one of the same dtype, one after another: they fill it."""
    np.concatenate([array.reshape(-1) for array in arrays], out=flat)


def part(flat: Array, arrays: Sequence[Array]) -> None:
    """The way back."""
    start = 0
    for array in arrays:
        end = start + array.size
        array[...] = flat[start:end].reshape(array.shape)
        start = end


def contiguous(array: Any) -> Any:
    """The array, or a C-contiguous, aligned copy. (NumPy's own function would make a 0-d array one-dimensional.)"""
    if isinstance(array, DeviceArray):  # which always is
        return array
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy(order="C")


def apart(array: Any) -> Any:
    """A copy, for a source that lies where the result goes."""
    if isinstance(array, DeviceArray):
        raise ValueError("x and out overlap, and neither is the other's part that a call in place has; copy x first")
    return array.copy()


def _kind(x: Any) -> str:
    root = type(x).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def _foreign(x: Any, role: str, writable: bool) -> Array:
    kind = _kind(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{role} is a masked array, whose mask would be lost; pass x.filled(value)")
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    if isinstance(x, np.generic):
        if writable:
            raise ValueError(f"{role} is a NumPy scalar, which cannot be written to; pass an array of shape ()")
        return np.asarray(x)
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(
            f"{role} is in GPU memory, and this communicator's backend moves CPU arrays; use backend='cuda' or 'nccl'"
        )
    if kind == "torch":
        return _from_torch(x, role)
    if kind == "jax":
        if writable:
            raise ValueError(
                f"{role} is a JAX array, which cannot be written to; take the result that the call returns"
            )
        return np.asarray(x)
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    if hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except Exception as error:
            raise TypeError(f"{role}, of type {type(x).__name__}, cannot be read through DLPack: {error}") from error
    raise TypeError(
        f"{role} is of type {type(x).__name__}; expected an array (NumPy, PyTorch, JAX, or anything with "
        f"__array_interface__ or DLPack). For a number or a list, pass numpy.asarray(...)"
    )


# Types that PyTorch has and NumPy lacks travel as integers of their width.
_TORCH_EXTRA: dict[str, tuple[str, Any]] = {
    "torch.bfloat16": ("int16", ml_dtypes.bfloat16),
    "torch.float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "torch.float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}


def _from_torch(tensor: Any, role: str) -> Array:
    import torch

    if tensor.device.type != "cpu":
        raise TypeError(
            f"{role} is on {tensor.device}, and this communicator's backend moves CPU arrays; "
            f"use backend='nccl' or 'cuda'"
        )
    tensor = tensor.detach()
    extra = _TORCH_EXTRA.get(str(tensor.dtype))
    if extra:
        array: Array = tensor.view(getattr(torch, extra[0])).numpy().view(extra[1])
        return array
    array = tensor.numpy()
    return array


def _to_torch(array: Array) -> Any:
    import torch

    for name, (carrier, numpy) in _TORCH_EXTRA.items():
        if array.dtype == numpy:
            return torch.from_numpy(array.view(carrier)).view(getattr(torch, name.removeprefix("torch.")))
    return torch.from_numpy(array)
