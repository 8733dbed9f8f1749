"""A check in a process of its own: rows, or how it ended."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import apart
from bench.apart import Row

_WRITES = "import sys; from bench import apart; apart.write([apart.Row('programs', 2, 3, 0, 0.5, 'fine')], sys.argv[1])"


def run(code: str, limit: float = 60.0) -> Row:
    (row,) = apart.run("programs", 2, [sys.executable, "-c", code], limit)
    return row


def test_rows_come_back(tmp_path: Path) -> None:
    assert run(_WRITES) == Row("programs", 2, 3, 0, 0.5, "fine")


def test_a_process_that_crashes_is_a_failure_with_its_last_words() -> None:
    row = run("import ctypes; print('about to'); ctypes.string_at(0)")
    assert row.wrong == 1 and "its process ended by SIGSEGV" in row.note
    assert "about to" in row.details and "string_at" in row.details, "Python says where it was"
    row = run("raise SystemExit('no memory left')")
    assert row.note == "its process ended with exit code 1; it said last: no memory left"


def test_a_process_that_hangs_is_ended_and_says_where_it_was() -> None:
    row = run("import time\ndef on_the_gpu(): time.sleep(600)\non_the_gpu()", 2.0)
    assert row.wrong == 1 and row.note.startswith("it had not ended after 2 s") and "on_the_gpu" in row.details
    deaf = (
        "import os, signal, time; print('deaf', flush=True); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGABRT])"
    )
    apart_words, apart._LAST_WORDS = apart._LAST_WORDS, 0.1
    try:
        assert "deaf" in run(f"{deaf}; time.sleep(600)", 2.0).details
    finally:
        apart._LAST_WORDS = apart_words


def test_what_is_raised_is_a_row() -> None:
    def make() -> list[Row]:
        raise MemoryError("too large")

    (row,) = apart.attempt("timings", 8, make)
    assert (row.check, row.ranks, row.wrong, row.note) == ("timings", 8, 1, "MemoryError: too large")
    assert "in make" in row.details
