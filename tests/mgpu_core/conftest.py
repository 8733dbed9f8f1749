"""The oracle for every gradient: central differences in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mgpu_core import Tensor


def _check_gradients(function: Callable[..., Tensor], *arrays: Any, step: float = 1e-6) -> None:
    """Compares the gradients of `function`, for a random gradient of its result, with central differences."""
    inputs = [Tensor(np.array(array, np.float64), requires_grad=True) for array in arrays]
    output = function(*inputs)
    assert output.dtype == np.float64
    gradient = np.random.default_rng(7).standard_normal(output.shape)
    output.backward(gradient)
    for tensor in inputs:
        expected = np.zeros(tensor.shape)
        for index in np.ndindex(tensor.shape):
            value = tensor.data[index]
            ends = []
            for side in (step, -step):
                tensor.data[index] = value + side
                ends.append(np.sum(function(*inputs).data * gradient))
            tensor.data[index] = value
            expected[index] = (ends[0] - ends[1]) / (2 * step)
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        np.testing.assert_allclose(tensor.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def check_gradients() -> Callable[..., None]:
    return _check_gradients
