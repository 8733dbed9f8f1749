"""Functions of layers: values against the definition, gradients against differences, errors that say what was wrong."""

import numpy as np
import pytest

from mgpu_core import Tensor, random
from mgpu_core.nn import functional as F

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape)


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "tanh", "sigmoid", "relu"])
def test_activations(name, shape, check_gradients):
    check_gradients(getattr(F, name), normal(*shape) + 0.01)


def test_gelu_is_close_to_its_definition():
    erf = np.vectorize(__import__("math").erf)
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(F.gelu(Tensor(x)).data, 0.5 * x * (1 + erf(x / np.sqrt(2))), atol=1e-3)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(axis, check_gradients):
    x = normal(3, 4, 5)
    e = np.exp(x) / np.exp(x).sum(axis=axis, keepdims=True)
    np.testing.assert_allclose(F.softmax(Tensor(x), axis).data, e)
    np.testing.assert_allclose(F.log_softmax(Tensor(x), axis).data, np.log(e))
    check_gradients(lambda x: F.softmax(x, axis), x)
    check_gradients(lambda x: F.log_softmax(x, axis), x)


def test_softmax_of_large_numbers():
    x = Tensor([[1e4, 0.0, -1e4]])
    np.testing.assert_array_equal(F.softmax(x).data, [[1, 0, 0]])
    np.testing.assert_array_equal(F.log_softmax(x).data, [[0, -1e4, -2e4]])


# Loss


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (2, 4, 3), (3,), (0, 3)], ids=str)
def test_cross_entropy(shape, weighted, reduction, check_gradients):
    x, targets = normal(*shape), rng.integers(0, shape[-1], shape[:-1])
    weights = rng.uniform(0, 2, shape[:-1]) if weighted else None
    p = np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    losses = -np.log(np.take_along_axis(p, targets[..., None], axis=-1)[..., 0])
    factors = np.ones(shape[:-1]) if weights is None else weights
    expected = np.sum(losses * factors)
    if reduction == "mean" and factors.size:
        expected /= np.sum(factors)
    loss = F.cross_entropy(Tensor(x), targets, weights=weights, reduction=reduction)
    assert loss.shape == ()
    np.testing.assert_allclose(loss.data, expected)
    check_gradients(lambda x: F.cross_entropy(x, targets, weights=weights, reduction=reduction), x)


def test_cross_entropy_of_uneven_shards_adds_up_to_the_mean():
    x, targets = normal(10, 4), rng.integers(0, 4, 10)
    whole = Tensor(x, requires_grad=True)
    F.cross_entropy(whole, targets).backward()
    for sizes in [(5, 5), (7, 3), (10, 0), (3, 3, 4)]:
        parts, start, total = [], 0, 0.0
        for size in sizes:
            part = Tensor(x[start : start + size], requires_grad=True)
            loss = F.cross_entropy(part, targets[start : start + size], reduction="sum") / 10
            loss.backward()
            parts.append(part.grad)
            total += loss.item()
            start += size
        np.testing.assert_allclose(np.concatenate(parts), whole.grad)
        np.testing.assert_allclose(total, F.cross_entropy(Tensor(x), targets).item())


def test_a_mean_over_no_weight_is_zero():
    for x, targets, weights in [(np.zeros((0, 3)), np.zeros(0, int), None), (np.zeros((2, 3)), [0, 1], [0.0, 0.0])]:
        logits = Tensor(x, requires_grad=True)
        loss = F.cross_entropy(logits, targets, weights=weights)
        loss.backward()
        assert loss.item() == 0
        np.testing.assert_array_equal(logits.grad, 0)


def test_cross_entropy_far_out_and_in_float32():
    x = Tensor(np.float32([[1000, -1000]]), requires_grad=True)
    loss = F.cross_entropy(x, [1], weights=np.ones(1))
    assert loss.dtype == np.float32
    assert loss.item() == 2000
    loss.backward()
    np.testing.assert_array_equal(x.grad, np.float32([[1, -1]]))


