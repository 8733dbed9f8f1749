"""Mixed precision: what computes in which type, how each result is rounded, and the rule by which a loss is scaled."""

import json
import operator

import ml_dtypes
import numpy as np
import pytest

from mgpu_core import nn, optim
from mgpu_core.autograd import autocast, cpu, portable, short
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.nn import functional as F
from mgpu_core.parallel import recompute
from mgpu_core.precision import PRECISIONS, Precision
from mgpu_core.tensor import Tensor

SHORT = [ml_dtypes.bfloat16, np.float16]
RNG = np.random.default_rng(0)


def images(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def parameters(*shapes):
    return [Tensor(0.5 * images(*shape), requires_grad=True) for shape in shapes]


# Which operations


NARROW = {
    "matmul": (operator.matmul, (3, 4), (4, 5)),
    "many matmuls": (operator.matmul, (2, 3, 4), (2, 4, 5)),
    "rows of many": (operator.matmul, (2, 3, 4), (4, 5)),
    "linear": (F.linear, (3, 4), (5, 4), (5,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 5, 5), (4, 3, 3, 3), (4,)),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (2, 4, 5, 5), (4, 2, 3, 3), (4,)),
    "attention": (lambda x: F.self_attention(x, 2, causal=True), (2, 5, 12)),
}
WIDE = {
    "exp": (lambda x: x.exp(), (3, 4)),
    "log": (lambda x: (x**2 + 1).log(), (3, 4)),
    "power": (lambda x: x**2, (3, 4)),
    "sum": (lambda x: x.sum(0), (3, 4)),
    "mean": (lambda x: x.mean(), (3, 4)),
    "softmax": (F.softmax, (3, 4)),
    "log_softmax": (F.log_softmax, (3, 4)),
    "cross_entropy": (lambda x: F.cross_entropy(x, np.array([0, 1, 3])), (3, 4)),
    "ctc": (lambda x: F.ctc_loss(x, np.array([[1, 2], [3, 1]])), (2, 6, 4)),
    "layer_norm": (F.layer_norm, (3, 4), (4,), (4,)),
    "lstm": (lambda *x: F.lstm(*x)[0], (2, 3, 4), (20, 4), (20, 5), (20,)),
    "gru": (lambda *x: F.gru(*x)[0], (2, 3, 4), (15, 4), (15, 5), (15,), (5,)),
}
AS_IT_IS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "batch_norm": lambda x: nn.BatchNorm2d(3)(x),
    "sum of two": lambda x: x + x,
    "slice": lambda x: x[1:, :, ::2],
    "max": lambda x: x.max(1),
}


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", [*NARROW, *WIDE])
def test_an_operation_chooses_the_type_that_it_computes_in(dtype, name):
    function, *shapes = (NARROW | WIDE)[name]
    arguments = parameters(*shapes)
    with autocast(dtype):
        y = function(*arguments)
    assert y.dtype == (dtype if name in NARROW else np.float32)
    y.backward(np.ones(y.shape, y.dtype))
    plain = parameters(*shapes)
    for mine, theirs in zip(arguments, plain):
        theirs.data = mine.data
    expected = function(*plain)
    expected.backward(np.ones(y.shape))
    assert function(*plain).dtype == np.float32  # outside nothing is cast
    near = {"rtol": 0.05, "atol": 0.1} if name in NARROW else {"rtol": 0, "atol": 0}
    np.testing.assert_allclose(y.data.astype(np.float32), expected.data, **near)
    for mine, theirs in zip(arguments, plain):
        assert mine.grad.dtype == np.float32
        np.testing.assert_allclose(mine.grad, theirs.grad, **near)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", [*WIDE, *AS_IT_IS])
def test_what_a_16_bit_array_becomes(dtype, name):
    function, *shapes = WIDE.get(name) or (AS_IT_IS[name], (4, 3, 6, 6))
    first, *others = parameters(*shapes)  # parameters have 32
    arguments = [Tensor(first.data.astype(dtype), requires_grad=True), *others]
    wide = [Tensor(x.data.astype(np.float32), requires_grad=True) for x in arguments]
    with autocast(dtype):
        y, expected = function(*arguments), function(*wide)
        assert y.dtype == (np.float32 if name in WIDE else dtype)
        np.testing.assert_array_equal(y.data, expected.data.astype(y.dtype))  # computed wide, rounded once
        y.sum().backward()
        expected.sum().backward()
    for mine, theirs in zip(arguments, wide):
        assert mine.grad.dtype == mine.dtype
        np.testing.assert_array_equal(mine.grad, theirs.grad.astype(mine.dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_products_are_summed_in_float32_and_rounded_once(dtype):
    a, b = np.ones((1, 5000), dtype), np.ones((5000, 2), dtype)
    np.testing.assert_array_equal((Tensor(a) @ Tensor(b)).data, np.full((1, 2), 5000).astype(dtype))
    x, w = images(9, 40).astype(dtype), images(7, 40).astype(dtype)
    expected = (x.astype(np.float32) @ w.astype(np.float32).T).astype(dtype)
    np.testing.assert_array_equal(F.linear(Tensor(x), Tensor(w)).data, expected)


def test_the_same_kernels_for_16_bits():
    assert short.__all__ == portable.__all__ and all(callable(getattr(short, name)) for name in short.__all__)
    assert all(kernels_for(np.zeros(3, dtype)) is short for dtype in SHORT)


def test_convolutions_of_16_bit_arrays_that_are_not_numpys():
    """Those go to the array-API kernels as they are: here with NumPy's own product of float16."""
    x, w, b = (images(*shape).astype(np.float16) for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4,)))
    arguments = (1, 1), (1, 1)
    y = portable.conv2d(x, w, b, *arguments)
    g = images(*y.shape).astype(np.float16)
    for function, given in {
        "conv2d": (x, w, b),
        "conv2d_input_gradient": (g, w, x.shape),
        "conv2d_weight_gradient": (g, x, w.shape),
    }.items():
        mine = getattr(portable, function)(*given, *arguments)
        wide = (a.astype(np.float32) if isinstance(a, np.ndarray) else a for a in given)
        assert mine.dtype == np.float16
        np.testing.assert_allclose(mine, getattr(cpu, function)(*wide, *arguments), rtol=0.02, atol=0.05)


