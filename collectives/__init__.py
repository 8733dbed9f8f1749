"""Who talks to whom: programs, proofs, communicators, backends, buckets and point-to-point messages.

    import collectives
    comm = collectives.init()      # under `mgpu run`, torchrun, mpirun or srun; or collectives.spawn(function, 4)
    comm.all_reduce(array, out=array)

Names are imported when first used, so that `import collectives` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectives.installation import check_ours

if TYPE_CHECKING:
    from collectives.algorithms import algorithm
    from collectives.bucket import Bucketer
    from collectives.builder import Chunks, Share
    from collectives.call import PremulSum, premul_sum
    from collectives.communicator import Communicator, Work
    from collectives.cost import Topology, predict
    from collectives.errors import (
        CollectiveError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        PeerLostError,
        ProgramError,
    )
    from collectives.initialise import init, init_all
    from collectives.launch import spawn
    from collectives.lowering import build
    from collectives.program import Program
    from collectives.verify import verify

check_ours("kernels")

_HOMES = {
    "Bucketer": "bucket",
    "Chunks": "builder",
    "Share": "builder",
    "algorithm": "algorithms",
    "PremulSum": "call",
    "premul_sum": "call",
    "Communicator": "communicator",
    "Work": "communicator",
    "Topology": "cost",
    "predict": "cost",
    "CollectiveError": "errors",
    "CollectiveMismatchError": "errors",
    "CollectiveTimeoutError": "errors",
    "PeerLostError": "errors",
    "ProgramError": "errors",
    "init": "initialise",
    "init_all": "initialise",
    "spawn": "launch",
    "build": "lowering",
    "Program": "program",
    "verify": "verify",
}

__all__ = [
    "Bucketer",
    "Chunks",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Communicator",
    "PeerLostError",
    "PremulSum",
    "Program",
    "ProgramError",
    "Share",
    "Topology",
    "Work",
    "algorithm",
    "build",
    "init",
    "init_all",
    "predict",
    "premul_sum",
    "spawn",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"collectives.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
