"""Letters between ranks of several hosts, at any time: what ranks that share no memory need beside NCCL, which neither
compares calls nor says who is gone.

When ranks have met (collectives.rendezvous), the star around rank 0 goes on. A thread of each process reads and writes
its channels, and rank 0's, the hub, carries letters on, gathers what all ranks of a communicator give, and compares the
calls that they put into streams. It is the first to know that a rank or a host is gone: a process that ends closes its
connection, and for a host that has lost its power or its cable the kernel's own probes (`collectives.door`) find that
out within half a minute, even where a process is stopped or too busy to answer. Which ranks are silent meanwhile, it
knows from a letter that each sends every second.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from collectives.backends.base import Backend
from collectives.book import Book, Calls
from collectives.channel import Channel, ClosedError
from collectives.door import listen
from collectives.place import Place, endpoint
from collectives.rendezvous import Meeting
from collectives.star import BYE, FAILED, unpack

HUB = 0
LOOK = 0.05  # seconds between two reports of what was put into streams
_BEAT = 1.0  # seconds between two signs of life
_SILENT = 2.5 * _BEAT  # after which a rank is called silent
_FLUSH = 1.0  # seconds that a rank which closes leaves its last letters
_MOST_WAITING = 8 << 20  # bytes of letters under way from this process, or to one, beyond which a sender is to wait
_RECEIPT = 1 << 20  # bytes of mail that a rank has got from another before it says so
_REACH = 2.0  # seconds in which a living rank's host answers
_HEAD = struct.Struct("<8sIIq")  # communicator, source, target, number
_WORLD = bytes(8)  # letters that are of no communicator
_SIOCGIFADDR = 0x8915


class Kind(IntEnum):
    """What a letter is, beside the frames of collectives.star."""

    JOIN = 16  # the source belongs to a communicator now, and who else does
    GATHER = 17  # the source's part of the communicator's gather of this number; from the hub, all parts
    CALLS = 18  # what the source has put into streams since the last time
    DIFFERENT = 19  # from the hub: calls differ, and how
    MAIL = 20  # to one rank
    SIGNAL = 21  # likewise
    LEFT = 22  # the source has closed a communicator, or given it up, and why
    GONE = 23  # from the hub: a rank's process or host is gone
    ASK = 24  # where are the others?
    ANSWER = 25
    BEAT = 26  # the source lives
    RECEIPT = 27  # to one rank, from which the source has got so many more bytes of mail


class Letter(NamedTuple):
    """source, target: ranks of the world."""

    kind: int
    comm: bytes
    source: int
    target: int
    number: int
    body: bytes

    @property
    def payload(self) -> bytes:
        """As it travels."""
        return _HEAD.pack(self.comm, self.source, self.target, self.number) + self.body


class Farewell(NamedTuple):
    """How a rank left a communicator. state: CLOSED or FAILED of collectives.region; kind: of its error."""

    state: int
    kind: str
    text: str
    ended: int  # calls that it had ended


@dataclass
class Box:
    """What has come for one communicator of this rank. Ranks are the world's."""

    gathered: dict[int, list[bytes]] = field(default_factory=dict)
    mail: dict[int, deque[bytes]] = field(default_factory=dict)
    signals: Counter[int] = field(default_factory=Counter)
    left: dict[int, Farewell] = field(default_factory=dict)
    answers: dict[int, str] = field(default_factory=dict)
    different: str = ""
    members: Sequence[int] | None = None  # of a communicator that this rank has left


