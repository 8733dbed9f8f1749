"""Tensor parallelism is the training of one process: layer by layer, and of a transformer from its first weights on."""

import functools

import numpy as np
import pytest
from crew import crews

import collectives
from mgpu_core import nn, optim, random
from mgpu_core.nn import functional as F
from mgpu_core.parallel import Mesh, clip_grad_norm
from mgpu_core.parallel.functions import split
from mgpu_core.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelDropout,
    ParallelTransformerBlock,
    RowParallelLinear,
    SequenceParallelLayerNorm,
    VocabularyParallelEmbedding,
    parallelize,
    vocabulary_parallel_cross_entropy,
)
from mgpu_core.parallel.weight_gradients import WeightGradients
from mgpu_core.tensor import Tensor, backward

WORDS, TIMES, SIZE, HEADS, HIDDEN = 7, 5, 6, 3, 10  # none of them divides by 2 and by 3
BATCH = 4
FIGURES = np.random.default_rng(0)
TEXTS = FIGURES.integers(0, WORDS, (40, TIMES + 1))
TEXTS[:, 1:] = (TEXTS[:, :-1] * 3 + 1) % WORDS  # each word follows from the one before


def figures(*shape):
    return np.random.default_rng(3).standard_normal(shape)


# Layers


def layers(comm, sequence):
    """(name, whole layer, parallel layer, input, whether the rank takes its part of the input's last axis)."""
    draw = lambda: np.random.default_rng(1)  # noqa: E731
    real = {"rng": draw(), "dtype": np.float64}
    cut = {"sequence_parallel": True} if sequence else {}
    linear = nn.Linear(SIZE, HIDDEN, rng=draw(), dtype=np.float64)
    unbiased = nn.Linear(HIDDEN, SIZE, bias=False, rng=draw(), dtype=np.float64)
    narrow = nn.Linear(HIDDEN, SIZE, rng=draw(), dtype=np.float64)
    tiny = nn.Linear(SIZE, 1, rng=draw(), dtype=np.float64)
    block = {"size": SIZE, "hidden": HIDDEN, "dropout": 0.3, **real}
    attention = nn.MultiHeadAttention(SIZE, HEADS, causal=True, dropout=0.3, **real)
    alone = nn.MultiHeadAttention(SIZE, 1, **real)
    yield "column", linear, ColumnParallelLinear(linear, comm, **cut), figures(BATCH, TIMES, SIZE), "outputs"
    yield "narrower than ranks", tiny, ColumnParallelLinear(tiny, comm, **cut), figures(BATCH, TIMES, SIZE), "outputs"
    yield "row", narrow, RowParallelLinear(narrow, comm, **cut), figures(BATCH, TIMES, HIDDEN), "inputs"
    yield "no bias", unbiased, RowParallelLinear(unbiased, comm, **cut), figures(BATCH, TIMES, HIDDEN), "inputs"
    yield "attention", attention, ParallelAttention(attention, comm, **cut), figures(BATCH, TIMES, SIZE), ""
    yield "one head", alone, ParallelAttention(alone, comm, **cut), figures(BATCH, TIMES, SIZE), ""
    for heads in (2, HEADS):
        whole = nn.TransformerBlock(heads=heads, **block)
        ends = (True, True) if sequence else None
        yield "block", whole, ParallelTransformerBlock(whole, comm, sequence_ends=ends), figures(BATCH, TIMES, SIZE), ""
    if sequence:
        norm = nn.LayerNorm(SIZE, dtype=np.float64)
        dropout = nn.Dropout(0.4, rng=draw())
        yield "norm", norm, SequenceParallelLayerNorm(norm, comm), figures(BATCH, TIMES, SIZE), "part"
        yield "dropout", dropout, ParallelDropout(dropout, comm), figures(BATCH, TIMES, SIZE), "part"
    else:
        embedding = nn.Embedding(WORDS, SIZE, rng=draw(), dtype=np.float64)
        yield "embedding", embedding, VocabularyParallelEmbedding(embedding, comm), TEXTS[:BATCH], ""
        flat = nn.Dropout(0.4, rng=draw())
        yield "dropout of features", flat, ParallelDropout(flat, comm), figures(BATCH, 9), "part"


