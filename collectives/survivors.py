"""A communicator of the ranks that are left when some have died: what MPI's fault tolerance calls shrinking (Bland et
al., "Post-failure recovery of MPI communication capability", 2013).

Those that are left meet anew, where all of them know to come. Who is left every rank sees for itself, in
the others' processes, and may see it sooner than another; then the two do not find each other, and look again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from collectives.errors import CollectiveError
from collectives.host import Host
from collectives.place import Place
from collectives.region import CLOSED
from collectives.rendezvous import meet

if TYPE_CHECKING:
    from collectives.backends.shm import Shm
    from collectives.backends.tcp import Tcp

_Engine = TypeVar("_Engine")
_LOOK_AGAIN = 5.0  # seconds in which ranks that agree in who is left have met


def regroup(old: Shm | Tcp, rejoin: Callable[[Sequence[int], float], _Engine]) -> _Engine:
    """A new engine of the ranks of `old` that have neither died nor closed it, in their order; they call it together.
    `rejoin(ranks, seconds)` makes it if they meet in time.

    Raises CollectiveTimeoutError naming who has not come by `old`'s deadline, though it is alive.
    """
    deadline = time.monotonic() + old.timeout
    while True:
        dead = {rank for rank in range(old.size) if old.host.dead([old.members[rank]])}
        left = [rank for rank in range(old.size) if rank not in dead and old.regions[rank].state != CLOSED]
        seconds = min(_LOOK_AGAIN, max(0.0, deadline - time.monotonic()))
        try:
            return rejoin(left, seconds)
        except CollectiveError:
            if time.monotonic() > deadline:
                raise


def rejoin(old: Shm, left: Sequence[int], seconds: float) -> Shm:
    """An engine of these ranks of one host, at an address that follows from who they are."""
    place = Place(left.index(old.rank), len(left), _address(old, left), timeout=seconds)
    host = Host(meet(place))
    try:
        engine = type(old)(host, range(place.size), 0, old.timeout)
        host.meeting.exchange(b"")  # nobody touches a peer's memory before everybody's is ready
    except BaseException:
        host.close()
        raise
    return engine


def _address(old: Shm, left: Sequence[int]) -> str:
    """Where these ranks of this communicator meet, and no others of this host."""
    processes = [old.host.meeting.peers[member].pid for member in old.members]
    names = json.dumps([processes, old.arena, list(left)])
    return f"unix:{hashlib.sha256(names.encode()).hexdigest()}"
