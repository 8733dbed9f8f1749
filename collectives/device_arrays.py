"""Arrays in GPU memory as collectives see them: an address, a shape, a dtype and the stream that they are ready on.

CuPy, PyTorch and JAX arrays, and whatever has `__cuda_array_interface__` (Numba). Libraries are recognised by their
types' names, so none is imported that the caller has not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np

from kernels import dtypes

LEGACY = 0  # CUDA's default stream, where a library says nothing else

_TORCH = {
    "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


class DeviceArray:
    """A C-contiguous array in GPU memory. `owner` keeps the memory; `stream` is the caller's current one.

    Has `__cuda_array_interface__`, so that any library can wrap it without copying.
    """

    def __init__(self, address: int, shape: Sequence[int], dtype: Any, stream: int = LEGACY, owner: Any = None) -> None:
        self.address, self.shape, self.dtype = address, tuple(shape), np.dtype(dtype)
        self.stream, self.owner = stream, owner

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        known = self.dtype.kind != "V" and self.dtype.isbuiltin == 1
        return {
            "shape": self.shape,
            "typestr": self.dtype.str if known else f"<u{self.itemsize}",  # which has no name for bfloat16
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": self.stream or 1,
        }

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same memory in another shape; one dimension may be -1."""
        new = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if -1 in new:
            rest = -math.prod(new)
            new = tuple(self.size // rest if n == -1 else n for n in new)
        if math.prod(new) != self.size:
            raise ValueError(f"an array of shape {self.shape} cannot have shape {new}")
        return DeviceArray(self.address, new, self.dtype, self.stream, self)

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Rows that follow one another: the same memory."""
        start, end, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"rows {start} to {end} in steps of {step} are not contiguous")
        width = math.prod(self.shape[1:])
        shape = max(0, end - start), *self.shape[1:]
        return DeviceArray(self.address + start * width * self.itemsize, shape, self.dtype, self.stream, self)

    def view(self, dtype: Any) -> DeviceArray:
        """The same memory as a flat array of another type."""
        return DeviceArray(self.address, (self.nbytes // np.dtype(dtype).itemsize,), dtype, self.stream, self)


def is_on_device(x: Any) -> bool:
    """Whether x is an array in GPU memory."""
    kind = _kind(x)
    if kind in ("torch", "jax"):
        return bool(getattr(x, "is_cuda", False)) if kind == "torch" else _jax_on_gpu(x)
    return isinstance(x, DeviceArray) or hasattr(x, "__cuda_array_interface__")


def view(x: Any, role: str = "the array", writable: bool = False) -> DeviceArray:
    """x, which is in GPU memory, without copying (a strided one that is only read is made contiguous).

    Raises TypeError for a dtype that cannot be moved, and ValueError for what is `writable` and cannot be written.
    """
    if isinstance(x, DeviceArray):
        return x
    kind = _kind(x)
    if kind == "torch":
        import torch

        tensor = x.detach()
        tensor = tensor if writable or tensor.is_contiguous() else tensor.contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        strides = [n * tensor.element_size() for n in tensor.stride()]
        return _checked(role, tensor.data_ptr(), tensor.shape, _TORCH.get(name, name), strides, False, stream, tensor)
    if kind == "jax" and writable:
        raise ValueError(f"{role} is a JAX array, which cannot be written to; take the result that the call returns")
    if kind == "jax" or kind == "cupy":
        import cupy

        # DLPack makes CuPy's current stream wait for what JAX is still computing.
        array = cupy.from_dlpack(x) if kind == "jax" else x
        array = array if writable else cupy.ascontiguousarray(array)
        stream = cupy.cuda.get_current_stream().ptr
        return _checked(role, array.data.ptr, array.shape, array.dtype, array.strides, False, stream, array)
    interface = x.__cuda_array_interface__
    address, read_only = interface["data"]
    return _checked(
        role, address, interface["shape"], interface["typestr"], interface.get("strides"), read_only and writable,
        interface.get("stream") or LEGACY, x,
    )  # fmt: skip


def fresh(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A new array of the kind that `like` is, on the same device. Raises TypeError for kinds that only the caller can
    make."""
    kind = _kind(like)
    if kind == "torch":
        import torch

        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if kind in ("cupy", "jax"):
        import cupy

        return cupy.empty(shape, dtype)
    if kind == "numba":
        from numba import cuda

        return cuda.device_array(shape, dtype)
    raise TypeError(f"a new {type(like).__name__} cannot be made here; pass out=")


def same_kind(like: Any, result: Any) -> Any:
    """`result`, from `fresh`, as the caller's kind of array."""
    if _kind(like) == "jax":
        import jax

        return jax.dlpack.from_dlpack(result)
    return result


def present(array: DeviceArray) -> Any:
    """Symmetric memory as users get it: a CuPy array if CuPy is there and has the type, else the array itself."""
    if find_spec("cupy") is None or array.dtype.isbuiltin != 1:
        return array
    import cupy

    return cupy.asarray(array)


def _checked(
    role: str, address: int, shape: Sequence[int], dtype: Any, strides: Any, read_only: bool, stream: int, owner: Any
) -> DeviceArray:
    try:
        kind = dtypes.find(np.dtype(dtype)).numpy
    except TypeError as error:
        raise TypeError(f"{role}: {error}") from None
    if read_only:
        raise ValueError(f"{role} is read-only, and would have to be written to; pass a writable copy")
    expected: list[int] = []
    step = kind.itemsize
    for n in reversed(shape):
        expected.insert(0, step)
        step *= n
    if strides is not None and any(n > 1 and s != e for n, s, e in zip(shape, strides, expected)) and 0 not in shape:
        raise ValueError(
            f"{role} (shape {tuple(shape)}, strides {tuple(strides)} bytes) is not C-contiguous; pass a contiguous "
            f"array, and copy it back if it is written to"
        )
    return DeviceArray(address, shape, kind, stream, owner)


def _jax_on_gpu(x: Any) -> bool:
    return any(device.platform in ("gpu", "cuda") for device in x.devices())


def _kind(x: Any) -> str:
    root = type(x).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root
