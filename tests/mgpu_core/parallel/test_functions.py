"""Functions that communicate: what they compute, and that backward is the transpose of forward."""

import numpy as np
import pytest
from crew import crews

from mgpu_core.parallel.functions import copy, gather, reduce, reduce_scatter, split
from mgpu_core.parallel.placement import even_part
from mgpu_core.tensor import Tensor

SHAPES = [(5, 2), (6, 2), (1, 3), (2, 4, 3), (3, 0)]


def held(function, shape, axis, rank, size):
    """What a rank puts in: copies are equal, summands differ, and parts are cut from one array."""
    whole = np.random.default_rng(1).standard_normal(shape)
    if function in (copy, split):
        return whole
    if function is gather:
        return whole[(slice(None),) * axis + (slice(*even_part(shape[axis], rank, size)),)]
    return np.random.default_rng(2 + rank).standard_normal(shape)


def cases():
    for shape in SHAPES:
        yield copy, shape, ()
        yield reduce, shape, ()
        for axis in range(len(shape)):
            yield from ((function, shape, (axis,)) for function in (split, gather, reduce_scatter))


def run(comm):
    """For each case: what this rank put in, got, was given as gradient, and got as gradient."""
    found = []
    for function, shape, axis in cases():
        x = Tensor(held(function, shape, *(axis or (0,)), comm.rank, comm.size), requires_grad=True)
        y = function(x, comm, *axis)
        alike = function in (reduce, gather)  # all go on with copies of the result in the same way
        gradient = np.random.default_rng(50 + (0 if alike else comm.rank)).standard_normal(y.shape)
        y.backward(gradient)
        found.append((x.data, y.data, gradient, x.grad))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_results_and_gradients(size):
    by_rank = crews(run, size)
    for (function, shape, axis), *ranks in zip(cases(), *by_rank):
        inputs, outputs, gradients, back = map(list, zip(*ranks))
        axis = axis[0] if axis else 0
        expected = {
            copy: lambda: inputs,
            reduce: lambda: [sum(inputs)] * size,
            split: lambda: cut(inputs[0], axis, size),
            gather: lambda: [np.concatenate(inputs, axis)] * size,
            reduce_scatter: lambda: cut(sum(inputs), axis, size),
        }[function]()
        transposed = {
            copy: lambda: [sum(gradients)] * size,
            reduce: lambda: gradients,
            split: lambda: [np.concatenate(gradients, axis)] * size,
            gather: lambda: cut(gradients[0], axis, size),
            reduce_scatter: lambda: [np.concatenate(gradients, axis)] * size,
        }[function]()
        for result, wanted in zip(outputs + back, expected + transposed, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-14, err_msg=f"{function.__name__} {shape} {axis}")


def cut(whole, axis, size):
    parts = (even_part(whole.shape[axis], rank, size) for rank in range(size))
    return [whole[(slice(None),) * axis + (slice(*part),)] for part in parts]


def test_alone_nothing_happens():
    x = Tensor(np.ones((2, 3)))
    assert all(function(x, None) is x for function in (copy, reduce))
    assert all(function(x, None, 1) is x for function in (split, gather, reduce_scatter))
