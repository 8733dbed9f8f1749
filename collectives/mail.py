"""Messages between two ranks over MPI. Each is a header (number, tag, dtype, count) and its data, so that MPI's own
tags, which are few, need not carry ours, and a receiver can say what is wrong with a message. A receiver takes a rank's
messages in the order in which they were sent; those with a tag that it does not ask for are put aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import wire
from collectives.arrays import Array
from collectives.stream import ToSelf, check_message
from kernels.dtypes import DTYPES, find

if TYPE_CHECKING:
    from collectives.backends.mpi import Mpi

_HEADER, _DATA, _SIGNAL = 1, 2, 3  # MPI's tags
_HEADER_WORDS = 4  # number, tag, dtype, count


class Mail:
    """One rank's messages and signals, to and from each rank of its communicator."""

    def __init__(self, engine: Mpi) -> None:
        self._engine = engine
        self._to_self = ToSelf(engine.rank)
        self._sent: dict[int, int] = {}  # messages so far, by receiver
        self._came: dict[int, int] = {}  # and by sender
        self._aside: dict[int, list[tuple[int, Array]]] = {}
        self._signals: list[Any] = []

    def exchange(self, sends: Sequence[tuple[Array, int, int]], receives: Sequence[tuple[Array, int, int]]) -> None:
        """Run all messages to their ends, turning from one to the other. Each pair of ranks keeps its order."""
        work: dict[tuple[int, bool], deque[Iterator[Sequence[Any]]]] = {}
        for array, peer, tag in sends:
            if peer == self._engine.rank:
                self._to_self.send(array, tag)
            else:
                work.setdefault((peer, True), deque()).append(self._send(array, peer, tag))
        for array, peer, tag in receives:
            if peer == self._engine.rank:
                self._to_self.receive(array, tag)
            else:
                work.setdefault((peer, False), deque()).append(self._receive(array, peer, tag))
        awaited: dict[tuple[int, bool], Sequence[Any]] = {}

        def advance() -> bool:
            for stream, queue in list(work.items()):
                while queue and wire.ended(awaited.get(stream, ())):
                    following = next(queue[0], None)
                    awaited[stream] = following or ()
                    if following is None:
                        queue.popleft()
                if not queue:
                    del work[stream]
            return not work

        def pending() -> list[Any]:
            return [request for requests in awaited.values() for request in requests]

        peers = sorted({peer for peer, _ in work})
        self._engine.wait(advance, lambda: "a send or recv", peers, pending)

    def signal(self, rank: int) -> None:
        """One signal more for `rank`."""
        with wire.LOCK:
            self._signals = [request for request in self._signals if not request.Test()]
            self._signals.append(self._engine.comm.Isend(b"", rank, _SIGNAL))

    def wait_signal(self, rank: int) -> None:
        """Wait for the next signal of `rank`."""
        with wire.LOCK:
            request = self._engine.comm.Irecv(bytearray(), rank, _SIGNAL)
        self._engine.finish([request], lambda: f"wait_signal({rank})", [rank])

    # Each of these yields what it has to wait for, and then goes on.

    def _send(self, array: Array, peer: int, tag: int) -> Iterator[Sequence[Any]]:
        number = self._sent[peer] = self._sent.get(peer, 0) + 1
        header = np.array([number, tag, find(array.dtype).code, array.size], np.int64)
        with wire.LOCK:
            requests = [self._engine.comm.Isend(header.view(np.uint8), peer, _HEADER)]
            if array.size:
                requests.append(self._engine.comm.Isend(array.reshape(-1).view(np.uint8), peer, _DATA))
        yield requests

    def _receive(self, out: Array, peer: int, tag: int) -> Iterator[Sequence[Any]]:
        aside = self._aside.setdefault(peer, [])
        for i, (known, array) in enumerate(aside):
            if known == tag:
                del aside[i]
                check_message(peer, tag, find(array.dtype), array.size, out)
                out.reshape(-1)[:] = array.reshape(-1)
                return
        header = np.empty(_HEADER_WORDS, np.int64)
        while True:
            with wire.LOCK:
                request = self._engine.comm.Irecv(header.view(np.uint8), peer, _HEADER)
            yield [request]
            self._came[peer] = self._came.get(peer, 0) + 1
            number, known, code, count = header.tolist()
            assert number == self._came[peer], "messages of a pair come in order"
            dtype = DTYPES[code]
            if known == tag:
                check_message(peer, tag, dtype, count, out)
            array = out if known == tag else np.empty(count, dtype.numpy)
            if count:
                with wire.LOCK:
                    request = self._engine.comm.Irecv(array.reshape(-1).view(np.uint8), peer, _DATA)
                yield [request]
            if known == tag:
                return
            aside.append((known, array))
