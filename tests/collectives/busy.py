"""A rank that meets the others, does with them everything that ranks do together, in an order that is drawn at random
and agreed, leaves, and comes again: until something happens to one of them."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
from survivors import report

import collectives
from collectives import Communicator
from collectives.errors import CollectiveError

WHAT = ("all_reduce", "rooted", "gathering", "empty", "asynchronous", "plan", "message", "group", "one-sided", "split")


def live(seed: int, timeout: float) -> None:
    """Until another rank is lost: that is reported, and raised. Nobody can raise before its call has begun."""
    draw, began = random.Random(seed), [time.monotonic()]
    try:
        if seed % 2:  # nothing happens before all have met
            collectives.init(timeout=60.0).close()
            Path(os.environ["SURVIVORS"], "met").touch()
        while True:
            began[0] = time.monotonic()
            with collectives.init(timeout=timeout) as comm:
                work(comm, draw, draw.randrange(1, 60), began)
    except CollectiveError as error:
        report(int(os.environ["MGPU_RANK"]), type(error).__name__, str(error), since=began[0])
        time.sleep(0.5)  # lest this rank's end be what others see first
        raise


def work(comm: Communicator, draw: random.Random, calls: int, began: list[float]) -> None:
    symmetric = comm.zeros(1000)
    for _ in range(calls):
        began[0] = time.monotonic()
        what = draw.choice(WHAT)
        n = draw.choice([0, 1, 100, 10_000, 300_000])
        x = np.ones(n, draw.choice(["float32", "float64", "int32"]))
        root, op = draw.randrange(comm.size), draw.choice(["sum", "max", "avg"])
        if what == "all_reduce":
            comm.all_reduce(x, op, out=x)
        elif what == "rooted":
            comm.broadcast(x, root=root)
            comm.reduce(x, op, root=root)
            comm.gather(x, root=root)
        elif what == "gathering":
            comm.all_gather(x)
            comm.all_to_all(np.ones((comm.size, 3)))
            comm.barrier()
        elif what == "empty":
            symmetric = comm.empty(1 + n // 10)
            comm.all_reduce(symmetric, "max", out=symmetric)
        elif what == "asynchronous":
            for call in [comm.all_reduce(x, async_op=True) for _ in range(3)]:
                call.wait()
        elif what == "plan":
            plan = comm.plan("all_reduce", x, "max", out=x)
            for _ in range(5):
                plan()
        elif what == "message":
            comm.sendrecv(x, (comm.rank + 1) % comm.size, np.empty_like(x), (comm.rank - 1) % comm.size)
        elif what == "group":
            with comm.group():
                for peer in range(comm.size):
                    comm.send(x, peer)
                    comm.recv(np.empty_like(x), peer)
        elif what == "one-sided":
            comm.put(np.ones_like(symmetric), symmetric, (comm.rank + 1) % comm.size)
            comm.signal((comm.rank + 1) % comm.size)
            comm.wait_signal((comm.rank - 1) % comm.size)
        else:
            with comm.split(0, key=draw.randrange(3) * comm.rank) as child:  # type: ignore[union-attr]
                child.all_reduce(child.zeros(10))
