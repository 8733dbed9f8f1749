"""Any backend with every call noted in a timeline: see `collectives.timeline`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from collectives.backends.around import Around
from collectives.backends.base import Backend, Pending
from collectives.call import Call, describe
from collectives.timeline import COMMUNICATION, COMPUTE, Timeline


class Traced(Around):
    """`inner`, with its calls noted."""

    def __init__(self, inner: Backend, timeline: Timeline) -> None:
        super().__init__(inner)
        self._timeline = timeline

    def run(self, call: Call, source: Any, target: Any) -> None:
        self._note(describe(call.signature()), lambda: self._inner.run(call, source, target))

    def start(self, call: Call, source: Any, target: Any) -> Pending:
        return _Noted(self._inner.start(call, source, target), describe(call.signature()), self._timeline)

    def plan(self, call: Call, source: Any, target: Any) -> Callable[..., None]:
        plan, name = self._inner.plan(call, source, target), describe(call.signature())
        return lambda keep=None: self._note(name, lambda: plan(keep))

    def exchange(self, sends: Sequence[tuple[Any, int, int]], receives: Sequence[tuple[Any, int, int]]) -> None:
        told = [f"send to {peer}" for _, peer, _ in sends] + [f"recv from {peer}" for _, peer, _ in receives]
        self._note(", ".join(told), lambda: self._inner.exchange(sends, receives))

    def wait_signal(self, rank: int) -> None:
        self._note(f"wait_signal({rank})", lambda: self._inner.wait_signal(rank))

    def split(self, color: int | None, key: int) -> Backend | None:
        child = self._inner.split(color, key)
        return None if child is None else Traced(child, self._timeline)

    def survivors(self) -> Backend:
        return Traced(self._inner.survivors(), self._timeline)

    def close(self) -> None:
        self._inner.close()
        self._timeline.write()

    def _note(self, name: str, run: Callable[[], None]) -> None:
        began = time.monotonic_ns()
        run()
        self._timeline.note(name, "communication", COMPUTE, began, time.monotonic_ns())


class _Noted(Pending):
    """A call under way, which is noted when its end is first seen."""

    def __init__(self, inner: Pending, name: str, timeline: Timeline) -> None:
        self._inner, self._name, self._timeline = inner, name, timeline
        self._seen = False

    def wait(self) -> None:
        self._inner.wait()
        self._see()

    def done(self) -> bool:
        ended = self._inner.done()
        if ended:
            self._see()
        return ended

    def times(self) -> tuple[int, int]:
        return self._inner.times()

    def _see(self) -> None:
        if not self._seen:
            self._seen = True
            self._timeline.note(self._name, "communication", COMMUNICATION, *self._inner.times())
