"""Programs ready to run: built, proven by rank 0, encoded for this rank, and kept."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from collectives import select
from collectives.builder import lookup
from collectives.call import Call
from collectives.contract import Geometry, geometry
from collectives.cost import Topology
from collectives.job import Encoded, Link
from collectives.lowering import Memory, build
from collectives.verify import verified
from kernels.executor import MOST_SCALED


def ready(collective: str, algorithm: str, size: int, rank: int, **options: Any) -> Encoded:
    """This rank's part of a program. Rank 0 proves it; the digest, which goes into every call's descriptor, tells the
    others that theirs is the same. `options` are `build`'s.

    Raises ProgramError, on rank 0, for an algorithm that is wrong.
    """
    return _ready(lookup(collective, algorithm), collective, algorithm, size, rank, tuple(sorted(options.items())))


def for_call(call: Call, link: Link, memory: Memory, tuned: Topology | None = None) -> tuple[Encoded, Geometry]:
    """This rank's part of the program for a call, the shorter one if one slice holds the message; and where the call's
    chunks lie. `tuned`: rank 0's constants, by which to choose the algorithm, if it has any.

    Raises as `ready`, and ValueError for a premul_sum that the algorithm makes too wide.
    """
    nbytes = call.count * call.dtype.itemsize
    algorithm = call.algorithm or select.choose(
        call.collective, link.size, nbytes, memory, call.op, tuned, link.slot_bytes
    )
    for pipelined in (False, True):
        encoded = ready(
            call.collective, algorithm, link.size, link.rank,
            memory=memory, slots=link.slots, root=call.root, pipelined=pipelined,
        )  # fmt: skip
        contract = encoded.program.contract
        counts = call.count if call.counts is None else np.reshape(call.counts, contract.shape)
        layout = geometry(contract, counts, call.dtype.itemsize)
        if link.fits_one_slice(encoded.program, layout, call.dtype):
            break
    if call.op == "premul_sum" and encoded.program.fan_in > MOST_SCALED:
        raise ValueError(
            f"premul_sum by {algorithm} among {link.size} ranks reduces {encoded.program.fan_in} contributions at "
            f"once, and {MOST_SCALED} can be scaled; choose another algorithm, such as ring"
        )
    return encoded, layout


@lru_cache(maxsize=1024)
def _ready(
    function: object, collective: str, algorithm: str, size: int, rank: int, options: tuple[tuple[str, Any], ...]
) -> Encoded:
    make = verified if rank == 0 else build
    return Encoded.of(make(collective, algorithm, size, **dict(options)), rank)
