"""Asynchronous calls of a backend that makes each call in one go: a thread makes them, in the order in which they were
begun."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from collectives.backends.base import Pending


class InTurn:
    """One communicator's calls, of which none overtakes another."""

    def __init__(self) -> None:
        self._queue: ThreadPoolExecutor | None = None
        self._last: Future[tuple[int, int]] | None = None

    def run(self, make: Callable[[], None]) -> None:
        """Make a call when those before it have been made; here, if there are none."""
        if self._last is not None and not self._last.done():
            self.start(make).wait()
        else:
            make()

    def start(self, make: Callable[[], None]) -> Pending:
        """Let the thread make a call."""
        if self._queue is None:
            self._queue = ThreadPoolExecutor(1, "mgpu progress")

        def timed() -> tuple[int, int]:
            began = time.monotonic_ns()
            make()
            return began, time.monotonic_ns()

        self._last = self._queue.submit(timed)
        return _Queued(self._last)

    def forget(self) -> None:
        """This process is a fork: the thread is not here."""
        self._queue = None

    def close(self) -> None:
        """Return when all calls have been made."""
        if self._queue is not None:
            self._queue.shutdown()


class _Queued(Pending):
    """A call that a communicator's own thread makes after those before it."""

    def __init__(self, future: Future[tuple[int, int]]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return self._future.done()

    def times(self) -> tuple[int, int]:
        return self._future.result()
