"""Self-attention: values against loops, masks, dropout by sample and head, gradients against differences."""

import numpy as np
import pytest

from mgpu_core import Tensor, random
from mgpu_core.autograd import cpu, portable
from mgpu_core.nn import functional as F

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape)


def spelled_out(qkv, heads, causal, lengths):
    """One query of one head at a time."""
    samples, times, width = qkv.shape
    size = width // (3 * heads)
    q, k, v = np.moveaxis(qkv.reshape(samples, times, 3, heads, size), 2, 0)
    y = np.zeros((samples, times, heads, size))
    for n in range(samples):
        for h in range(heads):
            for t in range(times):
                end = min(lengths[n], t + 1) if causal else lengths[n]
                if end:
                    weights = np.exp(k[n, :end, h] @ q[n, t, h] / np.sqrt(size))
                    y[n, t, h] = weights @ v[n, :end, h] / weights.sum()
    return y.reshape(samples, times, heads * size)


CASES = [
    # samples, times, heads, size, lengths
    (2, 5, 3, 4, None),
    (3, 4, 1, 2, [4, 2, 0]),
    (1, 1, 2, 3, None),
    (0, 3, 2, 2, None),
    (2, 0, 2, 2, None),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("samples, times, heads, size, lengths", [*CASES, (2, 150, 2, 8, [150, 77])])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_formula(samples, times, heads, size, lengths, causal, dtype):
    qkv = normal(samples, times, 3 * heads * size)
    expected = spelled_out(qkv, heads, causal, [times] * samples if lengths is None else lengths)
    y = F.self_attention(Tensor(qkv.astype(dtype)), heads, causal=causal, lengths=lengths)
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(y.data, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("samples, times, heads, size, lengths", CASES)
def test_gradients(samples, times, heads, size, lengths, causal, dropout, check_gradients):
    def function(qkv):
        with random.batch(seed=0, step=0, samples=range(samples)):
            return F.self_attention(qkv, heads, causal=causal, lengths=lengths, dropout=dropout)

    check_gradients(function, normal(samples, times, 3 * heads * size))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("blocks", [(1 << 16, 64), (200, 7), (1, 1)])
def test_blocks_do_what_the_whole_does(blocks, dtype, dropping, causal, monkeypatch):
    """Blocks of several heads or a few queries of one, against all scores at once."""
    monkeypatch.setattr(cpu.attention, "_SCORES", blocks[0])
    monkeypatch.setattr(cpu.attention, "_QUERIES", blocks[1])
    qkv, g = normal(3, 18, 3, 4, 5).astype(dtype), normal(3, 18, 4, 5).astype(dtype)
    kept = rng.integers(0, 2, (3, 4, 18, 18)).astype(bool) if dropping else None
    options = np.array([18, 11, 0]), causal, kept, 2.0
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    results = portable.self_attention(qkv, *options)
    for actual, expected in zip(cpu.self_attention(qkv, *options), results):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    actual = cpu.self_attention_gradient(g, qkv, results[1], *options)
    expected = portable.self_attention_gradient(g, qkv, results[1], *options)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=10 * tolerance, atol=10 * tolerance)


def test_large_scores():
    qkv = normal(1, 3, 6).astype(np.float32) * 1e3
    y = F.self_attention(Tensor(qkv, requires_grad=True), 1)
    assert np.isfinite(y.data).all()
    y.sum().backward()


def attend(qkv, samples, **options):
    with random.batch(seed=1, step=2, samples=samples):
        return F.self_attention(Tensor(qkv), **options).data


def test_dropout_masks_belong_to_samples_and_heads():
    """However the batch and the heads are split over ranks."""
    samples, times, heads, size = 6, 5, 4, 3
    qkv = normal(samples, times, 3, heads, size)
    whole = attend(qkv.reshape(samples, times, -1), range(samples), heads=heads, dropout=0.5, layer=9)
    for part in (range(2), range(2, 6), [5, 1, 2]):
        own = attend(qkv[list(part)].reshape(len(part), times, -1), part, heads=heads, dropout=0.5, layer=9)
        np.testing.assert_allclose(own, whole[list(part)], rtol=1e-12)
    by_head = whole.reshape(samples, times, heads, size)
    for first, last in ((0, 1), (1, 4)):
        mine = qkv[:, :, :, first:last].reshape(samples, times, -1)
        own = attend(mine, range(samples), heads=last - first, dropout=0.5, layer=9, first_head=first)
        np.testing.assert_allclose(own.reshape(samples, times, last - first, size), by_head[:, :, first:last])


def test_dropout_keeps_the_mean():
    qkv = np.concatenate([np.zeros((400, 8, 4)), np.ones((400, 8, 2))], axis=2)  # all weights 1/8, all values 1
    y = attend(qkv, range(400), heads=1, dropout=0.25)
    assert abs(y.mean() - 1) < 0.02
    assert y.std() > 0.1


def test_pytorch():
    torch = pytest.importorskip("torch")
    qkv = normal(2, 6, 24)
    mine = Tensor(qkv, requires_grad=True)
    theirs = torch.tensor(qkv, requires_grad=True)
    q, k, v = theirs.reshape(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    other = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 8)
    y = F.self_attention(mine, 2, causal=True)
    g = normal(2, 6, 8)
    y.backward(g)
    other.backward(torch.from_numpy(g))
    np.testing.assert_allclose(y.data, other.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mine.grad, theirs.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_what_is_refused():
    for shape, heads in [((2, 3, 10), 2), ((2, 12), 2), ((2, 3, 12), 0)]:
        with pytest.raises(ValueError, match=f"attention with {heads} heads"):
            F.self_attention(Tensor(normal(*shape)), heads)
    x = Tensor(normal(2, 3, 12))
    with pytest.raises(ValueError, match="lengths must be 2 integers from 0 to 3"):
        F.self_attention(x, 2, lengths=[1, 4])
    with pytest.raises(ValueError, match="dropout's p"):
        F.self_attention(x, 2, dropout=1.0)
    with pytest.raises(RuntimeError, match=r"random\.batch"):
        F.self_attention(x, 2, dropout=0.5)
