"""Small all-gathers in a star: one rank, the hub, holds a channel to each of the others.

The hub sees every death and every deadline first, so it is the one that knows who is missing and tells the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum

from collectives.channel import MAX_DESCRIPTORS, Channel, ClosedError, wait_for
from collectives.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

_VERDICT = 1.0  # seconds that a rank which gives up leaves the hub to say who was missing
_LAST_WORDS = 2048  # characters of why a rank failed


class _Kind(IntEnum):
    WELCOME = 0  # all have come
    DATA = 1
    DESCRIPTORS = 2
    FAILED = 3  # and why
    GIVE_UP = 4  # this rank's deadline has passed, in its exchange number ...
    BYE = 5  # closed normally


FAILED, BYE = _Kind.FAILED, _Kind.BYE


class Star:
    """The connections of `members`, the first of whom is the hub: it holds a channel to each, and they one to it."""

    def __init__(self, rank: int, members: Sequence[int], channels: dict[int, Channel]) -> None:
        self.rank = rank
        self.members = members
        self.hub = members[0]
        self.channels = channels
        self.pidfds: dict[int, int] = {}  # owned by the meeting
        self.hosts: dict[int, str] = {}  # for messages, where there are several
        self.error: CollectiveError | None = None
        self._number = 0  # of the exchange now going on

    def exchange(self, payload: bytes, deadline: float) -> list[bytes]:
        """Every member's payload, in the order of `members`."""
        self._begin()
        if self.rank != self.hub:
            self._send(self.hub, _Kind.DATA, payload, deadline)
            return unpack(self._answer(_Kind.DATA, deadline))
        parts = self._collect(_Kind.DATA, payload, deadline)
        everything = pack(parts)
        for rank in self.members[1:]:
            self._send(rank, _Kind.DATA, everything, deadline)
        return parts

    def exchange_fd(self, fd: int, deadline: float) -> dict[int, int]:
        """The other members' descriptors, by rank."""
        self._begin()
        found: dict[int, int] = {}
        try:
            if self.rank == self.hub:
                self._collect(_Kind.DESCRIPTORS, b"", deadline)  # every member's own, waiting in its channel
                for rank, channel in self.channels.items():
                    (found[rank],) = channel.take_descriptors()
                for rank in self.members[1:]:
                    others = [found.get(other, fd) for other in self.members if other != rank]
                    for start in range(0, len(others), MAX_DESCRIPTORS):
                        self._send(rank, _Kind.DESCRIPTORS, b"", deadline, others[start : start + MAX_DESCRIPTORS])
            else:
                self._send(self.hub, _Kind.DESCRIPTORS, b"", deadline, [fd])
                others = [rank for rank in self.members if rank != self.rank]
                while len(found) < len(others):
                    self._answer(_Kind.DESCRIPTORS, deadline)
                    found.update(zip(others[len(found) :], self.channels[self.hub].take_descriptors()))
        except BaseException:
            for descriptor in found.values():
                os.close(descriptor)
            raise
        return found

    def welcome(self, deadline: float) -> None:
        """The hub says that all have come; the others wait for that."""
        if self.rank == self.hub:
            for rank in self.members[1:]:
                self._send(rank, _Kind.WELCOME, b"", deadline)
        else:
            self._answer(_Kind.WELCOME, deadline)

    def fail(self, error: CollectiveError) -> None:
        """Tell the others, as far as they listen, and refuse further calls."""
        if self.error is None:
            self.error = error
            words = json.dumps([type(error).__name__, str(error)[:_LAST_WORDS]]).encode()
            for channel in self.channels.values():
                with suppress(ClosedError, TimeoutError):
                    channel.send(_Kind.FAILED, words, time.monotonic())

    def close(self) -> None:
        for channel in self.channels.values():
            if self.error is None:
                with suppress(ClosedError, TimeoutError):
                    channel.send(_Kind.BYE, b"", time.monotonic())
            channel.close()
        self.channels = {}
        self.error = self.error or CollectiveError("this meeting is closed")

    def _begin(self) -> None:
        if self.error:
            raise type(self.error)(str(self.error))
        self._number += 1

    def _send(self, rank: int, kind: _Kind, payload: bytes, deadline: float, descriptors: Sequence[int] = ()) -> None:
        try:
            self.channels[rank].send(kind, payload, deadline, descriptors)
        except TimeoutError:
            raise CollectiveTimeoutError(f"rank {rank} did not read what rank {self.rank} sent it in time") from None
        except ClosedError as error:
            with suppress(ClosedError):  # it may have said why before it went
                while frame := self.channels[rank].receive():
                    self._heed(rank, *frame)
            raise PeerLostError(f"{self._name([rank])} was lost: {error}") from error

    def _collect(self, kind: _Kind, own: bytes, deadline: float) -> list[bytes]:
        """The hub's part: one frame of this kind from every member."""
        parts = {self.rank: own}
        while len(parts) < len(self.members):
            found = self.next(deadline)
            if found is None:
                raise CollectiveTimeoutError(self.missing(parts, f"rank {self.rank}'s deadline passed"))
            rank, found_kind, payload = found
            if found_kind == kind:
                parts[rank] = payload
            elif found_kind != _Kind.GIVE_UP:
                raise CollectiveMismatchError(
                    f"rank {rank} is in an exchange of {_Kind(found_kind).name}, rank {self.rank} in one of {kind.name}"
                )
            elif int.from_bytes(payload, "little") == self._number:
                raise CollectiveTimeoutError(self.missing(parts, f"rank {rank}'s deadline passed"))
        return [parts[rank] for rank in self.members]

    def missing(self, arrived: Iterable[int], event: str) -> str:
        """Say who arrived and who did not."""
        absent = sorted(set(self.members) - set(arrived))
        return f"{event}: {self._name(arrived)} arrived, {self._name(absent)} did not"

    def _name(self, ranks: Iterable[int]) -> str:
        """Such as: ranks 0, 1 and 5 (on host7)."""
        numbers = [str(rank) for rank in sorted(ranks)]
        if not numbers:
            return "nobody"
        text = f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}" if numbers[1:] else f"rank {numbers[0]}"
        hosts = sorted({self.hosts[rank] for rank in ranks if rank in self.hosts})
        return f"{text} (on {', '.join(hosts)})" if hosts else text

    def _answer(self, kind: _Kind, deadline: float) -> bytes:
        """A member's part: the hub's frame of this kind."""
        found = self.next(deadline)
        if found is None:
            # The hub knows who is missing, and this exchange cannot succeed any more: it tells everybody.
            self._send(self.hub, _Kind.GIVE_UP, self._number.to_bytes(8, "little"), time.monotonic() + _VERDICT)
            found = self.next(time.monotonic() + _VERDICT)
        if found is None:
            raise CollectiveTimeoutError(
                f"rank {self.rank}'s deadline passed, and {self._name([self.hub])}, which knows who arrived, is silent"
            )
        _, found_kind, payload = found
        if found_kind != kind:
            raise CollectiveMismatchError(
                f"rank {self.hub} is in an exchange of {_Kind(found_kind).name}, rank {self.rank} in one of {kind.name}"
            )
        return payload

    def next(self, deadline: float) -> tuple[int, int, bytes] | None:
        """The next frame of any channel, as (rank, kind, payload); None at the deadline.

        Raises PeerLostError if an end is gone, and the error of one that says it has failed.
        """
        for rank, channel in self.channels.items():
            if frame := channel.buffered():
                return self._heed(rank, *frame)
        files = {channel.fileno(): rank for rank, channel in self.channels.items()}
        processes = {self.pidfds[rank]: rank for rank in self.channels if rank in self.pidfds}
        while ready := wait_for([*files, *processes], deadline):
            for descriptor in ready:
                rank = files.get(descriptor, processes.get(descriptor, -1))
                try:
                    frame = self.channels[rank].receive()  # what it sent before it ended still counts
                except ClosedError as error:
                    raise PeerLostError(f"{self._name([rank])} was lost: {error}") from error
                if frame:
                    return self._heed(rank, *frame)
                if descriptor in processes:
                    raise PeerLostError(f"{self._name([rank])} was lost: its process has ended")
        return None

    def _heed(self, rank: int, kind: int, payload: bytes) -> tuple[int, int, bytes]:
        """The frame itself, unless it reports an end or an error: that is raised."""
        if kind == _Kind.BYE:
            raise PeerLostError(f"rank {rank} has closed its communicator, and rank {self.rank} still counted on it")
        if kind == _Kind.FAILED:
            name, text = json.loads(payload)
            kinds = (CollectiveMismatchError, CollectiveTimeoutError, PeerLostError)
            raise next((each for each in kinds if each.__name__ == name), CollectiveError)(text)
        return rank, kind, payload


@contextmanager
def passing_on(*stars: Star | None) -> Iterator[None]:
    """Tell the others of an error of this rank's. Any error in mid-exchange, Ctrl-C too, leaves a star out of step."""
    try:
        yield
    except BaseException as error:
        reason = error if isinstance(error, CollectiveError) else None
        for star in stars:
            if star:
                star.fail(reason or PeerLostError(f"rank {star.rank} was stopped by {type(error).__name__}"))
        raise


def pack(parts: Iterable[bytes]) -> bytes:
    """Several payloads as one."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unpack(data: bytes) -> list[bytes]:
    """The payloads again."""
    parts, start = [], 0
    while start < len(data):
        end = start + 4 + int.from_bytes(data[start : start + 4], "little")
        parts.append(data[start + 4 : end])
        start = end
    return parts
