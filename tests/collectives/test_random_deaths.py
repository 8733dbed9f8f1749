"""Ranks that are killed or stopped at random moments, from their start on, while all meet, allocate, compile, split,
call, send, signal, close and meet again: the others say so, and nothing is left. A few by default; under `slow`
hundreds, and then the time counts too."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from survivors import Outcome, now_it_happens

from collectives import launch, ranks
from kernels import native

pytestmark = pytest.mark.usefixtures("nothing_shared_left")
PROMISED = 2.0  # seconds from a death, or from a deadline, until everybody has raised
DEADLINE = 3.0  # of the calls of ranks that wait for one that is stopped
PATIENCE = 60.0  # of those that wait for one that is killed: never used up


class Event(NamedTuple):
    """What a signal to one of several ranks came to."""

    seed: int
    size: int
    victim: int
    pid: int
    code: int
    outcomes: dict[int, Outcome]

    def check(self, kind: str) -> float:
        """All others have raised an error of this kind that names the victim; after how many seconds."""
        assert sorted(self.outcomes) == [rank for rank in range(self.size) if rank != self.victim], self
        for outcome in self.outcomes.values():
            assert outcome.kind == kind, self
            assert re.search(rf"\bprocess {self.pid}\b|\brank {self.victim}\b", outcome.text), self
        return max(outcome.seconds for outcome in self.outcomes.values())


def happens(monkeypatch: pytest.MonkeyPatch, number: int, seed: int, folder: Path, within: float = 2.5) -> Event:
    """Start ranks as `mgpu run` does, and send a random one this signal at a random moment: of their start and what
    comes then, or, for odd seeds, of what comes when they have met first."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 3, 4])
    victim, moment = draw.randrange(size), within * draw.random()
    folder.mkdir()
    script = folder / "rank.py"
    timeout = PATIENCE if number == signal.SIGKILL else DEADLINE
    script.write_text(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import busy; busy.live({seed}, {timeout})"
    )
    monkeypatch.setenv("SURVIVORS", str(folder))  # by which we know our ranks
    grace = 4.0 if number == signal.SIGSTOP else 30.0  # one that still starts shall see the death, and not be ended
    monkeypatch.setattr(launch, "GRACE", grace)
    monkeypatch.setattr(ranks, "GRACE", grace)
    found: list[int] = []

    over = threading.Event()

    def strike() -> None:
        while seed % 2 and not (folder / "met").exists() and not over.is_set():
            time.sleep(0.01)
        time.sleep(moment)
        while not (pids := _processes(folder, victim)):
            if over.is_set():
                return  # and nothing was found
            time.sleep(0.01)
        found.append(pids[0])
        now_it_happens()
        os.kill(pids[0], number)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        code = launch.main(["-n", str(size), str(script)])
    finally:
        over.set()
        thread.join()
    assert not _processes(folder), "processes are left"
    assert found, "the ranks have ended before anything happened"
    outcomes = {int(path.stem): Outcome(*json.loads(path.read_text())) for path in folder.glob("*.json")}
    return Event(seed, size, victim, found[0], code, outcomes)


def _processes(folder: Path, rank: int | None = None) -> list[int]:
    """Processes that have inherited this folder's name; of one rank only, if it is given."""
    wanted = {f"SURVIVORS={folder}".encode()} | ({f"MGPU_RANK={rank}".encode()} if rank is not None else set())
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                environ = Path("/proc", name, "environ").read_bytes().split(b"\0")
                if wanted <= set(environ):
                    pids.append(int(name))
    return pids


def kills(monkeypatch: pytest.MonkeyPatch, seeds: range, folder: Path, within: float = 2.5) -> list[float]:
    seconds = []
    for seed in seeds:
        event = happens(monkeypatch, signal.SIGKILL, seed, folder / str(seed), within)
        assert event.code == 128 + signal.SIGKILL, event
        seconds.append(event.check("PeerLostError"))
    return seconds


def stops(monkeypatch: pytest.MonkeyPatch, seeds: range, folder: Path) -> list[float]:
    seconds = []
    for seed in seeds:
        event = happens(monkeypatch, signal.SIGSTOP, seed, folder / str(seed))
        assert event.code == 1, event  # of a rank that gave up
        seconds.append(event.check("CollectiveTimeoutError"))
    return seconds


def told(what: str, seconds: list[float]) -> str:
    median, most = sorted(seconds)[len(seconds) // 2], max(seconds)
    number = seconds.index(most) + 1
    return f"{len(seconds)} {what}: the last survivor raised after {median:.2f} s, at most {most:.2f} (number {number})"


def test_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(told("kills", kills(monkeypatch, range(2), tmp_path)))


def test_a_rank_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(told("stops", stops(monkeypatch, range(1), tmp_path)))


@pytest.fixture
def compiled() -> None:
    """All that the ranks use: who compiles makes its call, and begins to wait, only afterwards."""
    for name in ("execute_on", "short_way", "message_way", "advance", "submit", "serve", "complete", "settle"):
        native.load(name)
    for dtype in ("float32", "float64", "int32", "int64"):
        for op in ("sum", "max", "avg"):
            native.load(f"reduce-{dtype}-{op}")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("piece", range(8))
def test_two_hundred_deaths(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = kills(monkeypatch, range(1000 + 25 * piece, 1025 + 25 * piece), tmp_path)
    print(told("kills", seconds))
    assert max(seconds) < PROMISED


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("piece", range(5))
def test_fifty_stops(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = stops(monkeypatch, range(2000 + 10 * piece, 2010 + 10 * piece), tmp_path)
    print(told("stops", seconds))
    assert max(seconds) < DEADLINE + PROMISED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deaths_in_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing compiled before. Who compiles sees a death afterwards, and so does who waits for that: no time is
    promised here."""
    seconds = []
    for seed in range(3000, 3008):
        monkeypatch.setenv("MGPU_CACHE", str(tmp_path / f"cache {seed}"))
        seconds += kills(monkeypatch, range(seed, seed + 1), tmp_path, within=10.0)
    print(told("kills", seconds))