class Post:
    """This process's end. Made by all ranks of a meeting together, which it takes over; `close` ends both."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.rank, self.size = meeting, meeting.rank, meeting.size
        self.gone: dict[int, str] = {}  # ranks, and how that was seen
        self._boxes: dict[bytes, Box] = {}
        self._news = threading.Condition()  # around what has come
        self._books: dict[bytes, Book] = {}  # of the hub: its thread's
        self._heard = [time.monotonic()] * self.size  # likewise
        self._calls: dict[bytes, Calls] = {}
        self._questions = itertools.count()
        self.engines: weakref.WeakSet[Backend] = weakref.WeakSet()
        self._listener, own = self._listen(meeting)
        self._addresses = [answer.decode() for answer in meeting.exchange(own.encode())]
        self._channels: dict[int, Channel] = meeting.hand_over()
        self._said_bye: set[int] = set()
        self._outgoing: dict[int, deque[memoryview]] = {rank: deque() for rank in self._channels}
        self._waiting = 0  # bytes in there
        self._on_the_way: Counter[int] = Counter()  # bytes of mail, to each rank, of which there is no receipt
        self._got: Counter[int] = Counter()  # bytes of mail, from each rank, since the last receipt
        self._incoming: deque[Letter] = deque()  # of the hub to itself
        self._mutex = threading.Lock()  # around what is to go
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="mgpu post", daemon=True)
        self._thread.start()

    # For communicators

    def send(self, kind: Kind, comm: bytes, number: int = 0, body: bytes = b"", target: int = HUB) -> None:
        """Send a letter, which travels by itself from here on. Whoever sends many waits first until there is `room`."""
        if kind == Kind.MAIL:
            with self._mutex:
                self._on_the_way[target] += len(body)
        self._post(Letter(kind, comm, self.rank, target, number, body))

    def room(self, target: int = HUB) -> bool:
        """Whether not very much is under way already, nor much mail to `target`, which the hub may have to keep."""
        return max(self._waiting, self._on_the_way[target]) <= _MOST_WAITING

    def box(self, comm: bytes) -> Box:
        """What has come for a communicator."""
        with self._news:
            return self._boxes.setdefault(comm, Box())

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until something has come that makes `ready` so."""
        with self._news:
            return self._news.wait_for(ready, seconds)

    def report(self, comm: bytes, calls: Calls) -> None:
        """From now on, tell the hub what is put into streams."""
        with self._mutex:
            self._calls[comm] = calls

    def ask(self, comm: bytes, number: int, what: str) -> str:
        """Who has come to a gather, or has begun a call, of this number, and who is silent: as the hub sees it."""
        question, box = next(self._questions), self.box(comm)
        self.send(Kind.ASK, comm, question, json.dumps([number, what]).encode())
        if self.wait(lambda: question in box.answers, _REACH):
            return box.answers.pop(question)
        return f"rank {HUB}{self.where(HUB)}, which knows where the others are, does not answer"

    def leave(self, comm: bytes, members: Sequence[int], word: Farewell) -> None:
        """Say that this rank has closed or given up a communicator of these ranks."""
        with self._mutex:
            self._calls.pop(comm, None)
        self._post(Letter(Kind.LEFT, comm, self.rank, HUB, 0, json.dumps(word).encode()))
        with self._news:
            self._boxes.setdefault(comm, Box()).members = members
            self._forget(comm)
        self._flush()

    # What `Watch` asks

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that are gone."""
        lost = {*self.meeting.lost(), *self.gone}
        return [rank for rank in ranks if rank in lost]

    def where(self, rank: int) -> str:
        """ " (on HOST)", for messages, after a rank's number."""
        return f" (on {self.meeting.peers[rank].hostname})"

    def obituary(self, rank: int) -> str:
        """What is known of a rank's end."""
        peer = self.meeting.peers[rank]
        how = self.gone.get(rank, "")
        return f"(process {peer.pid} on {peer.hostname}) " + (f"was lost: {how}" if how else "has died")

    # Beginning again

    def probe(self) -> None:
        """Find out which ranks are gone where the hub, which would have said so, is: a living process still listens."""
        if HUB not in self.gone:
            return
        for rank in range(self.size):
            if rank != self.rank and rank not in self.gone:
                family, address = endpoint(self.place_of(rank, self.rank, self.size, _REACH))
                with socket.socket(family, socket.SOCK_STREAM) as knock:
                    knock.settimeout(_REACH)
                    try:
                        knock.connect(address)
                    except OSError as error:
                        self.gone[rank] = error.strerror or str(error)

    def place_of(self, hub: int, rank: int, size: int, timeout: float) -> Place:
        """The place of this process as rank `rank` of `size` that meet at another rank, `hub`, which every rank can
        do."""
        address = self._addresses[hub]
        return replace(self.meeting.place, rank=rank, size=size, address=address, timeout=timeout)

    def listener(self) -> socket.socket:
        """This rank's socket at its own address, once more."""
        return self._listener.dup()

    @property
    def interface(self) -> str:
        """The address of this host that ranks use, and its interface: "10.0.0.7 (eth1)"."""
        address = self._addresses[self.rank].rpartition(":")[0].strip("[]")
        return f"{address} ({name})" if (name := _interface(address)) else address

    @staticmethod
    def _listen(meeting: Meeting) -> tuple[socket.socket, str]:
        """A socket where others can come if the hub is gone, and its address."""
        host = meeting.own_address
        if not host:
            address = f"unix:{os.urandom(16).hex()}"
            family, where = endpoint(replace(meeting.place, address=address))
            return listen(family, where, address), address
        listener = listen(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0), host)
        port = listener.getsockname()[1]
        return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    # The thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            for rank in range(self.size):  # whoever waits here learns that it is in vain
                self._deliver(Letter(Kind.GONE, _WORLD, rank, self.rank, 0, f"its letters here: {error!r}".encode()))
            raise

    def _serve(self) -> None:
        beat = 0.0
        while self._open:
            if time.monotonic() >= beat:
                beat = time.monotonic() + _BEAT
                self._post(Letter(Kind.BEAT, _WORLD, self.rank, HUB, 0, b""))
            self._report()
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            ranks = {}
            for rank, channel in self._channels.items():
                ranks[channel.fileno()] = rank
                poll.register(channel, select.POLLIN | (select.POLLOUT if self._outgoing[rank] else 0))
            for descriptor, event in poll.poll(LOOK * 1000):
                if descriptor == self._wake:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    continue
                rank = ranks[descriptor]
                try:
                    if event & select.POLLOUT:
                        self._write(rank)
                    if event & ~select.POLLOUT:
                        self._read(rank)
                except (ClosedError, OSError) as error:
                    self._lose(rank, str(error))
            while self._incoming:
                self._take(self._incoming[0])
                self._incoming.popleft()  # now, since `_flush` looks

    def _report(self) -> None:
        with self._mutex:
            reports = [(comm, calls.news()) for comm, calls in self._calls.items()]
        for comm, news in reports:
            if news:
                self._post(Letter(Kind.CALLS, comm, self.rank, HUB, 0, news))

    def _read(self, rank: int) -> None:
        while frame := self._channels[rank].receive():
            kind, payload = frame
            if kind == FAILED:  # as it met the others
                self._lose(rank, json.loads(payload)[1])
                return
            if kind == BYE:
                with self._news:
                    self._said_bye.add(rank)
                    self._news.notify_all()
            else:
                comm, source, target, number = _HEAD.unpack_from(payload)
                source = source if rank == HUB else rank  # the hub alone speaks for others
                self._take(Letter(kind, comm, source, target, number, payload[_HEAD.size :]))

    def _write(self, rank: int) -> None:
        queue, full = self._outgoing[rank], self._waiting > _MOST_WAITING
        with suppress(BlockingIOError):
            while queue:
                sent = self._channels[rank].socket.send(queue[0], socket.MSG_NOSIGNAL)
                with self._mutex:
                    self._waiting -= sent
                queue[0] = queue[0][sent:]
                if not queue[0]:
                    queue.popleft()
        if full and self._waiting <= _MOST_WAITING:
            with self._news:
                self._news.notify_all()

    def _lose(self, rank: int, how: str) -> None:
        """A channel has ended."""
        with self._mutex:
            channel = self._channels.pop(rank, None)
            if channel is None:
                return
            self._waiting -= sum(map(len, self._outgoing.pop(rank)))
        channel.close()
        if self.rank != HUB:
            self._deliver(Letter(Kind.GONE, _WORLD, rank, self.rank, 0, how.encode()))
        elif rank not in self._said_bye:
            for other in range(self.size):
                self._pass_on(Letter(Kind.GONE, _WORLD, rank, other, 0, how.encode()))

    def _post(self, letter: Letter) -> None:
        """Queue a letter on its way: to the hub first."""
        if self.rank == HUB:
            self._incoming.append(letter)
        else:
            self._queue(HUB, letter)
        with suppress(OSError):  # closed
            os.eventfd_write(self._wake, 1)

    def _queue(self, rank: int, letter: Letter) -> None:
        with self._mutex:
            if rank in self._outgoing:
                data = self._channels[rank].frame(letter.kind, letter.payload)
                self._outgoing[rank].append(memoryview(data))
                self._waiting += len(data)

    def _take(self, letter: Letter) -> None:
        if self.rank != HUB:
            self._deliver(letter)
            return
        self._heard[letter.source] = time.monotonic()
        if letter.kind in (Kind.MAIL, Kind.SIGNAL, Kind.RECEIPT):
            self._pass_on(letter)
        elif letter.kind != Kind.BEAT:
            self._keep_book(letter)

    def _pass_on(self, letter: Letter) -> None:
        if letter.target == self.rank:
            self._deliver(letter)
        else:
            self._queue(letter.target, letter)

    def _keep_book(self, letter: Letter) -> None:
        kind, comm, source, _, number, body = letter
        if kind == Kind.JOIN:
            self._books.setdefault(comm, Book()).members = json.loads(body)
        book = self._books.get(comm)
        if book is None:  # all have left, and a last report was on its way
            return
        if kind == Kind.GATHER:
            if everything := book.gather(source, number, body):
                for member in book.members:
                    self._pass_on(Letter(kind, comm, source, member, number, everything))
        elif kind == Kind.CALLS:
            if text := book.note(source, body):
                for member in book.members:
                    self._pass_on(Letter(Kind.DIFFERENT, comm, source, member, 0, text.encode()))
        elif kind == Kind.LEFT:
            for member in book.members:
                if member != source:
                    self._pass_on(Letter(kind, comm, source, member, 0, body))
            book.left.add(source)
            if book.left.union(self.gone) >= set(book.members):
                del self._books[comm]
        elif kind == Kind.ASK:
            after, what = json.loads(body)
            told = "; ".join(filter(None, [book.arrivals(after, what), *self._silent(book.members)]))
            told = told or "all others are there"
            self._pass_on(Letter(Kind.ANSWER, comm, source, source, number, told.encode()))

    def _silent(self, members: Sequence[int]) -> list[str]:
        now = time.monotonic()
        return [
            f"rank {member}{self.where(rank)} has been silent for {now - self._heard[rank]:.0f} s"
            for member, rank in enumerate(members)
            if now - self._heard[rank] > _SILENT and rank not in (self.rank, *self.gone)
        ]

    def _deliver(self, letter: Letter) -> None:
        kind, comm, source, _, number, body = letter
        with self._news:
            if kind == Kind.GONE:
                self.gone.setdefault(source, body.decode())
            elif kind == Kind.RECEIPT:
                with self._mutex:
                    self._on_the_way[source] -= number
            elif kind != Kind.BEAT:
                box = self._boxes.setdefault(comm, Box())
                if kind == Kind.GATHER:
                    box.gathered[number] = unpack(body)
                elif kind == Kind.MAIL:
                    box.mail.setdefault(source, deque()).append(body)
                    self._acknowledge(source, len(body))
                elif kind == Kind.SIGNAL:
                    box.signals[source] += 1
                elif kind == Kind.LEFT:
                    box.left.setdefault(source, Farewell(*json.loads(body)))
                elif kind == Kind.DIFFERENT:
                    box.different = body.decode()
                elif kind == Kind.ANSWER:
                    box.answers[number] = body.decode()
                self._forget(comm)
            self._news.notify_all()

    def _acknowledge(self, source: int, nbytes: int) -> None:
        """Mail has come."""
        self._got[source] += nbytes
        if self._got[source] >= _RECEIPT:
            self._post(Letter(Kind.RECEIPT, _WORLD, self.rank, source, self._got.pop(source), b""))

    def _forget(self, comm: bytes) -> None:
        """Nothing more comes for a communicator that all have left."""
        members = self._boxes[comm].members
        if members is not None and {*self._boxes[comm].left, *self.gone, self.rank} >= set(members):
            del self._boxes[comm]

    # The end

    def close(self, patience: float) -> None:
        """Take leave. The hub stays, for `patience` seconds at most, until all others have left, since it carries their
        letters."""
        if not self._open:
            return
        if self.rank == HUB:
            others = set(range(self.size)) - {HUB}
            self.wait(lambda: others <= self._said_bye.union(self.gone), patience)
        self._flush()
        self._open = False
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._listener.close()
        self.meeting.take_back(self._channels)
        self.meeting.close()

    def _flush(self) -> None:
        """Let what is to go go: this process may be about to end."""
        until = time.monotonic() + _FLUSH
        while (self._incoming or self._waiting) and time.monotonic() < until:
            time.sleep(0.001)

    def disown(self) -> None:
        """This process is a fork of the rank's, without a part in it: the others must see when the rank itself ends."""
        self._open = False
        for channel in self._channels.values():
            channel.close()
        self._listener.close()
        self.meeting.disown()


def _interface(address: str) -> str:
    """The name of the network interface that has an IPv4 address; "" where that is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""
