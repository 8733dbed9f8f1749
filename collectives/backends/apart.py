"""Ranks that share no memory: what one-sided calls are for arrays of the CPU, of which each reaches its own only."""

from __future__ import annotations

from collectives.arrays import Array
from collectives.backends.base import Backend


class Apart(Backend):
    """An engine of such ranks. `peer_view` gives a rank its own array, and refuses another's."""

    def fetch_add(self, word: Array, value: int, rank: int) -> int:
        view = self.peer_view(word, rank)
        before = int(view.item())
        view[...] = before + value
        return before

    def acquire(self, lock: Array, rank: int) -> None:
        self.peer_view(lock, rank)  # its own: threads of one rank count as one

    def release(self, lock: Array, rank: int) -> None:
        self.peer_view(lock, rank)
