"""A rank's place in its job, and the socket address that a text means."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from dataclasses import dataclass, field, replace

from collectives.errors import CollectiveError

SocketAddress = str | tuple[str, int]


@dataclass(frozen=True)
class Place:
    """One rank's place in its job: what it must know to meet the others.

    address: "unix:NAME", or "HOST:PORT" of rank 0. A loopback HOST means one host, and a Unix socket.
    secret: known to the job's ranks only; may be empty on one host, where it is then enough to be the same user.
    host: an identity to use in place of this machine's own; ranks with equal ones must share memory and Unix sockets.
    timeout: seconds for `meet`, and for each exchange unless it says otherwise.
    """

    rank: int
    size: int
    address: str
    secret: bytes = field(default=b"", repr=False)
    host: str | None = None
    timeout: float = 300.0


def endpoint(place: Place) -> tuple[socket.AddressFamily, SocketAddress]:
    """The socket address of rank 0, or for rank 0 itself where to listen.

    Raises CollectiveError where the address cannot be one, and where the network is meant and there is no secret.
    """
    if place.address.startswith("unix:"):
        name = place.address[len("unix:") :]
        return socket.AF_UNIX, abstract(name if place.secret else f"{name} of user {os.geteuid()}")
    host, port = _split(place.address)
    if place.host is None and _is_loopback(host):
        return endpoint(replace(place, address=f"unix:{host}:{port}"))
    if not place.secret:
        raise CollectiveError(
            f"ranks that meet over the network, here at {place.address}, need a secret, and there is none; make one by "
            f"`export MGPU_SECRET=$(python -c 'import secrets; print(secrets.token_hex(32))')`, and start every rank "
            f"with it (mpirun -x MGPU_SECRET, or mpiexec -genv MGPU_SECRET $MGPU_SECRET; srun passes it on)"
        )
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CollectiveError(
            f"the host {host!r} of address {place.address!r} is not known here: {error.strerror}"
        ) from None
    resolved = str(found[0])
    if place.rank == 0 and _is_loopback(resolved) and not _is_loopback(host):
        resolved = (
            "::" if family == socket.AF_INET6 else "0.0.0.0"
        )  # its own name, which /etc/hosts may tie to loopback
    return family, (resolved, port)


def abstract(name: str) -> str:
    """An abstract Unix address: no file, and gone with its holder. Names have any length, addresses 107 bytes."""
    return "\0mgpu-" + hashlib.sha256(name.encode()).hexdigest()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise CollectiveError(f"address {address!r} is not one; expected HOST:PORT of rank 0, or unix:NAME on one host")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
