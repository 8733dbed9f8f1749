"""What is measured: one call of a collective, with nccl-tests' way of counting, and what comes of it on every rank.

Size is the bytes of the longer of a rank's input and output; count the elements of the array, or of one rank's block
where arrays are made of blocks. `send_recv` sends to the next rank and receives from the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.inputs import Array
from collectives.contract import COLLECTIVES

ROOTED = ("reduce", "broadcast", "gather", "scatter")
_BLOCKS_IN = ("reduce_scatter", "scatter", "all_to_all")  # the input has a block for every rank
_BLOCKS_OUT = ("all_gather", "gather", "all_to_all")
_ONE_PLACEMENT = {"broadcast": True, "all_to_all": False, "send_recv": False, "barrier": False}


@dataclass(frozen=True)
class Case:
    """One call. op: "none" where nothing is reduced; root: -1 where there is none."""

    collective: str
    nbytes: int
    count: int
    dtype: str
    op: str
    root: int
    in_place: bool


def reduces(collective: str) -> bool:
    """Whether it has an operation."""
    return COLLECTIVES[collective].source is None


def placements(collective: str) -> tuple[bool, ...]:
    """False for out of place, True for in place: both, or the only one that there is."""
    return (_ONE_PLACEMENT[collective],) if collective in _ONE_PLACEMENT else (False, True)


def blocks(collective: str, ranks: int) -> int:
    """How many counts make a size."""
    return ranks if collective in (*_BLOCKS_IN, *_BLOCKS_OUT) else 1


def views(case: Case, rank: int, ranks: int, source: Array, target: Array) -> tuple[Array, Array]:
    """This rank's input and output: parts of two one-dimensional arrays, or in place both of the first."""
    brought = case.count * (ranks if case.collective in _BLOCKS_IN else 1)
    wanted = case.count * (ranks if case.collective in _BLOCKS_OUT else 1)
    if not case.in_place:
        return source[:brought], target[:wanted]
    whole = source[: max(brought, wanted)]
    mine = whole[rank * case.count : (rank + 1) * case.count]
    return whole if brought == whole.size else mine, whole if wanted == whole.size else mine


def outcome(case: Case, rank: int, given: Array, reduced: Array) -> list[tuple[slice, Array]]:
    """The parts of this rank's output, and what each must repeat, if rank r's input repeats `given[r]`.

    `reduced` is the reduction of all of these. Nothing, for a rank that gets nothing.
    """
    count, ranks = case.count, len(given)
    everything = slice(0, count)
    if case.collective == "barrier" or (case.collective in ("reduce", "gather") and rank != case.root):
        return []
    if case.collective in ("all_reduce", "reduce"):
        return [(everything, reduced)]
    if case.collective == "reduce_scatter":
        return [(everything, _from(rank * count, reduced))]
    if case.collective == "broadcast":
        return [(everything, given[case.root])]
    if case.collective == "scatter":
        return [(everything, _from(rank * count, given[case.root]))]
    if case.collective == "send_recv":
        return [(everything, given[rank - 1])]
    first = rank * count if case.collective == "all_to_all" else 0
    return [(slice(r * count, (r + 1) * count), _from(first, given[r])) for r in range(ranks)]


def _from(element: int, block: Array) -> Array:
    """What an array that repeats the block repeats from this element on."""
    return np.roll(block, -element)
