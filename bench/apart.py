"""A check in a process of its own, with a deadline: one that crashes, or hangs on the GPU, is a row of the table, and
the checks after it begin with a GPU that nothing has been done to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import format_exc

_LAST_WORDS = 5.0  # seconds that a process which is told to abort has to say where it is
_TAIL = 8000  # characters of what a process has said that are kept


@dataclass
class Row:
    """One line of the table. `wrong`: cases that gave other bytes than the CPU; -1 for a check that was not run.
    `details`: what a failure can be mended from, for the JSON file."""

    check: str
    ranks: int
    cases: int
    wrong: int
    seconds: float
    note: str = ""
    details: str = ""


def attempt(name: str, ranks: int, make: Callable[[], Sequence[Row]]) -> list[Row]:
    """The rows that `make` gives, or one for what it raises."""
    begun = time.monotonic()
    try:
        return list(make())
    except Exception as error:
        note = f"{type(error).__name__}: {error}"
        return [Row(name, ranks, 1, 1, time.monotonic() - begun, note, format_exc())]


def write(rows: Sequence[Row], path: str | Path) -> None:
    """For `run` to read."""
    Path(path).write_text(json.dumps([asdict(row) for row in rows]))


def run(name: str, ranks: int, command: Sequence[str], limit: float) -> list[Row]:
    """The rows that a command writes into the file whose name it is given as its last argument; one that tells of its
    end if it writes none. After `limit` seconds it is told to abort, and killed with all of its session."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        said, rows = Path(folder, "said"), Path(folder, "rows.json")
        with open(said, "wb") as output:
            process = subprocess.Popen(
                [*command, str(rows)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        problem = ""
        try:
            status = process.wait(limit)
            if not rows.exists():
                how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
                problem = f"its process ended {how}"
        except subprocess.TimeoutExpired:
            problem = f"it had not ended after {limit:.0f} s"
            process.send_signal(signal.SIGABRT)
            try:
                process.wait(_LAST_WORDS)
            except subprocess.TimeoutExpired:
                pass
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if not problem:
            return [Row(**row) for row in json.loads(rows.read_text())]
        tail = said.read_text(errors="replace")[-_TAIL:]
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "nothing")
    note = f"{problem}; it said last: {last.strip()[:200]}"
    return [Row(name, ranks, 1, 1, time.monotonic() - begun, note, tail)]
