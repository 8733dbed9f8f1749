"""Strangers at the door, by the thousand: whatever they say and however long they stay, nothing crashes, nobody gets
in, the hub's memory and descriptors stay what they are, and the honest ranks still meet."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from test_rendezvous import HELLO, crafted, knock, tcp, together, unix

from collectives import channel
from collectives.door import connect
from collectives.errors import CollectiveError
from collectives.place import endpoint
from collectives.rendezvous import Place, meet

HUB = """
import sys
from collectives.rendezvous import Place, meet
meeting = meet(Place(0, 3, sys.argv[1], {secret!r}, sys.argv[2] or None, 300.0))
print(meeting.exchange(b"hub"), flush=True)
meeting.close()
"""


def replayed(secret: bytes) -> bytes:
    """All that a rank has sent in an earlier meeting, proof included: right at that time."""
    rank, hub = channel.introduce(secret, 1, 3), channel.admit(secret)
    next(hub)
    hello, _ = next(rank)
    answer, _ = hub.send(hello)
    proof, _ = rank.send(answer)
    with pytest.raises(StopIteration):
        hub.send(proof)
    return hello + proof


def huge(rng: random.Random) -> bytes:
    """A frame that says it is longer than any memory, with or without a greeting before it."""
    greeting = HELLO.pack(b"MGPU", channel.PROTOCOL, b"0.1.0", 1, 3, rng.randbytes(32)) if rng.random() < 0.5 else b""
    return greeting + b"\xff" * 8 + rng.randbytes(rng.randrange(200))


class Strangers:
    """They come one after the other; some stay, and say a byte more now and then."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.rng = place, random.Random(seed)
        self.staying: deque[socket.socket] = deque()
        self.replay = replayed(place.secret)
        self.answered = 0

    def come(self, data: bytes, wrong_secret: bool = False) -> None:
        connection = self._knock()
        with contextlib.suppress(OSError):
            if wrong_secret:
                self._pretend(connection)
            else:
                connection.sendall(data)
        if self.rng.random() < 0.02:
            self.staying.append(connection)
            if len(self.staying) > 100:
                self.staying.popleft().close()
            with contextlib.suppress(OSError):
                self.rng.choice(self.staying).send(self.rng.randbytes(1), socket.MSG_DONTWAIT)
        else:
            connection.close()

    def _knock(self) -> socket.socket:
        while True:
            with contextlib.suppress(
                BlockingIOError, ConnectionRefusedError, TimeoutError
            ):  # it is not up yet, or busy
                return knock(self.place)
            time.sleep(0.01)

    def _pretend(self, connection: socket.socket) -> None:
        """The whole greeting, with another secret."""
        liar = channel.introduce(b"not this job's secret", 1, 3)
        hello, _ = next(liar)
        connection.sendall(hello)
        connection.settimeout(2.0)
        answer = connection.recv(channel._ANSWER.size + channel._PROOF, socket.MSG_WAITALL)
        if len(answer) == channel._ANSWER.size + channel._PROOF:
            self.answered += 1
            transcript = hello + answer[: channel._ANSWER.size]
            connection.sendall(channel._prove(b"not this job's secret", b"connecting", transcript))

    def leave(self) -> None:
        for connection in self.staying:
            connection.close()


def usage(pid: int) -> tuple[int, int]:
    """KiB of memory, and descriptors."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def besieged(places: list[Place], random_streams: int, crafted_streams: int) -> None:
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    argv = [sys.executable, "-c", HUB.format(secret=places[0].secret), places[0].address, places[0].host or ""]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as hub:
        try:
            strangers = Strangers(places[0], seed)
            strangers.come(b"")
            before = usage(hub.pid)
            kinds = ["crafted"] * crafted_streams + ["random"] * random_streams
            rng.shuffle(kinds)
            most = 0
            for number, kind in enumerate(kinds):
                if kind == "random":
                    strangers.come(rng.randbytes(rng.randrange(300)))
                else:
                    data = rng.choice([crafted(rng), huge(rng), strangers.replay, strangers.replay + bytes(50)])
                    strangers.come(data, wrong_secret=rng.random() < 0.2)
                if number % 100 == 0:
                    most = max(most, usage(hub.pid)[1])
                    assert hub.poll() is None, f"seed {seed}: the hub has ended: {hub.communicate()}"

            def honest(place: Place) -> list[bytes]:
                meeting = meet(place)
                after.append(usage(hub.pid))
                try:
                    return meeting.exchange(b"%d" % place.rank)
                finally:
                    meeting.close()

            after: list[tuple[int, int]] = []
            results = together([lambda place=place: honest(place) for place in places[1:]])
            assert results == [[b"hub", b"1", b"2"]] * 2, f"seed {seed}"
            assert hub.communicate(timeout=60) == ("[b'hub', b'1', b'2']\n", ""), f"seed {seed}"
            grown = after[0][0] - before[0]
            print(f"{len(kinds)} strangers: the hub took {grown} KiB more, at most {most} descriptors; "
                  f"{strangers.answered} were answered and had the wrong secret")  # fmt: skip
            assert strangers.answered
            assert grown < 8 << 10 and most < 200, f"seed {seed}"
        finally:
            strangers.leave()
            hub.kill()


@pytest.mark.parametrize("make", [unix, tcp])
def test_a_siege(make) -> None:
    besieged(make(3, timeout=60.0), random_streams=1500, crafted_streams=100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_siege() -> None:
    besieged(unix(3, timeout=60.0), random_streams=100_000, crafted_streams=1000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_siege_by_network() -> None:
    besieged(tcp(3, timeout=60.0), random_streams=10_000, crafted_streams=1000)


def test_a_rank_that_knocks_at_a_stranger_s_door() -> None:
    """It hears noise instead of a hub: an error of ours, soon, whatever that is."""
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    place = unix(2, timeout=2.0)[1]

    family, address = endpoint(place)
    for _ in range(60):
        with socket.socket(family) as listener:
            listener.bind(address)
            listener.listen()

            def answer(listener: socket.socket = listener) -> None:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(b"MGPU" * rng.randrange(2) + rng.randbytes(200))
                    connection.recv(1000)

            _, found = together([answer, lambda: connect(place, 0, family, address, time.monotonic() + 2.0)])
        assert type(found) is CollectiveError, f"seed {seed}: {found}"
        assert "is not rank 0 of this job" in str(found)
