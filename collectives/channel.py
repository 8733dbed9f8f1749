"""One authenticated connection between two ranks: each end proves that it knows the job's secret, and every frame after
that is bound to the connection, its direction and its place in the order.

Nothing is unpickled, and no length is believed before it is checked. An end that has proven nothing yet costs the other
one a hundred bytes.
"""

from __future__ import annotations

import hmac
import math
import os
import select
import socket
import struct
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.errors import CollectiveError
from kernels import __version__

PROTOCOL = 1
MAX_FRAME = 64 << 20  # bytes of payload
MAX_DESCRIPTORS = 250  # with one frame; the kernel's limit is 253

# These two never change, so that any two versions can tell each other their names.
_HELLO = struct.Struct("<4sH32sII32s")  # magic, protocol, version, rank, size, nonce
_ANSWER = struct.Struct("<4sH32s32s")  # magic, protocol, version, nonce; a proof follows
_MAGIC = b"MGPU"
_PROOF = 32
_HEADER = struct.Struct("<IB")  # payload bytes, kind
_TAG = 16

# (what to send, how many bytes to read next) is yielded, and those bytes are sent in
Handshake = Generator[tuple[bytes, int], bytes, "Introduction"]


class StrangerError(Exception):
    """The other end does not speak this protocol, or does not know the secret."""


class ClosedError(Exception):
    """The other end is gone, or what arrives is not what it sent."""


@dataclass(frozen=True)
class Introduction:
    """What the other end said of itself and has proven with the secret. (The accepting end does not say its rank.)"""

    rank: int
    size: int
    version: str
    key: bytes


def introduce(secret: bytes, rank: int, size: int) -> Handshake:
    """The connecting end's part of the handshake: HMAC challenge and response, both ways."""
    hello = _HELLO.pack(_MAGIC, PROTOCOL, _version(), rank, size, os.urandom(32))
    answer = yield hello, _ANSWER.size + _PROOF
    head, proof = answer[: _ANSWER.size], answer[_ANSWER.size :]
    transcript = hello + head
    if head[:4] != _MAGIC or not hmac.compare_digest(proof, _prove(secret, b"accepting", transcript)):
        raise StrangerError("it does not know this job's secret")
    yield _prove(secret, b"connecting", transcript), 0
    _, protocol, version, _ = _ANSWER.unpack(head)
    return Introduction(0, size, _name(version, protocol), _prove(secret, b"session", transcript))


def admit(secret: bytes) -> Handshake:
    """The accepting end's part."""
    hello = yield b"", _HELLO.size
    magic, protocol, version, rank, size, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise StrangerError("it speaks another protocol")
    head = _ANSWER.pack(_MAGIC, PROTOCOL, _version(), os.urandom(32))
    transcript = hello + head
    proof = yield head + _prove(secret, b"accepting", transcript), _PROOF
    if not hmac.compare_digest(proof, _prove(secret, b"connecting", transcript)):
        raise StrangerError("it does not know this job's secret")
    return Introduction(rank, size, _name(version, protocol), _prove(secret, b"session", transcript))


class Visitor:
    """A connection in mid-handshake, driven without blocking."""

    def __init__(self, connection: socket.socket, handshake: Handshake) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.since = time.monotonic()
        self._handshake = handshake
        self._inbox = b""
        outgoing, self._wanted = next(handshake)
        self._send(outgoing)

    def step(self) -> Introduction | None:
        """Go on as far as the bytes that have come allow; the introduction when it is complete.

        Raises StrangerError when the other end is not one of ours, ClosedError when it has gone.
        """
        try:
            while self._wanted:
                data = self.socket.recv(self._wanted - len(self._inbox))  # never past the handshake
                if not data:
                    raise ClosedError("the connection was closed")
                self._inbox += data
                if len(self._inbox) == self._wanted:
                    self._advance()
            self._advance()
        except BlockingIOError:
            return None
        except StopIteration as done:
            introduction: Introduction = done.value
            return introduction
        except OSError as error:
            raise ClosedError(error.strerror) from error
        return None

    def _advance(self) -> None:
        inbox, self._inbox = self._inbox, b""
        outgoing, self._wanted = self._handshake.send(inbox)
        self._send(outgoing)

    def _send(self, outgoing: bytes) -> None:
        if outgoing and self.socket.send(outgoing) != len(outgoing):  # a new connection takes a hundred bytes
            raise ClosedError("it does not read")


