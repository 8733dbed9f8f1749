"""Crews: groups of rank processes that wait, asleep, until the conductor asks one of them for a sample.

Every peer needs processes of its own, started by its own launcher. To interleave peers finely they must all be there
at once and stay out of each other's way: an idle rank is blocked in a read of its socket, outside of any library that
might spin. All crews' rank r runs on the same core.

Conductor and ranks speak lines of JSON over a Unix socket in a private folder.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINE = 64  # bytes in a cache line
ADDRESS = "MGPU_BENCH_SOCKET"  # where a rank finds its conductor
RANK = "MGPU_BENCH_RANK"  # set where the launcher has no environment of its own
FOLDER = "MGPU_BENCH_FOLDER"  # and a folder that its crew may use
_BACKLOG = 128
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

Message = dict[str, Any]


class CrewError(RuntimeError):
    """A crew's rank failed, died or did not answer in time."""


class Track:
    """The memory in which ranks meet at the start line and play ping-pong (`bench.pace`).

    All crews use the same cache lines, one crew at a time. Where cores are far apart, a round trip depends on where the
    line has its home as well (430 to 1,100 ns on one machine), and only trips over the same line can be compared.
    """

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create("mgpu-bench")
        self._nbytes = (ranks + 2) * LINE
        os.ftruncate(self.fd, self._nbytes)
        self._next = 1

    def take(self, count: int) -> int:
        """The first of `count` numbers that no flag has had yet."""
        first = self._next
        self._next += count
        return first

    def clear(self) -> None:
        """Forget ranks that were killed while they slept here; nobody may be running."""
        os.pwrite(self.fd, bytes(self._nbytes), 0)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class Crew:
    """The processes of one engine, rank by rank.

    `ready` must be called next; it returns when all ranks have come. `folder` holds the socket, and what they print.
    """

    def __init__(self, name: str, ranks: int, folder: Path, track: Track, launch: Launch, *, timeout: float) -> None:
        self.name = name
        self.ranks = ranks
        self.version = ""
        self.track = track
        self.timeout = timeout
        self._sockets: list[socket.socket] = []
        self._log = folder / f"{name}.log"
        address = str(folder / f"{name}.socket")
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(address)
        self._door.listen(_BACKLOG)
        self._processes = []
        with self._log.open("wb") as log:
            for command, environment in zip(launch.commands, launch.environments, strict=True):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **_ONE_THREAD, **environment, ADDRESS: address, FOLDER: str(folder)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def ready(self, cpus: Sequence[int]) -> None:
        """Wait for all ranks' greetings, and give each a core and the track."""
        deadline = time.monotonic() + self.timeout
        self._door.settimeout(0.1)
        met: dict[int, tuple[socket.socket, _Lines]] = {}
        while len(met) < self.ranks:
            try:
                connection, _ = self._door.accept()
            except TimeoutError:
                if any(process.poll() for process in self._processes):
                    raise self._error("ended before it was ready") from None
                if time.monotonic() > deadline:
                    missing = sorted(set(range(self.ranks)) - set(met))
                    raise self._error(f"ranks {missing} did not come within {self.timeout:g} s") from None
                continue
            lines = _Lines(connection)
            greeting = self._hear({connection: lines}, "greeting")[0]
            met[greeting["rank"]] = connection, lines
            self.version = greeting["version"]
        self._sockets = [met[rank][0] for rank in range(self.ranks)]
        self._lines = [met[rank][1] for rank in range(self.ranks)]
        for rank, connection in enumerate(self._sockets):
            welcome = {"ranks": self.ranks, "cpu": cpus[rank % len(cpus)]}
            socket.send_fds(connection, [json.dumps(welcome).encode() + b"\n"], [self.track.fd])
        self._hear(dict(zip(self._sockets, self._lines, strict=True)), "welcome")

    def ask(self, request: Message, ranks: Sequence[int] | None = None) -> list[Message]:
        """Send a request to these ranks (None: to all), and return their answers in that order.

        Raises CrewError, with the rank's traceback, where one fails, ends or is silent for `timeout` seconds.
        """
        chosen = range(self.ranks) if ranks is None else ranks
        line = json.dumps(request).encode() + b"\n"
        for rank in chosen:
            try:
                self._sockets[rank].sendall(line)
            except OSError as error:
                raise self._error(f"rank {rank} is gone ({error})") from error
        return self._hear({self._sockets[rank]: self._lines[rank] for rank in chosen}, str(request.get("do")))

    def close(self) -> None:
        """Let the ranks leave; end what has not left after five seconds."""
        for connection in self._sockets:
            connection.close()
        self._door.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """End the crew's processes at once."""
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self.track.clear()

    def _hear(self, awaited: Mapping[socket.socket, _Lines], what: str) -> list[Message]:
        answers: dict[socket.socket, Message] = {}
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            for connection in awaited:
                selector.register(connection, selectors.EVENT_READ)
            while len(answers) < len(awaited):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._error(f"no answer to '{what}' within {self.timeout:g} s")
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    connection = key.fileobj
                    try:
                        line = awaited[connection].read()
                    except OSError as error:
                        raise self._error(f"a rank ended during '{what}' ({error})") from error
                    if line is None:
                        continue
                    answer = json.loads(line)
                    if "error" in answer:
                        raise self._error(f"rank {answer['rank']} failed in '{what}':\n{answer['error']}")
                    answers[connection] = answer
                    selector.unregister(connection)
        return [answers[connection] for connection in awaited]

    def _error(self, what: str) -> CrewError:
        log = self._log.read_text(errors="replace").strip().splitlines()[-15:]
        return CrewError("\n    ".join([f"{self.name}: {what}", *log]))


class _Lines:
    """Whole lines out of a stream that comes in pieces. One answer is out at a time, so nothing follows a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pieces: list[bytes] = []

    def read(self) -> bytes | None:
        """What can be read now: a line if that completes one, else None. Raises ConnectionError at the end."""
        piece = self._connection.recv(1 << 16)
        if not piece:
            raise ConnectionError("its socket closed")
        self._pieces.append(piece)
        if not piece.endswith(b"\n"):
            return None
        line = b"".join(self._pieces)
        self._pieces.clear()
        return line


@dataclass(frozen=True)
class Launch:
    """How a crew's processes are started: a launcher, or one process per rank, each with its environment."""

    commands: Sequence[Sequence[str]]
    environments: Sequence[Mapping[str, str]]

    @classmethod
    def each(cls, ranks: int, program: Sequence[str]) -> Launch:
        """The program once per rank, which finds its number in the environment."""
        return cls([program] * ranks, [{RANK: str(rank)} for rank in range(ranks)])


def start(
    stack: ExitStack, launches: Mapping[str, Launch], ranks: int, *, timeout: float, needed: str
) -> tuple[dict[str, Crew], list[str]]:
    """(crews that are ready, by name; remarks on those that did not start). All end with the stack.

    Raises CrewError if a crew does not start whose name begins with `needed`.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mgpu-bench-")))
    track = stack.enter_context(closing(Track(ranks)))
    crews: dict[str, Crew] = {}
    remarks = []
    for name, launch in launches.items():
        crews[name] = stack.enter_context(closing(Crew(name, ranks, folder, track, launch, timeout=timeout)))
    for name in launches:
        try:
            crews[name].ready(sorted(os.sched_getaffinity(0)))
        except CrewError as error:
            if name.startswith(needed):
                raise
            remarks.append(f"left out: {error}")
            crews.pop(name).kill()
    return crews, remarks


def python(code: str) -> list[str]:
    """The command that runs a line of Python in this interpreter, with nothing from the working folder in the way."""
    return [sys.executable, "-c", code]