def test_cross_entropy_refuses():
    x = Tensor(np.zeros((2, 3)))
    for targets in ([0, 3], [-1, 0]):
        with pytest.raises(IndexError, match="a class must be from 0 to 2"):
            F.cross_entropy(x, targets)
    with pytest.raises(TypeError, match="integer"):
        F.cross_entropy(x, [0.0, 1.0])
    with pytest.raises(ValueError, match="targets of shape"):
        F.cross_entropy(x, [0])


# Joining


def test_concat_stack_and_pad(check_gradients):
    a, b, c = normal(2, 3), normal(2, 1), normal(2, 0)
    for axis in (1, -1):
        np.testing.assert_array_equal(
            F.concat([Tensor(a), Tensor(b), Tensor(c)], axis).data, np.concatenate([a, b, c], axis)
        )
        check_gradients(lambda *tensors, axis=axis: F.concat(tensors, axis), a, b, c)
    for axis in (0, 1, -1):
        np.testing.assert_array_equal(F.stack([Tensor(a), Tensor(2 * a)], axis).data, np.stack([a, 2 * a], axis))
        check_gradients(lambda *tensors, axis=axis: F.stack(tensors, axis), a, 2 * a)
    np.testing.assert_array_equal(
        F.pad(Tensor(a), [(1, 0), (0, 2)], 5.0).data, np.pad(a, [(1, 0), (0, 2)], constant_values=5)
    )
    check_gradients(lambda a: F.pad(a, [(1, 0), (0, 2)]), a)
    with pytest.raises(ValueError, match="each of 2 axes"):
        F.pad(Tensor(a), [(1, 1)])


def test_one_tensor_joined_twice(check_gradients):
    check_gradients(lambda a: F.concat([a, a * a, a]), normal(2, 3))


# Linear and embedding


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (3,), (0, 3), (2, 0, 3)], ids=str)
def test_linear(shape, check_gradients):
    x, weight, bias = normal(*shape), normal(4, 3), normal(4)
    np.testing.assert_allclose(F.linear(Tensor(x), Tensor(weight), Tensor(bias)).data, x @ weight.T + bias)
    check_gradients(F.linear, x, weight, bias)
    check_gradients(F.linear, x, weight)
    with pytest.raises(ValueError, match="linear"):
        F.linear(Tensor(x), Tensor(normal(4, 2)))


@pytest.mark.parametrize("indices", [[3, 0, 3, 3], [[1], [2]], 4, np.zeros((0,), int), np.zeros((2, 0), int)], ids=str)
def test_embedding(indices, check_gradients):
    weight = normal(5, 3)
    np.testing.assert_array_equal(F.embedding(indices, Tensor(weight)).data, weight[np.asarray(indices)])
    check_gradients(lambda w: F.embedding(indices, w), weight)


def test_embedding_refuses():
    weight = Tensor(normal(5, 3))
    for bad in ([5], [-1, 2]):
        with pytest.raises(IndexError, match="from 0 to 4"):
            F.embedding(bad, weight)
    with pytest.raises(TypeError, match="integer"):
        F.embedding([0.5], weight)


# Normalisation


def running(channels, dtype=np.float64):
    return Tensor(np.zeros(channels, dtype)), Tensor(np.ones(channels, dtype))


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 2, 5), (1, 3, 2, 2)], ids=str)
def test_batch_norm(shape, check_gradients):
    x, weight, bias = normal(*shape) * 3 + 5, normal(3), normal(3)
    mean, var = running(3)
    axes = tuple(i for i in range(x.ndim) if i != 1)
    per_channel = (3,) + (1,) * (x.ndim - 2)

    def normalised(mean, var):
        centered = (x - mean.reshape(per_channel)) / np.sqrt(var.reshape(per_channel) + 1e-5)
        return centered * weight.reshape(per_channel) + bias.reshape(per_channel)

    y = F.batch_norm(Tensor(x), Tensor(weight), Tensor(bias), mean, var, training=True)
    np.testing.assert_allclose(y.data, normalised(x.mean(axes), x.var(axes)), atol=1e-12)
    np.testing.assert_allclose(mean.data, 0.1 * x.mean(axes))
    np.testing.assert_allclose(var.data, 0.9 + 0.1 * x.var(axes, ddof=1))
    y = F.batch_norm(Tensor(x), Tensor(weight), Tensor(bias), mean, var, training=False)
    np.testing.assert_allclose(y.data, normalised(mean.data, var.data))
    for training in (True, False):
        mean, var = running(3)

        def function(x, weight, bias, training=training):
            return F.batch_norm(x, weight, bias, Tensor(mean.data.copy()), Tensor(var.data.copy()), training=training)

        check_gradients(function, x, weight, bias)


