"""CTC: against the sum over every alignment there is, against differences, and PyTorch; both kernels alike."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_core import Tensor
from mgpu_core.autograd import cpu, portable
from mgpu_core.nn import functional as F

rng = np.random.default_rng(0)


def merged(path, blank):
    """What a path spells: repetitions merged, then blanks left out."""
    return tuple(label for label, _ in itertools.groupby(path) if label != blank)


def spelled_out(logits, target, blank):
    """Minus the log of the probability of all paths that spell the target."""
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    total = 0.0
    for path in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        if merged(path, blank) == tuple(target):
            total += math.prod(p[t, label] for t, label in enumerate(path))
    return -math.log(total) if total else math.inf


def total(logits, *args, **options):
    return F.ctc_loss(Tensor(np.asarray(logits)), *args, reduction="sum", **options).item()


CASES = [(4, "ab"), (4, "aa"), (5, "aab"), (3, "a"), (3, ""), (0, ""), (1, "ab"), (2, "aa"), (3, "aa")]


@pytest.mark.parametrize("blank", [0, 1, 2])
@pytest.mark.parametrize("length, target", CASES)
def test_every_alignment(length, target, blank):
    letters = dict(zip("ab", [label for label in range(3) if label != blank]))
    labels = [letters[letter] for letter in target]
    logits = rng.standard_normal((length, 3))
    expected = spelled_out(logits, labels, blank)
    np.testing.assert_allclose(total(logits[None], np.array([labels], int), blank=blank), expected, rtol=1e-12)


def batch(samples=4, times=7, classes=4, longest=3):
    """Samples of unequal lengths; beyond them there is rubbish."""
    logits = rng.standard_normal((samples, times, classes))
    targets = rng.integers(1, classes, (samples, longest))
    target_lengths = rng.integers(0, longest + 1, samples)
    lengths = np.minimum(times, 2 * target_lengths + rng.integers(0, 3, samples))
    for n in range(samples):
        targets[n, target_lengths[n] :] = -7
    return logits, targets, lengths, target_lengths


def test_a_batch_is_its_samples():
    logits, targets, lengths, target_lengths = batch()
    losses = [
        total(logits[n : n + 1, : lengths[n]], targets[n : n + 1, : target_lengths[n]]) for n in range(len(logits))
    ]
    np.testing.assert_allclose(total(logits, targets, lengths=lengths, target_lengths=target_lengths), sum(losses))
    mean = F.ctc_loss(Tensor(logits), targets, lengths=lengths, target_lengths=target_lengths)
    np.testing.assert_allclose(mean.item(), np.mean(losses))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients(reduction, check_gradients):
    logits, targets, lengths, target_lengths = batch()
    options = {"lengths": lengths, "target_lengths": target_lengths, "reduction": reduction}
    check_gradients(lambda x: F.ctc_loss(x, targets, **options), logits)
    check_gradients(lambda x: F.ctc_loss(x, np.array([[1, 1]])) * 3, logits[:1])


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(0, 9), st.integers(2, 6), st.integers(0, 4), st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_compiled_kernels_do_what_the_portable_ones_do(dtype, samples, times, classes, longest, seed):
    random = np.random.default_rng(seed)
    log_p = portable.log_softmax(random.standard_normal((samples, times, classes)).astype(dtype) * 3, -1)
    labels = np.zeros((samples, 2 * longest + 1), np.int64)
    labels[:, 1::2] = random.integers(1, classes, (samples, longest))
    lengths, target_lengths = random.integers(0, times + 1, samples), random.integers(0, longest + 1, samples)
    scale = random.standard_normal(samples).astype(dtype)
    results = []
    for kernels in (cpu, portable):
        losses, beginnings = kernels.ctc(log_p, labels, lengths, target_lengths)
        gradient = kernels.ctc_gradient(log_p, beginnings, losses, labels, lengths, target_lengths, scale)
        assert losses.dtype == np.float64
        assert gradient.dtype == dtype
        results.append((losses, gradient))
    tolerance = 1e-5 if dtype == np.float32 else 1e-11
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_a_target_that_does_not_fit_has_infinite_loss_and_no_gradient():
    logits = Tensor(rng.standard_normal((2, 2, 3)), requires_grad=True)
    loss = F.ctc_loss(logits, [[1, 1], [1, 2]], reduction="sum")  # two equal labels need three times
    assert loss.item() == math.inf
    loss.backward()
    np.testing.assert_array_equal(logits.grad[0], 0)
    assert np.abs(logits.grad[1]).min() > 0


def test_a_long_sequence_in_float32_loses_nothing():
    """Probabilities of 1e-600 and smaller, where numbers themselves would be zero."""
    logits, targets = 5 * rng.standard_normal((2, 400, 20)), rng.integers(1, 20, (2, 60))
    exact = total(logits, targets)
    assert exact > 1400
    assert abs(total(logits.astype(np.float32), targets) / exact - 1) < 1e-6
    x = Tensor(logits.astype(np.float32), requires_grad=True)
    F.ctc_loss(x, targets).backward()
    assert x.grad.dtype == np.float32
    np.testing.assert_allclose(x.grad.sum(axis=2), 0, atol=1e-5)  # the shares of the classes sum to 1


def test_an_empty_batch_adds_nothing():
    assert F.ctc_loss(Tensor(np.zeros((0, 5, 3))), np.zeros((0, 2), int)).item() == 0


def test_pytorch():
    torch = pytest.importorskip("torch")
    logits, targets, lengths, target_lengths = batch(samples=6, times=12)
    mine = Tensor(logits, requires_grad=True)
    F.ctc_loss(mine, targets, lengths=lengths, target_lengths=target_lengths, reduction="sum").backward()
    theirs = torch.tensor(logits, requires_grad=True)
    log_p = torch.log_softmax(theirs, -1).transpose(0, 1)
    sizes = torch.from_numpy(lengths), torch.from_numpy(target_lengths)
    loss = torch.nn.functional.ctc_loss(
        log_p, torch.from_numpy(np.abs(targets) % 4), *sizes, reduction="sum", zero_infinity=True
    )
    loss.backward()
    np.testing.assert_allclose(mine.grad, theirs.grad.numpy(), rtol=1e-8, atol=1e-10)


def test_what_is_refused():
    x = Tensor(np.zeros((2, 5, 3)))
    with pytest.raises(ValueError, match=r"expected logits \(N, T, classes\)"):
        F.ctc_loss(x, [1, 2])
    with pytest.raises(ValueError, match=r"expected logits \(N, T, classes\)"):
        F.ctc_loss(x, [[1, 2]])
    with pytest.raises(ValueError, match="one of 3 classes, not 3"):
        F.ctc_loss(x, [[1], [2]], blank=3)
    with pytest.raises(ValueError, match="must not contain the blank"):
        F.ctc_loss(x, [[1], [0]])
    with pytest.raises(IndexError, match="a class must be from 0 to 2"):
        F.ctc_loss(x, [[1], [3]])
    with pytest.raises(ValueError, match="lengths must be 2 integers from 0 to 5"):
        F.ctc_loss(x, [[1], [2]], lengths=[6, 1])
    with pytest.raises(ValueError, match="lengths must be 2 integers from 0 to 1"):
        F.ctc_loss(x, [[1], [2]], target_lengths=[2, 1])