class Channel:
    """An authenticated connection to `rank`: frames of a kind and a payload, with descriptors over a Unix socket.

    It never blocks longer than a deadline (seconds of time.monotonic) and is used by one thread at a time.
    """

    def __init__(self, connection: socket.socket, rank: int, key: bytes, connecting: bool) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.socket = connection
        self.local = connection.family == socket.AF_UNIX
        self.descriptors: list[int] = []  # received and not yet taken
        directions = b"from connecting", b"from accepting"
        self._out_key, self._in_key = (
            _prove(key, name, b"") for name in (directions if connecting else directions[::-1])
        )
        self._sent = self._received = 0
        self._inbox = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: int, payload: bytes, deadline: float, descriptors: Sequence[int] = ()) -> None:
        """Send one frame. Raises TimeoutError at the deadline, ClosedError if the other end is gone."""
        data = memoryview(self.frame(kind, payload))
        ancillary: list[Any] = []
        if descriptors:
            rights = struct.pack(f"{len(descriptors)}i", *descriptors)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        while data:
            try:
                data = data[self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL) :]
                ancillary = []
            except BlockingIOError:
                if not wait_for([self.socket], deadline, select.POLLOUT):
                    raise TimeoutError from None
            except OSError as error:
                raise ClosedError(error.strerror) from error

    def frame(self, kind: int, payload: bytes) -> bytes:
        """The next frame's bytes, for whoever sends them: whole, and in the order in which they were asked for."""
        tag = _tag(self._out_key, self._sent, kind, payload)
        self._sent += 1
        return _HEADER.pack(len(payload), kind) + payload + tag

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame (kind, payload), or None if it has not all come yet. Raises ClosedError."""
        frame = self.buffered()
        while frame is None:
            try:
                data = self._read()
            except BlockingIOError:
                return None
            except OSError as error:
                raise ClosedError(error.strerror) from error
            if not data:
                raise ClosedError("the connection was closed")
            self._inbox += data
            frame = self.buffered()
        return frame

    def buffered(self) -> tuple[int, bytes] | None:
        """The next frame if all of it has been read from the socket already."""
        if len(self._inbox) < _HEADER.size:
            return None
        nbytes, kind = _HEADER.unpack_from(self._inbox)
        if nbytes > MAX_FRAME:
            raise ClosedError("a frame is longer than any that is sent")
        end = _HEADER.size + nbytes
        if len(self._inbox) < end + _TAG:
            return None
        payload, tag = bytes(self._inbox[_HEADER.size : end]), bytes(self._inbox[end : end + _TAG])
        if not hmac.compare_digest(tag, _tag(self._in_key, self._received, kind, payload)):
            raise ClosedError("a frame is not what was sent")
        self._received += 1
        del self._inbox[: end + _TAG]
        return kind, payload

    def is_closed(self) -> bool:
        """Whether the other end has closed, or is gone, and what it sent before has been read."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take_descriptors(self) -> list[int]:
        """The descriptors that came with the frames received; they are the caller's to close."""
        descriptors, self.descriptors = self.descriptors, []
        return descriptors

    def close(self) -> None:
        for descriptor in self.take_descriptors():
            os.close(descriptor)
        self.socket.close()

    def _read(self) -> bytes:
        if not self.local:
            return self.socket.recv(1 << 18)
        space = socket.CMSG_SPACE(4 * (MAX_DESCRIPTORS + 3))
        data, ancillary, flags, _ = self.socket.recvmsg(1 << 18, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, rights in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.descriptors += struct.unpack(f"{len(rights) // 4}i", rights[: len(rights) // 4 * 4])
        if flags & socket.MSG_CTRUNC:
            raise CollectiveError("a descriptor was lost: this process may open no more files; raise ulimit -n")
        return data


def wait_for(files: Iterable[Any], deadline: float, event: int = select.POLLIN) -> list[int]:
    """Wait until one of the given files is ready, or broken, and say which descriptors are; [] at the deadline."""
    poll = select.poll()
    for file in files:
        poll.register(file, event)
    left = max(0.0, deadline - time.monotonic())
    return [descriptor for descriptor, _ in poll.poll(math.ceil(min(left, 2e6) * 1000))]


def _prove(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + transcript, "sha256")


def _tag(key: bytes, number: int, kind: int, payload: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<QB", number, kind) + payload, "sha256")[:_TAG]


def own_version() -> str:
    """What this end is called in messages about versions."""
    return _name(_version(), PROTOCOL)


def _version() -> bytes:
    return __version__.encode()[:32]


def _name(version: bytes, protocol: int) -> str:
    return f"mgpu-core {version.rstrip(bytes(1)).decode('ascii', 'replace')} (protocol {protocol})"
