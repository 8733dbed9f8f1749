"""Where a rank's part of an array lies in the whole: what lets any number of ranks save and load the same arrays.

A parameter that is cut over the ranks of an axis of a mesh says so: `sharded_over` has the axis' name, and `placement`
which part this rank holds. Both belong to the parameter, whatever layer it is in, so norms, optimisers and checkpoints
need not know the layers.

    whole[placement.index]      what the rank holds
    placement.runs()            the same as runs of the flattened arrays, to copy, save or load by
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mgpu_core.data.sampler import part

Range = tuple[int, int]  # start and stop


@dataclass(frozen=True)
class Placement:
    """The part of an array of `shape` that has, along `axis`, the indices in `ranges`, joined in their order.

    >>> Placement((6, 2), axis=0, ranges=((1, 2), (4, 6))).local_shape
    (3, 2)
    """

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[Range, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        held = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.axis], held, *self.shape[self.axis + 1 :])

    @property
    def index(self) -> tuple[Any, ...]:
        """Indexes a whole array for the part, to read it (a copy) or to assign it."""
        held = np.concatenate([np.empty(0, np.int64), *(np.arange(*r) for r in self.ranges)])
        return (slice(None),) * self.axis + (held,)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(here, there, count): elements of the flattened part from `here` are those of the flattened whole from
        `there`. In the order of the part, and as long as they can be."""
        inner = math.prod(self.shape[self.axis + 1 :])
        here = 0
        last: tuple[int, int, int] | None = None
        for outer in range(math.prod(self.shape[: self.axis])):
            for start, stop in self.ranges:
                there = (outer * self.shape[self.axis] + start) * inner
                count = (stop - start) * inner
                if last is not None and last[1] + last[2] == there:
                    last = (last[0], last[1], last[2] + count)
                elif count:
                    if last is not None:
                        yield last
                    last = (here, there, count)
                here += count
        if last is not None:
            yield last


@dataclass(frozen=True)
class FlatPlacement:
    """Elements `start` to `stop` of a flattened array: of a whole one of `shape`, or of the part `of` one."""

    part_shape: tuple[int, ...]
    start: int
    stop: int
    of: Placement | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.part_shape if self.of is None else self.of.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this part: (stop - start,)."""
        return (self.stop - self.start,)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """As `Placement.runs`."""
        for here, there, count in [(0, 0, self.stop)] if self.of is None else self.of.runs():
            first, last = max(here, self.start), min(here + count, self.stop)
            if first < last:
                yield first - self.start, there + first - here, last - first


def even_part(count: int, rank: int, size: int) -> Range:
    """Start and stop of rank `rank`'s part of `count` things; parts differ by one at most, and may be empty."""
    return part(count, rank, [1] * size)
