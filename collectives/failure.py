"""Which of several ranks' failures is the cause: when one rank fails, the others fail too, of its loss.

Ranks that `spawn` started send a `Failure`; those of `mgpu run` report theirs through a pipe.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from collectives.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from collectives.inherit import bequest, inherited

VARIABLE = "MGPU_REPORT"


class RankTraceback(Exception):
    """The traceback of the rank in which an error was raised, as the cause of that error here."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """How a rank failed. when: time.monotonic, which is one clock for all processes of a host."""

    rank: int
    when: float
    error: BaseException
    weight: int
    traceback: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """For an exception caught just now; in place of one that does not survive pickling, its text."""
        when, text = time.monotonic(), "".join(traceback.format_exception(error))
        sent = error
        if isinstance(error, SystemExit):
            sent = CollectiveError(f"rank {rank} called sys.exit({error.code!r})")
        elif not _travels(error):
            sent = CollectiveError(f"{type(error).__qualname__}: {error}")
        return cls(rank, when, sent, weight(error), text)

    @property
    def order(self) -> tuple[int, float]:
        """The least is the root cause."""
        return self.weight, self.when


def weight(error: BaseException) -> int:
    """2 for the loss of a peer and what came of it, 1 for a deadline that passed, 0 for everything else."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    if any(isinstance(each, PeerLostError) for each in chain):
        return 2
    return int(any(isinstance(each, CollectiveTimeoutError) for each in chain))


class Reports:
    """The launcher's end of a pipe through which ranks say why they fail, since an exit code says nothing of causes."""

    def __enter__(self) -> Reports:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._text = b""
        self._found: dict[int, dict[str, Any]] = {}
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.reader)
        os.close(self.writer)

    @property
    def variables(self) -> dict[str, str]:
        """For the ranks' environment."""
        return bequest(VARIABLE, self.writer)

    def read(self) -> None:
        """Take in what has come."""
        with suppress(BlockingIOError):
            while True:
                self._text += os.read(self.reader, 1 << 16)
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            report = json.loads(line)
            self._found.setdefault(report["rank"], report)

    def weight(self, rank: int) -> int:
        """As `weight` above; 0 for a rank that has said nothing."""
        return int(self._found[rank]["weight"]) if rank in self._found else 0

    def reason(self, rank: int) -> str:
        """The exception that ended a rank, with a colon before it; empty for a rank that has said nothing."""
        return f": {self._found[rank]['error']}" if rank in self._found else ""


def report_failures() -> None:
    """In a rank of `mgpu run`, tell it the exception that ends this process, if one does. Called by `init`."""
    pipe = inherited(VARIABLE)
    if pipe is None:
        return
    rank, previous = int(os.environ["MGPU_RANK"]), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report = {"rank": rank, "weight": weight(error), "error": f"{kind.__name__}: {error}"[:500]}
        with suppress(OSError):
            os.write(pipe, json.dumps(report).encode() + b"\n")  # in one piece, being short
        previous(kind, error, trace)

    sys.excepthook = hook


def _travels(error: BaseException) -> bool:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return type(copy) is type(error) and str(copy) == str(error)
