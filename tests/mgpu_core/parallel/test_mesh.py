"""Ranks on a grid with named axes; and training on any grid is that of one process."""

import functools
import itertools

import numpy as np
import pytest

from mgpu_core import nn, optim, random
from mgpu_core.data.sampler import part
from mgpu_core.nn import functional as F
from mgpu_core.parallel import SCHEDULES, Mesh, Pipeline, clip_grad_norm, parallelize

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


def test_real_ranks_talk_along_the_axes(crew):
    assert crew(sums, 4) == [[1, 2, 6], [1, 4, 6], [5, 2, 6], [5, 4, 6]]


# Hybrid training


WORDS, TIMES, SIZE, BATCH = 7, 5, 6, 5  # which no two ranks can share evenly
TEXTS = np.random.default_rng(0).integers(0, WORDS, (40, TIMES + 1))
TEXTS[:, 1:] = (TEXTS[:, :-1] * 3 + 1) % WORDS  # each word follows from the one before
GRIDS = {
    2: [{"data": 2}, {"tensor": 2}, {"pipeline": 2}],
    4: [{"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}],
    8: [{"data": 2, "tensor": 2, "pipeline": 2}],
}


def transformer(dtype):
    rng = np.random.default_rng(1)
    real = {"rng": rng, "dtype": dtype}
    blocks = [nn.TransformerBlock(SIZE, 3, hidden=9, causal=True, dropout=0.1, **real) for _ in range(2)]
    return nn.Sequential(
        nn.Embedding(WORDS, SIZE, **real),
        nn.PositionalEmbedding(TIMES, SIZE, **real),
        *blocks,
        nn.LayerNorm(SIZE, dtype=dtype),
        nn.Linear(SIZE, WORDS, **real),
    )


def loss(logits, words):
    return F.cross_entropy(logits, words, reduction="sum") / TIMES


def train(mesh, dtype, steps, *, sequence_parallel=False, order=None):
    """The losses (this rank's share), the gradient norms, and (array, placement) of this rank's parameters."""
    model = parallelize(transformer(dtype), mesh.tensor, sequence_parallel=sequence_parallel)
    schedule, microbatches = SCHEDULES["1f1b"], 1 if mesh.comm is None else 2
    pipeline = Pipeline(
        model, mesh.pipeline, loss=loss, schedule=schedule, microbatches=microbatches, data=mesh.data, bucket_bytes=300
    )
    optimizer = optim.SGD(pipeline.module.named_parameters(), lr=0.1, momentum=0.9)
    start, stop = part(BATCH, mesh.index("data"), [1] * mesh.shape["data"])
    losses, norms = [], []
    for step in range(steps):
        batch = np.arange(step * BATCH, (step + 1) * BATCH) % len(TEXTS)
        samples = np.arange(BATCH)
        if order is not None:  # the same sums in another order
            samples = np.random.default_rng(order + step).permutation(BATCH)
        texts = TEXTS[batch[samples]][start:stop]
        optimizer.zero_grad()
        with random.batch(seed=7, step=step, samples=samples[start:stop]):
            losses.append(pipeline.forward_backward(texts[:, :-1], texts[:, 1:], count=BATCH))
        norms.append(clip_grad_norm(pipeline.module.parameters(), 0.5, mesh))
        optimizer.step()
    state = {name: (p.data, p.placement) for name, p in pipeline.module.named_parameters()}
    return np.array(losses) * (mesh.index("tensor") == 0), np.array(norms), state


@functools.cache
def alone(dtype, steps, order=None):
    with Mesh() as mesh:
        return joined([train(mesh, dtype, steps, order=order)])


def joined(results):
    """The whole model's losses, norms and parameters; copies, and the norm on all ranks, are equal to the last bit."""
    whole = {}
    for _, norms, state in results:
        np.testing.assert_array_equal(norms, results[0][1])
        for name, (array, placement) in state.items():
            if placement is None:
                np.testing.assert_array_equal(array, whole.setdefault(name, array), err_msg=name)
            else:
                whole.setdefault(name, np.full(placement.shape, np.nan))[placement.index] = array
    return {"losses": sum(losses for losses, _, _ in results), "norms": results[0][1], **whole}


def distance(one, other):
    """The largest difference of anything, relative to the largest value of the same."""
    assert one.keys() == other.keys()
    return max(float(np.max(abs(one[key].astype(float) - other[key])) / np.max(abs(other[key]))) for key in other)


def rough_steps(steps):
    """Fewer tell nothing of how rounding adds up."""
    return max(steps, 6)


def train_on_grids(comm, steps):
    found = []
    for grid in GRIDS[comm.size]:
        with Mesh(comm, **grid) as mesh:
            for sequence_parallel in (False, True)[: mesh.shape["tensor"]]:
                exact = train(mesh, np.float64, steps, sequence_parallel=sequence_parallel)
                rough = train(mesh, np.float32, rough_steps(steps), sequence_parallel=sequence_parallel)
                found.append((f"{grid}, sequence parallel: {sequence_parallel}", exact, rough))
    return found


def follow_one_process(spawn, size, steps):
    reference = alone(np.float32, rough_steps(steps))
    permuted = max(distance(alone(np.float32, rough_steps(steps), order), reference) for order in (100, 200, 300))
    for cases in zip(*spawn(train_on_grids, size, (steps,)), strict=True):
        (grid, *_), *_ = cases
        exact, rough = (joined([case[kind] for case in cases]) for kind in (1, 2))
        assert distance(exact, alone(np.float64, steps)) < 1e-10, grid
        assert distance(rough, reference) <= 3 * permuted, grid
        if steps == 50:
            assert exact["losses"][-5:].mean() < exact["losses"][:5].mean()  # it learns


@pytest.mark.parametrize("size", [2, 4])
def test_training_on_any_grid_follows_one_process(crew, size):
    """Losses, gradient norms and parameters, with dropout and clipping, and with sequence parallelism too."""
    follow_one_process(crew, size, 3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_training_on_any_grid_follows_one_process_for_50_steps(crew, size):
    follow_one_process(crew, size, 50)
