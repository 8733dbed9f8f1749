"""What each collective promises: who brings which part of the data, who must end up with which, and where it lies.

The data of a call is cut into *chunks*. A collective has a fixed set of blocks (one for all_reduce, one per rank for
all_gather, one per ordered pair of ranks for all_to_all ...) and a program may cut every block into `parts`; chunk
number = block * parts + part. A chunk's number is also its place in the tables of INPUT and OUTPUT positions, so that
"chunk 3 of rank 5's output" needs no further look-up, and in an in-place call the input and output places of equal
number are the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.wording import counted

CACHE_LINE = 64  # bytes; parts begin on multiples of it, so that no two ranks write one line

Counts = int | Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.integer]
RankOf = Callable[[int, int, int], int]  # (block, size, root) -> the rank concerned


class Terms(NamedTuple):
    """One collective's terms: which rank brings a block and which wants it; None means that every rank does.

    `axes`: 0 if there is one block, 1 if one per rank, 2 if one per (source, destination). `input_axis`: along which of
    these axes one rank's input blocks follow one another in memory, None if it has just one; `output_axis` likewise.
    """

    axes: int
    source: RankOf | None
    target: RankOf | None
    input_axis: int | None = None
    output_axis: int | None = None


def _root(block: int, size: int, root: int) -> int:
    return root


def _owner(block: int, size: int, root: int) -> int:
    return block


def _first_of_pair(block: int, size: int, root: int) -> int:
    return block // size


def _second_of_pair(block: int, size: int, root: int) -> int:
    return block % size


COLLECTIVES: dict[str, Terms] = {
    "all_reduce": Terms(0, None, None),
    "reduce": Terms(0, None, _root),
    "broadcast": Terms(0, _root, None),
    "send_recv": Terms(0, _root, None),  # between two ranks: the root sends, the other receives
    "all_gather": Terms(1, _owner, None, output_axis=0),
    "reduce_scatter": Terms(1, None, _owner, input_axis=0),
    "gather": Terms(1, _owner, _root, output_axis=0),
    "scatter": Terms(1, _root, _owner, input_axis=0),
    "all_to_all": Terms(2, _first_of_pair, _second_of_pair, input_axis=1, output_axis=0),
    "barrier": Terms(1, _owner, None, output_axis=0),  # an all-gather of nothing, or not even that (parts = 0)
}


@dataclass(frozen=True)
class Contract:
    """The promise of one collective among `size` ranks, its blocks cut into `parts`.

    Sets of ranks are bit masks: bit r stands for rank r's contribution.
    """

    collective: str
    size: int
    root: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ValueError(f"no collective is called {self.collective!r}; there are {', '.join(COLLECTIVES)}")
        if self.size < 1 or (self.collective == "send_recv" and self.size != 2):
            raise ValueError(f"{self.collective} cannot be among {counted(self.size, 'rank')}")
        if not 0 <= self.root < self.size:
            raise ValueError(f"root {self.root} is not a rank: expected 0 to {self.size - 1}")
        if self.parts < (0 if self.collective == "barrier" else 1):
            raise ValueError(f"a block is cut into at least 1 part, not {self.parts}")

    @property
    def terms(self) -> Terms:
        return COLLECTIVES[self.collective]

    @property
    def reduces(self) -> bool:
        """Whether what is wanted is the reduction over all ranks (else a copy of what one rank brings)."""
        return self.terms.source is None

    @property
    def shape(self) -> tuple[int, ...]:
        """The blocks' shape: (), (size,) or (size, size)."""
        return (self.size,) * self.terms.axes

    @property
    def blocks(self) -> int:
        return self.size**self.terms.axes

    @property
    def chunks(self) -> int:
        return self.blocks * self.parts

    @property
    def everyone(self) -> int:
        return (1 << self.size) - 1

    def brings(self, rank: int) -> tuple[int, ...]:
        """The chunks of which `rank`'s INPUT holds its contribution."""
        return self._brings[rank]

    def wants(self, rank: int) -> dict[int, int]:
        """For each chunk that must end up in `rank`'s OUTPUT, the set of contributions it must hold.

        A broadcast is in place by nature: its root has what the others want, and wants nothing.
        """
        return self._wants[rank]

    @cached_property
    def _brings(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(chunks) for chunks in self._by_rank(self.terms.source))

    @cached_property
    def _wants(self) -> tuple[dict[int, int], ...]:
        wanted = self._by_rank(self.terms.target)
        if self.reduces:
            return tuple(dict.fromkeys(chunks, self.everyone) for chunks in wanted)
        origin = {chunk: rank for rank in range(self.size) for chunk in self.brings(rank)}
        already = self.root if self.terms.axes == 0 else None
        return tuple(
            {chunk: 1 << origin[chunk] for chunk in chunks if rank != already} for rank, chunks in enumerate(wanted)
        )

    def _by_rank(self, rank_of: RankOf | None) -> list[list[int]]:
        concerned: list[list[int]] = [[] for _ in range(self.size)]
        for block in range(self.blocks):
            chunks = range(block * self.parts, (block + 1) * self.parts)
            for rank in range(self.size) if rank_of is None else (rank_of(block, self.size, self.root),):
                concerned[rank] += chunks
        return concerned


