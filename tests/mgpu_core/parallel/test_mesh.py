"""Ranks on a grid with named axes."""

import itertools

import numpy as np
import pytest

import collectives
from mgpu_core.parallel import Mesh

AXES = ("tensor", "data", "pipeline")


class Told:
    """One of many ranks, whose axes are only written down."""

    def __init__(self, rank, size, members=None):
        self.rank, self.size, self.members, self.closed, self.aborted = rank, size, members, 0, 0

    def split(self, color, key):
        return Told(key, None, color)

    def close(self):
        self.closed += 1

    def __exit__(self, kind, error, trace):
        self.aborted += error is not None
        self.close()


@pytest.mark.parametrize("shape", list(itertools.product((1, 2, 3), repeat=3)))
def test_tensor_varies_fastest_then_data_then_pipeline(shape):
    sizes = dict(zip(AXES, shape))
    size = int(np.prod(shape))
    for rank, (pipeline, data, tensor) in enumerate(itertools.product(*map(range, reversed(shape)))):
        mesh = Mesh(Told(rank, size), **sizes)
        assert [mesh.index(axis) for axis in AXES] == [tensor, data, pipeline]
        assert mesh.shape == sizes
        for axis, length in sizes.items():
            assert (getattr(mesh, axis) is None) == (length == 1)


@pytest.mark.parametrize("rest", [-1, None])
def test_one_size_may_be_the_rest(rest):
    assert Mesh(Told(0, 12), data=rest, tensor=2, pipeline=3).shape == {"tensor": 2, "data": 2, "pipeline": 3}
    assert Mesh(Told(0, 6), tensor=2, pipeline=rest).shape == {"tensor": 2, "data": 1, "pipeline": 3}
    assert Mesh(Told(0, 2), data=rest, tensor=2).shape["data"] == 1
    assert Mesh(None, data=rest).shape["data"] == 1


@pytest.mark.parametrize(
    "size, shape, said",
    [
        (6, {"data": 2, "tensor": 2}, "ranks, 6: tensor=3 or data=3 would fit"),
        (6, {"data": 2}, r"tensor=3 or data=6 or pipeline=3 would fit"),
        (4, {"data": 2}, "tensor=2 or data=4 or pipeline=2 would fit"),
        (4, {}, "tensor=4 or data=4 or pipeline=4 would fit"),
        (1, {"tensor": 2}, "tensor=1 would fit"),
        (6, {"data": 4, "tensor": 4}, "every size has to divide 6"),
        (6, {"data": -1, "tensor": 4}, "every size has to divide 6"),
        (4, {"data": -1, "tensor": -1}, "one of them may be -1"),
        (4, {"data": 0}, "whole numbers from 1"),
        (4, {"data": 2.0, "tensor": 2}, "whole numbers from 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_would(size, shape, said):
    with pytest.raises(ValueError, match=said):
        Mesh(Told(0, size), **shape)


def test_alone_there_are_no_communicators():
    for comm in (None, Told(0, 1)):
        with Mesh(comm) as mesh:
            assert (mesh.comm, mesh.data, mesh.tensor, mesh.pipeline) == (None,) * 4
            assert [mesh.index(axis) for axis in AXES] == [0, 0, 0]


def test_closing_and_failing():
    with Mesh(Told(0, 4), data=2, tensor=2) as mesh:
        pass
    assert (mesh.data.closed, mesh.tensor.closed, mesh.comm.closed, mesh.data.aborted) == (1, 1, 0, 0)
    with pytest.raises(KeyError), Mesh(Told(0, 4), data=4) as mesh:
        raise KeyError
    assert mesh.data.aborted == 1


def sums(comm):
    """Sums of ranks along each axis of a 2 x 2 x 1 mesh, and of a mesh of one axis."""
    with Mesh(comm, data=2, tensor=-1) as mesh, Mesh(comm, pipeline=4) as line:
        rank = np.array([comm.rank])
        return [int(along.all_reduce(rank)[0]) for along in (mesh.tensor, mesh.data, line.pipeline)]


def test_real_ranks_talk_along_the_axes():
    assert collectives.spawn(sums, 4) == [[1, 2, 6], [1, 4, 6], [5, 2, 6], [5, 4, 6]]
