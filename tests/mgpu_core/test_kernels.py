"""The compiled kernels against the array-API ones: the same functions, the same results, for every shape and layout."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_core.autograd import cpu, portable
from mgpu_core.autograd.kernels import kernels_for

DTYPES = [np.float32, np.float64]


def close(actual, expected, dtype):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    tolerance = 1e-4 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def test_the_same_functions():
    assert cpu.__all__ == portable.__all__


def test_which_arrays_have_compiled_kernels():
    for dtype in DTYPES:
        assert kernels_for(np.zeros(3, dtype)) is cpu
    assert kernels_for(np.zeros(3, np.int64)) is portable


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def windows(draw, sizes=pairs):
    """(N, C, H, W), window, stride and padding that fit, batch and padding down to zero."""
    window, stride = draw(sizes), draw(pairs)
    padding = tuple(draw(st.integers(0, k // 2)) for k in window)
    size = tuple(draw(st.integers(max(1, k - 2 * p), 9)) for k, p in zip(window, padding))
    return (draw(st.integers(0, 3)), draw(st.integers(1, 5)), *size), window, stride, padding


@settings(max_examples=50)
@given(windows(), st.integers(1, 4), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**32 - 1))
def test_convolution(case, outputs, dtype, with_bias, seed):
    shape, window, stride, padding = case
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(dtype)
    weight = rng.standard_normal((outputs, shape[1], *window)).astype(dtype)
    bias = rng.standard_normal(outputs).astype(dtype) if with_bias else None
    y = portable.conv2d(x, weight, bias, stride, padding)
    g = rng.standard_normal(y.shape).astype(dtype)
    close(cpu.conv2d(x, weight, bias, stride, padding), y, dtype)
    for name, args in [
        ("conv2d_input_gradient", (g, weight, shape, stride, padding)),
        ("conv2d_weight_gradient", (g, x, weight.shape, stride, padding)),
    ]:
        close(getattr(cpu, name)(*args), getattr(portable, name)(*args), dtype)


@settings(max_examples=50)
@given(windows(st.sampled_from([(2, 2), (1, 3)])), st.integers(0, 2**32 - 1))  # each size is compiled by itself
@pytest.mark.parametrize("dtype", DTYPES)
def test_pooling(dtype, case, seed):
    shape, window, stride, padding = case
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, shape).astype(dtype)  # with many ties
    y, taken = portable.max_pool2d(x, window, stride, padding)
    for actual, expected in zip(cpu.max_pool2d(x, window, stride, padding), (y, taken)):
        np.testing.assert_array_equal(actual, expected)
    close(cpu.avg_pool2d(x, window, stride, padding), portable.avg_pool2d(x, window, stride, padding), dtype)
    g = rng.standard_normal(y.shape).astype(dtype)
    for name, args in [
        ("max_pool2d_gradient", (g, taken, shape, window, stride, padding)),
        ("avg_pool2d_gradient", (g, shape, window, stride, padding)),
    ]:
        close(getattr(cpu, name)(*args), getattr(portable, name)(*args), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_in_several_blocks(dtype):
    """More columns than are made at once: the blocks end in the middle of images."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 24, 33, 17)).astype(dtype)
    weight = rng.standard_normal((7, 24, 3, 5)).astype(dtype)
    y = portable.conv2d(x, weight, None, (1, 1), (1, 2))
    columns = 24 * 15 * y[:, 0].size
    assert columns > 2 * cpu.columns._BLOCK and columns % cpu.columns._BLOCK
    scale = np.sqrt(24 * 15)
    close(cpu.conv2d(x, weight, None, (1, 1), (1, 2)) / scale, y / scale, dtype)
    dx = portable.conv2d_input_gradient(y, weight, x.shape, (1, 1), (1, 2))
    close(cpu.conv2d_input_gradient(y, weight, x.shape, (1, 1), (1, 2)) / 1e3, dx / 1e3, dtype)
    dw = portable.conv2d_weight_gradient(y, x, weight.shape, (1, 1), (1, 2))
    close(cpu.conv2d_weight_gradient(y, x, weight.shape, (1, 1), (1, 2)) / 1e5, dw / 1e5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 5), (1, 1), (0, 3, 4, 4), (2, 3, 0, 4), (1000, 7)], ids=str)
def test_channels(shape, dtype):
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    center, a, b, c = rng.standard_normal((4, shape[1]))
    for name, args in [
        ("channel_sums", (g,)),
        ("channel_moments", (x, center)),
        ("channel_products", (g, x, center)),
        ("normalize_channels", (x, center, a, b)),
        ("combine_channels", (g, x, center, a, b, c)),
    ]:
        actual, expected = getattr(cpu, name)(*args), getattr(portable, name)(*args)
        for one, other in zip(actual, expected) if isinstance(actual, tuple) else [(actual, expected)]:
            close(one, other, dtype)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1),
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}


