"""A short trial of each backend that could be used here: two ranks meet, reduce, and part."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import collectives
from collectives.doctor import gpus
from collectives.doctor.finding import Finding

RANKS = 2
_PATIENCE = 60.0  # seconds for a whole trial
_SIZES = (2, 1 << 18)  # float32 elements: 8 bytes and 1 MB
_CALLS = {2: 2000, 1 << 18: 200}


def examine() -> list[Finding]:
    """Try every backend that needs no more than what is here."""
    found = [shm()]
    if importlib.util.find_spec("numba_cuda") is not None:
        found.append(simulator())
    if gpus.devices().facts["count"] >= RANKS and importlib.util.find_spec("nccl") is not None:
        found.append(nccl())
    return found


def shm() -> Finding:
    """Shared memory, with times."""
    try:
        ((small, large), _) = collectives.spawn(_measure, RANKS, backend="shm", timeout=_PATIENCE)
    except Exception as error:
        return _failed("shm", error)
    what = (
        f"works: two ranks all-reduce 8 bytes in {small * 1e6:.1f} µs and 1 MB in {large * 1e6:,.0f} µs "
        f"(symmetric arrays, in place)"
    )
    facts = {"seconds": {"8": small, "1048576": large}}
    if small > 1e-3:
        advice = "milliseconds where microseconds are due: the ranks share a core, or the machine is busy"
        return Finding("backend shm", what, advice, facts=facts)
    return Finding("backend shm", what, facts=facts)


def nccl() -> Finding:
    """Two GPUs joined by NCCL: right or wrong, and no times."""
    return _tried("nccl", _reduce_on_gpus, "two GPUs all-reduce through NCCL")


def simulator() -> Finding:
    """GPU kernels in Numba's simulator: right or wrong, and no times."""
    return _tried("sim", _reduce_once, "the GPU kernels run in Numba's simulator (right, and slow: for tests)")


def _tried(backend: str, function: Callable[..., Any], works: str) -> Finding:
    """Whether two ranks get through `function`."""
    try:
        collectives.spawn(function, RANKS, backend=backend, timeout=_PATIENCE)
    except Exception as error:
        return _failed(backend, error)
    return Finding(f"backend {backend}", f"works: {works}")


def _failed(backend: str, error: Exception) -> Finding:
    """Whatever went wrong, it is what a user would meet."""
    return Finding(f"backend {backend}", f"two ranks fail: {type(error).__name__}: {error}", _REMEDY, True)


_REMEDY = "please report this, with the output of `mgpu doctor --json`"


def _measure(comm: Any) -> list[float]:
    """Median seconds of an all-reduce of each size."""
    medians = []
    for count in _SIZES:
        x = comm.zeros(count, np.float32)
        run = comm.plan("all_reduce", x, out=x)
        samples = []
        for _ in range(_CALLS[count]):
            began = time.perf_counter()
            run()
            samples.append(time.perf_counter() - began)
        medians.append(statistics.median(samples))
    _reduce_once(comm)
    return medians


def _reduce_on_gpus(comm: Any) -> None:
    import cupy

    x = cupy.full(5, comm.rank + 1, np.int64)
    comm.all_reduce(x, out=x)
    if cupy.asnumpy(x).tolist() != [3] * 5:
        raise ArithmeticError(f"all_reduce gave {cupy.asnumpy(x).tolist()}, expected threes")


def _reduce_once(comm: Any) -> None:
    x = np.arange(5, dtype=np.int64) + comm.rank
    got = comm.all_reduce(x)
    expected = np.arange(5) * comm.size + sum(range(comm.size))
    if not np.array_equal(got, expected):
        raise ArithmeticError(f"all_reduce gave {got.tolist()}, expected {expected.tolist()}")
