"""CUDA's simulator: blocks are channels, their threads are lanes, and what each runs is the Python target.

It shows that the lanes and channels of a program share the work rightly. It cannot show that memory is ordered
rightly: that is proven from the program. One block runs after another, so channels must not wait for each other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda import config

from kernels import atomic, executor, lowlatency, messages, native, progress
from kernels.dtypes import DTYPES, OPERATIONS, find
from kernels.executor import BLOCKED, JOB_PLACE, PLACE_STATUS
from kernels.native import Native
from kernels.portable import bind
from kernels.primitives import load_word, store_word
from kernels.targets import python

if not config.ENABLE_CUDASIM:
    raise ImportError(
        "Numba simulates CUDA only if NUMBA_ENABLE_CUDASIM=1 was set before it was imported; set it in the environment "
        "of every rank, as collectives.spawn(..., backend='sim') does"
    )

LANES = 4  # threads of the one block that `load("execute")` launches

sys.setswitchinterval(1e-4)  # seconds; a block's threads hand the interpreter to each other all the time
_one_launch = threading.Lock()  # the simulator has one kernel at a time in a process


def sync() -> None:
    """Wait for the block's other threads. In this module, because the simulator replaces the name `cuda` only here."""
    cuda.syncthreads()


def combine(function: int, *arguments: int) -> None:
    """The reduction whose number `load` gave."""
    _reduction(function)(*arguments)


@cache
def _reduction(number: int) -> Callable[..., int]:
    return python.reduction(DTYPES[number >> 8], OPERATIONS[(number & 0xFF) - 1])


_run = bind(executor.run_channel, {**python.PRIMITIVES, "combine": combine, "sync": sync}, python.as_it_is)


@cuda.jit
def kernel(job):  # type: ignore[no-untyped-def]
    """`kernel[channels, lanes](job)` runs a job: see `kernels.executor.run_channel`."""
    _run(job, cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x, cuda.blockDim.x)


def execute(job: int, channel: int, channels: int, lane: int, lanes: int) -> int:
    """`kernels.executor.execute` for a job of one channel, by a block of LANES threads."""
    status = job + 8 * (JOB_PLACE + PLACE_STATUS)
    with _one_launch:
        store_word(status, BLOCKED)
        kernel[1, LANES](job)
        result = load_word(status)
    if result == BLOCKED:
        time.sleep(0)  # another thread may have one to launch
    return result


def load(name: str, meanwhile: Callable[[], None] | None = None) -> Native:
    """What `kernels.native.load` gives for the CPU: a function to call, or the number of a reduction. Atomics are
    the CPU's, since the simulator's hold within one process."""
    return native.load(name, meanwhile) if hasattr(atomic, name) else _load(name)


@cache
def _load(name: str) -> Native:
    if name.startswith("reduce-"):
        _, dtype, operation = name.split("-")
        return Native(python.reduction(find(dtype), operation), find(dtype).code << 8 | OPERATIONS.index(operation) + 1)
    if name == "execute":
        return Native(execute, 0)
    known: dict[Any, Any] = {executor.execute: execute}
    home = messages if hasattr(messages, name) else progress
    return Native(bind(getattr(home, name), python.PRIMITIVES, python.as_it_is, known), 0)


@cuda.jit
def _small(number, job):  # type: ignore[no-untyped-def]
    _all_reduce(number)(job, cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x, cuda.blockDim.x)


@cache
def _all_reduce(number: int) -> Callable[..., int]:
    bodies = python.small(DTYPES[number >> 8], OPERATIONS[number & 0xFF])
    return bind(lowlatency.all_reduce, {**bodies, "sync": sync}, python.as_it_is)


def small(dtype: str, operation: str) -> Callable[[int, int, int], int]:
    """`lowlatency.all_reduce` for one dtype and operation: a function of a job, of channels and of lanes."""
    number = find(dtype).code << 8 | OPERATIONS.index(operation)

    def run(job: int, channels: int, lanes: int) -> int:
        with _one_launch:
            _small[channels, lanes](number, job)
        states = load_word(job + 8 * lowlatency.JOB_STATES)
        stride = 8 * lowlatency.STATE_WORDS
        status = [load_word(states + stride * c + 8 * lowlatency.STATE_STATUS) for c in range(channels)]
        store_word(job + 8 * lowlatency.JOB_AGAIN, BLOCKED in status)
        return BLOCKED if BLOCKED in status else executor.DONE

    return run
