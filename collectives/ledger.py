"""What each rank has put into its streams, written down in memory that all of them see: calls are compared beside the
streams, while nobody waits.

A rank writes the descriptor of each call into a page of its own. Whoever comes to a call that another has begun before
compares the two; so, of ranks that differ, the later one finds it. Entries carry a check sum, since nothing else orders
what two ranks write and read here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.call import describe
from collectives.errors import CollectiveMismatchError
from kernels.executor import SIGNATURE_WORDS

ROWS = 1024  # calls that a rank may be ahead of another
_WORDS = 8  # of a row: the call's number, its signature, a check sum
_CHECK = 1 + SIGNATURE_WORDS
_BEGUN, _ENDED = 0, 1  # words of the row before the first
NBYTES = (1 + ROWS) * _WORDS * 8

Page = npt.NDArray[np.int64]


class Ledger:
    """Every rank's page: int64 of shape (1 + ROWS, 8), zero at first. `own` is the number of this rank; `memory` what
    the pages live as long as."""

    def __init__(self, pages: Sequence[npt.NDArray[Any]], own: int, memory: object = None) -> None:
        self._memory = memory
        self._pages: list[Page] = [page.view(np.int64).reshape(1 + ROWS, _WORDS) for page in pages]
        self._own = own
        self._compared = [0] * len(pages)  # up to which call, with each rank

    def begin(self, signature: Sequence[int] | None) -> int:
        """Write down this rank's next call, or only that there is one, and return its number. With a signature, nobody
        may be ROWS calls behind."""
        page = self._pages[self._own]
        number = int(page[0, _BEGUN]) + 1
        if signature is not None:
            row = page[1 + number % ROWS]
            row[:_CHECK] = (number, *signature)
            row[_CHECK] = _sum(row)
        page[0, _BEGUN] = number
        return number

    def end(self, number: int) -> None:
        """This rank's calls up to this one have ended."""
        self._pages[self._own][0, _ENDED] = number

    def begun(self, rank: int) -> int:
        """Calls that a rank has begun."""
        return int(self._pages[rank][0, _BEGUN])

    def ended(self, rank: int) -> int:
        """Calls that a rank's GPU is known to have ended."""
        return int(self._pages[rank][0, _ENDED])

    def behind(self) -> list[int]:
        """Ranks that have to begin another call before this one may."""
        next_ = self.begun(self._own) + 1
        return [rank for rank in range(len(self._pages)) if next_ - self.begun(rank) > ROWS]

    def compare(self) -> None:
        """Compare what is new since the last time. Raises CollectiveMismatchError that says who called what."""
        for rank in range(len(self._pages)):
            while self._compared[rank] < min(self.begun(self._own), self.begun(rank)):
                number = self._compared[rank] + 1
                mine, theirs = self._signature(self._own, number), self._signature(rank, number)
                if theirs is None and number > self.begun(rank) - ROWS:
                    break  # being written
                if mine and theirs and mine != theirs:
                    raise CollectiveMismatchError(f"the ranks disagree in call {number}: {self._told(number)}")
                self._compared[rank] = number

    def arrivals(self, number: int) -> str:
        """Who has begun a call and who has not, and what each did last."""
        ranks = range(len(self._pages))
        late = [rank for rank in ranks if self.begun(rank) < number]
        absent = f"{', '.join(f'rank {rank}' for rank in late) or 'nobody'} did not begin it"
        return "; ".join([absent, *(f"rank {rank} has begun {self._last(rank)}" for rank in ranks)])

    def _last(self, rank: int) -> str:
        number = self.begun(rank)
        signature = self._signature(rank, number)
        return f"call {number}" + (f", {describe(signature)}" if signature else "")

    def _told(self, number: int) -> str:
        groups: dict[str, list[str]] = {}
        for rank in range(len(self._pages)):
            if signature := self._signature(rank, number):
                groups.setdefault(describe(signature), []).append(f"rank {rank}")
        return "; ".join(f"{', '.join(ranks)} called {what}" for what, ranks in groups.items())

    def _signature(self, rank: int, number: int) -> tuple[int, ...] | None:
        """What a rank called, if it has been written and not been overwritten."""
        row = self._pages[rank][1 + number % ROWS].copy()
        return tuple(row[1:_CHECK].tolist()) if row[0] == number and row[_CHECK] == _sum(row) else None


def _sum(row: Page) -> int:
    return zlib.crc32(struct.pack(f"{_CHECK}q", *row[:_CHECK].tolist()))