def test_batch_norm_of_all_ranks_is_that_of_the_whole_batch():
    """Ranks that take turns: each `reduce` waits for all, as an all-reduce does. One rank has no samples."""
    import threading

    x, weight, bias, g = normal(7, 3, 2, 2) + 4, normal(3), normal(3), normal(7, 3, 2, 2)
    whole = [Tensor(t, requires_grad=True) for t in (x, weight, bias)]
    stats = running(3)
    y = F.batch_norm(*whole, *stats, training=True)
    y.backward(g)

    parts = [slice(0, 2), slice(2, 2), slice(2, 7)]
    barrier, vectors, results = threading.Barrier(3), {}, {}

    def rank(r):
        def reduce(vector):
            assert vector.dtype == np.float64
            barrier.wait(10)
            vectors[r] = vector
            barrier.wait(10)
            return vectors[0] + vectors[1] + vectors[2]

        own = [Tensor(t, requires_grad=True) for t in (x[parts[r]], weight, bias)]
        own_stats = running(3)
        y = F.batch_norm(*own, *own_stats, training=True, reduce=reduce)
        y.backward(g[parts[r]])
        results[r] = (y.data, own[0].grad, own[1].grad, own[2].grad, own_stats)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_rank = [results[r] for r in range(3)]
    np.testing.assert_allclose(np.concatenate([r[0] for r in by_rank]), y.data, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([r[1] for r in by_rank]), whole[0].grad, rtol=1e-10, atol=1e-12)
    for i in (1, 2):
        np.testing.assert_allclose(sum(r[i + 1] for r in by_rank), whole[i].grad, rtol=1e-12)
    for r in by_rank:
        for own, expected in zip(r[4], stats):
            np.testing.assert_allclose(own.data, expected.data, rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 2, 2)], ids=str)
def test_batch_norm_of_a_rank_without_samples_moves_nothing(shape):
    weight, (mean, var) = Tensor(np.ones(3), requires_grad=True), running(3)
    x, before = Tensor(np.zeros(shape), requires_grad=True), (mean.data.copy(), var.data.copy())
    y = F.batch_norm(x, weight, Tensor(np.ones(3)), mean, var, training=True)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    for array, expected in zip((mean.data, var.data, weight.grad), (*before, np.zeros(3))):
        np.testing.assert_array_equal(array, expected)


def test_batch_norm_of_all_ranks_needs_a_sample():
    arguments = Tensor(np.zeros((0, 3))), Tensor(np.ones(3)), Tensor(np.ones(3)), *running(3)
    with pytest.raises(ValueError, match="at least one element"):
        F.batch_norm(*arguments, training=True, reduce=lambda sums: sums)


def test_batch_norm_of_one_sample_is_its_bias():
    mean, var = running(3)
    y = F.batch_norm(Tensor(normal(1, 3)), Tensor(np.ones(3)), Tensor(np.full(3, 2.0)), mean, var, training=True)
    np.testing.assert_array_equal(y.data, 2)
    assert np.isfinite(var.data).all()


def test_batch_norm_far_from_zero():
    """Statistics in float64 about the running mean: float32 data with a large mean lose nothing more."""
    x = (normal(1000, 2) + 1000).astype(np.float32)
    mean, var = running(2, np.float32)
    y = F.batch_norm(
        Tensor(x), Tensor(np.ones(2, np.float32)), Tensor(np.zeros(2, np.float32)), mean, var, training=True
    )
    assert y.dtype == mean.dtype == np.float32
    exact = x.astype(np.float64)
    np.testing.assert_allclose(y.data, (exact - exact.mean(0)) / exact.std(0), atol=2e-4)


