"""Block-scaled int8 and e4m3: NumPy says what they mean, and the CPU, plain Python, the simulator and PTX agree."""

import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from kernels import native, quantize

CODES = list(quantize.CODES)
SIMULATED = """
import sys
import numpy as np
from numba import cuda
from kernels import quantize
pack, unpack, reduce = quantize.pack_blocks, quantize.unpack_blocks, quantize.reduce_blocks

@cuda.jit
def all_three(packed, values, result, total, blocks, block, code):
    lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
    pack(packed, values, blocks, block, code, lane, lanes)
    cuda.syncthreads()
    unpack(result, packed, blocks, block, code, lane, lanes)
    cuda.syncthreads()
    reduce(total, packed, 1, blocks, block, code, lane, lanes)

values = np.frombuffer(sys.stdin.buffer.read(), np.float32).copy()
block, code = int(sys.argv[1]), int(sys.argv[2])
blocks = len(values) // block
packed, result = np.zeros(blocks * (4 + block), np.uint8), np.zeros_like(values)
total = np.zeros_like(packed)
all_three[1, 3](*(a.ctypes.data for a in (packed, values, result, total)), blocks, block, code)
sys.stdout.buffer.write(packed.tobytes() + result.tobytes() + total.tobytes())
"""


def values(blocks, block, seed=0):
    """Blocks of every size of number, with zeros, ties, subnormal numbers, and what is not finite."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((blocks, block)) * 10.0 ** rng.integers(-30, 30, (blocks, 1))
    rows = rows.astype(np.float32)
    special = [
        0,
        np.arange(block) - block / 2 + 0.5,
        1e-45,
        -0.0,
        np.nan,
        np.inf,
        -np.inf,
        3.4e38,
        1e-39,
        2.7e-43,
        8.4e-43,
    ]
    for row, value in zip(rows, special):
        row[...] = value
    if blocks > len(special) + 1:
        rows[len(special), ::2] = 0
        rows[len(special) + 1, 1] = np.nan
    return rows.reshape(-1)


def kernels(pack, unpack, x, block, code):
    blocks = x.size // block
    packed, result = np.full((blocks, 4 + block), 0xA5, np.uint8), np.full(x.size, np.nan, np.float32)
    for lane in range(3):
        pack(packed.ctypes.data, x.ctypes.data, blocks, block, quantize.CODES[code], lane, 3)
    for lane in range(2):
        unpack(result.ctypes.data, packed.ctypes.data, blocks, block, quantize.CODES[code], lane, 2)
    return packed, result


def assert_same(found, x, block, code):
    packed, result = quantize.pack(x, block, code), quantize.unpack(quantize.pack(x, block, code), block, code)
    np.testing.assert_array_equal(found[0].reshape(packed.shape), packed)
    same = (found[1].view(np.uint32) == result.view(np.uint32)) | (np.isnan(found[1]) & np.isnan(result))
    assert same.all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("blocks", "block"), [(0, 4), (1, 4), (13, 32), (50, 128), (3, 1000)])
def test_every_target_has_the_bits_of_numpy(code, blocks, block):
    x = values(blocks, block)
    assert_same(
        kernels(*(native.load(n).call for n in ("pack_blocks", "unpack_blocks")), x, block, code), x, block, code
    )
    if x.size < 1000:
        assert_same(kernels(quantize.pack_blocks, quantize.unpack_blocks, x, block, code), x, block, code)


@pytest.mark.parametrize("code", CODES)
def test_the_simulator_has_the_bits_of_numpy(code):
    pytest.importorskip("numba_cuda", reason="numba-cuda, which brings the simulator, is not installed")
    x = values(13, 32)
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED, "32", str(quantize.CODES[code])],
        input=x.tobytes(), capture_output=True, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, check=True,
    )  # fmt: skip
    packed, result, total = np.split(np.frombuffer(done.stdout, np.uint8), [13 * 36, 13 * 36 + 13 * 128])
    assert_same((packed, result.copy().view(np.float32)), x, 32, code)
    np.testing.assert_array_equal(total.reshape(13, 36), quantize.reduce(packed.reshape(1, 13, 36), 32, code))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("senders", "blocks", "block"), [(1, 13, 32), (2, 1, 4), (3, 20, 12), (8, 13, 128), (5, 0, 4)])
def test_a_sum_of_packed_blocks_is_that_of_what_they_stand_for_packed(code, senders, blocks, block):
    parts = np.stack([quantize.pack(np.roll(values(blocks, block, s), s), block, code) for s in range(senders)])
    total = np.zeros(blocks * block, np.float32)
    with np.errstate(all="ignore"):
        for s in range(senders):
            total = quantize.unpack(parts[s], block, code) + (total if s else -0.0)
    wanted = quantize.pack(total, block, code)
    np.testing.assert_array_equal(quantize.reduce(parts, block, code), wanted)
    for reduce in (native.load("reduce_blocks").call, quantize.reduce_blocks):
        if parts.size < 5000 or reduce is not quantize.reduce_blocks:
            found = np.full((blocks, 4 + block), 0xA5, np.uint8)
            for lane in range(3):
                with np.errstate(all="ignore"):
                    reduce(
                        found.ctypes.data, parts.ctypes.data, senders, blocks, block, quantize.CODES[code], lane, 3
                    )  # fmt: skip
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("code", CODES)
def test_no_element_is_further_off_than_half_a_step_of_its_block(code):
    x = values(60, 64, seed=1)[20 * 64 :]
    found = quantize.unpack(quantize.pack(x, 64, code), 64, code)
    largest = abs(x.reshape(-1, 64)).max(axis=1).repeat(64).astype(np.float64)
    step = largest / 127 / 2 if code == "int8" else np.maximum(abs(x) / 16, largest / 448 * 2**-10)
    assert (abs(found.astype(np.float64) - x) <= step * 1.0001).all()


@pytest.mark.parametrize("code", CODES)
def test_all_codes_come_back(code):
    codes = np.arange(256).astype(np.uint8).view(np.int8 if code == "int8" else ml_dtypes.float8_e4m3fn)
    numbers = codes.astype(np.float32)
    numbers = numbers[np.isfinite(numbers) & (abs(numbers) <= quantize.LARGEST[code])]
    numbers = np.append(numbers, quantize.LARGEST[code] * np.ones(-len(numbers) % 4 + 4)).astype(np.float32)
    np.testing.assert_array_equal(
        quantize.unpack(quantize.pack(numbers, len(numbers), code), len(numbers), code), numbers
    )


# Each for each, of which one of each by default.
COMPILED = [
    pytest.param(name, (generation, 0), marks=[pytest.mark.slow] if i != j else [], id=f"{name}-sm_{generation}0")
    for i, name in enumerate(("pack_blocks", "unpack_blocks", "reduce_blocks"))
    for j, generation in enumerate((8, 9, 10))
]


@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_it_compiles_for_gpus_with_exact_arithmetic(name, architecture):
    cuda = pytest.importorskip("kernels.targets.cuda", reason="CUDA's compilers are missing", exc_type=ImportError)
    kernel = cuda.compile_quantize(name, architecture)
    assert re.findall(r"\.entry (\w+)", kernel.ptx) == [name] and ".extern" not in kernel.ptx
    assert ".target sm_{}{}\n".format(*architecture) in kernel.ptx
    assert not re.search(r"\bfma\.|\.ftz|div\.(approx|full)", kernel.ptx)
    assert re.search(r"mul(\.rn)?\.f32" if name == "unpack_blocks" else r"div\.rn\.f32", kernel.ptx)
    if architecture == (9, 0):
        pytest.importorskip("cuda.core", reason="cuda-core is not installed")
        assert kernel.cubin[:4] == b"\x7fELF" and name.encode() in kernel.cubin
