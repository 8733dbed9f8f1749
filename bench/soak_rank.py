"""What each rank of `mgpu bench soak` does until it is killed or asked to stop: in turn, collectives of random families
of ranks, each result of which is known, and some steps of training, which end with a checkpoint.

    mgpu run -n 3 --restarts 1000 --min-ranks 2 -m bench.soak_rank FOLDER SEED PAUSE
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import collectives
from bench import inputs
from collectives.environment import restarts
from mgpu_core import nn, optim, schedule
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel, Synchronous
from mgpu_core.tensor import Tensor
from mgpu_core.trainer import CHECKPOINT, Trainer

PROGRESS, STOP = "progress.jsonl", "stop"
COUNT, BATCH = 1000, 48  # 21 steps an epoch, the last with 40 samples
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
WAYS = (*COLLECTIVES, *COLLECTIVES, "sendrecv", "put", "count", "together")
KINDS = 24  # of calls that one life has
MOST = 6  # families alive at a time, beside the world

Array = npt.NDArray[Any]


def live(folder: Path, seed: int, pause: float) -> None:
    """One rank's life: it goes on where the last checkpoint is, if there is one. Rank 0 notes how far all have come."""
    attempt, calls = restarts(), 0
    with collectives.init(timeout=60.0) as comm:
        training = trainer(comm, folder, seed)
        if (folder / CHECKPOINT).exists():
            training.resume(folder / CHECKPOINT)
        families = Families(comm, random.Random(f"{seed} {attempt}"))
        draw = families.draw
        while True:
            if comm.rank == 0:
                note = {"attempt": attempt, "ranks": comm.size, "steps": training.steps_done, "calls": calls}
                with open(folder / PROGRESS, "a") as file:
                    file.write(json.dumps({**note, "moment": time.monotonic()}) + "\n")
            if calls and comm.broadcast_object((folder / STOP).exists()):
                return
            for _ in range(draw.randrange(5, 30)):
                families.call()
                calls += 1
            training.fit(sys.maxsize, steps=draw.randrange(5, 40))
            time.sleep(2 * pause * draw.random())


def trainer(comm: Any, folder: Path, seed: int) -> Trainer:
    """A small network that learns, by all ranks or by one (None), which goes equally whoever does it."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, COUNT)
    points = rng.standard_normal((COUNT, 12)) + 0.7 * labels[:, None]
    layers = nn.Linear(12, 24, rng=rng, dtype=np.float64), nn.Tanh(), nn.Dropout(0.1, rng=rng)
    model = DataParallel(nn.Sequential(*layers, nn.Linear(24, 4, rng=rng, dtype=np.float64)), comm)
    optimizer = optim.SGD(model.named_parameters(), 0.02, momentum=0.9, weight_decay=1e-3)
    strategy = Synchronous(model, optimizer)
    train = Loader((points, labels), Sampler(COUNT, BATCH, seed=seed), **strategy.part)
    test = Loader((points, labels), Sampler(COUNT, COUNT, shuffle=False), **strategy.test_part)
    return Trainer(strategy, schedule.constant(0.02), train, test, loss=loss, score=score, folder=folder)


def loss(model: Any, arrays: tuple[Any, ...]) -> Tensor:
    """The sum of the samples' cross-entropies."""
    points, labels = arrays
    return F.cross_entropy(model(Tensor(points)), labels, reduction="sum")


