"""Tensors to a bucket and back: the CUDA C++ built for the host against NumPy, and what it becomes for GPUs."""

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels import machine_code, pack
from kernels.dtypes import DTYPES, find

FLOATS = [dtype.name for dtype in DTYPES if dtype.kind == "float"]
# What of CUDA the source uses, for a host compiler: one thread after another.
SHIM = """
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(n)
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
static float __uint_as_float(unsigned bits) { float number; memcpy(&number, &bits, 4); return number; }
static unsigned __float_as_uint(float number) { unsigned bits; memcpy(&bits, &number, 4); return bits; }
extern "C" void launch(void (*kernel)(const long long*), const long long* job, unsigned blocks, unsigned threads) {
  gridDim.x = blocks, blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(job);
}
"""


def variant(tensor: str, bucket: str, scaled: bool) -> str:
    return f"{tensor}_{bucket}_{int(scaled)}"


VARIANTS = [
    *((tensor, bucket, True) for tensor, bucket in itertools.product(FLOATS, FLOATS)),
    *((dtype.name, dtype.name, False) for dtype in DTYPES),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of all variants, for this processor."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    folder = tmp_path_factory.mktemp("pack")
    lines = [SHIM]
    for names in VARIANTS:
        macros = pack.defines(find(names[0]), find(names[1]), names[2])
        lines += [f"#define {name} {value}" for name, value in macros.items()]
        lines += [f"#define {direction} {direction}_{variant(*names)}" for direction in pack.DIRECTIONS]
        lines += [f"namespace {variant(*names)} {{", '#include "pack.cu"', "}"]
        lines += [f"#undef {name}" for name in (*macros, *pack.DIRECTIONS)]
    (folder / "host.cpp").write_text("\n".join(lines))
    command = [compiler, "-O1", "-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-unknown-pragmas", "-w"]
    where = ["-I", str(Path(pack.__file__).parent), "-shared", "-fPIC", str(folder / "host.cpp")]
    done = subprocess.run([*command, *where, "-o", str(folder / "host.so")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "host.so"))


def run(host: ctypes.CDLL, direction: str, tensors: list[Any], bucket: Any, starts: list[int], scale: float) -> None:
    """Launch the kernel for these arrays."""
    tensor, flat = find(tensors[0].dtype) if tensors else find(bucket.dtype), find(bucket.dtype)
    rows = pack.table([t.ctypes.data for t in tensors], [t.size for t in tensors], starts, bucket.size)
    words = pack.job(rows.shape[1], rows.ctypes.data, bucket.ctypes.data, bucket.size, scale)
    name = f"{direction}_{variant(tensor.name, flat.name, tensor != flat or scale != 1)}"
    kernel = ctypes.cast(getattr(host, name), ctypes.c_void_p)
    host.launch(kernel, ctypes.c_void_p(words.ctypes.data), pack.blocks(bucket.size, tensor, flat, 3), pack.THREADS)


def noise(count: int, dtype: Any, rng: np.random.Generator, shift: int = 0) -> Any:
    """Any bits, beginning `shift` elements after a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    memory = rng.integers(0, 256, (count + shift) * dtype.itemsize + 64, np.uint8)
    first = -memory.ctypes.data % 64 + shift * dtype.itemsize
    data = memory[first : first + count * dtype.itemsize]
    return (data % 2 if dtype == np.bool_ else data).view(dtype)


def assert_same(got: Any, wanted: Any) -> None:
    """Equal bits, but for which NaN a NaN is."""
    same = got.view(np.uint8).reshape(got.size, -1) == wanted.view(np.uint8).reshape(got.size, -1)
    same = same.all(axis=1)
    if find(got.dtype).kind == "float":
        same |= np.isnan(got) & np.isnan(wanted)
    assert same.all(), (got[~same][:5], wanted[~same][:5])


def both_ways(host: ctypes.CDLL, tensor: Any, bucket: Any, scale: float, layout: list[Any], rng: Any) -> None:
    """Pack and unpack; `layout` says of each tensor: elements before it, its elements, how it is shifted in memory."""
    starts, end = [], 0
    for gap, count, _ in layout:
        starts.append(end + gap)
        end += gap + count
    tensors = [noise(count, tensor, rng, shift) for _, count, shift in layout]
    length = end + int(rng.integers(0, 3))
    found, wanted = noise(length, bucket, rng), np.empty(length, bucket)
    run(host, "pack", tensors, found, starts, scale)
    pack.pack(tensors, wanted, starts, scale)
    assert_same(found, wanted)

    flat = noise(length, bucket, rng)
    copies = [noise(count + 2, tensor, rng, shift) for _, count, shift in layout]  # and an element before and after
    results = [copy[1:-1] for copy in copies]
    expected = [copy.copy() for copy in copies]
    run(host, "unpack", results, flat, starts, scale)
    pack.unpack(flat, [copy[1:-1] for copy in expected], starts, scale)
    for one, other in zip(copies, expected):
        assert_same(one, other)


def random_layout(rng: Any, tensors: int, most: int) -> list[Any]:
    gaps, counts = rng.integers(0, 3, tensors) * rng.integers(0, 9, tensors), rng.integers(0, most, tensors)
    return [tuple(map(int, each)) for each in zip(gaps, counts, rng.integers(0, 5, tensors))]


def test_every_cast_scales_and_rounds_as_numpy_does(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    for tensor, bucket in itertools.product(FLOATS, FLOATS):
        for scale in (1 / 3, 1024.0):
            both_ways(host, find(tensor).numpy, find(bucket).numpy, scale, random_layout(rng, 5, 200), rng)


def test_every_dtype_is_moved_bit_for_bit(host: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    for dtype in DTYPES:
        both_ways(host, dtype.numpy, dtype.numpy, 1.0, random_layout(rng, 6, 100), rng)


@pytest.mark.parametrize(
    "layout",
    [
        [], [(0, 0, 0)], [(0, 1, 0)], [(3, 1, 1)], [(0, 16, 0), (0, 16, 0)], [(0, 15, 0), (1, 16, 1), (0, 0, 0)],
        [(0, 100_003, 0)], [(5, 0, 0), (0, 0, 0), (0, 4096, 2), (0, 0, 0), (4096, 1, 0), (0, 0, 0)],
        [(0, 1, i % 3) for i in range(3000)], [(i % 2, i % 7, i % 5) for i in range(2000)],
    ],
    ids=["none", "empty", "one", "one, shifted", "aligned", "odd", "large", "gaps", "thousands", "thousands or empty"],
)  # fmt: skip
def test_any_layout(host: ctypes.CDLL, layout: list[Any]) -> None:
    rng = np.random.default_rng(2)
    both_ways(host, np.float32, np.float32, 1.0, layout, rng)
    if layout:
        both_ways(host, np.float32, find("bfloat16").numpy, 0.5, layout, rng)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1 takes elements 3 to 5 of a bucket of 9, and those before it end at 4"):
        pack.table([0, 0], [4, 2], [0, 3], 9)
    with pytest.raises(ValueError, match="takes elements 8 to 10"):
        pack.pack([np.zeros(2)], np.zeros(9), [8])
    with pytest.raises(ValueError, match="1 tensors need as many starts, and there are 2"):
        pack.unpack(np.zeros(9), [np.zeros(2)], [0, 2])
    with pytest.raises(ValueError, match="must begin at a multiple of 16 bytes"):
        pack.job(1, 0, 24, 8)
    for tensor, bucket, scaled in (("int32", "int32", True), ("int32", "float32", False), ("bool", "bool", True)):
        with pytest.raises(TypeError, match="only floats can be cast or scaled"):
            pack.defines(find(tensor), find(bucket), scaled)
    with pytest.raises(TypeError, match="only floats"):
        pack.pack([np.zeros(2, np.int32)], np.zeros(4, np.int32), [0], scale=0.5)


@pytest.mark.parametrize(
    ("tensor", "bucket", "architecture"),
    [("float32", "float32", (8, 0)), ("float32", "bfloat16", (9, 0)), ("float16", "float8_e4m3fn", (10, 0))],
)
def test_machine_code_moves_16_bytes_at_a_time(tensor: str, bucket: str, architecture: tuple[int, int]) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    ptx, cubin = pack.compile_kernels(tensor, bucket, architecture)
    assert cubin[:4] == b"\x7fELF" and b"unpack" in cubin
    assert re.findall(r"\.entry (\w+)", ptx) == ["pack", "unpack"] and ".extern" not in ptx
    assert not re.search(r"\bfma\.|\.ftz|\.approx", ptx)
    for direction in pack.DIRECTIONS:
        made = machine_code.assemble(ptx, architecture, direction)
        assert made.spills == 0 and made.wide("LD") > 0 and made.wide("ST") > 0
        assert made.registers * pack.THREADS * 4 <= 65536, "at least four blocks to a multiprocessor"


def test_what_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    monkeypatch.setattr(pack, "source", lambda: "int wrong(")
    with pytest.raises(RuntimeError, match="pack.cu for float32 and float64: .*error"):
        pack.compile_kernels("float32", "float64", (9, 0))


def test_cupy_gets_the_same_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same options; the options are what `compile_kernels` compiles with."""
    given: dict[str, Any] = {}

    def raw_kernel(code: str, name: str, options: tuple[str, ...]) -> Callable[..., None]:
        given.update(code=code, name=name, options=options)
        return print

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawKernel=raw_kernel))
    assert pack.raw_kernel("unpack", "float32", "bfloat16") is print
    assert given["name"] == "unpack" and given["code"] == pack.source() and "__global__" in given["code"]
    macros = ("-DTENSOR=float32", "-DBUCKET=bfloat16", "-DSCALED=1")
    assert given["options"] == ("--std=c++17", "--fmad=false", *macros)
