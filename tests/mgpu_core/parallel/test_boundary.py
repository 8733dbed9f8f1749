"""What stages hand on: as tensors, as a form that is told once, and as one message."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core.parallel.boundary import Form, leaves, tensors
from mgpu_core.tensor import Tensor

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, np.bool_]
PARTS = st.tuples(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.sampled_from(DTYPES).map(np.dtype))
FORMS = st.builds(
    lambda is_tuple, parts: Form(is_tuple or len(parts) != 1, tuple(parts)),
    st.booleans(),
    st.lists(PARTS, max_size=5),
)


@given(FORMS)
def test_a_form_is_what_its_header_says(form):
    header = form.header()
    assert header.shape == (Form.HEADER_WORDS,) and header.dtype == np.int64
    assert Form.from_header(header) == form


def test_a_form_too_long_for_its_header_is_refused():
    with pytest.raises(ValueError, match="40 tensors are too many"):
        Form(True, (((2,), np.dtype(np.float32)),) * 40).header()


@given(FORMS, st.integers(0, 2**32))
def test_arrays_arrive_as_one_message(form, seed):
    rng = np.random.default_rng(seed)
    sent = [rng.integers(0, 2, shape).astype(dtype) for shape, dtype in form.parts]
    message = form.message(sent, np)
    memory, arrays = form.room(np)
    assert message.shape == memory.shape and message.dtype == memory.dtype and memory.flags.c_contiguous
    memory[...] = message
    for array, original, (shape, dtype) in zip(arrays, sent, form.parts):
        assert array.shape == shape and array.dtype == dtype
        np.testing.assert_array_equal(array, original)
        assert array.flags.aligned
    assert form.nbytes >= sum(array.nbytes for array in sent)
    assert len(form.parts) == 1 or memory.nbytes == form.nbytes


def test_a_single_array_is_its_own_message():
    array = np.ones((2, 3))
    assert Form.of(Tensor(array)).message([array], np) is array
    assert Form.of((Tensor(array),)).message([array], np) is array


def test_only_real_numbers_have_gradients():
    form = Form.of((Tensor(np.ones(2, np.float32)), Tensor(np.ones(3, np.int64)), Tensor(np.ones(4))))
    assert form.gradients() == Form(True, (((2,), np.dtype(np.float32)), ((4,), np.dtype(np.float64))))


def test_leaves_have_the_same_data_and_no_history():
    x = Tensor(np.ones(3), requires_grad=True)
    mask = Tensor(np.ones(3, np.int64))
    real, whole = leaves((x * 2.0, mask))
    assert real.is_leaf and real.requires_grad and real.data.tolist() == [2, 2, 2]
    assert whole.data is mask.data and not whole.requires_grad
    assert isinstance(leaves(x), Tensor)


@pytest.mark.parametrize("value", [np.ones(3), (Tensor(np.ones(3)), None), [Tensor(np.ones(3))], ((Tensor(1.0),),)])
def test_only_tensors_and_tuples_of_tensors_are_handed_on(value):
    with pytest.raises(TypeError, match="a tensor or a tuple of tensors"):
        tensors(value)
