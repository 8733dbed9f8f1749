"""Ranks that share no memory: a call is made in one go, here or by a thread, and one-sided calls for arrays of the CPU
reach a rank's own only."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable

from collectives.arrays import Array
from collectives.backends.base import Backend, Pending
from collectives.backends.in_turn import InTurn
from collectives.call import Call
from collectives.errors import CollectiveError


class Apart(Backend):
    """An engine of such ranks. `peer_view` gives a rank its own array, and refuses another's."""

    def __init__(self) -> None:
        self._in_turn = InTurn()
        self._failure = ""  # why this communicator is of no further use
        self._closed = False
        self._ending = threading.RLock()

    @abstractmethod
    def _make(self, call: Call, source: Array | None, target: Array | None) -> None:
        """Make a call, when those before it have been made."""

    def run(self, call: Call, source: Array | None, target: Array | None) -> None:
        self.check_usable()
        self._in_turn.run(lambda: self._make(call, source, target))

    def start(self, call: Call, source: Array | None, target: Array | None) -> Pending:
        self.check_usable()
        return self._in_turn.start(lambda: self._make(call, source, target))

    def plan(self, call: Call, source: Array | None, target: Array | None) -> Callable[..., None]:
        def run(keep: object = None) -> None:
            self.run(call, source, target)

        return run

    def check_usable(self) -> None:
        """Raise if this communicator has failed or is closed."""
        if self._failure:
            raise CollectiveError(f"this communicator is of no further use: {self._failure}")
        if self._closed:
            raise CollectiveError("this communicator is closed")

    @abstractmethod
    def _close(self) -> None:
        """Close what is open."""

    def close(self) -> None:
        with self._ending:
            if not self._closed:
                self._close()

    def disown(self, reason: str) -> None:
        self._failure, self._closed = reason, True
        self._ending = threading.RLock()  # whoever has it is not here
        self._in_turn.forget()

    def fetch_add(self, word: Array, value: int, rank: int) -> int:
        view = self.peer_view(word, rank)
        before = int(view.item())
        view[...] = before + value
        return before

    def acquire(self, lock: Array, rank: int) -> None:
        self.peer_view(lock, rank)  # its own: threads of one rank count as one

    def release(self, lock: Array, rank: int) -> None:
        self.peer_view(lock, rank)
