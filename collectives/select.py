"""Which algorithm for which call: a pure function of what all ranks agree on."""

from __future__ import annotations

from kernels.executor import MOST_SCALED

ONE_SHOT_BYTES = 4096  # up to here one step with more bytes beats two steps with fewer


def choose(collective: str, size: int, nbytes: int, memory: str, op: str = "sum") -> str:
    """The name of the algorithm to use for a message of `nbytes` among `size` ranks of one host."""
    if op == "premul_sum" and size > MOST_SCALED:
        return "chain" if collective == "reduce" else "ring"
    if collective in ("all_reduce", "reduce"):
        return "one_shot" if nbytes <= ONE_SHOT_BYTES else "two_shot"
    return "direct"
