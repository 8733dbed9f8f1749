"""`init`: from a process that somebody started to a communicator of all ranks."""

from __future__ import annotations

from collectives.backends.shm import Shm
from collectives.communicator import Communicator
from collectives.host import Host
from collectives.place import Place
from collectives.rendezvous import meet


def join(place: Place) -> Communicator:
    """Meet the other ranks and make the communicator of all."""
    meeting = meet(place)
    host = Host(meeting)
    backend = Shm(host, range(place.size), 0, place.timeout)
    meeting.exchange(b"")  # nobody uses a peer's memory before everybody's is ready
    return Communicator(backend)
