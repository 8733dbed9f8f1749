"""Arrays of other libraries and odd arrays: seen as NumPy sees them, without a copy, or refused with the reason."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives import arrays
from kernels.dtypes import DTYPES


class Interface:
    """An array of a library that nobody has heard of."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
        self._keep = array


class Dlpack:
    """One that speaks DLPack only."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class OnGpu:
    """A CuPy array, as far as one can tell without CuPy."""

    __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (0, False), "version": 3}


@pytest.mark.parametrize(
    "wrap",
    [lambda a: a, Interface, Dlpack, lambda a: a.view(np.matrix)],
    ids=["own", "interface", "dlpack", "subclass"],
)
def test_memory_is_shared(wrap: Any) -> None:
    array = np.arange(6.0).reshape(2, 3)
    view = arrays.view(wrap(array), writable=True)
    assert type(view) is np.ndarray
    assert arrays.address(view) == array.ctypes.data
    view[1, 2] = -1
    assert array[1, 2] == -1


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_address_of_every_dtype_and_shape(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype.numpy)
    assert arrays.view(array) is array
    assert arrays.address(array) == array.ctypes.data


STRANGE = {
    "a list": ([1.0, 2.0], TypeError, "x is of type list; expected an array"),
    "a number": (3.0, TypeError, "x is of type float; expected an array"),
    "None": (None, TypeError, "x is of type NoneType; expected an array"),
    "a string": ("abc", TypeError, "x is of type str; expected an array"),
    "objects": (np.array([None, {}]), TypeError, "x: dtype object cannot be moved"),
    "big-endian": (np.zeros(3, ">f4"), TypeError, "x: dtype >f4 cannot be moved"),
    "dates": (np.zeros(3, "M8[s]"), TypeError, "x: dtype datetime64"),
    "text": (np.array(["a"]), TypeError, "x: dtype <U1"),
    "records": (np.zeros(3, [("a", "f4"), ("b", "i4")]), TypeError, "x: dtype"),
    "long double": (np.zeros(3, np.longdouble), TypeError, "x: dtype float128"),
    "masked": (np.ma.masked_less(np.arange(3.0), 1), TypeError, "x is a masked array, whose mask would be lost"),
    "on a GPU": (OnGpu(), TypeError, "x is in GPU memory"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_array_of_numbers(what: str) -> None:
    x, kind, text = STRANGE[what]
    with pytest.raises(kind, match=text.replace("<", "<")):
        arrays.view(x, "x")


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


UNWRITABLE = {
    "read-only": (frozen(np.zeros(3)), "out is read-only"),
    "a constant buffer": (np.frombuffer(b"12345678"), "out is read-only"),
    "broadcast": (np.broadcast_to(np.zeros(1), (3,)), "out is read-only"),
    "strided": (np.zeros(6)[::2], "not C-contiguous"),
    "Fortran order": (np.zeros((2, 3), order="F"), "not C-contiguous"),
    "transposed": (np.zeros((2, 3)).T, "not C-contiguous"),
    "backwards": (np.zeros(3)[::-1], "not C-contiguous"),
    "unaligned": (np.zeros(25, np.uint8)[1:].view(np.float64), "not C-contiguous and aligned"),
    "a NumPy scalar": (np.float64(1), "NumPy scalar"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_cannot_be_written_to(what: str) -> None:
    x, text = UNWRITABLE[what]
    arrays.view(x, "out")  # may be read
    with pytest.raises(ValueError, match=text):
        arrays.view(x, "out", writable=True)


@pytest.mark.parametrize("what", UNWRITABLE)
def test_contiguous_has_the_same_values(what: str) -> None:
    x = np.asarray(UNWRITABLE[what][0])
    copy = arrays.contiguous(x)
    assert copy.flags.c_contiguous and copy.flags.aligned
    assert copy.shape == x.shape and copy.tobytes() == x.tobytes()


def test_a_copy_only_where_needed() -> None:
    for x in (np.zeros(()), np.zeros((2, 3)), np.zeros((3, 1)).T, frozen(np.zeros(2))):
        assert arrays.contiguous(x) is x


def test_pytorch() -> None:
    torch = pytest.importorskip("torch")
    for name, numpy in (
        ("float64", np.float64), ("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn), ("float8_e5m2", ml_dtypes.float8_e5m2), ("int64", np.int64),
        ("uint8", np.uint8), ("bool", np.bool_), ("complex64", np.complex64),
    ):  # fmt: skip
        tensor = torch.zeros(6, dtype=getattr(torch, name)).reshape(2, 3)
        view = arrays.view(tensor, writable=True)
        assert view.dtype == numpy and view.shape == (2, 3) and arrays.address(view) == tensor.data_ptr()
        back = arrays.same_kind(tensor, view)
        assert back.dtype == tensor.dtype and back.shape == tensor.shape and back.data_ptr() == tensor.data_ptr()
        assert arrays.view(tensor[0, 0]).shape == ()
    parameter = torch.ones(3, requires_grad=True)
    arrays.view(parameter, writable=True)[:] = 2
    assert parameter.tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="not C-contiguous"):
        arrays.view(torch.zeros(2, 3).T, writable=True)
    with pytest.raises(TypeError, match="is on meta"):
        arrays.view(torch.zeros(3, device="meta"))
    assert not arrays.is_immutable(parameter)


def test_jax() -> None:
    pytest.importorskip("jax")
    import jax.numpy as jnp

    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_):
        x = jnp.ones((2, 3), dtype)
        view = arrays.view(x)
        assert view.dtype == x.dtype and view.shape == (2, 3)
        back = arrays.same_kind(x, np.zeros((2, 3), view.dtype))
        assert type(back) is type(x) and back.dtype == x.dtype
        assert arrays.is_immutable(x)
        with pytest.raises(ValueError, match="JAX array, which cannot be written to"):
            arrays.view(x, writable=True)
