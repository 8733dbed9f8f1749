"""Large loops shared among the threads that this process may use.

BLAS divides its own products; this is for the loops around them. Numba's parallel loops are not used: where neither
OpenMP nor TBB is installed, they end the process when two of its threads enter one at the same time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np

from collectives import threads

T = TypeVar("T")

_LEAST = 1 << 16  # elements for each thread: with fewer, waking it takes longer than it saves
_BLAS = (  # how many threads it has, and how many it shall have
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
)


def limit() -> int:
    """Threads that this process may use: what `collectives.init`, a launcher or the user has set, else all."""
    text = os.environ.get("OMP_NUM_THREADS")
    return int(text.split(",")[0]) if text else _processors()


def share(work: Callable[[slice], T], count: int, elements: int) -> list[T]:
    """work(part) for consecutive parts of range(count), each part in a thread of its own; the results in order.

    `elements` says how much work it is in all: a loop over few is not divided.
    """
    parts = min(elements // _LEAST, count)
    if parts > 1:
        parts = min(parts, limit())
    if parts <= 1:
        return [work(slice(0, count))]
    first, *others = (slice(count * i // parts, count * (i + 1) // parts) for i in range(parts))
    pending = [_pool(os.getpid()).submit(work, part) for part in others]
    return [work(first), *(future.result() for future in pending)]


def share_products(work: Callable[[slice], T], count: int, products: int) -> list[T]:
    """`share` for work that consists of matrix products: meanwhile each is computed by the thread that asks for it."""
    get, set_to = _blas() or (lambda: 1, lambda count: None)
    before = get()
    if before == 1:
        return share(work, count, products)
    set_to(1)
    try:
        return share(work, count, products)
    finally:
        set_to(before)


@cache
def _processors() -> int:
    return threads.here(1)


@cache
def _pool(process: int) -> ThreadPoolExecutor:  # a fork has none of its parent's threads
    return ThreadPoolExecutor(threads.here(1), thread_name_prefix="mgpu loop")


@cache
def _blas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    library = ctypes.CDLL(np.linalg._umath_linalg.__file__)
    return next(
        ((getattr(library, get), getattr(library, set_to)) for get, set_to in _BLAS if hasattr(library, get)), None
    )
