"""What a rank looks at while it waits: peers that gave up, closed or died, and the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from collectives.region import CLOSED, FAILED

if TYPE_CHECKING:
    from collectives.backends.shm import Shm

_ERRORS = {
    kind.__name__: kind for kind in (CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError)
}


class Watch:
    """One wait of one call. Make it when the wait has begun, and look every 50 ms or so."""

    def __init__(self, shm: Shm, call: str) -> None:
        self._shm, self._call = shm, call
        self._began = time.monotonic()
        self._gone: list[int] = []

    def look(self, peers: Sequence[int], arrivals: Callable[[], str]) -> None:
        """Raise if the wait for one of `peers` is in vain or has lasted too long. `arrivals` says who has come.

        Raises PeerLostError for a peer that died or closed, what a peer gave up with, and CollectiveTimeoutError.
        """
        shm = self._shm
        for rank in peers:
            if shm.regions[rank].state == FAILED:
                reason = shm.regions[rank].reason()
                error = _ERRORS.get(str(reason.get("kind")), CollectiveError)(
                    f"{self._call}: rank {rank} gave up: {reason.get('text')}"
                )
                error.echo = True
                raise error
        # What a peer did before it went may have arrived since we last looked at our flags: only the second look
        # counts.
        gone = [rank for rank in peers if rank in self._gone]
        if gone:
            raise PeerLostError(f"{self._call}: {'; '.join(map(self._obituary, gone))}")
        dead = set(shm.host.dead([shm.members[rank] for rank in peers]))
        self._gone = [
            rank
            for rank in peers
            if rank != shm.rank and (shm.members[rank] in dead or shm.regions[rank].state == CLOSED)
        ]
        waited = time.monotonic() - self._began
        if waited > shm.timeout:
            raise CollectiveTimeoutError(f"{self._call} did not finish in {waited:.1f} s. {arrivals()}".strip())

    def _obituary(self, rank: int) -> str:
        region = self._shm.regions[rank]
        if region.state == CLOSED:
            return f"rank {rank} closed its communicator after call {region.calls_ended}"
        peer = self._shm.host.meeting.peers[self._shm.members[rank]]
        return f"rank {rank} (process {peer.pid}) has died after call {region.calls_ended}"
