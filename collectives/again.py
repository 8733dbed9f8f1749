"""Calls that are made again: what the short way of `kernels/again.py` knows of them, filled in from Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from collectives.arrays import Array
from collectives.backends.base import Backend, Ready
from collectives.call import Call, PremulSum
from collectives.table import Table
from kernels import again as layout
from kernels import native

Terms = tuple[str, object, object, object, object]  # collective, op, root, algorithm, async_op


@dataclass
class Known:
    """A call that was made. Calls like it have x for a source and out for a target, where this rank has such."""

    call: Call
    has_source: bool
    has_target: bool
    shape: tuple[int, ...] | None  # of a new array for the result, if such a call was made
    dtype: np.dtype[Any]
    jobs: dict[int, Ready] = field(default_factory=dict)  # by address

    def arrays(self, x: Array, out: Array) -> tuple[Array | None, Array | None]:
        """Source and target."""
        return x if self.has_source else None, out if self.has_target else None


class Again:
    """One communicator's table. `call` is `native.short_way`, which takes the communicator's lock, by `acquire` and
    `release`; whoever else touches the table holds it."""

    def __init__(self, backend: Backend, acquire: Callable[[], bool], release: Callable[[], None]) -> None:
        self._table = Table(layout.TABLE_ROWS + layout.MOST_ROWS * layout.ROW_WORDS, backend, acquire, release)
        self._rows = self._table.words[layout.TABLE_ROWS :].reshape(layout.MOST_ROWS, layout.ROW_WORDS)
        self._terms: list[Terms] = []  # whose addresses are in the table
        self.known: list[Known] = []
        self.pending = self._table.pending
        self.call = native.short_way(self._table.address)

    def learn(self, known: Known, terms: Terms, x: Array, count: int, ahead: int | None) -> bool:
        """Remember a call, if there is room: whether there is.

        x: like the call's; `count`: elements of out; `ahead`: bytes from out's beginning to x's in a call in place,
        None if there is no such.
        """
        terms = the_one_object(terms)
        if x.ndim > layout.MOST_DIMS or not all(map(_has_one, terms)):
            return True
        header = object.__basicsize__
        found = layout.find_row(self._table.address, id(x) + header, *map(id, terms))
        if found >= 0:
            if known.shape is not None:
                self.known[found].shape = known.shape
                self._rows[found, layout.ROW_FRESH] = 1
            return True
        number = len(self.known)
        if number == layout.MOST_ROWS:
            return False
        self.known.append(known)
        self._terms.append(terms)
        row = self._rows[number]
        row[: layout.ROW_DTYPE] = [id(term) for term in terms]
        row[layout.ROW_DTYPE] = layout.dtype_of(self._table.address, id(x) + header)
        row[layout.ROW_BYTES] = x.nbytes
        row[layout.ROW_OUT_COUNT], row[layout.ROW_OUT_BYTES] = count, count * x.itemsize
        row[layout.ROW_AHEAD] = layout.NEVER if ahead is None else ahead
        row[layout.ROW_FRESH] = known.shape is not None
        row[layout.ROW_NDIM] = x.ndim
        row[layout.ROW_DIMS : layout.ROW_DIMS + x.ndim] = x.shape
        self._table.words[layout.TABLE_SLOTS + ~found] = number + 1
        return True

    def lacks_job(self, number: int, symmetric: int) -> bool:
        """Whether a call has no job for arrays that all are in symmetric memory, or not."""
        return not self._rows[number, layout.ROW_JOBS + symmetric]

    def equip(self, number: int, symmetric: int, job: Ready | None) -> None:
        """Give it one, if there is such."""
        if job is not None:
            self.known[number].jobs[job.address] = job
            self._rows[number, layout.ROW_JOBS + symmetric] = job.address

    def under_way(self, number: int) -> tuple[Ready, int]:
        """The job that a call has begun and not ended, and its status."""
        row = self._rows[number]
        return self.known[number].jobs[int(row[layout.ROW_JOB])], int(row[layout.ROW_STATUS])


def the_one_object(terms: Terms) -> Terms:
    """The same terms, each the one object by which all that are equal to it are known."""
    collective, op, root, algorithm, async_op = terms
    return collective, _the_one(op), _the_one(root), _the_one(algorithm), async_op


def _the_one(term: object) -> object:
    if isinstance(term, PremulSum):
        return _first_of_equals(term, repr(term.scale))
    if isinstance(term, str):
        return sys.intern(str.__str__(term))  # a subclass may write itself otherwise
    return int(term) if isinstance(term, np.integer) else term


@lru_cache(maxsize=64)
def _first_of_equals(op: PremulSum, scale: str) -> PremulSum:
    """`scale` tells 0.0 from -0.0, which are equal."""
    return op


def _has_one(term: object) -> bool:
    """Whether there is one object for all equal terms: of Python's integers, there is of small ones."""
    return type(term) in (str, type(None), bool, PremulSum) or (type(term) is int and 0 <= term <= 256)
