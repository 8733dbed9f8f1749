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
_BEGUN, _ENDED = 0, 1  # words of the row before the first
_ROW = _WORDS * 8
NBYTES = (1 + ROWS) * _ROW
_CALL = struct.Struct(f"={1 + SIGNATURE_WORDS}q")
_CHECKED = struct.Struct(f"={2 + SIGNATURE_WORDS}q")


class Ledger:
    """Every rank's page: int64 of shape (1 + ROWS, 8), zero at first. `own` is the number of this rank; `memory` what
    the pages live as long as."""

    def __init__(self, pages: Sequence[npt.NDArray[Any]], own: int, memory: object = None) -> None:
        self._memory = memory
        # Views of bytes and of words: several times as quick as NumPy for a few words, which every call costs.
        self._bytes = [page.reshape(-1).view(np.uint8).data for page in pages]
        self._words = [page.cast("q") for page in self._bytes]
        self._own = own
        self._others = [rank for rank in range(len(pages)) if rank != own]
        self._compared = [0] * len(pages)  # up to which call, with each rank

    def begin(self, signature: Sequence[int] | None) -> int:
        """Write down this rank's next call, or only that there is one, and return its number. With a signature, nobody
        may be ROWS calls behind."""
        words = self._words[self._own]
        number = words[_BEGUN] + 1
        if signature is not None:
            call = _CALL.pack(number, *signature)
            _CHECKED.pack_into(self._bytes[self._own], _at(number), number, *signature, zlib.crc32(call))
        words[_BEGUN] = number
        return number

    def end(self, number: int) -> None:
        """This rank's calls up to this one have ended."""
        self._words[self._own][_ENDED] = number

    def begun(self, rank: int) -> int:
        """Calls that a rank has begun."""
        return self._words[rank][_BEGUN]

    def ended(self, rank: int) -> int:
        """Calls that a rank's GPU is known to have ended."""
        return self._words[rank][_ENDED]

    def behind(self) -> list[int]:
        """Ranks that have to begin another call before this one may."""
        next_ = self._words[self._own][_BEGUN] + 1
        return [rank for rank in self._others if next_ - self._words[rank][_BEGUN] > ROWS]

    def compare(self) -> None:
        """Compare what is new since the last time. Raises CollectiveMismatchError that says who called what."""
        own, mine = self._words[self._own][_BEGUN], self._bytes[self._own]
        for rank in self._others:
            begun, theirs = self._words[rank][_BEGUN], self._bytes[rank]
            while self._compared[rank] < own and self._compared[rank] < begun:
                number = self._compared[rank] + 1
                start, end = _at(number), _at(number) + _CHECKED.size
                if bytes(mine[start:end]) != bytes(theirs[start:end]) and not self._excused(rank, number, begun):
                    break
                self._compared[rank] = number

    def _excused(self, rank: int, number: int, begun: int) -> bool:
        """Whether rows that differ say nothing: one has been overwritten, or none was written. False for one that is
        being written."""
        mine, theirs = self._signature(self._own, number), self._signature(rank, number)
        if theirs is None and number > begun - ROWS:
            return False
        if mine and theirs and mine != theirs:
            raise CollectiveMismatchError(f"the ranks disagree in call {number}: {self._told(number)}")
        return True

    def arrivals(self, number: int) -> str:
        """Who has begun a call and who has not, and what each did last."""
        ranks = range(len(self._words))
        late = [rank for rank in ranks if self.begun(rank) < number]
        absent = f"{', '.join(f'rank {rank}' for rank in late) or 'nobody'} did not begin it"
        return "; ".join([absent, *(f"rank {rank} has begun {self._last(rank)}" for rank in ranks)])

    def _last(self, rank: int) -> str:
        number = self.begun(rank)
        signature = self._signature(rank, number)
        return f"call {number}" + (f", {describe(signature)}" if signature else "")

    def _told(self, number: int) -> str:
        groups: dict[str, list[str]] = {}
        for rank in range(len(self._words)):
            if signature := self._signature(rank, number):
                groups.setdefault(describe(signature), []).append(f"rank {rank}")
        return "; ".join(f"{', '.join(ranks)} called {what}" for what, ranks in groups.items())

    def _signature(self, rank: int, number: int) -> tuple[int, ...] | None:
        """What a rank called, if it has been written and not been overwritten."""
        known, *signature, check = _CHECKED.unpack_from(self._bytes[rank], _at(number))
        whole = known == number and check == zlib.crc32(_CALL.pack(number, *signature))
        return tuple(signature) if whole else None


def _at(number: int) -> int:
    """Where a call's row begins in a page."""
    return (1 + number % ROWS) * _ROW
