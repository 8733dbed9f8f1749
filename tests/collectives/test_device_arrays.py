"""Arrays in GPU memory, as their libraries describe them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives import device_arrays
from collectives.device_arrays import DeviceArray


def interface(**given: Any) -> Any:
    """An array with this `__cuda_array_interface__`, as Numba's have."""
    words = {"shape": (3, 4), "typestr": "<f4", "data": (4096, False), "version": 3, **given}
    return SimpleNamespace(__cuda_array_interface__=words)


def test_an_interface_gives_address_shape_type_and_stream() -> None:
    seen = device_arrays.view(interface(stream=77))
    assert (seen.address, seen.shape, seen.dtype, seen.stream) == (4096, (3, 4), np.float32, 77)
    assert (seen.size, seen.nbytes, seen.ndim, len(seen)) == (12, 48, 2, 3)
    assert device_arrays.view(interface(stream=None)).stream == device_arrays.view(interface()).stream == 0


def test_what_is_not_contiguous_is_refused() -> None:
    assert device_arrays.view(interface(strides=(16, 4))).size == 12
    assert device_arrays.view(interface(shape=(1, 4), strides=(999, 4))).size == 4
    with pytest.raises(ValueError, match="not C-contiguous"):
        device_arrays.view(interface(strides=(4, 12)), "x")


def test_what_cannot_be_moved_or_written_is_refused() -> None:
    with pytest.raises(TypeError, match="x: dtype"):
        device_arrays.view(interface(typestr="|S3"), "x")
    assert device_arrays.view(interface(data=(4096, True))).address == 4096
    with pytest.raises(ValueError, match="read-only"):
        device_arrays.view(interface(data=(4096, True)), "out", writable=True)


def test_only_arrays_on_a_device_are() -> None:
    assert device_arrays.is_on_device(interface()) and device_arrays.is_on_device(DeviceArray(0, (1,), np.int8))
    assert not device_arrays.is_on_device(np.ones(3)) and not device_arrays.is_on_device([1.0])


def test_shapes_and_types_of_the_same_memory() -> None:
    array = DeviceArray(4096, (24,), np.uint8, stream=5)
    other = array.view(np.float32).reshape(2, -1)
    assert (other.address, other.shape, other.dtype, other.stream) == (4096, (2, 3), np.float32, 5)
    assert other.owner.owner is array
    with pytest.raises(ValueError, match="cannot have shape"):
        other.reshape(4, 4)


def test_rows_are_the_same_memory() -> None:
    rows = DeviceArray(4096, (6, 2), np.float32)[1:4]
    assert (rows.address, rows.shape) == (4104, (3, 2)) and rows[2:2].size == rows[9:].size == 0
    with pytest.raises(ValueError, match="not contiguous"):
        rows[::2]


def test_any_library_can_wrap_one() -> None:
    words = DeviceArray(4096, (2,), np.float32, stream=9).__cuda_array_interface__
    assert words["data"] == (4096, False) and words["typestr"] == "<f4" and words["stream"] == 9
    assert DeviceArray(0, (2,), np.int8).__cuda_array_interface__["stream"] == 1, "0 is not allowed"
    assert DeviceArray(0, (2,), ml_dtypes.bfloat16).__cuda_array_interface__["typestr"] == "<u2"


def test_new_arrays_of_an_unknown_kind_are_the_callers_to_make() -> None:
    with pytest.raises(TypeError, match="pass out="):
        device_arrays.fresh(interface(), (3,), np.float32)