def apply(layer, x, gradient):
    """A layer's output, and the gradients of its input and parameters."""
    layer.zero_grad()
    x = Tensor(x, requires_grad=x.dtype == np.float64)
    with random.batch(seed=5, step=2, samples=range(10, 10 + len(x))):
        y = layer(x)
    y.backward(gradient(y))
    return y.data, x.grad, {name: p.grad.copy() for name, p in layer.named_parameters()}


def compare(comm):
    """Every layer against the whole one, and every part against its place in the whole."""
    rank, size = comm.rank, comm.size
    found = []
    for sequence in (False, True):
        for name, whole, part, x, kind in layers(comm, sequence):
            expected, dx, grads = apply(whole, x, lambda y: figures(*y.shape))

            def cut(array, axis):
                return split(Tensor(array), comm, axis).data

            lies_in_sequence = sequence and name != "block"
            given = cut(x, x.ndim - 1) if kind == "inputs" else x
            result = expected
            if kind == "part" or (lies_in_sequence and kind != "inputs"):
                given, dx = cut(given, 1), None if dx is None else cut(dx, 1)
            if kind == "inputs":
                dx = cut(dx, dx.ndim - 1)
            if kind == "outputs":
                result = cut(expected, expected.ndim - 1)
            elif kind == "part" or lies_in_sequence:
                result = cut(expected, 1)
            gradient = figures(*expected.shape)
            gradient = cut(gradient, 1) if kind == "part" or (lies_in_sequence and kind != "outputs") else gradient
            gradient = cut(gradient, 2) if kind == "outputs" else gradient
            y, to_x, to_parameters = apply(part, given, lambda _, gradient=gradient: gradient)
            where = f"{name}, sequence {sequence}, rank {rank} of {size}"
            np.testing.assert_allclose(y, result, rtol=1e-12, atol=1e-13, err_msg=where)
            if dx is not None:
                np.testing.assert_allclose(to_x, dx, rtol=1e-11, atol=1e-13, err_msg=where)
            originals = dict(whole.named_parameters())
            assert originals.keys() == to_parameters.keys()
            for key, parameter in part.named_parameters():
                index = ... if parameter.placement is None else parameter.placement.index
                assert (parameter.sharded_over == ()) == (parameter.placement is None)
                np.testing.assert_array_equal(parameter.data, originals[key].data[index])
                wanted = grads[key][index]
                np.testing.assert_allclose(
                    to_parameters[key], wanted, rtol=1e-11, atol=1e-12, err_msg=f"{where}, {key}"
                )
            found.append(name)
    return len(found)


@functools.cache
def ranks(size):
    """What several tests look at, of each rank, from one start of the processes."""
    return crews(work, size)


def work(comm):
    exact = train_all(comm, np.float64, 4, OPTIONS)
    rough = train_all(comm, np.float32, 10, [OPTIONS[1]])
    return compare(comm), losses(comm), exact, rough


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_layers_compute_what_the_whole_does(size):
    assert [compared for compared, *_ in ranks(size)] == [20] * size


def losses(comm):
    """The loss and its gradient for numbers of classes from 1, for batches of any shape, and huge logits."""
    for classes in (1, 2, 5, WORDS):
        for shape in ((4,), (2, 3), (0,)):
            for scale in (1.0, 1e4):
                logits = scale * figures(*shape, classes)
                targets = np.random.default_rng(4).integers(0, classes, shape)
                for reduction in ("mean", "sum"):
                    whole = Tensor(logits, requires_grad=True)
                    loss = F.cross_entropy(whole, targets, reduction=reduction)
                    loss.backward(0.7)
                    part = split(Tensor(logits), comm, len(shape))
                    leaf = Tensor(part.data, requires_grad=True)
                    found = vocabulary_parallel_cross_entropy(leaf, targets, comm, classes=classes, reduction=reduction)
                    found.backward(0.7)
                    np.testing.assert_allclose(found.data, loss.data, rtol=1e-12, atol=1e-12)
                    wanted = split(Tensor(whole.grad), comm, len(shape)).data
                    np.testing.assert_allclose(leaf.grad, wanted, rtol=1e-10, atol=1e-13)
    with pytest.raises(IndexError, match="a class must be from 0 to 6"):
        part = split(Tensor(figures(1, WORDS)), comm, 1)
        vocabulary_parallel_cross_entropy(part, np.array([WORDS]), comm, classes=WORDS)
    with pytest.raises(ValueError, match="this rank's part of 7 classes"):
        vocabulary_parallel_cross_entropy(Tensor(figures(1, WORDS)), np.array([0]), comm, classes=WORDS)
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_the_loss_over_parts_of_the_classes(size):
    assert all(passed for _, passed, _, _ in ranks(size))


