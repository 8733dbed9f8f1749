"""Which algorithm for which call: a pure function of what all ranks agree on."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from collectives.cost import Seconds, Topology, predict, slices_of
from collectives.lowering import Memory, build
from collectives.memory import SLOTS
from collectives.program import Program
from kernels.executor import MOST_SCALED

ONE_SHOT_BYTES = 4096  # up to here one step with more bytes beats two steps with fewer
CANDIDATES = {
    "all_reduce": ("one_shot", "two_shot"),
    "reduce": ("one_shot", "two_shot"),
    "broadcast": ("direct", "scatter_all_gather"),
}


def choose(
    collective: str,
    size: int,
    nbytes: int,
    memory: Memory,
    op: str = "sum",
    tuned: Topology | None = None,
    slot: int | None = None,
) -> str:
    """The name of the algorithm to use for a message of `nbytes` among `size` ranks of one host.

    `tuned`: what `mgpu tune` has measured there, if it has; then the model says which takes least time, in scratch
    slots of `slot` bytes.
    """
    if op == "premul_sum" and size > MOST_SCALED:
        return "chain" if collective == "reduce" else "ring"
    if collective not in CANDIDATES:
        return "direct"
    if tuned is not None:
        here = replace(tuned, hosts=(size,))
        return min(CANDIDATES[collective], key=lambda it: predicted(collective, it, nbytes, memory, here, slot=slot))
    if collective == "broadcast":
        return "direct"
    return "one_shot" if nbytes <= ONE_SHOT_BYTES else "two_shot"


def predicted(
    collective: str,
    algorithm: str,
    nbytes: int,
    memory: Memory,
    topology: Topology,
    *,
    in_place: bool = False,
    slot: int | None = None,
) -> Seconds:
    """`predict` for the program that would run: the shorter one, if one slice holds the message."""
    program = _program(collective, algorithm, topology.size, memory, False)
    if slices_of(program, nbytes, slot) > 1:
        program = _program(collective, algorithm, topology.size, memory, True)
    return predict(program, nbytes, topology, in_place=in_place, slot=slot)


@lru_cache(maxsize=64)
def _program(collective: str, algorithm: str, size: int, memory: Memory, pipelined: bool) -> Program:
    """What would run, if it were proven: as `programs.for_call` has it."""
    return build(collective, algorithm, size, memory=memory, slots=SLOTS, pipelined=pipelined)
