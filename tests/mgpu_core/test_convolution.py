"""Convolution and pooling layers: values against loops that spell out the definition, gradients against differences."""

import math

import numpy as np
import pytest

from mgpu_core import Tensor
from mgpu_core.nn import functional as F

rng = np.random.default_rng(0)


def windows(x, window, stride, padding, fill):
    """For each place (i, j), the part of every image under the window: (N, C, kh, kw)."""
    padded = np.pad(x, [(0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2], constant_values=fill)
    rows = (padded.shape[2] - window[0]) // stride[0] + 1
    columns = (padded.shape[3] - window[1]) // stride[1] + 1
    return [
        [
            padded[:, :, i * stride[0] : i * stride[0] + window[0], j * stride[1] : j * stride[1] + window[1]]
            for j in range(columns)
        ]
        for i in range(rows)
    ]


def assembled(places):
    return np.stack([np.stack(row, axis=-1) for row in places], axis=-2)


CASES = [
    # x, outputs, kernel size, stride, padding
    ((2, 3, 5, 7), 4, 3, 1, 1),
    ((2, 3, 5, 7), 4, (3, 1), (2, 3), (1, 0)),
    ((1, 1, 4, 4), 1, 4, 1, 0),
    ((3, 2, 6, 5), 2, 1, 2, 0),
    ((2, 2, 5, 5), 3, 2, 3, 1),  # a row of the image that no window sees
    ((0, 2, 5, 5), 3, 3, 1, 1),
    ((2, 2, 3, 3), 3, (5, 5), 1, 2),
]


@pytest.mark.parametrize("shape, outputs, kernel, stride, padding", CASES, ids=str)
def test_conv2d(shape, outputs, kernel, stride, padding, check_gradients):
    kernel, both = F.convolution.pair(kernel), F.convolution.pair
    x, weight = rng.standard_normal(shape), rng.standard_normal((outputs, shape[1], *kernel))
    bias = rng.standard_normal(outputs)
    expected = assembled(
        [
            [np.einsum("nchw,ochw->no", part, weight) + bias for part in row]
            for row in windows(x, kernel, both(stride), both(padding), 0)
        ]
    )
    y = F.conv2d(Tensor(x), Tensor(weight), Tensor(bias), stride=stride, padding=padding)
    np.testing.assert_allclose(y.data, expected, atol=1e-12)
    check_gradients(lambda x, w, b: F.conv2d(x, w, b, stride=stride, padding=padding), x, weight, bias)
    check_gradients(lambda x, w: F.conv2d(x, w, stride=stride, padding=padding), x, weight)


@pytest.mark.parametrize("groups", [2, 4])
def test_conv2d_in_groups(groups, check_gradients):
    x, weight = rng.standard_normal((2, 4, 5, 4)), rng.standard_normal((8, 4 // groups, 3, 3))
    bias = rng.standard_normal(8)
    whole = np.zeros((8, 4, 3, 3))  # a grouped convolution is one whose weight is zero between groups
    for o in range(8):
        first = o // (8 // groups) * (4 // groups)
        whole[o, first : first + 4 // groups] = weight[o]
    y = F.conv2d(Tensor(x), Tensor(weight), Tensor(bias), padding=1, groups=groups)
    np.testing.assert_allclose(y.data, F.conv2d(Tensor(x), Tensor(whole), Tensor(bias), padding=1).data, atol=1e-12)
    check_gradients(lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=groups), x, weight, bias)


POOLS = [
    ((2, 3, 6, 4), 2, None, 0),
    ((2, 3, 5, 7), 2, None, 0),  # the last row and column are left out
    ((2, 2, 5, 6), (3, 2), (2, 1), (1, 1)),
    ((1, 3, 4, 4), 4, None, 0),
    ((0, 3, 4, 4), 2, None, 0),
    ((2, 1, 5, 5), 3, 1, 1),
]


@pytest.mark.parametrize("shape, kernel, stride, padding", POOLS, ids=str)
def test_pooling(shape, kernel, stride, padding, check_gradients):
    both = F.convolution.pair
    x = rng.permutation(math.prod(shape)).reshape(shape) / 7.0  # no ties, and gaps wider than the step
    window = both(kernel)
    for function, reduce, fill in [(F.max_pool2d, np.max, -np.inf), (F.avg_pool2d, np.mean, 0)]:
        places = windows(x, window, both(stride or kernel), both(padding), fill)
        expected = assembled([[reduce(part, axis=(2, 3)) for part in row] for row in places])
        np.testing.assert_allclose(function(Tensor(x), kernel, stride, padding).data, expected)
        check_gradients(lambda x, function=function: function(x, kernel, stride, padding), x)


def test_images_in_any_memory_layout(check_gradients):
    x = rng.standard_normal((4, 3, 6, 5)).transpose(0, 1, 3, 2)[::2]
    weight = rng.standard_normal((3, 3, 3, 4)).transpose(0, 1, 3, 2)
    y = F.conv2d(Tensor(x), Tensor(weight))
    expected = F.conv2d(Tensor(x.copy()), Tensor(weight.copy()))
    np.testing.assert_allclose(y.data, expected.data)

    def strided(x, weight):
        return F.conv2d(x.permute(0, 1, 3, 2), weight[:, :, ::-1]).permute(2, 3, 0, 1)

    check_gradients(strided, rng.standard_normal((2, 3, 6, 5)), rng.standard_normal((3, 3, 4, 3)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_are_kept(dtype):
    x = Tensor(rng.standard_normal((2, 3, 6, 6)).astype(dtype), requires_grad=True)
    weight = Tensor(rng.standard_normal((4, 3, 3, 3)).astype(dtype), requires_grad=True)
    bias = Tensor(np.zeros(4, dtype), requires_grad=True)
    y = F.avg_pool2d(F.max_pool2d(F.conv2d(x, weight, bias, padding=1).relu(), 2), 3)
    assert y.dtype == dtype
    y.sum().backward()
    assert {t.grad.dtype for t in (x, weight, bias)} == {np.dtype(dtype)}


def test_the_input_gradient_is_skipped_where_nobody_needs_it(monkeypatch):
    from mgpu_core.autograd import cpu

    def never(*args):
        raise AssertionError

    monkeypatch.setattr(cpu, "conv2d_input_gradient", never)
    weight = Tensor(np.ones((1, 1, 3, 3)), requires_grad=True)
    F.conv2d(Tensor(np.ones((1, 1, 3, 3))), weight).sum().backward()
    np.testing.assert_array_equal(weight.grad, 1)


def test_shapes_that_do_not_fit():
    x = Tensor(np.zeros((2, 3, 5, 5)))
    for weight in [(4, 2, 3, 3), (4, 3, 3)]:
        with pytest.raises(ValueError, match="conv2d of x"):
            F.conv2d(x, Tensor(np.zeros(weight)))
    with pytest.raises(ValueError, match="groups=2"):
        F.conv2d(x, Tensor(np.zeros((4, 2, 3, 3))), groups=2)
    with pytest.raises(ValueError, match="does not fit"):
        F.conv2d(x, Tensor(np.zeros((4, 3, 6, 6))))
    with pytest.raises(ValueError, match="does not fit"):
        F.max_pool2d(x, 6)
    with pytest.raises(ValueError, match="does not fit"):
        F.avg_pool2d(Tensor(np.zeros((3, 5, 5))), 2)
