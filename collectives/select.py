"""Which algorithm for which call: a pure function of what all ranks agree on."""

from __future__ import annotations

ONE_SHOT_BYTES = 4096  # up to here one step with more bytes beats two steps with fewer


def choose(collective: str, size: int, nbytes: int, memory: str) -> str:
    """The name of the algorithm to use for a message of `nbytes` among `size` ranks of one host."""
    if collective in ("all_reduce", "reduce"):
        return "one_shot" if nbytes <= ONE_SHOT_BYTES else "two_shot"
    return "direct"
