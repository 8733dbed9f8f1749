"""LSTM and GRU: values against the formulas spelled out, and PyTorch's; gradients against differences; lengths."""

import numpy as np
import pytest

from mgpu_core import Tensor
from mgpu_core.autograd import cpu, portable
from mgpu_core.nn import functional as F

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_cell(x, state, weight, hidden_weight, bias):
    h, c = state
    i, f, g, o = np.split(weight @ x + hidden_weight @ h + bias, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def gru_cell(x, state, weight, hidden_weight, bias, hidden_bias):
    (h,) = state
    xr, xz, xn = np.split(weight @ x + bias, 3)
    hr, hz, hn = np.split(hidden_weight @ h, 3)
    r, z = sigmoid(xr + hr), sigmoid(xz + hz)
    return ((1 - z) * np.tanh(xn + r * (hn + hidden_bias)) + z * h,)


def lstm_weights(inputs, size):
    return normal(4 * size, inputs), normal(4 * size, size), normal(4 * size)


def gru_weights(inputs, size):
    return normal(3 * size, inputs), normal(3 * size, size), normal(3 * size), normal(size)


def gru(x, *weights, state=None, **options):
    output, last = F.gru(x, *weights, state=state and state[0], **options)
    return output, (last,)


KINDS = {"lstm": (F.lstm, lstm_cell, lstm_weights, 2), "gru": (gru, gru_cell, gru_weights, 1)}
kinds = pytest.mark.parametrize("kind", KINDS)


def spelled_out(cell, x, weights, state, lengths, reverse):
    """The outputs (N, T, H) and the last state, sample by sample and step by step."""
    size = weights[1].shape[1]
    outputs = np.zeros((*x.shape[:2], size))
    last = [np.zeros((len(x), size)) for _ in state]
    for n, length in enumerate(lengths):
        current = tuple(part[n] for part in state)
        for t in reversed(range(length)) if reverse else range(length):
            current = cell(x[n, t], current, *weights)
            outputs[n, t] = current[0]
        for part, value in zip(last, current):
            part[n] = value
    return outputs, last


CASES = [
    # samples, times, inputs, size, lengths
    (3, 4, 2, 5, None),
    (3, 4, 2, 5, [4, 1, 3]),
    (2, 3, 1, 1, [0, 3]),
    (1, 1, 3, 2, None),
    (0, 3, 2, 2, None),
    (2, 0, 2, 2, None),
]


@kinds
@pytest.mark.parametrize("samples, times, inputs, size, lengths", CASES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_formulas(kind, samples, times, inputs, size, lengths, reverse, dtype):
    function, cell, make, parts = KINDS[kind]
    x, weights = normal(samples, times, inputs), make(inputs, size)
    state = [np.zeros((samples, size)) if reverse else normal(samples, size) for _ in range(parts)]
    expected = spelled_out(cell, x, weights, state, [times] * samples if lengths is None else lengths, reverse)
    tensors = [Tensor(array.astype(dtype)) for array in (x, *weights)]
    given = None if reverse else tuple(Tensor(part.astype(dtype)) for part in state)
    output, last = function(*tensors, state=given, lengths=lengths, reverse=reverse)
    for actual, wanted in zip((output, *last), (expected[0], *expected[1]), strict=True):
        assert actual.dtype == dtype
        tolerance = 1e-5 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(actual.data, wanted, rtol=tolerance, atol=tolerance)


@kinds
@pytest.mark.parametrize("samples, times, inputs, size, lengths", CASES)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients(kind, samples, times, inputs, size, lengths, reverse, check_gradients):
    function, _, make, parts = KINDS[kind]
    state = [] if reverse else [normal(samples, size) for _ in range(parts)]

    def everything(x, *rest):
        """Outputs and the last state in one tensor."""
        weights, given = rest[: len(rest) - len(state)], rest[len(rest) - len(state) :]
        output, last = function(x, *weights, state=given or None, lengths=lengths, reverse=reverse)
        return F.concat([output.reshape(-1), *(part.reshape(-1) * 0.5 for part in last)])

    check_gradients(everything, normal(samples, times, inputs), *make(inputs, size), *state)


@kinds
def test_gradients_of_the_last_state_alone_and_of_the_outputs_alone(kind, check_gradients):
    function, _, make, _ = KINDS[kind]
    arrays = normal(2, 3, 2), *make(2, 3)
    check_gradients(lambda *tensors: function(*tensors)[0], *arrays)
    check_gradients(lambda *tensors: function(*tensors)[1][-1], *arrays)
    check_gradients(lambda *tensors: function(*tensors, lengths=[2, 3])[1][-1], *arrays)


@kinds
def test_sequences_can_be_cut_anywhere(kind):
    function, _, make, _ = KINDS[kind]
    x, weights = Tensor(normal(3, 7, 2)), [Tensor(array) for array in make(2, 4)]
    whole, last = function(x, *weights)
    first, state = function(x[:, :3], *weights)
    second, end = function(x[:, 3:], *weights, state=state)
    np.testing.assert_allclose(np.concatenate([first.data, second.data], axis=1), whole.data, rtol=1e-12)
    for one, other in zip(last, end):
        np.testing.assert_allclose(one.data, other.data, rtol=1e-12)


@kinds
@pytest.mark.parametrize("reverse", [False, True])
def test_what_comes_after_the_end_does_not_matter(kind, reverse):
    function, _, make, _ = KINDS[kind]
    weights, lengths = [Tensor(array) for array in make(2, 4)], np.array([2, 5, 0])
    results = []
    for padding in (0.0, 1e3):
        x = np.where(np.arange(5)[None, :, None] < lengths[:, None, None], np.ones((3, 5, 2)), padding)
        x = Tensor(x, requires_grad=True)
        output, last = function(x, *weights, lengths=lengths, reverse=reverse)
        output.sum().backward()
        results.append([output.data, *(part.data for part in last), x.grad])
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)
    for n, length in enumerate(lengths):
        assert not results[0][0][n, length:].any()
        assert not results[0][-1][n, length:].any()


@kinds
def test_the_compiled_steps_do_what_the_portable_ones_do(kind, monkeypatch):
    function, _, make, _ = KINDS[kind]
    arrays = [array.astype(np.float32) for array in (normal(5, 6, 3), *make(3, 20))]
    results = []
    for patched in (False, True):
        if patched:
            for name in (f"{kind}_step", f"{kind}_step_gradient"):
                monkeypatch.setattr(cpu, name, getattr(portable, name))
        tensors = [Tensor(array, requires_grad=True) for array in arrays]
        output, last = function(*tensors, lengths=[6, 0, 3, 6, 1])
        F.concat([output.reshape(-1), last[-1].reshape(-1)]).sum().backward()
        results.append([output.data, *(tensor.grad for tensor in tensors)])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@kinds
def test_pytorch(kind):
    torch = pytest.importorskip("torch")
    function, _, make, parts = KINDS[kind]
    x, weights, state = normal(3, 5, 2), make(2, 4), [normal(3, 4) for _ in range(parts)]
    theirs = getattr(torch.nn, kind.upper())(2, 4, batch_first=True, dtype=torch.float64)
    bias = torch.zeros_like(theirs.bias_hh_l0)
    if kind == "gru":
        bias[8:] = torch.from_numpy(weights[3])
    theirs.load_state_dict(
        {
            "weight_ih_l0": torch.from_numpy(weights[0]),
            "weight_hh_l0": torch.from_numpy(weights[1]),
            "bias_ih_l0": torch.from_numpy(weights[2]),
            "bias_hh_l0": bias,
        }
    )
    y, end = theirs(
        torch.from_numpy(x),
        tuple(torch.from_numpy(s[None]) for s in state) if parts == 2 else torch.from_numpy(state[0][None]),
    )
    output, last = function(*(Tensor(array) for array in (x, *weights)), state=tuple(map(Tensor, state)))
    np.testing.assert_allclose(output.data, y.detach().numpy(), rtol=1e-10, atol=1e-12)
    for one, other in zip(last, end if parts == 2 else [end], strict=True):
        np.testing.assert_allclose(one.data, other[0].detach().numpy(), rtol=1e-10, atol=1e-12)


def test_what_is_refused():
    x, weights = Tensor(normal(2, 3, 4)), [Tensor(array) for array in lstm_weights(4, 5)]
    with pytest.raises(ValueError, match=r"expected \(N, T, D\), \(4 H, D\)"):
        F.lstm(x, *(Tensor(array) for array in lstm_weights(3, 5)))
    with pytest.raises(ValueError, match="from 0 to 3"):
        F.lstm(x, *weights, lengths=[1, 4])
    with pytest.raises(ValueError, match="lengths"):
        F.lstm(x, *weights, lengths=[1])
    with pytest.raises(ValueError, match=r"must be \(2, 5\), not \(2, 4\)"):
        F.lstm(x, *weights, state=(Tensor(normal(2, 4)), Tensor(normal(2, 5))))
    with pytest.raises(ValueError, match="read forward"):
        F.lstm(x, *weights, state=(Tensor(normal(2, 5)), Tensor(normal(2, 5))), reverse=True)
