"""Ranks that are killed or stopped at random moments, while all start, meet, allocate, split, call, send, signal and
close: the others say so, and nothing is left. By default a few; under `slow` hundreds, and then the time counts too."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from survivors import Outcome, now_it_happens, report

import collectives
from collectives import Communicator, launch, ranks
from collectives.errors import CollectiveError

pytestmark = pytest.mark.usefixtures("nothing_shared_left")
PROMISED = 2.0  # seconds from a death, or from a deadline, until everybody has raised
DEADLINE = 3.0  # of the calls of ranks that wait for one that is stopped
DTYPES = ("float32", "float64", "int32", "bfloat16")


def busy(comm: Communicator, seed: int) -> None:
    """Everything that ranks do together, in an order that is drawn at random and agreed, and never ends."""
    draw = random.Random(seed)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    symmetric = comm.zeros(1000)
    while True:
        what = draw.choice(WHAT)
        n = draw.choice([0, 1, 100, 10_000, 300_000])
        dtype = np.dtype(draw.choice(DTYPES)) if what in ("all_reduce", "asynchronous") else np.dtype(np.float64)
        x = np.ones(n, dtype)
        root = draw.randrange(comm.size)
        if what == "all_reduce":
            comm.all_reduce(x, draw.choice(["sum", "max", "avg"]), out=x)
        elif what == "rooted":
            comm.broadcast(x, root=root)
            comm.reduce(x, root=root)
            comm.gather(x, root=root)
        elif what == "gathering":
            comm.all_gather(x)
            comm.all_to_all(np.ones((comm.size, 3)))
            comm.barrier()
        elif what == "symmetric":
            symmetric = comm.empty(1 + n // 10)
            comm.all_reduce(symmetric, "max", out=symmetric)
        elif what == "asynchronous":
            for work in [comm.all_reduce(x, async_op=True) for _ in range(3)]:
                work.wait()
        elif what == "message":
            comm.sendrecv(x, right, np.empty_like(x), left)
        elif what == "group":
            with comm.group():
                for peer in range(comm.size):
                    comm.send(x, peer)
                    comm.recv(np.empty_like(x), peer)
        elif what == "one-sided":
            comm.put(np.ones(symmetric.size, symmetric.dtype), symmetric, right)
            comm.signal(right)
            comm.wait_signal(left)
        elif what == "split":
            with comm.split(0, key=draw.randrange(3) * comm.rank) as child:  # type: ignore[union-attr]
                child.all_reduce(child.zeros(10))


WHAT = ("all_reduce", "rooted", "gathering", "symmetric", "asynchronous", "message", "group", "one-sided", "split")


def comes_and_goes(comm: Communicator, folder: str, seed: int) -> None:
    """A rank that works, leaves and comes again, until something happens; and what that was."""
    os.environ["SURVIVORS"] = folder
    draw = random.Random(seed)
    pids = {rank: peer.pid for rank, peer in enumerate(comm._backend.host.meeting.peers)}  # type: ignore[attr-defined]
    if comm.rank == 0:
        Path(folder, "pids").write_text(json.dumps(pids))
    try:
        while True:
            with suppress(StopIteration), comm:
                busy_for(comm, draw.randrange(1, 60), draw.random())
            comm = collectives.init(timeout=comm._backend.timeout)  # type: ignore[attr-defined]
    except CollectiveError as error:
        report(int(os.environ["MGPU_RANK"]), type(error).__name__, str(error))
        time.sleep(0.5)  # its end is not what the others shall see first