# A transformer


class Transformer(nn.Module):
    """Words (N, T) to the cross-entropy of those that follow. The output layer shares the embedding's weight."""

    def __init__(self, comm, dtype, *, sequence_parallel=False, tied=False):
        rng = np.random.default_rng(1)
        real = {"rng": rng, "dtype": dtype}
        blocks = [nn.TransformerBlock(SIZE, HEADS, hidden=HIDDEN, causal=True, dropout=0.1, **real) for _ in range(2)]
        self.body = nn.Sequential(
            nn.Embedding(WORDS, SIZE, **real),
            nn.PositionalEmbedding(TIMES, SIZE, **real),
            nn.Dropout(0.1, rng=rng),
            *blocks,
            nn.LayerNorm(SIZE, dtype=dtype),
        )
        parallelize(self.body, comm, sequence_parallel=sequence_parallel)
        self.output = ColumnParallelLinear(nn.Linear(SIZE, WORDS, bias=not tied, **real), comm)
        if tied:
            self.output.weight = self.body[0].weight
        self.comm = comm

    def forward(self, words, targets):
        logits = self.output(self.body(Tensor(words)))
        return vocabulary_parallel_cross_entropy(logits, targets, self.comm, classes=WORDS, reduction="sum")


@functools.cache
def alone(dtype, steps, tied, order=None):
    return train(None, dtype, steps, tied=tied, order=order)


def train(mesh, dtype, steps, *, order=None, **options):
    """The losses, gradient norms and, by name, (array, placement) in the end."""
    model = Transformer(None if mesh is None else mesh.tensor, dtype, **options)
    optimizer = optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)  # AdamW magnifies gradients that are noise
    found = []
    for step in range(steps):
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(TEXTS)
        samples = np.arange(BATCH)
        if order is not None:  # the same sums in another order
            samples = np.random.default_rng(order + step).permutation(BATCH)
        texts = TEXTS[rows[samples]]
        model.zero_grad()
        with random.batch(seed=7, step=step, samples=samples):
            loss = model(texts[:, :-1], texts[:, 1:]) / texts[:, 1:].size
        loss.backward()
        norm = clip_grad_norm(model.parameters(), 0.5, mesh)
        optimizer.step()
        found.append((float(loss), norm))
    return np.array(found), {name: (p.data, p.placement) for name, p in model.named_parameters()}


def joined(states):
    """Whole arrays from all ranks' parts; copies are equal to the last bit."""
    whole = {}
    for state in states:
        for name, (array, placement) in state.items():
            if placement is None:
                np.testing.assert_array_equal(array, whole.setdefault(name, array))
            else:
                whole.setdefault(name, np.full(placement.shape, np.nan))[placement.index] = array
    return whole


def distance(one, other):
    """The largest difference of losses and of parameters, relative to the largest value of each."""
    pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in other[1])]
    return max(float(np.max(abs(a.astype(float) - b)) / np.max(abs(b.astype(float)))) for a, b in pairs)


OPTIONS = [{"tied": tied, "sequence_parallel": sequence} for tied in (False, True) for sequence in (False, True)]


def train_all(comm, dtype, steps, cases):
    with Mesh(comm, tensor=-1) as mesh:
        return [train(mesh, dtype, steps, **options) for options in cases]


def follows_one_process(by_rank, steps):
    for options, *results in zip(OPTIONS, *by_rank):
        figures_alone, state = alone(np.float64, steps, options["tied"])
        expected = figures_alone, joined([state])
        for figures_found, _ in results:
            np.testing.assert_array_equal(figures_found, results[0][0])  # every rank knows the same loss and norm
        assert distance((results[0][0], joined([state for _, state in results])), expected) < 1e-10, options
        if steps == 50:
            assert expected[0][-1, 0] < expected[0][0, 0]  # it learns