@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 3, 4), (0, 4)], ids=str)
def test_layer_norm(shape, check_gradients):
    x, weight, bias = normal(*shape) * 3 + 5, normal(4), normal(4)
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    expected = (x - mean) / np.sqrt(var + 1e-5) * weight + bias
    np.testing.assert_allclose(F.layer_norm(Tensor(x), Tensor(weight), Tensor(bias)).data, expected, atol=1e-12)
    check_gradients(F.layer_norm, x, weight, bias)


# Dropout


def test_dropout(check_gradients):
    x = rng.uniform(1, 2, (40, 50))
    with random.batch(seed=1, step=2, samples=range(40)):
        y = F.dropout(Tensor(x), 0.3, layer=5)
        kept = y.data != 0
        np.testing.assert_allclose(y.data[kept], (x / 0.7)[kept])
        assert abs(kept.mean() - 0.7) < 0.05
        check_gradients(lambda x: F.dropout(x, 0.3, layer=5), x[:, :2])
        assert F.dropout(Tensor(np.float32(x)), 0.3, layer=5).dtype == np.float32


def test_dropout_does_not_depend_on_how_the_batch_is_split():
    x = np.ones((12, 3, 5))
    with random.batch(seed=1, step=2, samples=range(12)):
        whole = F.dropout(Tensor(x), 0.5, layer=5).data
    for samples in [range(4), range(4, 12), range(1, 12, 3), [7, 2, 3, 11], []]:
        with random.batch(seed=1, step=2, samples=samples):
            part = F.dropout(Tensor(x[list(samples)]), 0.5, layer=5).data
        np.testing.assert_array_equal(part, whole[list(samples)])


def test_dropout_refuses():
    x = Tensor(np.ones((2, 3)))
    with pytest.raises(RuntimeError, match=r"random\.batch"):
        F.dropout(x, 0.5, layer=0)
    with random.batch(seed=0, step=0, samples=range(3)), pytest.raises(ValueError, match="3 samples.*2 rows"):
        F.dropout(x, 0.5, layer=0)
    for p in (1.0, -0.1):
        with pytest.raises(ValueError, match="dropout's p"):
            F.dropout(x, p, layer=0)
    assert F.dropout(x, 0.0, layer=0) is x


@pytest.mark.parametrize("length", [0, 3, 5])
def test_parameters_of_another_length_are_refused(length):
    """Compiled loops would read and write past the end of what is too short."""

    def of(shape):
        return Tensor(np.ones(shape, np.float32), requires_grad=True)

    fits, other = of(4), of(length)
    images, sequences = of((2, 4, 5, 5)), of((2, 3, 4))
    for given in ((other, fits), (fits, other)):
        with pytest.raises(ValueError, match=rf"layer_norm: .* must have the shape \(4,\), not \({length},\)"):
            F.layer_norm(of((2, 3, 4)), *given)
    for place in range(4):
        given = [other if i == place else fits for i in range(4)]
        for training in (True, False):
            with pytest.raises(ValueError, match=r"batch_norm: .* must have the shape \(4,\)"):
                F.batch_norm(images, *given, training=training)
    with pytest.raises(ValueError, match=r"conv2d: bias must have the shape \(4,\)"):
        F.conv2d(images, of((4, 4, 3, 3)), other)
    with pytest.raises(ValueError, match=r"lstm: bias must have the shape \(16,\)"):
        F.lstm(sequences, of((16, 4)), of((16, 4)), other)
    with pytest.raises(ValueError, match=r"gru: bias must have the shape \(12,\)"):
        F.gru(sequences, of((12, 4)), of((12, 4)), other, fits)
    with pytest.raises(ValueError, match=r"gru: hidden_bias must have the shape \(4,\)"):
        F.gru(sequences, of((12, 4)), of((12, 4)), of(12), other)
