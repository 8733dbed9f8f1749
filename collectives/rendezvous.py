"""How ranks find each other: a star around rank 0, over a Unix socket on one host and over TCP between hosts, and one
around the lowest rank of each host for passing descriptors.

    meeting = meet(place)                      # all have come, or the error says who has not
    answers = meeting.exchange(b"...")         # every rank's bytes, by rank
    descriptors = meeting.exchange_fd(fd)      # every same-host rank's descriptor

Unix sockets are abstract ones, which vanish with the processes that hold them. Between hosts, and between users of one
host, a rank is believed when it proves that it knows the job's secret (collectives.channel).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from collectives.channel import MAX_FRAME, Channel, wait_for
from collectives.door import Door, connect, listen
from collectives.errors import CollectiveError, PeerLostError
from collectives.place import Place, SocketAddress, abstract, endpoint
from collectives.star import Star, passing_on

__all__ = ["MAX_PAYLOAD", "Meeting", "Peer", "Place", "meet"]

MAX_PAYLOAD = 1 << 20  # bytes one rank may give to an exchange


@dataclass(frozen=True)
class Peer:
    """A rank as the others see it.

    pidfd: readable once the process has ended; None for oneself, across hosts, and where the kernel has none.
    """

    rank: int
    pid: int
    host: str
    local: bool
    pidfd: int | None

    @property
    def hostname(self) -> str:
        """The host's name, for messages."""
        return self.host.partition(" ")[0]


def meet(place: Place, listener: socket.socket | None = None) -> Meeting:
    """Wait until all ranks of the job have come. `listener`: rank 0's socket at the address, where it has one already.

    Raises CollectiveTimeoutError naming who is missing, PeerLostError naming a rank that died meanwhile, and
    CollectiveError where ranks disagree (version, size, two of one rank) or a secret is needed or wrong.
    """
    deadline = time.monotonic() + place.timeout
    if not 0 <= place.rank < place.size:
        raise CollectiveError(f"rank {place.rank} of {place.size} ranks; expected a rank from 0 to size - 1")
    if place.size == 1:
        return Meeting(place, None, None, [Peer(0, os.getpid(), machine(place.host), True, None)])
    family, address = endpoint(place)
    if place.rank == 0:
        listener = listener or listen(family, address, place.address)
    star = _form(place, range(place.size), family, address, listener, deadline)
    local: Star | None = None
    pidfds: dict[int, int] = {}
    try:
        with passing_on(star):
            here = _Identity(machine(place.host), os.getpid(), _link("/proc/self/ns/pid"))
            answers = star.exchange(json.dumps(here).encode(), deadline)
            identities = [_Identity(*json.loads(answer)) for answer in answers]
            if len({identity.host for identity in identities}) > 1:
                star.hosts = {rank: identity.host.partition(" ")[0] for rank, identity in enumerate(identities)}
            neighbours = [rank for rank, identity in enumerate(identities) if identity.host == here.host]
            if family == socket.AF_UNIX and len(neighbours) == place.size:
                local = star
            else:
                local = _form_local(place, star, neighbours, deadline)
            for rank in neighbours:
                identity = identities[rank]
                if rank != place.rank and identity.namespace == here.namespace:
                    pidfd = _pidfd(identity.pid, rank)
                    if pidfd is not None:
                        pidfds[rank] = pidfd
            # Who answers now was alive when its pidfd was opened: that is of its process, not of a later one.
            for each in (star, local):
                if each:
                    each.pidfds = pidfds
            star.exchange(b"", deadline)
    except BaseException:
        for each in (star, local):
            if each:
                each.close()
        for pidfd in pidfds.values():
            os.close(pidfd)
        raise
    peers = [
        Peer(rank, identity.pid, identity.host, rank in neighbours, pidfds.get(rank))
        for rank, identity in enumerate(identities)
    ]
    return Meeting(place, star, local, peers)