def score(model: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
    """Whether each sample is classified right."""
    points, labels = arrays
    return {"accuracy": model(Tensor(points)).data.argmax(axis=1) == labels}


class Family(NamedTuple):
    """A communicator, as every rank of the world knows it: its members' numbers there, in its own order."""

    members: list[int]
    comm: Any  # None on ranks that are no members


class Kind(NamedTuple):
    """A kind of call: what it does, with how many elements for each rank, and how."""

    way: str
    n: int
    dtype: str
    op: str
    root: int  # less the family's size as often as it has to be
    symmetric: bool

    @classmethod
    def drawn(cls, draw: random.Random) -> Kind:
        """Any."""
        n, dtype = draw.choice([0, 1, 2, 17, 500, 20_000]), draw.choice(["float32", "float64", "int32", "bfloat16"])
        return cls(draw.choice(WAYS), n, dtype, draw.choice(inputs.OPERATIONS), draw.randrange(4), draw.random() < 0.3)


class Families:
    """Communicators that come and go, and random calls of them. All ranks draw the same numbers, for those too that
    they are not in. As in a program the same kinds of calls come again and again, for which a communicator keeps what
    it has found out: so its memory has an end."""

    def __init__(self, comm: Any, draw: random.Random) -> None:
        self.me, self.draw, self.number = comm.rank, draw, 0
        self.all = [Family(list(range(comm.size)), comm)]
        self.kinds = [Kind.drawn(draw) for _ in range(KINDS)]

    def call(self) -> None:
        """Make a call, or a few at the same time. Raises AssertionError for a wrong result."""
        draw = self.draw
        self.number += 1
        if draw.random() < 0.1:
            self.split(draw.choice(self.all))
        way, n, dtype, op, root, symmetric = draw.choice(self.kinds)
        if way == "together":
            self.together(draw.sample(self.all, min(3, len(self.all))), n)
            return
        comm = draw.choice(self.all).comm
        if comm is not None and way in COLLECTIVES:
            collective(comm, way, Known(comm.size, dtype, op, n, self.number), root % comm.size, symmetric)
        elif comm is not None:
            {"sendrecv": ring, "put": put, "count": count}[way](comm, n, self.number)

    def split(self, parent: Family) -> None:
        """Some of a family's members make new ones; above `MOST`, others end."""
        chosen = {member: (self.draw.choice([None, 0, 1, 1]), self.draw.randrange(4)) for member in parent.members}
        child = None if parent.comm is None else parent.comm.split(*chosen[self.me])
        for color in (0, 1):
            members = [member for member in parent.members if chosen[member][0] == color]
            if members:
                members.sort(key=lambda member: chosen[member][1])
                self.all.append(Family(members, child if self.me in members else None))
        while len(self.all) > 1 + MOST:
            ended = self.all.pop(self.draw.randrange(1, len(self.all)))
            if ended.comm is not None:
                ended.comm.close()

    def together(self, families: Sequence[Family], n: int) -> None:
        """An asynchronous call in each, which end in whatever order."""
        under_way = []
        for family in families:
            if family.comm is not None:
                known = Known(family.comm.size, "float32", "sum", n, self.number)
                under_way.append((family.comm.all_reduce(known.every[family.comm.rank], async_op=True), known.total))
        for work, total in reversed(under_way):
            check(work.wait(), total, "asynchronous all_reduce")


class Known:
    """What each rank brings, (size, size * n), and the reduction of it, (size * n,): other numbers in each call."""

    def __init__(self, size: int, dtype: str, op: str, n: int, number: int) -> None:
        every, total = _blocks(size, dtype, op)
        places = (np.arange(size * n) + 31 * number) % inputs.PERIOD
        self.op, self.every, self.total = op, every[:, places], total[places]


@cache
def _blocks(size: int, dtype: str, op: str) -> tuple[Array, Array]:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    return inputs.blocks(size, kind, op), inputs.expected(size, kind, op)


def collective(comm: Any, name: str, known: Known, root: int, symmetric: bool) -> None:
    """Make the call, with memory of either kind, and compare the result on every rank."""
    rank, size, every = comm.rank, comm.size, known.every
    x = comm.empty(every[rank].shape, every.dtype) if symmetric else np.empty_like(every[rank])
    x[...] = every[rank]
    options: dict[str, Any] = {"root": root} if name in ("reduce", "broadcast", "gather", "scatter") else {}
    if name == "scatter" and rank != root:
        x, options["out"] = None, np.empty(every.shape[1] // size, every.dtype)
    arguments = (x, known.op) if "reduce" in name else (x,)
    got = getattr(comm, name)(*arguments, **options)
    check(got, wanted(name, known, rank, size, root), f"{name} of {every.dtype}, {known.op}, root {root}")


def wanted(name: str, known: Known, rank: int, size: int, root: int) -> Array | None:
    """What a rank gets; None where it gets nothing."""
    every, total = known.every, known.total
    if name in ("reduce", "gather") and rank != root:
        return None
    if name in ("all_reduce", "reduce"):
        return total
    if name == "broadcast":
        return every[root]
    if name in ("all_gather", "gather"):
        return every.reshape(-1)
    if name == "reduce_scatter":
        return total.reshape(size, -1)[rank]
    if name == "scatter":
        return every[root].reshape(size, -1)[rank]
    return every.reshape(size, size, -1)[:, rank].reshape(-1)


def ring(comm: Any, n: int, number: int) -> None:
    """Every rank sends to the next."""
    every = Known(comm.size, "float32", "sum", n, number).every
    out, before = np.empty_like(every[0]), (comm.rank - 1) % comm.size
    comm.sendrecv(every[comm.rank], (comm.rank + 1) % comm.size, out, before)
    check(out, every[before], "sendrecv")


def put(comm: Any, n: int, number: int) -> None:
    """Every rank writes into the next one's memory."""
    every = Known(comm.size, "float32", "sum", n, number).every
    box, before, after = comm.empty(every.shape[1]), (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.put(every[comm.rank], box, after)
    comm.signal(after)
    comm.wait_signal(before)
    check(box, every[before], "put")


def count(comm: Any, n: int, number: int) -> None:
    """All ranks add to one word of rank 0's."""
    word = comm.zeros(1, np.int64)
    comm.fetch_add(word, number, 0)
    comm.wait_until(word, comm.size * number, 0)
    comm.barrier()


def check(got: Any, want: Array | None, what: str) -> None:
    """The same bytes."""
    same = got is None if want is None else got.tobytes() == np.ascontiguousarray(want).tobytes()
    if not same:
        raise AssertionError(f"{what} gave {got}, expected {want}")


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
