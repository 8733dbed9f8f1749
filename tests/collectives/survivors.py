"""Ranks of which some do not survive: what the others raise, and how soon."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import collectives
from collectives import Communicator
from collectives.errors import CollectiveError

SOON = 15.0  # seconds; two are promised, but this machine may be overloaded


class Outcome(NamedTuple):
    """What a rank's function came to: its error's class name and text, or "" and what it returned; and how long that
    took from `now_it_happens` on (-1 if that was never called)."""

    kind: str
    text: str
    seconds: float


def outcomes(fn: Callable[..., Any], size: int, folder: Path, *args: Any, timeout: float = 60.0) -> dict[int, Outcome]:
    """Run fn(comm, *args) on every rank; what each that survived came to."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        collectives.spawn(_attempt, size, (str(folder), fn, args), timeout=timeout)
    except CollectiveError:
        pass  # the one that died
    return reported(folder)


def reported(folder: Path) -> dict[int, Outcome]:
    """What the ranks have written down, by rank."""
    return {int(path.stem): Outcome(*json.loads(path.read_text())) for path in folder.glob("*.json")}


def _attempt(comm: Communicator, folder: str, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ["SURVIVORS"] = folder
    try:
        kind, text = "", str(fn(comm, *args))
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    report(comm.rank, kind, text)


def report(rank: int, kind: str, text: str, since: float = 0.0) -> None:
    """Write down what became of this rank, and how long after what happened, or after `since` if that is later."""
    folder = Path(os.environ["SURVIVORS"])
    moment = folder / "moment"
    seconds = time.monotonic() - max(since, float(moment.read_text())) if moment.exists() else -1.0
    (folder / f"{rank}.json").write_text(json.dumps([kind, text, seconds]))


def now_it_happens() -> None:
    """From here on seconds are counted; time.monotonic is one clock for all processes."""
    folder = Path(os.environ["SURVIVORS"])
    (folder / "moment.new").write_text(repr(time.monotonic()))
    (folder / "moment.new").rename(folder / "moment")


def die() -> None:
    """As by the out-of-memory killer."""
    now_it_happens()
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """As by Ctrl-Z, or on a host that hangs."""
    now_it_happens()
    os.kill(os.getpid(), signal.SIGSTOP)


def waits_for(report: Path) -> bytes:
    """A compilation that ends only after its rank has said what became of it."""
    ends = time.monotonic() + 30
    while not report.exists() and time.monotonic() < ends:
        time.sleep(0.05)
    return b""