class Meeting:
    """All ranks of a job, met. One thread at a time; all ranks make the same calls in the same order."""

    def __init__(self, place: Place, star: Star | None, local: Star | None, peers: list[Peer]) -> None:
        self.place = place
        self.rank = place.rank
        self.size = place.size
        self.peers = peers
        self._timeout = place.timeout
        self._star = star
        self._local = local  # the star of this host's ranks; None if this rank is alone there
        self._pidfds = {peer.pidfd: peer.rank for peer in peers if peer.pidfd is not None}
        self._without = {peer.rank for peer in peers if peer.local and peer.pidfd is None and peer.rank != self.rank}

    def exchange(self, payload: bytes, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload, by rank; at most MAX_PAYLOAD bytes each, and MAX_FRAME together.

        Raises PeerLostError naming a rank that died or closed its meeting, CollectiveTimeoutError naming who came and
        who did not. After an error the meeting is of no further use: every rank's next call raises too.
        """
        limit = min(MAX_PAYLOAD, (MAX_FRAME - 8 * self.size) // self.size)
        if len(payload) > limit:
            raise ValueError(
                f"{len(payload):,} bytes are too many for an exchange of {self.size} ranks; at most {limit:,}"
            )
        if self._star is None:
            return [bytes(payload)]
        with passing_on(self._star, self._local):
            return self._star.exchange(bytes(payload), self._deadline(timeout))

    def exchange_fd(self, fd: int, timeout: float | None = None) -> list[int | None]:
        """Every same-host rank's descriptor, by rank; None for ranks of other hosts. Raises as `exchange` does.

        They are the caller's to close; the own one is a duplicate.
        """
        own = os.dup(fd)
        try:
            found: dict[int, int] = {}
            if self._local:
                with passing_on(self._star, self._local):
                    found = self._local.exchange_fd(own, self._deadline(timeout))
        except BaseException:
            os.close(own)
            raise
        found[self.rank] = own
        return [found.get(rank) for rank in range(self.size)]

    def lost(self) -> list[int]:
        """Same-host ranks whose process has ended, whether it had closed its meeting or not. Costs one poll.

        Where there are no pidfds, as in some sandboxes, the hub knows by their sockets, and the others know of the hub.
        """
        ended = {self._pidfds[pidfd] for pidfd in wait_for(self._pidfds, 0.0)}
        if self._without and self._local:
            channels = self._local.channels
            ended |= {rank for rank in self._without & channels.keys() if channels[rank].is_closed()}
        return sorted(ended)

    def fail(self, error: CollectiveError) -> None:
        """Tell the other ranks why this one gives up: their calls raise an error of the same class and text."""
        for star in (self._star, self._local):
            if star:
                star.fail(error)

    def hand_over(self) -> dict[int, Channel]:
        """The channels of the star, to rank 0, or of rank 0 to all others: for who goes on with them until it gives
        them back to be closed. Nothing can be exchanged here meanwhile."""
        channels: dict[int, Channel] = {}
        if self._star:
            channels, self._star.channels = self._star.channels, {}
        return channels

    def take_back(self, channels: dict[int, Channel]) -> None:
        """See `hand_over`."""
        if self._star:
            self._star.channels = channels

    @property
    def own_address(self) -> str:
        """This host's address that other ranks have reached, or reached them from; "" where they meet without a
        network."""
        channels = self._star.channels.values() if self._star else ()
        addresses = [str(channel.socket.getsockname()[0]) for channel in channels if not channel.local]
        return min(addresses, key=lambda address: address.startswith(("127.", "::1")), default="")

    def close(self) -> None:
        """Take leave of the others and close every descriptor."""
        for star in (self._star, self._local):
            if star:
                star.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = {}
        self.peers = [Peer(peer.rank, peer.pid, peer.host, peer.local, None) for peer in self.peers]

    def disown(self) -> None:
        """In a fork of this rank's process: let go of the connections without a word, since others see by them when the
        rank itself ends."""
        for star in (self._star, self._local):
            if star:
                star.error = star.error or CollectiveError("this process is a fork of the rank's")
                star.close()

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._timeout if timeout is None else timeout)


def _form(
    place: Place,
    members: Sequence[int],
    family: socket.AddressFamily,
    address: SocketAddress,
    listener: socket.socket | None,
    deadline: float,
) -> Star:
    """The star of `members` at an address: its hub has a listener there, and the others connect."""
    if listener:
        return Door(place, members, listener, deadline).open()
    channel = connect(place, members[0], family, address, deadline)
    star = Star(place.rank, members, {members[0]: channel})
    try:
        star.welcome(deadline)
    except BaseException:
        star.close()
        raise
    return star


def _form_local(place: Place, star: Star, neighbours: Sequence[int], deadline: float) -> Star | None:
    """The star of one host's ranks, at a Unix socket that its lowest rank names to them."""
    name, listener = "", None
    if place.rank == neighbours[0] and len(neighbours) > 1:
        name = secrets.token_hex(16)
        listener = listen(socket.AF_UNIX, abstract(name), name)
    try:
        names = star.exchange(name.encode(), deadline)
    except BaseException:
        if listener:
            listener.close()
        raise
    if len(neighbours) == 1:
        return None
    address = abstract(names[neighbours[0]].decode())
    return _form(place, neighbours, socket.AF_UNIX, address, listener, deadline)


class _Identity(NamedTuple):
    """What a rank tells the others of itself."""

    host: str
    pid: int
    namespace: str  # of process ids


def machine(given: str | None = None) -> str:
    """This host: a machine since its last start, and the network namespace in which abstract sockets are seen; or the
    identity that was given."""
    if given is not None:
        return given
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {_link('/proc/self/ns/net')}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _pidfd(pid: int, rank: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise PeerLostError(f"rank {rank} was lost: its process {pid} has ended") from None
    except (OSError, AttributeError):  # an older kernel, or a sandbox that forbids it: its socket has to do
        return None
