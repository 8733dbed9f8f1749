"""Ranks of one machine that take themselves for ranks of several hosts: joined by TCP, and by an NCCL in memory."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from typing import Any

from fakegpu import FakeDriver, without_compilers
from fakenccl import FakeNccl

from collectives import Communicator
from collectives.backends.tcp import Tcp
from collectives.initialise import over_nccl
from collectives.post import Post
from collectives.rendezvous import Place, meet


def place_to_meet(comm: Communicator) -> tuple[str, str]:
    """An address on this machine, and a secret."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    address, secret = comm.broadcast_object([address, secrets.token_hex(16)])
    return address, secret


def over_tcp(comm: Communicator, hosts: Sequence[str], timeout: float = 60.0) -> Tcp:
    """An engine of the same ranks, of which rank r is on `hosts[r]`."""
    address, secret = place_to_meet(comm)
    meeting = meet(Place(comm.rank, comm.size, address, secret.encode(), hosts[comm.rank], timeout))
    return Tcp(Post(meeting), range(comm.size), timeout)


def over_nccl_and_tcp(
    comm: Communicator, hosts: Sequence[str], backend: str = "nccl", timeout: float = 60.0, **options: Any
) -> tuple[Communicator, FakeDriver, FakeNccl]:
    """A communicator of fake GPUs on these hosts. What the NCCL in memory sends goes by shared memory."""
    without_compilers()
    carrier, driver = comm.split(0), FakeDriver()
    assert carrier is not None
    library = FakeNccl(driver, carrier, **options)
    control = over_tcp(comm, hosts, timeout)
    try:
        engine = over_nccl(backend, control, driver, library)  # type: ignore[arg-type]
    except BaseException as error:
        control.fail(error)
        control.close()
        raise
    return Communicator(engine), driver, library
