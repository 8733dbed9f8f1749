"""What a rank looks at while it waits: peers that gave up, closed or died, ranks that wait for each other, and the
deadline.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, cast

from collectives.deadlock import Circle, Doing, Waiting
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)
from collectives.region import CLOSED, FAILED, Region

if TYPE_CHECKING:
    from collectives.backends.shm import Shm
    from collectives.backends.tcp import Seat, Tcp

STALL = 8.0  # seconds after which a wait is told about; MGPU_STALL changes it, 0 never tells

_ERRORS = {
    kind.__name__: kind for kind in (CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError)
}


class Watch:
    """One wait of one call, `what` says which. Make it when the wait has begun, look every 50 ms or so, end it."""

    def __init__(self, engine: Shm | Tcp, what: Callable[[], str]) -> None:
        self._engine, self._what = engine, what
        self._began = time.monotonic()
        self._gone: list[int] = []
        self._patience = _stall() or math.inf
        self._circle: Circle | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._move_on()

    def look(self, peers: Sequence[int], arrivals: Callable[[], str], waiting: Waiting | None = None) -> None:
        """Raise if it is in vain to wait for all of `peers`, or has lasted too long. `arrivals` says who has come;
        `waiting` what this rank waits for, if it does nothing else until then.

        Raises what `see` does, CollectiveMismatchError for a circle, and CollectiveTimeoutError.
        """
        engine = self._engine
        self.see(peers)
        if waiting is None:
            self._move_on()
        elif circle := self._find_circle(waiting):
            raise CollectiveMismatchError(f"{self._what()}: {circle}")
        waited = time.monotonic() - self._began
        if waited > self._patience:
            self._patience = math.inf
            if self._tells(peers, waiting):
                print(
                    f"mgpu: rank {engine.rank} has waited for {waited:.0f} s in {self._what()}: {arrivals()}. "
                    f"`mgpu doctor --run` tells more",
                    file=sys.stderr,
                    flush=True,
                )
        if waited > engine.timeout:
            told = "; ".join([arrivals(), *self._stopped()])
            raise CollectiveTimeoutError(f"{self._what()} did not finish in {waited:.1f} s: {told}")

    def see(self, peers: Sequence[int]) -> None:
        """Raise what a rank gave up with, or PeerLostError for one of `peers` that died or closed."""
        engine = self._engine
        regions: Sequence[Region | Seat] = engine.regions
        for rank, region in enumerate(regions):
            if region.state == FAILED:
                reason = region.reason()
                where = engine.host.where(engine.members[rank])
                error = _ERRORS.get(str(reason.get("kind")), CollectiveError)(
                    f"{self._what()}: rank {rank}{where} gave up: {reason.get('text')}"
                )
                error.echo = True
                raise error
        # What a peer did before it went may have arrived since we last looked at our flags: only the second look
        # counts.
        gone = [rank for rank in peers if rank in self._gone]
        if gone:
            raise PeerLostError(f"{self._what()}: {'; '.join(map(self._obituary, gone))}")
        dead = set(engine.host.dead([engine.members[rank] for rank in peers]))
        self._gone = [
            rank
            for rank in peers
            if rank != engine.rank and (engine.members[rank] in dead or regions[rank].state == CLOSED)
        ]

    def _find_circle(self, waiting: Waiting) -> str:
        if self._circle is None:
            self._circle = Circle(cast("Shm", self._engine).regions, self._engine.rank)
        return self._circle.look(waiting)

    def _move_on(self) -> None:
        if self._circle is not None:
            self._circle.end()

    def _tells(self, peers: Sequence[int], waiting: Waiting | None) -> bool:
        """Whether it is for this rank to say so: of those who wait in a collective, the lowest does."""
        if waiting is not None and waiting.doing != Doing.COLLECTIVE:
            return True
        return self._engine.rank == min(set(range(self._engine.size)) - set(peers), default=0)

    def _obituary(self, rank: int) -> str:
        region, host, member = self._engine.regions[rank], self._engine.host, self._engine.members[rank]
        if region.state == CLOSED:
            return f"rank {rank}{host.where(member)} closed its communicator after call {region.calls_ended}"
        return f"rank {rank} {host.obituary(member)} after call {region.calls_ended}"

    def _stopped(self) -> Iterator[str]:
        """Who is late since its process is stopped, whether or not this rank waits for that one."""
        for rank, member in enumerate(self._engine.members):
            peer = self._engine.host.meeting.peers[member]
            if peer.pidfd is not None:  # then the id is one of this namespace
                with suppress(OSError), open(f"/proc/{peer.pid}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] in "Tt":
                        yield f"rank {rank} (process {peer.pid}) is stopped, by SIGSTOP or a debugger"


def _stall() -> float:
    """Seconds after which to tell about a wait. Raises ValueError for a setting that is no number."""
    text = os.environ.get("MGPU_STALL", "")
    try:
        return float(text or STALL)
    except ValueError:
        raise ValueError(f"MGPU_STALL={text!r} is not a number of seconds, such as 30; 0 never tells") from None
