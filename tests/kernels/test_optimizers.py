"""Fused steps of the optimisers: NumPy says what they do, and the CPU, plain Python, the simulator and PTX agree."""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kernels import machine_code, native, optimizers
from kernels.dtypes import find
from kernels.targets import python

SETTINGS = {
    "sgd": optimizers.sgd_settings(0.1, weight_decay=0.01),
    "momentum": optimizers.sgd_settings(0.1, momentum=0.9, fresh=0.8),
    "nesterov": optimizers.sgd_settings(0.01, momentum=0.95, weight_decay=0.001, nesterov=True),
    "adamw": optimizers.adamw_settings(1e-2, 3),
}
SIMULATED = """
import sys
import numpy as np
from numba import cuda
from kernels.dtypes import find
from kernels.targets import python

@cuda.jit
def kernel(rule, dtype, job):
    lane = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    UPDATES[rule, dtype](job, lane, cuda.blockDim.x * cuda.gridDim.x)

UPDATES = {(r, d): python.optimizer(("sgd", "adamw")[r], find(d)) for r in (0, 1) for d in ("float32", "bfloat16")}
sys.path.insert(0, sys.argv[1])
import test_optimizers as t
for name in t.SETTINGS:
    for dtype in ("float32", "bfloat16"):
        update = lambda job, lane, lanes: kernel[2, 3](int(name == "adamw"), dtype, job) if lane == 0 else None
        t.assert_agrees(name, dtype, 45, update, 1)
print("agreed")
"""


def arrays(name: str, dtype: str, count: int, seed: int = 0) -> list[Any]:
    """Parameters, gradients, momentum or means, and a copy, all of them two elements longer and poisoned there."""
    rng = np.random.default_rng(seed)
    gradient, state = find(dtype).numpy, find(find(dtype).accumulator).numpy
    p, m = (rng.standard_normal(count + 2).astype(state) for _ in range(2))
    g = (rng.standard_normal(count + 2) * 10.0 ** rng.integers(-6, 3, count + 2)).astype(gradient)
    v = rng.random(count + 2).astype(state) ** 8
    for special, value in zip((g, g, m, v, p), (np.inf, np.nan, 1e-40, 0, -0.0)):
        if count > 40:
            special[rng.integers(1, count)] = value
    copy = p.astype(gradient) if gradient != state else None
    first = None if name == "sgd" else m
    return [p, g, first, v if name == "adamw" else None, copy]


def twin(name: str, given: list[Any], settings: Any) -> None:
    """The step in NumPy on all elements but the first and the last."""
    p, g, first, second, copy = (None if x is None else x[1:-1] for x in given)
    with np.errstate(all="ignore"):
        if name == "adamw":
            optimizers.adamw(p, g, first, second, copy, settings)
        else:
            optimizers.sgd(p, g, first, copy, settings)


def assert_agrees(name: str, dtype: str, count: int, update: Any, lanes: int) -> None:
    """Two steps have the twin's bits, but for which NaN a NaN is, and touch nothing else."""
    found, wanted = arrays(name, dtype, count), arrays(name, dtype, count)
    for _ in range(2):
        twin(name, wanted, SETTINGS[name])
        places = [0 if x is None else x.ctypes.data + x.itemsize for x in found]
        job = optimizers.job(places, count, SETTINGS[name])
        for lane in range(lanes):
            assert update(job.ctypes.data, lane, lanes) in (0, None)
    for one, other in zip(found, wanted):
        if one is not None:
            same = one.view(f"u{one.itemsize}") == other.view(f"u{one.itemsize}")
            same |= np.isnan(one.astype(np.float64)) & np.isnan(other.astype(np.float64))
            assert same.all(), (name, dtype, count, one[~same], other[~same])


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float64", "float16"))]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_target_has_the_bits_of_numpy(name: str, dtype: str) -> None:
    rule = "adamw" if name == "adamw" else "sgd"
    compiled = native.load(f"{rule}-{dtype}").call
    plain = python.optimizer(rule, find(dtype))
    for count in (0, 1, 7, 16, 33, 1000):
        assert_agrees(name, dtype, count, compiled, 1)
        assert_agrees(name, dtype, count, plain, 1)
        assert_agrees(name, dtype, count, compiled, 3)


