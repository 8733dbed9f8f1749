"""One rank of a crew: it sleeps on its socket, and takes samples when the conductor asks for them."""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import candidates, inputs
from bench.case import Case, outcome, views
from bench.crew import ADDRESS, FOLDER, RANK, Message
from bench.pace import Pace
from collectives.builder import register_from
from collectives.initialise import ON_GPU
from kernels.dtypes import find

Answer = Callable[[Message], Message]


def run() -> None:
    """`python -m bench.worker ENGINE RANKS`, for every engine but ours."""
    name, ranks = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ.get(RANK, 0))
    if name == "gloo":
        sample_with(candidates.Gloo(rank, ranks, os.environ[FOLDER]))
    elif name == candidates.LIMIT:
        sample_with(candidates.Addition(rank))
    else:
        sample_with(candidates.Mpi())


def sample_ours(comm: Any, imports: Sequence[str] = ()) -> None:
    """What runs in each of our ranks; `imports` register algorithms."""
    for place in imports:
        register_from(place)
    sample_with((candidates.OnGpu if comm.backend in ON_GPU else candidates.Collectives)(comm))


def sample_with(engine: candidates.Engine) -> None:
    """Be one rank of the engine's crew."""
    serve(engine.rank, engine.version, lambda pace, ranks: _Sampler(engine, pace, ranks).answer)
    engine.close()


def serve(rank: int, version: str, prepare: Callable[[Pace, int], Answer]) -> None:
    """Greet the conductor, and answer it until it closes the socket.

    `prepare(pace, ranks)` gives the function that answers a request; pings are answered here.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ[ADDRESS])
        _say(connection, {"rank": rank, "version": version})
        line, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        if not line:
            return  # the crew was given up
        welcome = json.loads(line)
        pin(welcome["cpu"])
        track = mmap.mmap(descriptors[0], 0)
        os.close(descriptors[0])
        pace = Pace(track, rank, welcome["ranks"], lambda: _closed(connection))
        answer = prepare(pace, welcome["ranks"])
        _say(connection, {"rank": rank})
        with connection.makefile("rb") as requests:
            for line in requests:
                request = json.loads(line)
                try:
                    given = {"ns": pace.round_trip(**request["with"])} if request["do"] == "ping" else answer(request)
                except Exception:
                    given = {"error": traceback.format_exc()}
                try:
                    _say(connection, {"rank": rank, **given})
                except BrokenPipeError:
                    break


def pin(cpu: int) -> None:
    """Keep every thread of this process on one core, those that a library has started too."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), {cpu})
        except ProcessLookupError:
            pass  # it has just ended


class _Sampler:
    """Answers requests for samples, each a method here."""

    def __init__(self, engine: candidates.Engine, pace: Pace, ranks: int) -> None:
        self._engine = engine
        self._pace = pace
        self._ranks = ranks
        self._memory: dict[str, tuple[inputs.Array, inputs.Array]] = {}
        self._blocks: dict[tuple[str, str], tuple[inputs.Array, inputs.Array]] = {}

    def answer(self, request: Message) -> Message:
        """Do what is asked."""
        return (self._allocate if request["do"] == "allocate" else self._sample)(**request["with"])

    def _allocate(self, memory: str, nbytes: int) -> Message:
        """An input and an output of the largest size, every page of them touched."""
        x, out = (self._engine.allocate(nbytes, memory) for _ in range(2))
        x[:] = 0
        out[:] = 0
        self._memory[memory] = x, out
        return {}

    def _sample(self, candidate: Message, case: Message, warmups: int, calls: int, check: bool, first: int) -> Message:
        """Time `calls` calls, one by one, in ns. Before each, the input is written anew, and all ranks meet.

        The meetings are numbered from `first`.
        """
        which, what = candidates.Candidate(**candidate), Case(**case)
        kind = find(what.dtype).numpy
        whole = what.nbytes // kind.itemsize
        memory = (array[: whole * kind.itemsize].view(kind) for array in self._memory[which.memory])
        x, out = views(what, self._engine.rank, self._ranks, *memory)
        try:
            call = self._engine.prepare(which, what, x, out)
        except candidates.UnsupportedError as error:
            return {"unsupported": str(error)}
        given, reduced = self._inputs(what.dtype, what.op)
        block = given[self._engine.rank]
        inputs.poison(out)
        clock, start_line, fill = time.perf_counter_ns, self._pace.start_line, inputs.fill
        times = []
        gc.disable()
        try:
            for number in range(first, first + warmups + calls):
                fill(x, block)
                start_line(number)
                start = clock()
                call()
                times.append(clock() - start)
        finally:
            gc.enable()
        wrong = 0
        if check:
            parts = outcome(what, self._engine.rank, given, reduced)
            wrong = sum(inputs.count_wrong(out[part], expected) for part, expected in parts)
        return {"ns": times[warmups:], "wrong": wrong}

    def _inputs(self, dtype: str, op: str) -> tuple[inputs.Array, inputs.Array]:
        """Every rank's input block, and their reduction."""
        if (dtype, op) not in self._blocks:
            kind = find(dtype).numpy
            given = inputs.blocks(self._ranks, kind, op)
            reduced = given[0] if op == "none" else inputs.expected(self._ranks, kind, op)
            self._blocks[dtype, op] = self._engine.place(given), self._engine.place(reduced)
        return self._blocks[dtype, op]


def _say(connection: socket.socket, message: Message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _closed(connection: socket.socket) -> bool:
    """Whether the conductor is gone; asked while waiting for another rank."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    run()