class Geometry(NamedTuple):
    """Where a call's chunks lie, in elements: three int64 arrays of shape (chunks,), the same on every rank.

    `inputs[c]` is where chunk c starts in the INPUT of a rank that brings it; `outputs[c]` where it starts in the
    OUTPUT of a rank that wants it.
    """

    lengths: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]


def split(count: int, parts: int, itemsize: int = 1) -> npt.NDArray[np.int64]:
    """The bounds, int64 of shape (parts + 1,), that cut `count` elements of `itemsize` bytes into nearly equal parts.

    Bounds are whole cache lines from the start, so parts differ by a line at most (and the last is cut short); when
    there are fewer lines than parts, some parts are empty.
    """
    unit = max(1, CACHE_LINE // itemsize)
    lines = -(-count // unit)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * lines // max(parts, 1) * unit, count)


def geometry(contract: Contract, counts: Counts, itemsize: int = 1) -> Geometry:
    """Lay out one call. `counts`, in elements of `itemsize` bytes:

    - all_reduce, reduce, broadcast, send_recv: the array's length;
    - all_gather, gather, reduce_scatter, scatter: the length of one rank's block, or `size` of them when uneven;
    - all_to_all: the length of what any rank sends any other, or counts[source][destination] when uneven;
    - barrier: 0.

    A rank of an uneven all_to_all that knows only its own row and column may leave zeros elsewhere, and then has its
    own starts right. Raises ValueError when `counts` has another shape or a negative entry.
    """
    given = np.asarray(counts, dtype=np.int64)
    if given.shape not in ((), contract.shape) or (given < 0).any():
        several = f", or an array of shape {contract.shape} of them" if contract.shape else ""
        raise ValueError(f"counts of {contract.collective}: expected a count >= 0{several}; got {counts!r}")
    block_lengths = np.broadcast_to(given, contract.shape)

    def starts(axis: int | None) -> npt.NDArray[np.int64]:
        one_after_another = block_lengths * 0 if axis is None else np.cumsum(block_lengths, axis) - block_lengths
        return np.asarray(one_after_another, dtype=np.int64).reshape(-1, 1)

    bounds = [split(length, contract.parts, itemsize) for length in block_lengths.ravel().tolist()]
    within = np.array(bounds, dtype=np.int64).reshape(contract.blocks, contract.parts + 1)
    return Geometry(
        np.diff(within, axis=1).ravel(),
        (starts(contract.terms.input_axis) + within[:, :-1]).ravel(),
        (starts(contract.terms.output_axis) + within[:, :-1]).ravel(),
    )