def test_the_simulator_has_the_bits_of_numpy() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda, which brings the simulator, is not installed")
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED, os.path.dirname(__file__)],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "agreed", done.stderr


def test_the_rules_are_those_of_the_trainer() -> None:
    """Many steps of float64 follow `mgpu_core.optim` within rounding."""
    mgpu_core = pytest.importorskip("mgpu_core")
    from mgpu_core import optim

    rng = np.random.default_rng(0)
    made = {
        "nesterov": lambda p: optim.SGD([p], 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        "dampened": lambda p: optim.SGD([p], 0.1, momentum=0.9, dampening=0.1),
        "adamw": lambda p: optim.AdamW([p], 0.01, weight_decay=0.1),
    }
    for name, make in made.items():
        start = rng.standard_normal(50)
        tensor = mgpu_core.Tensor(start.copy(), requires_grad=True)
        optimizer = make(tensor)
        p, m, v = start.copy(), np.zeros(50), np.zeros(50)
        for step in range(1, 30):
            g = rng.standard_normal(50)
            tensor.grad = g.copy()
            optimizer.step()
            if name == "adamw":
                optimizers.adamw(p, g, m, v, None, optimizers.adamw_settings(0.01, step, weight_decay=0.1))
            else:
                fresh = 1.0 if step == 1 or name == "nesterov" else 0.9
                nesterov, decay = name == "nesterov", 0.01 if name == "nesterov" else 0.0
                settings = optimizers.sgd_settings(
                    0.1, momentum=0.9, fresh=fresh, weight_decay=decay, nesterov=nesterov
                )
                optimizers.sgd(p, g, m, None, settings)
        np.testing.assert_allclose(tensor.data, p, rtol=1e-12, atol=1e-14)


def test_a_16_bit_parameter_moves_by_less_than_its_last_place() -> None:
    """What the copy alone would lose."""
    p = np.ones(1, np.float32)
    copy = p.astype(find("bfloat16").numpy)
    for _ in range(100):
        optimizers.sgd(p, np.ones(1, copy.dtype), None, copy, optimizers.sgd_settings(1e-4))
    assert abs(p[0] - 0.99) < 1e-5 and copy[0] == np.float32(p[0]).astype(copy.dtype) != 1


@pytest.mark.parametrize(
    ("rule", "dtype", "architecture"),
    [
        ("sgd", "float32", (8, 0)),
        ("adamw", "bfloat16", (9, 0)),
        pytest.param("adamw", "float32", (10, 0), marks=pytest.mark.slow),
    ],
)
def test_machine_code_for_gpus(rule: str, dtype: str, architecture: tuple[int, int]) -> None:
    cuda = pytest.importorskip("kernels.targets.cuda", reason="CUDA's compilers are missing", exc_type=ImportError)
    kernel = cuda.compile_optimizer(rule, dtype, architecture)
    assert re.findall(r"\.entry (\w+)", kernel.ptx) == [rule] and ".extern" not in kernel.ptx
    assert not re.search(r"\bfma\.|\.ftz|(div|sqrt)\.approx", kernel.ptx)
    assert "%ctaid.y" in kernel.ptx, "a row of blocks for each job"
    assert rule == "sgd" or (re.search(r"div\.rn\.f", kernel.ptx) and re.search(r"sqrt\.rn\.f", kernel.ptx))
    made = machine_code.assemble(kernel.ptx, architecture, kernel.name)
    assert made.spills == 0 and made.wide("LD") >= 3 and made.wide("ST") >= 2
    assert made.registers * cuda.MOST_LANES <= 65536
