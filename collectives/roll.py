"""The roll of a job's ranks: their launcher writes down who has ended, and how, and they look while they wait for
others to come. Once ranks have met they watch each other's processes; before that only the launcher knows them.

It is a page of memory without a name, which ranks inherit as a descriptor that they can only read. A process that was
not started with it, or has got another file at that descriptor, or meets at another address, has no roll, and then the
deadline has to do.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from collectives.inherit import bequest, inherited

VARIABLE = "MGPU_ROLL"
LOOK = 0.1  # seconds between two looks
_ENTRY = 4  # bytes of each rank, after the digest of the job's address: 0, or how it ended
_ENDED = 1 << 16


class Roll:
    """The launcher's end."""

    def __init__(self, address: str, size: int) -> None:
        self._writer = os.memfd_create("ranks", os.MFD_CLOEXEC)
        os.write(self._writer, _heading(address) + bytes(_ENTRY * size))
        self.reader = os.open(f"/proc/self/fd/{self._writer}", os.O_RDONLY | os.O_CLOEXEC)  # for the ranks to inherit

    @property
    def variables(self) -> dict[str, str]:
        """For the ranks' environment."""
        return bequest(VARIABLE, self.reader)

    def note(self, rank: int, status: int) -> None:
        """A rank has ended, with an exit code or by minus a signal."""
        entry = (status + _ENDED).to_bytes(_ENTRY, "little")
        os.pwrite(self._writer, entry, len(_heading("")) + rank * _ENTRY)

    def close(self) -> None:
        os.close(self._writer)
        os.close(self.reader)


def ended(address: str, ranks: Iterable[int]) -> dict[int, int]:
    """In a rank: those of these ranks of the job that meets at `address` which have ended, and their status."""
    page = b""
    if (reader := _reader()) is not None:
        with suppress(OSError):
            page = os.pread(reader, 1 << 20, 0)
    heading = _heading(address)
    if not page.startswith(heading):
        return {}
    found = {}
    for rank in ranks:
        start = len(heading) + rank * _ENTRY
        if entry := int.from_bytes(page[start : start + _ENTRY], "little"):
            found[rank] = entry - _ENDED
    return found


def describe_end(status: int) -> str:
    """How a process ended: what follows its name."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ""
    if status == -signal.SIGKILL:
        hint = " (by somebody, or by the kernel for lack of memory: see dmesg)"
    elif status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE, -signal.SIGABRT):
        hint = " (PYTHONFAULTHANDLER=1 shows where)"
    return f"was killed by {name}{hint}"


@cache
def _reader() -> int | None:
    return inherited(VARIABLE)


def _heading(address: str) -> bytes:
    return hashlib.sha256(address.encode()).digest()
