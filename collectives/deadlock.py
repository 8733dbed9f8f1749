"""Ranks that wait for each other in a circle, as two large sends do that face each other: found within moments, and not
at the deadline.

A rank that has waited for a while publishes what for, again at each look. In a circle each rank waits for the next, and
nobody can help another before being helped. What was published may be out of date, so a circle is believed only when
each of its ranks has looked twice since it was first seen and none has moved: then everybody has seen everything that
was done before, and nobody has done anything since.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from collectives.call import describe
from collectives.region import Region

_LOOKS = 40  # the bit of a word from which on it counts looks


class Doing(IntEnum):
    """What a rank is in while it waits."""

    SEND = 1
    RECV = 2
    WAIT_SIGNAL = 3
    COLLECTIVE = 4


class Waiting(NamedTuple):
    """What a rank waits for: for `peer`, or in a collective for all that have not arrived. `moves` counts what it has
    done for others meanwhile."""

    doing: Doing
    peer: int = 0
    moves: int = 0

    def word(self, looks: int) -> int:
        """In one word, which is written and read as a whole."""
        return (looks & 0xFFFF) << _LOOKS | (self.moves & 0xFFFF) << 24 | self.peer << 8 | self.doing


class Circle:
    """One rank's search, during one wait, for a circle that it is in."""

    def __init__(self, regions: Sequence[Region], rank: int) -> None:
        self._regions, self._rank = regions, rank
        self._looks = 0
        self._seen: dict[int, int] = {}  # the words of the circle's ranks when it was first seen

    def look(self, waiting: Waiting) -> str:
        """Publish what this rank waits for. Returns a circle that will last, in words; else nothing."""
        self._looks += 1
        self._regions[self._rank].waiting = waiting.word(self._looks)
        circle = self._find()
        words = {rank: self._regions[rank].waiting for rank in circle}
        if {rank: _what(word) for rank, word in words.items()} != {r: _what(word) for r, word in self._seen.items()}:
            self._seen = words
        elif circle and all(_looks_between(self._seen[rank], words[rank]) >= 2 for rank in circle):
            return self._tell(words)
        return ""

    def end(self) -> None:
        """The wait is over."""
        if self._looks:
            self._regions[self._rank].waiting = 0

    def _find(self) -> list[int]:
        """Ranks, this one first, each of which waits for the next and the last for the first."""
        trails, met = [[self._rank]], set()
        for trail in trails:
            for rank in self._awaited(trail[-1]):
                if rank == self._rank:
                    return trail
                if rank not in met:
                    met.add(rank)
                    trails.append([*trail, rank])
        return []

    def _awaited(self, rank: int) -> list[int]:
        word = self._regions[rank].waiting
        if word & 0xFF == Doing.COLLECTIVE:
            call = self._regions[rank].calls_begun
            return [other for other, region in enumerate(self._regions) if region.calls_begun < call]
        return [word >> 8 & 0xFFFF] if word else []

    def _tell(self, words: dict[int, int]) -> str:
        """A circle in words; what its ranks wait for is given, since one that has told already waits no longer."""
        circle, parts, sends = list(words), [], False
        for rank, following in zip(circle, [*circle[1:], circle[0]]):
            doing = Doing(words[rank] & 0xFF)
            sends = sends or doing == Doing.SEND
            if doing == Doing.COLLECTIVE:
                page = self._regions[rank].page(self._regions[rank].calls_begun)
                what = f"in {describe(page) if page else 'a collective call'}, for which rank {following} has not come"
            else:
                preposition = "to" if doing == Doing.SEND else "from"
                what = f"in a {doing.name.lower()} {preposition} rank {following}"
            parts.append(f"rank {rank} is {what}")
        hint = ". A large message waits for its receiver: use sendrecv, or sends and receives inside group()"
        return f"ranks wait for each other in a circle: {', '.join(parts)}{hint if sends else ''}"


def _what(word: int) -> int:
    return word & ((1 << _LOOKS) - 1)


def _looks_between(earlier: int, later: int) -> int:
    return ((later >> _LOOKS) - (earlier >> _LOOKS)) & 0xFFFF
