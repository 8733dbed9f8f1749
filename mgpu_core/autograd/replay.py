"""Forward passes that run twice: what the first run read of state that it then changed, the second reads again.

Batch norm moves its running statistics in every forward pass and its sums are rounded about the old ones, so a second
run must find the old ones and leave the new ones alone. `remember` keeps such values for as long as they are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Value = TypeVar("Value")


class _Current(threading.local):
    journal: Journal | None = None


_current = _Current()


class Journal:
    """The values that one run remembers, for its replay."""

    def __init__(self) -> None:
        self._values: list[object] = []
        self._outer = _current.journal
        self._replaying: Iterator[object] | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Inside (this thread only) is the first run."""
        with _within(self):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Inside (this thread only) is the second run, of the same code."""
        self._replaying = iter(self._values)
        try:
            with _within(self):
                yield
        finally:
            self._replaying = None


def remember(make: Callable[[], Value]) -> Value:
    """What `make` returns; in a replay, what it returned the first time."""
    journal = _current.journal
    if journal is None:
        return make()
    if journal._replaying is not None:
        return next(journal._replaying)  # type: ignore[return-value]
    with _within(journal._outer):
        value = remember(make)
    journal._values.append(value)
    return value


def is_replay() -> bool:
    """Whether this run repeats an earlier one, and must not change what lasts."""
    journal = _current.journal
    while journal is not None:
        if journal._replaying is not None:
            return True
        journal = journal._outer
    return False


@contextmanager
def _within(journal: Journal | None) -> Iterator[None]:
    before, _current.journal = _current.journal, journal
    try:
        yield
    finally:
        _current.journal = before