@pytest.mark.parametrize("layouts", [("contiguous", "contiguous"), ("channels last", "contiguous"), ("strided",) * 2])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5, 4), (1, 1), (0, 4), (3, 1, 4, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(dtype, shape, layouts):
    rng = np.random.default_rng(0)
    g, x = (LAYOUTS[layout](rng.standard_normal(shape).astype(dtype) * 3) for layout in layouts)
    kept = LAYOUTS[layouts[0]](rng.integers(0, 2, shape).astype(bool))
    for name, args in [
        ("relu", (x,)),
        ("relu_gradient", (g, x)),
        ("gelu", (x,)),
        ("gelu_gradient", (g, x)),
        ("keep", (x, kept, 1 / 0.7)),
    ]:
        close(getattr(cpu, name)(*args), getattr(portable, name)(*args), dtype)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (1, 1), (7, 65)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(dtype, shape, axis):
    rng = np.random.default_rng(0)
    g, x = (rng.standard_normal(shape).astype(dtype) * 5 for _ in range(2))
    for name in ("softmax", "log_softmax"):
        y = getattr(portable, name)(x, axis)
        close(getattr(cpu, name)(x, axis), y, dtype)
        gradient = f"{name}_gradient"
        close(getattr(cpu, gradient)(g, y, axis), getattr(portable, gradient)(g, y, axis), dtype)


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (0, 4), (50, 33)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype, shape):
    rng = np.random.default_rng(0)
    g, x = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    weight, bias = rng.standard_normal((2, shape[1])).astype(dtype)
    results = portable.layer_norm(x, weight, bias, 1e-5)
    for actual, expected in zip(cpu.layer_norm(x, weight, bias, 1e-5), results):
        close(actual, expected, dtype)
    args = (g, x, weight, *results[1:])
    for actual, expected in zip(cpu.layer_norm_gradient(*args), portable.layer_norm_gradient(*args)):
        close(actual, expected, dtype)

    labels, scale = rng.integers(0, shape[1], shape[0]), rng.standard_normal(shape[0]).astype(dtype)
    losses, log_sums = portable.cross_entropy(x, labels)
    for actual, expected in zip(cpu.cross_entropy(x, labels), (losses, log_sums)):
        close(actual, expected, dtype)
    args = (x, labels, log_sums, scale)
    close(cpu.cross_entropy_gradient(*args), portable.cross_entropy_gradient(*args), dtype)

    indices = rng.integers(0, 6, shape[0])
    close(cpu.add_rows(indices, g, 6), portable.add_rows(indices, g, 6), dtype)


def test_nan_wins_in_max_pooling():
    x = np.ones((1, 1, 2, 4))
    x[0, 0, 1, 1] = np.nan
    y, taken = cpu.max_pool2d(x, (2, 2), (2, 2), (0, 0))
    np.testing.assert_array_equal(y, [[[[np.nan, 1]]]])
    np.testing.assert_array_equal(taken, [[[[3, 0]]]])


def test_results_have_channels_last_in_memory():
    """So that the next image layer needs no copy."""
    x = np.zeros((2, 3, 8, 8), np.float32)
    y = cpu.conv2d(x, np.zeros((4, 3, 3, 3), np.float32), None, (1, 1), (1, 1))
    assert cpu.layout.channels_last(y).base is y.base
    for z in (cpu.relu(y), cpu.max_pool2d(y, (2, 2), (2, 2), (0, 0))[0]):
        assert np.moveaxis(z, 1, -1).flags.c_contiguous


@pytest.fixture
def three_threads(monkeypatch):
    """However few elements there are, and whatever the machine."""
    monkeypatch.setattr(cpu.threads, "limit", lambda: 3)
    monkeypatch.setattr(cpu.threads, "_LEAST", 1)


def test_loops_are_shared_in_order(three_threads):
    seen = []
    for count in (0, 1, 2, 3, 7, 100):
        parts = cpu.threads.share(lambda part: (part, threading.get_ident()), count, count)
        assert [i for part, _ in parts for i in range(count)[part]] == list(range(count))
        assert len(parts) == max(1, min(count, 3))
        seen.append({thread for _, thread in parts})
    assert len(seen[-1]) > 1


def test_what_one_thread_raises_is_raised(three_threads):
    def work(part):
        if part.start:
            raise ValueError(part)

    with pytest.raises(ValueError, match="slice"):
        cpu.threads.share(work, 10, 10)


def test_products_run_on_the_threads_that_ask_for_them(three_threads):
    get, set_to = cpu.threads._blas() or pytest.skip("NumPy's BLAS has no known way to set its threads")
    before = get()
    set_to(2)
    try:
        assert cpu.threads.share_products(lambda part: get(), 10, 10) == [1, 1, 1]
        assert get() == 2
        with pytest.raises(ZeroDivisionError):
            cpu.threads.share_products(lambda part: 1 // 0, 10, 10)
        assert get() == 2
    finally:
        set_to(before)


def test_several_threads_compute_the_same(three_threads):
    test_convolution_in_several_blocks(np.float32)
    for shape in [(5, 3), (4, 3, 2, 5), (1000, 7)]:
        test_channels(shape, np.float32)
        test_elementwise(np.float32, shape, ("channels last", "contiguous"))
    test_rows(np.float32, (50, 33))
    test_softmax(np.float32, (7, 65), 1)


def test_the_same_bits_every_time():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 24, 33, 17)).astype(np.float32)
    weight = rng.standard_normal((7, 24, 3, 5)).astype(np.float32)
    results = [cpu.conv2d(x, weight, None, (1, 1), (1, 2)).tobytes() for _ in range(3)]
    assert len(set(results)) == 1
