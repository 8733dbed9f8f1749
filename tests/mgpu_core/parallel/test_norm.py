"""Gradients are clipped by the norm of the whole model's gradient, wherever its parts and copies are."""

import numpy as np
import pytest
from crew import crews

from mgpu_core.nn import Parameter
from mgpu_core.parallel import Mesh, clip_grad_norm, grad_norm
from mgpu_core.tensor import Tensor


def test_clipping_by_the_global_norm():
    parameters = [Tensor(np.zeros(n), requires_grad=True) for n in (2, 3, 1)]
    parameters[0].grad, parameters[1].grad = np.array([3.0, 0.0]), np.array([0.0, 4.0, 0.0])
    arrays = [p.grad for p in parameters]
    assert grad_norm(parameters) == 5
    assert clip_grad_norm(parameters, 10.0) == 5
    np.testing.assert_array_equal(parameters[0].grad, [3, 0])
    assert clip_grad_norm(iter(parameters), 1.0) == 5
    np.testing.assert_allclose(parameters[0].grad, [0.6, 0])
    np.testing.assert_allclose(parameters[1].grad, [0, 0.8, 0])
    assert all(p.grad is array for p, array in zip(parameters, arrays))
    parameters[0].grad[0] = np.nan
    assert np.isnan(clip_grad_norm(parameters, 0.1))
    np.testing.assert_allclose(parameters[1].grad, [0, 0.8, 0])


SHAPES = [{"data": 4}, {"tensor": 4}, {"pipeline": 4}, {"data": 2, "tensor": 2}, {"tensor": 2, "pipeline": 2}]
KINDS = [(), ("tensor",), ("data",), ("data", "tensor")]


def gradient(kind, place):
    """Gradients of copies are equal; those of parts and of other stages are not."""
    owner = [place[axis] if axis in (*kind, "pipeline") else 0 for axis in ("data", "tensor", "pipeline")]
    return np.random.default_rng([len(kind), *owner]).standard_normal((2, 3))


def clip(comm, max_norm):
    """For every shape of the mesh: the norm, and the clipped gradients beside what they were."""
    found = []
    for shape in SHAPES:
        with Mesh(comm, **shape) as mesh:
            place = {axis: mesh.index(axis) for axis in ("data", "tensor", "pipeline")}
            parameters = [Parameter(np.zeros((2, 3)), sharded_over=kind) for kind in KINDS]
            for parameter, kind in zip(parameters, KINDS):
                parameter.grad = gradient(kind, place)
            parameters.append(Parameter(np.zeros(2)))  # without a gradient
            norm = clip_grad_norm(parameters, max_norm, mesh)
            found.append((norm, [(p.grad, gradient(kind, place)) for p, kind in zip(parameters, KINDS)]))
    return found


def test_every_element_counts_once():
    by_rank = crews(clip, 4, (1.5,))
    for shape, *results in zip(SHAPES, *by_rank):
        sizes = {"data": 1, "tensor": 1, "pipeline": 1} | shape
        expected = np.linalg.norm([
            gradient(kind, {"data": d, "tensor": t, "pipeline": p})
            for kind in KINDS
            for d in range(sizes["data"] if "data" in kind else 1)
            for t in range(sizes["tensor"] if "tensor" in kind else 1)
            for p in range(sizes["pipeline"])
        ])  # fmt: skip
        assert len({norm for norm, _ in results}) == 1  # the same bits
        for norm, gradients in results:
            assert norm == pytest.approx(expected, rel=1e-12)
            for clipped, before in gradients:
                np.testing.assert_allclose(clipped, before * 1.5 / expected, rtol=1e-12)


def not_finite(comm):
    with Mesh(comm, pipeline=2) as mesh:
        parameters = [] if comm.rank else [Parameter(np.zeros(2)), Parameter(np.zeros(2))]
        for parameter, value in zip(parameters, (np.inf, 5.0)):
            parameter.grad = np.full(2, value)
        return clip_grad_norm(parameters, 1.0, mesh), [p.grad.tolist() for p in parameters]


def test_a_rank_may_have_nothing_and_what_is_not_finite_stays():
    assert crews(not_finite, 2) == [(np.inf, [[np.inf, np.inf], [5, 5]]), (np.inf, [])]
