"""One-sided communication: put, get, signals, and views of a peer's memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from crew import Crews
from expected import same_bits
from survivors import SOON

import collectives
from collectives import CollectiveError, Communicator


def peers_views(comm: Communicator) -> list[Any]:
    """A view of a view of symmetric memory is the peer's same view, strides and all."""
    x = comm.empty((6, 8), np.int32)
    x[...] = np.arange(48).reshape(6, 8) + 1000 * comm.rank
    comm.barrier()
    peer = (comm.rank + 1) % comm.size
    wanted = np.arange(48, dtype=np.int32).reshape(6, 8) + 1000 * peer
    wrong = [
        where
        for where, index in {
            "all": (...,), "a row": (3,), "one": (2, 5, ...), "columns": (slice(None), slice(1, 8, 3)),
            "none": (slice(0),), "backwards": (slice(None, None, -2),), "a block": (slice(2, 5), slice(3, 6)),
        }.items()
        if not same_bits(comm.peer(x[index], peer), wanted[index]) or comm.peer(x[index], peer).shape != x[index].shape
    ]  # fmt: skip
    if not same_bits(comm.peer(x.T, peer), wanted.T) or not same_bits(
        comm.peer(x.view(np.int16), peer), wanted.view(np.int16)
    ):
        wrong.append("other views")
    comm.barrier()
    comm.peer(x, peer)[0, 0] = -peer  # written, too
    comm.barrier()
    return [*wrong, int(x[0, 0])]


def test_views_of_a_peers_memory(crew: Crews) -> None:
    assert crew(peers_views, 3) == [[0], [-1], [-2]]


def passes_on(comm: Communicator) -> list[str]:
    """Every rank writes to its right neighbour and signals, again and again; all else that keeps them in step is that
    the neighbour signals back when it has read."""
    wrong = []
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    box = comm.zeros(1000, np.int64)
    for turn in range(50):
        comm.put(np.full(1000, comm.rank * 1000 + turn), box, right)
        comm.signal(right)
        comm.wait_signal(left)
        if not (box == left * 1000 + turn).all():
            wrong.append(f"turn {turn}: {box}")
        comm.signal(left)
        comm.wait_signal(right)
    return wrong[:3]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_put_and_signal(crew: Crews, size: int) -> None:
    assert crew(passes_on, size) == [[]] * size


def gets(comm: Communicator) -> list[Any]:
    x = comm.empty((2, 3), np.float32)
    x[...] = comm.rank
    comm.barrier()
    peer = comm.size - 1 - comm.rank
    copy = comm.get(x, peer)
    out = np.empty(3, np.float32)
    assert comm.get(x[1], peer, out=out) is out
    comm.barrier()
    x[...] = 50
    comm.barrier()
    return [copy.tolist(), out.tolist()]


def test_get(crew: Crews) -> None:
    for rank, (copy, out) in enumerate(crew(gets, 3)):
        peer = 2.0 - rank
        assert copy == [[peer] * 3] * 2  # which is a copy: it does not change any more
        assert out == [peer] * 3


def counts(comm: Communicator) -> float:
    """None is lost, whether waited for before or after it comes, and however many there are."""
    if comm.rank == 0:
        for _ in range(1000):
            comm.signal(1)
        time.sleep(0.3)
        comm.signal(1)
        return 0.0
    time.sleep(0.1)
    comm.wait_signal(0, 0)
    comm.wait_signal(0, 400)
    comm.wait_signal(0, count=600)
    began = time.monotonic()
    comm.wait_signal(0)
    return time.monotonic() - began


def test_signals_are_counted(crew: Crews) -> None:
    assert crew(counts, 2)[1] > 0.05


def counts_together(comm: Communicator) -> tuple[list[int], int, list[int]]:
    """Every rank draws numbers from one counter, and adds to a sum that only a lock keeps whole."""
    counter, lock, total, done = (comm.zeros(1, np.int64) for _ in range(4))
    last = comm.size - 1
    drawn = [comm.fetch_add(counter, 1, last) for _ in range(500)]
    for _ in range(200):
        with comm.lock(lock, 0):
            seen = int(comm.get(total, last)[0])
            comm.put(np.array([seen + 1]), total, last)
    comm.check()
    comm.fetch_add(done, 1, comm.rank)
    for rank in range(comm.size):
        comm.wait_until(done, 1, rank)
    return drawn, int(total[0]), [int(word[0]) for word in (counter, lock)]


@pytest.mark.parametrize("size", [1, 3])
def test_counters_and_locks(size: int) -> None:
    drawn, totals, words = zip(*collectives.spawn(counts_together, size))
    assert sorted(number for numbers in drawn for number in numbers) == list(range(500 * size))
    assert totals[-1] == 200 * size
    assert words[-1] == [500 * size, 0]


def misused(comm: Communicator) -> list[str]:
    told = []
    x, mine = comm.zeros(4), np.zeros(4, np.float32)
    for call in (
        lambda: comm.peer(mine, 0),
        lambda: comm.put(mine, mine, 0),
        lambda: comm.put(np.zeros(5, np.float32), x, 0),
        lambda: comm.put(np.zeros(4), x, 0),
        lambda: comm.get(x, 0, out=np.zeros(3, np.float32)),
        lambda: comm.get(x, 9),
        lambda: comm.signal(-1),
        lambda: comm.wait_signal(0, -1),
        lambda: comm.fetch_add(x, 1, 0),
        lambda: comm.fetch_add(np.zeros(1, np.int64), 1, 0),
        lambda: comm.lock(comm.zeros(2, np.int64), 0).__enter__(),
        lambda: comm.check([1]),
    ):
        try:
            call()
            told.append("no error")
        except ValueError as error:
            told.append(str(error))
    return told


def test_misuse(crew: Crews) -> None:
    (told,) = crew(misused, 1)
    assert told[0] == told[1] and "allocate the array with comm.empty" in told[0]
    assert told[2] == "x has 5 elements of float32, and the symmetric array 4 of float32"
    assert told[3] == "x has 4 elements of float64, and the symmetric array 4 of float32"
    assert told[4].startswith("out has 3 elements")
    assert told[5] == "rank 9 does not exist; this communicator has ranks 0 to 0"
    assert told[6] == "rank -1 does not exist; this communicator has ranks 0 to 0"
    assert told[7] == "count -1 is negative"
    assert told[8] == "word is a symmetric array of one int64, not of 4 float32"
    assert "allocate the array with comm.empty" in told[9]
    assert told[10] == "lock is a symmetric array of one int64, not of 2 int64"
    assert told[11] == "rank 1 does not exist; this communicator has ranks 0 to 0"


def waits_in_vain(comm: Communicator, why: str) -> tuple[str, float]:
    began = time.monotonic()
    try:
        if why == "circle":
            comm.wait_signal((comm.rank + 1) % comm.size)
        elif why == "itself":
            comm.wait_signal(comm.rank)
        elif comm.rank == 0:
            comm.wait_signal(1)
        elif why == "closed":
            comm.close()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("circle", "ranks wait for each other in a circle: rank"),
        ("itself", "ranks wait for each other in a circle: rank"),
        ("closed", "PeerLostError: wait_signal(1): rank 1 closed its communicator"),
    ],
)
def test_a_signal_that_never_comes(why: str, told: str) -> None:
    (text, seconds), other = collectives.spawn(waits_in_vain, 2, (why,))
    assert told in text
    assert seconds < SOON
