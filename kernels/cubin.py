"""Kernels for a GPU as machine code, from the cache folder or compiled for it: a process that finds them there imports
neither Numba nor a compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kernels import native

_COMPILERS = ("numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvjitlink-cu12", "nvidia-nvjitlink")


def load(dtype: str, operation: str, capability: tuple[int, int], meanwhile: Callable[[], None] | None = None) -> bytes:
    """The kernel `execute` (see `kernels.targets.cuda.compile_kernel`) for one compute capability; `meanwhile` as for
    `native.cached`."""
    return native.cached(
        f"{dtype}-{operation}-sm{capability[0]}{capability[1]}-{_compilers()}.cubin",
        lambda: _compile(dtype, operation, capability),
        meanwhile,
    )


def _compile(dtype: str, operation: str, capability: tuple[int, int]) -> bytes:
    from kernels.targets.cuda import compile_kernel

    return compile_kernel(dtype, operation, capability).cubin


@cache
def _compilers() -> str:
    """Which compilers they are; the folder's name tells the sources."""
    found = []
    for package in _COMPILERS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:8]
