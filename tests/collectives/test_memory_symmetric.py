"""Symmetric memory as a communicator hands it out: equal places, zero at first, freed when all have dropped it, refused
by all when one has no room."""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import numpy as np
import pytest
from crew import Crews

import collectives
from collectives import CollectiveMismatchError, Communicator
from kernels.dtypes import DTYPES


def shapes_and_dtypes(comm: Communicator) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for shape in (0, 1, 17, (), (0,), (3, 0), (2, 3, 5), np.int64(4), [2, 2]):
            x = comm.zeros(shape, dtype.numpy)  # type: ignore[arg-type]
            y = comm.empty(shape, dtype.name if dtype.kind != "float" or dtype.itemsize > 2 else dtype.numpy)  # type: ignore[arg-type]
            wanted = np.zeros(shape if not isinstance(shape, list) else tuple(shape))
            if x.shape != wanted.shape or x.dtype != dtype.numpy or x.any() or y.shape != x.shape or y.dtype != x.dtype:
                wrong.append(f"{shape} of {dtype.name}")
            if not x.flags.c_contiguous or not x.flags.writeable or x.ctypes.data % dtype.itemsize:
                wrong.append(f"layout of {shape} of {dtype.name}")
    if comm.empty(3).dtype != np.float32:
        wrong.append("default dtype")
    return wrong


def test_shapes_and_dtypes(crew: Crews) -> None:
    assert crew(shapes_and_dtypes, 2) == [[], []]


def never_what_was_there(comm: Communicator, seed: int) -> list[str]:
    """Arrays go in an order of each rank's own; each is zero at first, keeps what is written, and overlaps no other."""
    agreed, own = random.Random(seed), random.Random(seed + 1 + comm.rank)
    alive: dict[int, Any] = {}
    wrong = []
    for number in range(100):
        count = agreed.choice([0, 1, 100, 4096, 50_000])
        x = comm.zeros(count, np.int64)
        if x.any():
            wrong.append(f"array {number} is not zero")
        x[...] = number
        alive[number] = x
        del x
        while alive and own.random() < 0.5:
            gone, y = alive.popitem() if own.random() < 0.5 else (key := next(iter(alive)), alive.pop(key))
            if not (y == gone).all():
                wrong.append(f"array {gone} has changed")
            del y
        if number % 20 == 0:
            gc.collect()
    wrong += [f"array {number} has changed" for number, x in alive.items() if not (x == number).all()]
    return wrong[:5]


@pytest.mark.parametrize("seed", [1, 2])
def test_arrays_come_and_go(crew: Crews, seed: int) -> None:
    assert crew(never_what_was_there, 3, (seed,)) == [[]] * 3


def flat_memory(comm: Communicator) -> int:
    """By how many bytes the memory behind this rank's segment grows over many allocations."""
    own = comm._backend.host.own  # type: ignore[attr-defined]

    x = None
    taken = []
    for _ in range(60):
        x = comm.empty(1 << 20, np.uint8)
        x[:] = 1
        taken.append(os.fstat(own.fd).st_blocks * 512)
    return max(taken[10:]) - taken[5]


def test_memory_is_given_back(crew: Crews) -> None:
    assert all(growth <= 2 << 20 for growth in crew(flat_memory, 2))


def too_large(comm: Communicator) -> list[str]:
    told = []
    for nbytes in (1 << 45, 1 << 62):
        try:
            comm.empty(nbytes, np.uint8)
            told.append("no error")
        except MemoryError as error:
            told.append(str(error))
    x = comm.zeros(10)
    x[:] = 1
    comm.all_reduce(x, out=x)
    return [*told, str(x[9])]


def test_more_than_there_is(crew: Crews) -> None:
    for told in crew(too_large, 2):
        assert "no room for 35,184,372,088,832 bytes in the symmetric heap" in told[0]
        assert told[0].startswith("rank 0, rank 1: ")
        assert told[2] == "2.0"


def one_has_no_room(comm: Communicator) -> list[Any]:
    """Then all raise, and go on."""
    host = comm._backend.host  # type: ignore[attr-defined]
    commit = host.own.commit

    def refuse(offset: int, nbytes: int) -> None:
        raise MemoryError("out of memory, for the test")

    if comm.rank == 1:
        host.own.commit = refuse
    try:
        comm.empty(1000)
        told = "no error"
    except MemoryError as error:
        told = str(error)
    host.own.commit = commit
    x, y = comm.zeros(1000), comm.zeros(1000)
    y[:] = 5
    comm.barrier()
    peer = (comm.rank + 1) % comm.size
    return [told, float(x.sum()), float(comm.peer(y, peer)[999])]


def test_one_rank_without_room(crew: Crews) -> None:
    assert crew(one_has_no_room, 3) == [["rank 1: out of memory, for the test", 0.0, 5.0]] * 3


def unequal(comm: Communicator, splits: bool) -> str:
    try:
        comm.split(0) if splits and comm.rank else comm.empty(10 + comm.rank)
        return "no error"
    except CollectiveMismatchError as error:
        return str(error)


@pytest.mark.parametrize(
    ("splits", "told"),
    [
        (False, "the ranks allocate different numbers of bytes: rank 0 40, rank 1 44"),
        (True, "the ranks disagree: rank 0 called empty, rank 1 called split"),
    ],
)
def test_unequal_sizes(crew: Crews, splits: bool, told: str) -> None:
    assert crew(unequal, 2, (splits,)) == [told] * 2


def written_at_once(comm: Communicator) -> bool:
    """A peer may write to an array as soon as it has its own: nothing is zeroed after that."""
    good = True
    for turn in range(50):
        x = comm.zeros(64)
        comm.put(np.full(64, turn, np.float32), x, (comm.rank + 1) % comm.size)
        comm.barrier()
        good = good and bool((x == turn).all())
        comm.barrier()
    return good


def test_a_peer_may_write_at_once(crew: Crews) -> None:
    assert crew(written_at_once, 3) == [True] * 3


@pytest.mark.parametrize("scratch", ["4K", "64M"])
def test_scratch_of_other_sizes(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's setting is everybody's."""
    monkeypatch.setenv("MGPU_SCRATCH", scratch)
    assert collectives.spawn(with_scratch, 2) == [[20_000.0, 2.0]] * 2


def with_scratch(comm: Communicator) -> list[float]:
    return [float(comm.all_reduce(np.ones(10_000)).sum()), float(comm.all_reduce(np.ones(1), algorithm="ring")[0])]


def test_a_heap_too_small_for_a_communicator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_HEAP", "1M")
    with pytest.raises(MemoryError, match="MGPU_HEAP is too small: a communicator of 2 ranks takes .* 64M or more"):
        collectives.spawn(_nothing, 2)
    # Of 8 ranks, the world has room enough in 20 MB, and those split off have a quarter of that.
    monkeypatch.setenv("MGPU_HEAP", "20M")
    told = str(collectives.spawn(_family, 8)[0])
    assert "rank 0, rank 1, rank 2" in told and told.count("MGPU_HEAP is too small") == 1 and "64M or more" in told


def _family(comm: Communicator) -> str:
    with pytest.raises(MemoryError) as caught:
        comm.split(0)
    return str(caught.value)


def _nothing(comm: Communicator) -> None:
    pass
