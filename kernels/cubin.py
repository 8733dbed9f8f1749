"""Kernels for a GPU as machine code, from the cache folder or compiled for it: a process that finds them there imports
neither Numba nor a compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kernels import native, pack
from kernels.dtypes import DType

_COMPILERS = (
    "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cuda-nvcc-cu12", "nvidia-nvvm", "nvidia-nvjitlink-cu12",
    "nvidia-nvjitlink", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc",
)  # fmt: skip


def load(
    name: str,
    dtype: str,
    operation: str,
    capability: tuple[int, int],
    meanwhile: Callable[[], None] | None = None,
) -> bytes:
    """The kernel "execute" or "small" (see `compile_kernel` and `compile_small` in `kernels.targets.cuda`) for one
    compute capability; `meanwhile` as for `native.cached`."""

    def compile() -> bytes:
        from kernels.targets.cuda import compile_kernel, compile_small

        make = {"execute": compile_kernel, "small": compile_small}[name]
        return make(dtype, operation, capability).cubin

    return _cached(f"{name}-{dtype}-{operation}", capability, compile, meanwhile)


def load_optimizer(rule: str, dtype: str, capability: tuple[int, int]) -> bytes:
    """The kernel of an optimiser's rule for gradients of one dtype: `compile_optimizer` in `kernels.targets.cuda`."""

    def compile() -> bytes:
        from kernels.targets.cuda import compile_optimizer

        return compile_optimizer(rule, dtype, capability).cubin

    return _cached(f"{rule}-{dtype}", capability, compile, None)


def load_pack(dtype: DType, capability: tuple[int, int], meanwhile: Callable[[], None] | None = None) -> bytes:
    """The kernels "pack" and "unpack" between tensors and a bucket of one dtype; see `kernels.pack`."""
    name = dtype.name
    return _cached(
        f"pack-{dtype.itemsize}",
        capability,
        lambda: pack.compile_kernels(name, name, capability, False).cubin,
        meanwhile,
    )


def _cached(
    name: str, capability: tuple[int, int], make: Callable[[], bytes], meanwhile: Callable[[], None] | None
) -> bytes:
    return native.cached(f"{name}-sm{capability[0]}{capability[1]}-{compilers()}.cubin", make, meanwhile)


@cache
def compilers() -> str:
    """Which compilers they are; the folder's name tells the sources."""
    found = []
    for package in _COMPILERS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:8]
