"""What the kernels for GPUs have become: registers, spills, and how wide they load and store. No GPU is needed.

    python -m kernels.machine_code

prints the table of docs/gpu.md. These are facts of the compiler, not measurements.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ARCHITECTURES = ((8, 0), (9, 0), (10, 0))


@dataclass(frozen=True)
class MachineCode:
    """A kernel for one compute capability."""

    registers: int  # of a thread
    spills: int  # bytes of registers that did not fit, and of other memory of a thread's own
    code: str  # disassembled

    def wide(self, instruction: str) -> int:
        """How many times `instruction`, LD or ST, moves 16 bytes."""
        return len(re.findall(rf"\b{instruction}G?\.E\.128\b", self.code))


def tool(name: str) -> str:
    """A program of CUDA's toolkit, from NVIDIA's packages or on the path. Raises FileNotFoundError without it."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    places = [str(path) for root in roots for path in sorted(Path(root).glob(f"*/bin/{name}"))]
    found = places[0] if places else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; nvidia-cuda-nvcc-cu12 and nvidia-cuda-nvdisasm bring it")
    return found


def assemble(ptx: str, architecture: tuple[int, int], entry: str) -> MachineCode:
    """Make machine code of the kernel `entry` in some PTX, and look at it."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        arch = "-arch=sm_{}{}".format(*architecture)
        said = _said(tool("ptxas"), "-v", arch, "--entry", entry, str(source), "-o", str(cubin))
        code = _said(tool("nvdisasm"), "-c", str(cubin))
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return MachineCode(int(registers), sum(int(nbytes) for line in memory for nbytes in line), code)


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout + done.stderr


def every_kernel() -> Iterator[tuple[str, str, Callable[[tuple[int, int]], str]]]:
    """The kernels: what each is, its name, and a function from a compute capability to its PTX. Of those that exist for
    many dtypes, some."""
    from kernels import optimizers, pack
    from kernels.targets import cuda

    def made(what: str, compile: Callable[..., Any], *names: str) -> tuple[str, str, Callable[[tuple[int, int]], str]]:
        name: str = compile(*names, ARCHITECTURES[0]).name
        return what, name, lambda architecture: compile(*names, architecture).ptx

    for names in (("float32", "sum"), ("bfloat16", "avg"), ("uint8", "max"), ("complex128", "sum")):
        yield made(f"executor, {' '.join(names)}", cuda.compile_kernel, *names)
    for names in (("float32", "sum"), ("bfloat16", "sum"), ("float8_e4m3fn", "avg")):
        yield made(f"small messages, {' '.join(names)}", cuda.compile_small, *names)
    for name in ("pack_blocks", "unpack_blocks", "reduce_blocks"):
        yield made(f"quantize, {name}", cuda.compile_quantize, name)
    for names in itertools.product(optimizers.RULES, ("float32", "bfloat16")):
        yield made(f"optimizer, {' '.join(names)}", cuda.compile_optimizer, *names)
    for tensor, bucket in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")):
        ptx = partial(_packing, tensor, bucket)
        for name in pack.DIRECTIONS:
            yield f"{name}, {tensor} tensors, {bucket} bucket", name, ptx


def _packing(tensor: str, bucket: str, architecture: tuple[int, int]) -> str:
    from kernels import pack

    return pack.compile_kernels(tensor, bucket, architecture).ptx


def main() -> None:
    """Print the table: registers of a thread, bytes spilled, and instructions that load and store 16 bytes."""
    print("| kernel | " + " | ".join("sm_{}{}".format(*cc) for cc in ARCHITECTURES) + " |")
    print("|---" * (1 + len(ARCHITECTURES)) + "|")
    for what, name, ptx in every_kernel():
        made = [assemble(ptx(cc), cc, name) for cc in ARCHITECTURES]
        cells = [f"{m.registers}, {m.spills}, {m.wide('LD')}/{m.wide('ST')}" for m in made]
        print(f"| {what} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
