"""Convolution without a column matrix, against the array-API kernels in float64."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mgpu_core.autograd import cpu, portable
from mgpu_core.autograd.cpu import columns, direct
from mgpu_core.autograd.portable.windows import output_size

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

import guarded

# x (N, C, H, W), outputs, window, stride, padding. For each width of a result, up to 16, code is compiled.
CASES = [
    ((2, 16, 28, 28), 16, (3, 3), (1, 1), (1, 1)),
    ((2, 32, 14, 14), 32, (3, 3), (1, 1), (1, 1)),
    ((2, 64, 1, 1), 64, (3, 3), (1, 1), (1, 1)),
    ((3, 1, 7, 7), 16, (3, 3), (1, 1), (1, 1)),
    ((2, 3, 9, 14), 32, (3, 3), (1, 1), (1, 1)),
    ((2, 17, 13, 14), 16, (5, 5), (1, 1), (2, 2)),
    ((2, 16, 5, 15), 32, (3, 3), (2, 2), (1, 1)),  # tiles overlap
    ((2, 32, 14, 14), 64, (1, 1), (2, 2), (0, 0)),  # three of four pixels are seen by none
    ((2, 16, 9, 7), 48, (1, 3), (2, 1), (0, 1)),
    ((1, 16, 5, 10), 16, (1, 1), (2, 2), (2, 2)),  # places that see nothing but padding
    ((2, 48, 23, 7), 32, (3, 3), (3, 1), (2, 1)),
    ((0, 16, 7, 7), 16, (3, 3), (1, 1), (1, 1)),
]


def last(x, empty=np.empty):
    """x with channels last in memory."""
    inside = empty(np.moveaxis(x, 1, -1).shape, x.dtype)
    inside[...] = np.moveaxis(x, 1, -1)
    return np.moveaxis(inside, -1, 1)


def guarded_nan(shape, dtype):
    """NaN, at the end of memory."""
    memory = guarded.zeros(int(np.prod(shape)), dtype).reshape(shape)
    memory[...] = np.nan
    return memory


def results(kernels, arrays, stride, padding):
    """The result and both gradients, of those that have whole vectors."""
    x, weight, bias, g = arrays
    if weight.shape[0] % 16 == 0:
        yield kernels.conv2d(x, weight, bias, stride, padding)
        yield kernels.conv2d_weight_gradient(g, x, weight.shape, stride, padding)
    if weight.shape[1] % 16 == 0:
        yield kernels.conv2d_input_gradient(g, weight, x.shape, stride, padding)


def inputs(case):
    shape, outputs, window, stride, padding = case
    rng = np.random.default_rng()
    sizes = shape, (outputs, shape[1], *window), (outputs,)
    places = output_size(shape[2:], window, stride, padding)
    return [rng.standard_normal(size).astype(np.float32) for size in (*sizes, (shape[0], outputs, *places))]


def check(case):
    arrays = inputs(case)
    expected = results(portable, [a.astype(np.float64) for a in arrays], *case[3:])
    for actual, right in zip(results(direct, arrays, *case[3:]), expected, strict=True):
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5 * max(1, np.abs(right).max(initial=0)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_convolution(case):
    check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_reads_nothing_behind_arrays_and_writes_everything(case, monkeypatch):
    x, weight, bias, g = inputs(case)
    arrays = [last(x, guarded_nan), weight, bias, last(g, guarded_nan)]
    expected = [r.tobytes() for r in results(direct, arrays, *case[3:])]
    monkeypatch.setattr(direct.np, "empty", guarded_nan)
    assert [r.tobytes() for r in results(direct, arrays, *case[3:])] == expected
    assert not any(np.isnan(r).any() for r in results(direct, arrays, *case[3:]))


def test_an_image_in_bands(monkeypatch):
    """The buffer holds a line or two."""
    monkeypatch.setattr(direct, "_BUFFER", 5000)
    for case in CASES:
        check(case)


def test_threads_change_no_bits_of_results_and_inputs_gradients(monkeypatch):
    case = ((5, 16, 7, 7), 16, (3, 3), (1, 1), (1, 1))
    x, weight, bias, g = inputs(case)
    found = set()
    for threads in (1, 3):
        monkeypatch.setattr(cpu.threads, "limit", lambda threads=threads: threads)
        monkeypatch.setattr(cpu.threads, "_LEAST", 1)
        y, _, dx = results(direct, (x, weight, bias, g), *case[3:])
        found.add(y.tobytes() + dx.tobytes())
    assert len(found) == 1


def test_which_convolutions_it_computes(monkeypatch):
    asked = []
    for way in (direct, columns):
        for name in ("conv2d", "conv2d_input_gradient", "conv2d_weight_gradient"):
            monkeypatch.setattr(way, name, lambda *_, way=way: asked.append(way))

    def ways(shape, weight, dtype=np.float32, stride=(1, 1)):
        x, w = np.zeros(shape, dtype), np.zeros(weight, dtype)
        cpu.conv2d(x, w, None, stride, (0, 0))
        cpu.conv2d_input_gradient(x[:, :1], w, x.shape, stride, (0, 0))
        cpu.conv2d_weight_gradient(x[:, :1], x, w.shape, stride, (0, 0))
        return [asked.pop(0) for _ in range(3)]

    images = (1, 16, 8, 8)
    assert ways(images, (16, 16, 3, 3)) == [direct] * 3
    assert ways(images, (16, 16, 3, 3), np.float64) == [columns] * 3
    assert ways((1, 3, 8, 8), (16, 3, 3, 3)) == [direct, columns, direct]
    assert ways(images, (8, 16, 3, 3)) == [columns, direct, columns]
    assert ways(images, (16, 16, 1, 1)) == [columns] * 3
    assert ways(images, (16, 16, 1, 1), stride=(2, 2)) == [direct] * 3
    assert ways((1, 16, 4, 4), (16, 16, 3, 3)) == [direct, direct, columns]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor is an x86")
def test_on_a_processor_with_half_as_many_registers_of_half_the_length(tmp_path):
    code = "from test_direct import *; assert not direct.WIDE; [check(case) for case in CASES]"
    processor = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **processor, **paths}).returncode == 0