def test_recomputation_has_the_precision_of_the_first_run():
    layer, x = nn.Linear(6, 6, rng=np.random.default_rng(0)), Tensor(images(4, 6))
    gradients = []
    for run in (lambda: layer(layer(x)), lambda: recompute(lambda x: layer(layer(x)), x)):
        layer.zero_grad()
        with autocast(np.float16):
            y = run()
        y.backward(np.ones(y.shape, y.dtype))  # outside
        gradients.append(layer.weight.grad.copy())
    np.testing.assert_array_equal(*gradients)


def test_autocast_ends_and_refuses():
    with autocast("float16"), autocast(None):
        assert (Tensor(images(2, 2)) @ Tensor(images(2, 2))).dtype == np.float32
    with pytest.raises(ValueError, match="bfloat16 or float16, not float64"), autocast("float64"):
        pass
    with pytest.raises(ZeroDivisionError), autocast("float16"):
        1 / 0  # noqa: B018
    assert (Tensor(images(2, 2)) @ Tensor(images(2, 2))).dtype == np.float32


# The scale of the loss


def one_parameter(gradient):
    parameter = Tensor(np.ones(3, np.float32), requires_grad=True)
    parameter.grad = np.array(gradient, np.float32)
    return parameter, optim.SGD([parameter], lr=1.0)


def test_small_gradients_survive_in_float16_if_the_loss_is_scaled():
    found = {}
    for name, scale in (("float32", 1), ("float16", 1), ("float16", 2.0**16)):
        precision = Precision(name, scale=scale)
        x, w = Tensor(np.ones((1, 4), np.float32)), Tensor(np.ones((3, 4), np.float32), requires_grad=True)
        with precision.autocast():
            precision.backward(F.linear(x, w).sum() * 1e-9)
        optimizer = optim.SGD([w], lr=2.0**29)
        assert precision.step(optimizer)
        found[name, scale] = 1 - w.data
    np.testing.assert_array_equal(found["float16", 1], 0)  # 1e-9 is nothing in float16
    np.testing.assert_allclose(found["float16", 2.0**16], found["float32", 1], rtol=2e-3)


def test_a_step_with_an_overflow_is_left_out_and_halves_the_scale():
    precision = Precision("float16", scale=8.0, interval=3)
    for bad in (np.inf, -np.inf, np.nan):
        parameter, optimizer = one_parameter([8.0, bad, 8.0])
        before = precision.scale
        assert not precision.step(optimizer)
        assert precision.scale == before / 2 and optimizer.steps == 0
        np.testing.assert_array_equal(parameter.data, 1)
    assert (precision.scale, precision.skipped) == (1.0, 3)
    scales = []
    for _ in range(7):
        parameter, optimizer = one_parameter([0.5 * precision.scale] * 3)
        assert precision.step(optimizer)
        np.testing.assert_array_equal(parameter.data, 0.5)  # the gradients were divided again
        scales.append(precision.scale)
    assert scales == [1, 1, 2, 2, 2, 4, 4]


def test_a_scale_that_does_not_help_is_an_error():
    precision = Precision("float16", scale=2.0**-23)
    for _ in range(1):
        assert not precision.step(one_parameter([np.inf] * 3)[1])
    with pytest.raises(FloatingPointError, match="however small the loss is scaled"):
        precision.step(one_parameter([np.inf] * 3)[1])


def test_its_state_is_json():
    precision = Precision("float16", scale=4.0, interval=2)
    precision.step(one_parameter([np.nan] * 3)[1])
    precision.step(one_parameter([1.0] * 3)[1])
    other = Precision("float16", interval=2)
    other.load_state(json.loads(json.dumps(precision.state())))
    assert other.state() == {"scale": 2.0, "steps": 1, "skipped": 1}
    for name in PRECISIONS:
        fresh = Precision(name)
        fresh.load_state(Precision("bfloat16").state())  # a run that had none
        assert fresh.scale == (2.0**16 if name == "float16" else 1.0)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="float32, bfloat16 or float16, not 'half'"):
        Precision("half")
    for scale in (0.0, -2.0, 3.0, np.inf):
        with pytest.raises(ValueError, match="power of two"):
            Precision("float16", scale=scale)
