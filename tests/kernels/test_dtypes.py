"""The element types: found by NumPy dtype, scalar type or name, and what can be done with each."""

import ml_dtypes
import numpy as np
import pytest

from kernels.dtypes import DTYPES, OPERATIONS, DType, find


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_a_type_is_found_by_what_numpy_calls_it_and_by_its_name(dtype: DType) -> None:
    assert find(dtype.numpy) is find(dtype.numpy.type) is find(dtype.name) is dtype
    assert find(np.zeros(1, dtype.numpy).dtype) is dtype
    assert dtype.itemsize == dtype.numpy.itemsize


def test_codes_are_places_in_the_table_and_never_change() -> None:
    assert [dtype.code for dtype in DTYPES] == list(range(len(DTYPES)))
    assert [dtype.name for dtype in DTYPES[:4]] == ["float64", "float32", "float16", "bfloat16"]


def test_python_types_and_numpy_strings_are_understood() -> None:
    assert find(float).name == "float64"
    assert find("f4").name == "float32"
    assert find(ml_dtypes.bfloat16).name == "bfloat16"


@pytest.mark.parametrize("dtype", [object, "S4", "U4", "datetime64[s]", [("a", "i4")], np.longdouble, ">f4", "no such"])
def test_what_cannot_be_moved_is_refused_with_the_list_of_what_can(dtype: object) -> None:
    with pytest.raises(TypeError, match=r"cannot be moved or reduced; use one of float64, .*complex128"):
        find(dtype if not isinstance(dtype, list) else np.dtype(dtype))


def test_arithmetic_is_done_in_float32_for_small_floats_and_in_the_type_itself_otherwise() -> None:
    wide = {dtype.name: dtype.accumulator for dtype in DTYPES if dtype.accumulator != dtype.name}
    assert wide == dict.fromkeys(["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"], "float32")


def test_operations_that_make_no_sense_are_left_out() -> None:
    assert find("float32").operations() == find("uint8").operations() == OPERATIONS
    assert not {"min", "max"} & set(find("complex64").operations())
    assert not {"avg", "premul_sum"} & set(find("bool").operations())
    for dtype in DTYPES:
        assert set(dtype.operations()) <= set(OPERATIONS)
