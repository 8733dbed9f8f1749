"""How a star forms: its hub keeps a door, and the others knock until it opens.

Strangers may come in any number, say anything or nothing, and stay: they have a few seconds and a bounded number of
places, and an honest rank that loses its place to them comes again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from collectives.channel import (
    Channel,
    ClosedError,
    Introduction,
    StrangerError,
    Visitor,
    admit,
    introduce,
    own_version,
    wait_for,
)
from collectives.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from collectives.place import Place, SocketAddress
from collectives.roll import LOOK, describe_end, ended
from collectives.star import Star, passing_on

_HANDSHAKE = 5.0  # seconds a stranger may take to prove that it is none
_VISITORS = 128  # connections that have proven nothing yet
_LATE = 1.0  # seconds that a hub which has failed stays to say so


class Door:
    """Where the hub lets the others in."""

    def __init__(self, place: Place, members: Sequence[int], listener: socket.socket, deadline: float) -> None:
        self.place = place
        self.members = members
        self.listener = listener
        self.deadline = deadline
        self.visitors: dict[int, Visitor] = {}  # by descriptor, in order of arrival
        self.star = Star(place.rank, members, {})
        self.refused = 0

    def open(self) -> Star:
        """Wait for every member, and shut the door before telling them: whoever comes next meets anew."""
        try:
            with passing_on(self.star):
                while len(self.star.channels) < len(self.members) - 1:
                    if time.monotonic() >= self.deadline:
                        event = f"rank {self.place.rank} waited {self.place.timeout:g} s"
                        raise CollectiveTimeoutError(self._missing(event))
                    for introduction, channel in self._arrivals(min(self.deadline, time.monotonic() + LOOK)):
                        self._welcome(introduction, channel)
                    self._watch()
                self._shut()
                self.star.welcome(self.deadline)
        except BaseException as error:
            if isinstance(error, CollectiveError):
                self._turn_away(error)
            self.star.close()
            raise
        finally:
            self._shut()
        return self.star

    def _welcome(self, introduction: Introduction, channel: Channel) -> None:
        try:
            self._check(introduction)
        except CollectiveError as error:
            self._tell(channel, error)
            raise
        self.star.channels[introduction.rank] = channel

    def _turn_away(self, error: CollectiveError) -> None:
        """Ranks that started a little later learn why there is nothing to wait for, as those here have."""
        late = len(self._absent())
        if ended(self.place.address, self._absent()):
            return  # they look at the roll themselves
        until = time.monotonic() + _LATE
        while late and self.listener.fileno() >= 0 and time.monotonic() < until:
            for _, channel in self._arrivals(until):
                self._tell(channel, error)
                late -= 1

    def _tell(self, channel: Channel, error: CollectiveError) -> None:
        star = Star(self.place.rank, [self.place.rank, channel.rank], {channel.rank: channel})
        star.fail(error)
        star.close()

    def _arrivals(self, until: float) -> Iterator[tuple[Introduction, Channel]]:
        """Those who have proven themselves now; nobody, now and then, when something else has happened."""
        now = time.monotonic()
        for visitor in list(self.visitors.values()):
            if visitor.since + _HANDSHAKE < now:
                self._refuse(visitor)
        expiry = min((visitor.since for visitor in self.visitors.values()), default=now) + _HANDSHAKE
        sockets = [self.listener, *(visitor.socket for visitor in self.visitors.values())]
        waiting = [] if self.star.error else self.star.channels.values()
        ready = wait_for([*sockets, *waiting], min(until, expiry))
        visitors = [self.visitors[descriptor] for descriptor in ready if descriptor in self.visitors]
        if self.listener.fileno() in ready:
            self._accept()
        for visitor in visitors:
            if visitor.socket.fileno() >= 0 and (arrival := self._hear(visitor)):  # not shown out to make room just now
                yield arrival

    def _accept(self) -> None:
        for _ in range(16):  # then those who wait inside have their turn
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it has gone again, or there are no descriptors left: make room
                if not self.visitors:
                    time.sleep(0.01)
                    return
                self._refuse(next(iter(self.visitors.values())))
                continue
            if not self.place.secret and not _same_user(connection):
                connection.close()
                self.refused += 1
                continue
            if len(self.visitors) == _VISITORS:
                self._refuse(next(iter(self.visitors.values())))
            _tune(connection)
            self.visitors[connection.fileno()] = Visitor(connection, admit(self.place.secret))

    def _hear(self, visitor: Visitor) -> tuple[Introduction, Channel] | None:
        try:
            introduction = visitor.step()
        except (StrangerError, ClosedError):
            self._refuse(visitor)
            return None
        if introduction is None:
            return None
        del self.visitors[visitor.socket.fileno()]
        return introduction, Channel(visitor.socket, introduction.rank, introduction.key, connecting=False)

    def _check(self, introduction: Introduction) -> None:
        rank, own = introduction.rank, own_version()
        if introduction.version != own:
            raise CollectiveError(
                f"rank {rank} runs {introduction.version} and rank {self.place.rank} runs {own}; "
                f"install the same version everywhere"
            )
        if introduction.size != self.place.size:
            raise CollectiveError(
                f"rank {rank} was told of {introduction.size} ranks and rank {self.place.rank} of {self.place.size}; "
                f"start all with the same size"
            )
        if rank in self.star.channels or rank == self.place.rank or rank not in self.members:
            raise CollectiveError(
                f"{'two processes say that they are' if rank in self.members else 'nobody expects'} rank {rank}; "
                f"give every process a rank of its own, from 0 to {self.place.size - 1}"
            )

    def _watch(self) -> None:
        """See to those who have come and wait: they may die, fail or give up."""
        found = self.star.next(0.0) if self.star.channels else None
        if found:
            raise CollectiveTimeoutError(self._missing(f"rank {found[0]}'s deadline passed"))
        _see_the_roll(self.place, self._absent())

    def _absent(self) -> list[int]:
        return [rank for rank in self.members if rank != self.place.rank and rank not in self.star.channels]

    def _missing(self, event: str) -> str:
        text = self.star.missing([self.place.rank, *self.star.channels], event)
        strangers = f"; {self.refused} connections were refused (wrong secret, or strangers)" if self.refused else ""
        return f"{text} at {self.place.address}{strangers}"

    def _refuse(self, visitor: Visitor) -> None:
        del self.visitors[visitor.socket.fileno()]
        visitor.socket.close()
        self.refused += 1

    def _shut(self) -> None:
        self.listener.close()
        for visitor in self.visitors.values():
            visitor.socket.close()
        self.visitors = {}


def connect(place: Place, hub: int, family: socket.AddressFamily, address: SocketAddress, deadline: float) -> Channel:
    """A channel to the hub, tried again until the deadline."""
    pause, reason = 0.005, "nobody has answered there"
    while True:
        _see_the_roll(place, range(place.size))
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.001, min(_HANDSHAKE, deadline - time.monotonic())))
            connection.connect(address)
            if family != socket.AF_UNIX and connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError("Connection refused")  # TCP may connect a port of this host to itself
            if not place.secret and not _same_user(connection):
                raise CollectiveError(
                    f"another user's process is at {place.address}; choose another address, or set MGPU_SECRET"
                )
            _tune(connection)
            introduction = _handshake(place, connection, deadline)
            if introduction:
                if introduction.version != own_version():
                    raise CollectiveError(
                        f"rank {hub} runs {introduction.version} and rank {place.rank} runs {own_version()}; "
                        f"install the same version everywhere"
                    )
                return Channel(connection, hub, introduction.key, connecting=True)
            reason = "the connection was closed before either side was known"
        except OSError as error:
            reason = error.strerror or str(error)
        except StrangerError as error:
            connection.close()
            raise CollectiveError(
                f"what answers at {place.address} is not rank {hub} of this job: {error}. Give all ranks the same "
                f"MGPU_SECRET, and each job an address of its own"
            ) from None
        except BaseException:
            connection.close()
            raise
        connection.close()
        left = deadline - time.monotonic()
        if left <= 0:
            raise CollectiveTimeoutError(
                f"rank {place.rank} waited {place.timeout:g} s at {place.address} for rank {hub}, which did not arrive "
                f"({reason})"
            )
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.1)


def _handshake(place: Place, connection: socket.socket, deadline: float) -> Introduction | None:
    """The hub's introduction; None if it hung up or was too slow, as a hub besieged by strangers may."""
    visitor = Visitor(connection, introduce(place.secret, place.rank, place.size))
    until = min(deadline, time.monotonic() + _HANDSHAKE)
    with suppress(ClosedError):
        while (now := time.monotonic()) < until:
            if wait_for([connection], min(until, now + LOOK)) and (introduction := visitor.step()):
                return introduction
            _see_the_roll(place, range(place.size))
    return None


def _see_the_roll(place: Place, ranks: Iterable[int]) -> None:
    """Raise PeerLostError if one of these ranks has ended; only a launcher knows that of one that has never come."""
    gone = ended(place.address, ranks)
    if gone:
        told = "; ".join(f"rank {rank} {describe_end(status)}" for rank, status in gone.items())
        raise PeerLostError(f"{told}, before all {place.size} ranks had met")


def listen(family: socket.AddressFamily, address: SocketAddress, name: str) -> socket.socket:
    """The hub's listening socket; `name` is for the error."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise CollectiveError(
            f"rank 0 cannot listen at {name}: {error.strerror}. Give an address of rank 0's own host with a port that "
            f"is free (MGPU_ADDRESS=host:port)"
        ) from error
    return listener


def _tune(connection: socket.socket) -> None:
    """Small messages at once, and a cable that is pulled is noticed within half a minute even when nobody sends."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], "little") == os.geteuid()
