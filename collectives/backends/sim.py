"""GPU kernels without a GPU: the shm backend, with CUDA's simulator in place of compiled code.

Ranks are processes that share memory, and everything around the kernels (agreement, deadlines, lost peers, messages)
is the shm backend's. What a call moves or adds is done by the GPU's executor, a block of threads, in Python: slow, for
tests. Arrays may be NumPy's or the simulator's device arrays; one over symmetric memory shares it.
"""

from __future__ import annotations

from collectives.backends.shm import Shm
from kernels.targets import sim


class Sim(Shm):
    """One communicator of simulated GPUs. NUMBA_ENABLE_CUDASIM=1 must have been set before Numba was first imported."""

    name = "sim"
    load = staticmethod(sim.load)
    short_way = False
