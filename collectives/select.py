"""Which algorithm for which call: a pure function of what all ranks agree on."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from collectives.cost import Seconds, Topology, predict, slices_of
from collectives.lowering import Memory, build
from collectives.memory import SLOTS
from collectives.program import Program
from kernels.executor import MOST_SCALED

ONE_SHOT_BYTES = 4096  # up to here one step with more bytes beats two steps with fewer, if nobody has measured it


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

    `tuned`: what `mgpu tune` has measured there, if it has, for the model to say when one step stops being faster;
    `slot`: bytes of a slot of scratch.
    """
    if op == "premul_sum" and size > MOST_SCALED:
        return "chain" if collective == "reduce" else "ring"
    if collective not in ("all_reduce", "reduce"):
        return "direct"
    most = ONE_SHOT_BYTES if tuned is None else one_shot_bytes(collective, size, memory, tuned, slot)
    return "one_shot" if nbytes <= most else "two_shot"


@lru_cache(maxsize=256)
def one_shot_bytes(collective: str, size: int, memory: Memory, tuned: Topology, slot: int | None = None) -> int:
    """The largest message, a power of two that one slice holds, up to which the model prefers one step to two. It is
    asked only about what was measured: a program without scratch takes a message of any length in one slice."""
    here, nbytes = replace(tuned, hosts=(size,)), 8
    program, most = _program(collective, "one_shot", size, memory, False), tuned.own.points[-1][0]
    while 2 * nbytes <= most and slices_of(program, 2 * nbytes, slot) == 1:
        one, two = (predicted(collective, name, nbytes, memory, here, slot=slot) for name in ("one_shot", "two_shot"))
        if two < one:
            return nbytes // 2
        nbytes *= 2
    return nbytes


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
    """What would run, as `programs.for_call` has it, but for the proof."""
    return build(collective, algorithm, size, memory=memory, slots=SLOTS, pipelined=pipelined)
