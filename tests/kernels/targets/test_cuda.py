"""The executor compiled for GPUs, without one: what PTX and what machine code it becomes."""

import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
cuda = pytest.importorskip("kernels.targets.cuda", reason="CUDA's compilers are not installed", exc_type=ImportError)

ARCHITECTURES = ((8, 0), (9, 0), (10, 0))
NAMES = (
    "float32-premul_sum", "bfloat16-avg", "uint8-max", "float64-min", "float16-sum", "int64-avg", "int32-prod",
    "float8_e4m3fn-avg", "complex64-prod", "complex128-sum", "bool-max",
)  # fmt: skip
QUICK = {("bfloat16-avg", (8, 0)), ("float32-premul_sum", (9, 0)), ("uint8-max", (10, 0))}


def every_kernel() -> list[Any]:
    pairs = itertools.product(NAMES, ARCHITECTURES)
    marks = [() if pair in QUICK else (pytest.mark.slow,) for pair in itertools.product(NAMES, ARCHITECTURES)]
    return [
        pytest.param(name, cc, marks=mark, id="{}-sm_{}{}".format(name, *cc)) for (name, cc), mark in zip(pairs, marks)
    ]


every = pytest.mark.parametrize(("name", "architecture"), every_kernel())


def compiled(name: str, architecture: tuple[int, int]) -> Any:
    dtype, operation = name.split("-")
    return cuda.compile_kernel(dtype, operation, architecture)


def tool(name: str) -> str:
    """A program of CUDA's toolkit: from the packages installed, or on the path."""
    nvidia = pytest.importorskip("nvidia", reason=f"{name} is not installed")
    places = [path for root in nvidia.__path__ for path in sorted(Path(root).glob(f"*/bin/{name}"))]
    found = places[0] if places else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return str(found)


def said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@cache
def assembled(name: str, architecture: tuple[int, int]) -> tuple[str, str]:
    """What ptxas reports of a kernel, and what nvdisasm makes of its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled(name, architecture).ptx)
        arch = "-arch=sm_{}{}".format(*architecture)
        report = said(tool("ptxas"), "-v", arch, str(ptx), "-o", str(cubin))
        return report, said(tool("nvdisasm"), "-c", str(cubin))


@every
def test_ptx_has_one_entry_and_what_the_primitives_ask_for(name: str, architecture: tuple[int, int]) -> None:
    ptx = compiled(name, architecture).ptx
    assert ".target sm_{}{}\n".format(*architecture) in ptx
    assert re.findall(r"\.entry (\w+)", ptx) == ["execute"] and ".extern" not in ptx
    assert f".maxntid {cuda.MOST_LANES}" in ptx
    flags = ("ld.acquire.sys.global.u32", "st.release.sys.global.u32")
    for instruction in (*flags, "nanosleep.u32", "globaltimer", "bar.sync"):
        assert instruction in ptx
    for instruction in ("ld.global.v4.b32", "st.global.v4.b32"):
        assert ptx.count(instruction) > 5  # the copy has five, the reduction the rest


@every
def test_additions_and_multiplications_stay_apart(name: str, architecture: tuple[int, int]) -> None:
    assert not re.search(r"\bfma\.", compiled(name, architecture).ptx)


@every
def test_nothing_spills(name: str, architecture: tuple[int, int]) -> None:
    report, assembly = assembled(name, architecture)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", report) == [("0",) * 3]
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    print(name, architecture, registers, "registers a lane")
    assert registers * cuda.MOST_LANES <= 65536, "a block of the most lanes must fit into a multiprocessor"
    assert not re.search(r"\b(LDL|STL)\b", assembly)


@every
def test_machine_code_moves_16_bytes_at_a_time_and_orders_flags(name: str, architecture: tuple[int, int]) -> None:
    _, assembly = assembled(name, architecture)
    assert len(re.findall(r"\bLDG\.E\.128\b", assembly)) > 5 and len(re.findall(r"\bSTG\.E\.128\b", assembly)) > 5
    assert re.search(r"\bLDG\.E\.STRONG\.SYS\b", assembly) and re.search(r"\bSTG\.E\.STRONG\.SYS\b", assembly)
    assert re.search(r"\bMEMBAR\.\w+\.SYS\b", assembly), "a release waits for what was written before"
    assert re.search(r"\bCCTL\.IVALL\b", assembly), "an acquire forgets what the first cache holds"
    if not name.endswith("-avg"):  # a division is made of fused steps, and rounds as it should
        assert not re.search(r"\b[FD]FMA\b", assembly)


def test_the_linker_makes_machine_code_without_a_driver() -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    kernel = compiled("float32-premul_sum", (9, 0))
    assert kernel.cubin[:4] == b"\x7fELF" and kernel.name.encode() in kernel.cubin


def test_no_driver_and_no_simulator_is_asked_for() -> None:
    """A process that only compiles must not load libcuda: building machines have none."""
    code = """
from kernels.targets import cuda
cuda._combine("uint8", "max")
print(any("libcuda.so" in line for line in open("/proc/self/maps")))
"""
    assert said(sys.executable, "-c", code).strip() == "False"
