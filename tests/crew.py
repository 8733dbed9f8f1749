"""Crews: ranks that stay up through a test file and run one function after another, where starting them costs more than
what they do."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import collectives
from collectives import Communicator
from collectives.launch import _pack, _unpack


class Crew:
    """`size` ranks. A function that raises ends them."""

    def __init__(self, size: int) -> None:
        self.pids: set[int] = set()
        self._error: BaseException | None = None
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{folder}/door")
            door.listen(size)
            door.settimeout(0.1)
            self._ranks = threading.Thread(target=self._spawn, args=(size, f"{folder}/door"), daemon=True)
            self._ranks.start()
            self._connections: list[Connection] = []
            while len(self._connections) < size:
                try:
                    self._connections.append(Connection(door.accept()[0].detach()))
                except TimeoutError:
                    if not self._ranks.is_alive():
                        self.close()
        greetings = [connection.recv() for connection in self._connections]
        self._connections = [connection for _, connection in sorted(zip(greetings, self._connections), key=_first)]
        self.pids = {pid for _, pid in greetings}

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        """fn(comm, *args) on every rank: the results by rank. Raises what `collectives.spawn` would."""
        job = _pack(fn, args, "auto", 0.0)
        try:
            for connection in self._connections:
                connection.send(sys.path)
                connection.send_bytes(job)
            answers = [connection.recv() for connection in self._connections]
        except (EOFError, ConnectionError):
            self.close()
            raise
        except BaseException:  # pytest's timeout, Ctrl-C: the ranks go on with what nobody asks for any more
            self._kill()
            raise
        if troubles := [trouble for _, trouble in answers if trouble]:
            print(f"the crew of {len(answers)} ends here:", *troubles, sep="\n", file=sys.stderr)
            self.close()
        return [answer for answer, _ in answers]

    def close(self) -> None:
        """The ranks end. Raises what ended them earlier, if anything did."""
        for connection in self._connections:
            connection.close()
        self._ranks.join()
        if self._error:
            raise self._error

    def _kill(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(collectives.CollectiveError):  # what that ended them by
            self.close()
        self._error = None

    @property
    def works(self) -> bool:
        return self._ranks.is_alive()

    def _spawn(self, size: int, door: str) -> None:
        try:
            collectives.spawn(_serve, size, (door,))
        except BaseException as error:
            self._error = error


class Crews:
    """A crew of every size that was asked for, and for every environment. Called like `collectives.spawn`."""

    def __init__(self) -> None:
        self._crews: dict[Any, Crew] = {}

    def __call__(self, fn: Callable[..., Any], size: int, args: Sequence[Any] = ()) -> list[Any]:
        kind = size, *sorted(item for item in os.environ.items() if item[0].startswith("MGPU_"))
        crew = self._crews.get(kind)
        if crew is not None and not crew.works:
            del self._crews[kind]
            crew.close()  # raises what ended it, if that was nobody's wish
            crew = None
        if crew is None:
            crew = self._crews[kind] = Crew(size)
        return crew.run(fn, args)

    @property
    def pids(self) -> set[int]:
        return {pid for crew in self._crews.values() for pid in crew.pids}

    def close(self) -> None:
        for crew in self._crews.values():
            if crew.works:
                crew.close()


crews = Crews()  # of this process, for every test in it


def _first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


def _trouble(comm: Communicator) -> str:
    """Why it is of no further use after what some tests provoke; empty if it is."""
    try:
        comm.check()
    except collectives.CollectiveError as error:
        return str(error)
    return ""


def _serve(comm: Communicator, door: str) -> None:
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(door)
        connection = Connection(talk.detach())
    with connection:
        connection.send((comm.rank, os.getpid()))
        while True:
            try:
                sys.path[:] = connection.recv()
            except (EOFError, ConnectionError):
                return
            fn, args = _unpack(*pickle.loads(connection.recv_bytes())[:3])
            answer = fn(comm, *args)
            gc.collect()  # what one test has dropped is no concern of the next, and may be this communicator's end
            connection.send((answer, _trouble(comm)))
            del answer
