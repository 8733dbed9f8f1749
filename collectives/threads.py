"""Each rank's share of this host's processors: for the thread pools of BLAS, OpenMP and Numba, and for pinning.

A pool that is as large as the machine in every rank makes ranks fight for cores; in a container it is larger than the
quota, and everybody is throttled.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from collectives import cgroup

# OpenBLAS, MKL and BLIS read their own name and then OMP_NUM_THREADS.
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMBA_NUM_THREADS")
_SETTERS = (  # of libraries that are loaded already
    ("openblas", ("openblas_set_num_threads", "openblas_set_num_threads64_", "scipy_openblas_set_num_threads64_")),
    ("libmkl_rt", ("MKL_Set_Num_Threads",)),
    ("libblis", ("bli_thread_set_num_threads",)),
    ("omp", ("omp_set_num_threads",)),  # libgomp, libomp, libiomp5
)


def share(masks: Sequence[Iterable[int]], rank: int, quota: float | None = None) -> int:
    """Threads for one of several ranks of a host, at least one.

    masks: the processors each rank may run on. One that k ranks may run on counts 1/k for each: masks that a launcher
    has made disjoint count in full, a common one is divided. quota: processors that all ranks may use together.
    """
    sharers: dict[int, int] = {}
    for mask in masks:
        for processor in mask:
            sharers[processor] = sharers.get(processor, 0) + 1
    mine = sum(1 / sharers[processor] for processor in masks[rank])
    if quota is not None:
        mine = min(mine, quota * mine / len(sharers))
    return max(1, int(mine + 1e-9))


def here(ranks: int) -> int:
    """Threads for each of `ranks` that this process is about to start, from its own affinity mask and quota."""
    return share([os.sched_getaffinity(0)] * ranks, 0, cgroup.cpu_quota())


def variables(count: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a process whose pools shall have `count` threads; what the user has set stays as it is."""
    text = environ.get("OMP_NUM_THREADS", str(count))
    return {name: text for name in VARIABLES if name not in environ}


def limit(count: int) -> None:
    """Make the pools of this process have `count` threads: of libraries loaded already and of those still to be.

    Does nothing where the user has set OMP_NUM_THREADS.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    os.environ.update(variables(count))
    for path in _loaded():
        for name, functions in _SETTERS:
            if name in path.name:
                library = ctypes.CDLL(str(path))
                for function in functions:
                    if hasattr(library, function):
                        getattr(library, function)(ctypes.c_int(count))
                        break
                break
    numba = sys.modules.get("numba")
    if numba:
        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(count)


def pins(
    ranks: int, processors: Iterable[int] | None = None, sys: Path = Path("/sys/devices/system/cpu")
) -> list[set[int]]:
    """Processors for each of `ranks` to be pinned to: neighbours by package and core, disjoint if there are enough."""
    allowed = os.sched_getaffinity(0) if processors is None else set(processors)

    def position(processor: int) -> tuple[int, int, int]:
        topology = sys / f"cpu{processor}" / "topology"
        return _number(topology / "physical_package_id"), _number(topology / "core_id"), processor

    order = sorted(allowed, key=position)
    if ranks > len(order):
        return [{order[rank % len(order)]} for rank in range(ranks)]
    bounds = [rank * len(order) // ranks for rank in range(ranks + 1)]
    return [set(order[first:last]) for first, last in zip(bounds, bounds[1:])]


def _loaded() -> list[Path]:
    """Shared libraries in this process."""
    with open("/proc/self/maps") as lines:
        fields = (line.split(maxsplit=5) for line in lines)
        paths = {words[5].strip() for words in fields if len(words) == 6 and ".so" in words[5]}
    return [Path(path) for path in sorted(paths) if os.path.exists(path)]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
