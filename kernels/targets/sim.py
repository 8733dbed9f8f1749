"""CUDA's simulator: blocks are channels, their threads are lanes, and what each runs is the Python target.

It shows that the lanes and channels of a program share the work rightly. It cannot show that memory is ordered
rightly: that is proven from the program. One block runs after another, so channels must not wait for each other.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import config

from kernels import executor
from kernels.dtypes import find
from kernels.portable import bind
from kernels.targets import python

if not config.ENABLE_CUDASIM:
    raise ImportError("Numba simulates CUDA only if NUMBA_ENABLE_CUDASIM=1 was set before it was imported")

sys.setswitchinterval(1e-4)  # seconds; a block's threads hand the interpreter to each other all the time


def sync() -> None:
    """Wait for the block's other threads. In this module, because the simulator replaces the name `cuda` only here."""
    cuda.syncthreads()


@cache
def kernel(dtype: str, operation: str) -> Any:
    """`kernel(dtype, operation)[channels, lanes](job)` runs a job: see `kernels.executor.run_channel`."""
    run = bind(executor.run_channel, {**python.bodies(find(dtype), operation), "sync": sync}, python.as_it_is)

    @cuda.jit
    def block(job):  # type: ignore[no-untyped-def]
        run(job, cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x, cuda.blockDim.x)

    return block
