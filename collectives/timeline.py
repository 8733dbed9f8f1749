"""A timeline of what every rank computes and communicates, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

MGPU_TIMELINE=trace.json, or --timeline trace.json of `mgpu run` and `mgpu train`, makes every rank note when each call
and each `span` began and ended, and add its notes to that one file in the end: in Chrome's trace event format, a rank
as a process, computation and communication as its threads. `mgpu timeline trace.json` sums them up. (A timeline of
all ranks in this format is Horovod's idea.)
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE, COMMUNICATION = 0, 1  # the threads of a rank; a call that blocks its rank is noted with its computation
NAMES = {COMPUTE: "computation", COMMUNICATION: "communication"}
_FLUSH = 20_000  # events kept in memory


class Event(NamedTuple):
    """What happened from `began` to `ended`, nanoseconds of time.monotonic_ns, on the thread `lane`."""

    name: str
    category: str
    lane: int
    began: int
    ended: int


class Timeline:
    """One rank's notes."""

    def __init__(self, path: Path, rank: int) -> None:
        """Rank 0's begins the file anew, so it must be made before others' are full or closed."""
        self.path, self.rank = path, rank
        self._events: list[Event] = []
        self._shift = _wall_clock()
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        self._entries = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
            *({"name": "thread_name", "ph": "M", "pid": rank, "tid": k, "args": {"name": v}} for k, v in NAMES.items()),
        ]
        atexit.register(self.write)

    def note(self, name: str, category: str, lane: int, began: int, ended: int) -> None:
        """Note an event."""
        self._events.append(Event(name, category, lane, began, ended))
        if len(self._events) >= _FLUSH:
            self.write()

    def write(self) -> None:
        """Add what has been noted to the file, which is whole JSON before and after."""
        events, self._events = self._events, []
        entries, self._entries = self._entries + [self._entry(event) for event in events], []
        if not entries:
            return
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        with open(self.path, "r+" if self.path.exists() else "w+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - len("\n]\n"))
                file.write(f",\n{lines}\n]\n")
            else:
                file.write(f"[\n{lines}\n]\n")

    def _entry(self, event: Event) -> dict[str, Any]:
        began, took = (event.began + self._shift) / 1000, (event.ended - event.began) / 1000  # microseconds
        return {
            "name": event.name, "cat": event.category, "ph": "X", "pid": self.rank, "tid": event.lane, "ts": began,
            "dur": took,
        }  # fmt: skip


_timeline: Timeline | None = None


def begin(rank: int) -> Timeline | None:
    """This process's timeline, if the environment asks for one."""
    global _timeline
    path = os.environ.get("MGPU_TIMELINE")
    if path and _timeline is None:
        _timeline = Timeline(Path(path), rank)
    return _timeline


@contextmanager
def span(name: str, category: str = "compute") -> Iterator[None]:
    """Note what is done inside, if there is a timeline; else this costs about a microsecond."""
    if _timeline is None:
        yield
        return
    began = time.monotonic_ns()
    try:
        yield
    finally:
        _timeline.note(name, category, COMPUTE, began, time.monotonic_ns())


def _wall_clock() -> int:
    """Nanoseconds to add to time.monotonic_ns for the time of day, which hosts share more or less."""
    best, shift = 1 << 62, 0
    for _ in range(20):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < best:
            best, shift = after - before, wall - (before + after) // 2
    return shift