@pytest.mark.parametrize("size", [2, 3])
def test_training_follows_one_process(size):
    """Dropout, clipping and tied weights included."""
    follows_one_process([exact for _, _, exact, _ in ranks(size)], 4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_training_follows_one_process_for_50_steps(size):
    follows_one_process(collectives.spawn(train_all, size, (np.float64, 50, OPTIONS)), 50)


@pytest.mark.parametrize("size", [2, 3])
def test_float32_drifts_no_more_than_another_order_of_summation(size):
    figures_alone, state = alone(np.float32, 10, False)
    reference = figures_alone, joined([state])
    others = [alone(np.float32, 10, False, order) for order in (10, 20, 30)]
    permuted = max(distance((found, joined([state])), reference) for found, state in others)
    results = [result for _, _, _, (result,) in ranks(size)]
    assert distance((results[0][0], joined([state for _, state in results])), reference) <= 3 * permuted


# Communication


class Log:
    """Rank 0 of two that notes what is asked of it."""

    rank, size = 0, 2

    def __init__(self):
        self.lines = []

    def all_reduce(self, x, op="sum", *, out=None, async_op=False):
        self.lines.append("start" if async_op else "sum")
        return self if async_op else x

    def wait(self):
        self.lines.append("wait")
        return np.zeros((2, SIZE))


@pytest.mark.parametrize("halves", [False, True])
def test_the_sum_of_the_inputs_gradient_travels_while_the_weights_is_computed(halves):
    """Also where backward is cut in halves: then the second starts nothing."""
    log = Log()
    layer = ColumnParallelLinear(nn.Linear(SIZE, 4, rng=np.random.default_rng(0), dtype=np.float64), log)
    layer.weight.on_grad_ready(lambda _: log.lines.append("weight"))
    x = Tensor(figures(2, SIZE), requires_grad=True)
    y = layer(x)
    later = WeightGradients([y], [x]) if halves else None
    backward([y], [figures(2, 2)])
    if later:
        later.backward()
    assert log.lines == (["start", "wait", "weight"] if halves else ["start", "weight", "wait"])


def test_an_input_without_gradient_costs_no_communication():
    log = Log()
    layer = ColumnParallelLinear(nn.Linear(SIZE, 4, rng=np.random.default_rng(0), dtype=np.float64), log)
    layer(Tensor(figures(2, SIZE))).sum().backward()
    assert log.lines == []


# Models


def test_parallelize_cuts_pairs_of_linear_layers_and_keeps_names():
    rng = np.random.default_rng(0)

    def linear():
        return nn.Linear(4, 4, rng=rng)

    model = nn.Sequential(
        nn.Conv2d(1, 1, 1, rng=rng), nn.Flatten(), linear(), nn.ReLU(), linear(), nn.Tanh(), linear(), nn.LayerNorm(4),
        nn.Sequential(linear(), linear()), nn.Embedding(3, 4, rng=rng),
    )  # fmt: skip
    names = list(model.state_dict())
    assert parallelize(model, None) is model
    assert all(p.placement is None for p in model.parameters())
    assert parallelize(model, Log()) is model
    assert [type(layer).__name__ for layer in model] == [
        "Conv2d", "Flatten", "ColumnParallelLinear", "ReLU", "RowParallelLinear", "Tanh", "Linear", "LayerNorm",
        "Sequential", "VocabularyParallelEmbedding",
    ]  # fmt: skip
    assert [type(layer).__name__ for layer in model[8]] == ["ColumnParallelLinear", "RowParallelLinear"]
    assert list(model.state_dict()) == names


def test_layers_that_share_a_parameter_are_not_torn_apart():
    rng = np.random.default_rng(0)
    first, second = nn.Linear(2, 2, rng=rng), nn.Linear(2, 2, rng=rng)
    second.weight = first.weight
    with pytest.raises(ValueError, match="share a parameter"):
        parallelize(nn.Sequential(first, nn.ReLU(), second), Log())


def test_mistakes():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="last axis of x"):
        ColumnParallelLinear(nn.Linear(3, 4, rng=rng), Log())(Tensor(np.ones((2, 2), np.float32)))
    with pytest.raises(IndexError, match="from 0 to 2"):
        VocabularyParallelEmbedding(nn.Embedding(3, 4, rng=rng), Log())(np.array([3]))
