"""Communicators split from others: any colours and orders, nested, used at the same time, by the dozen; and their
memory, which is used again only when nobody can tell."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Crews

import collectives
from collectives import CollectiveError, Communicator
from collectives.host import ARENAS


def colours_and_keys(comm: Communicator) -> list[Any]:
    """Ranks of a colour, in the order of key and then of rank; None for who gives no colour."""
    found: list[Any] = []
    evens = comm.split(comm.rank % 2, key=-comm.rank)
    assert evens is not None
    found.append((evens.rank, evens.size, evens.all_gather(np.array([comm.rank])).tolist()))
    nobody = comm.split(None)
    found.append(nobody)
    some = comm.split(7 if comm.rank in (1, 4) else None)
    found.append(some and some.all_reduce(np.array([comm.rank])).tolist())
    alone = comm.split(comm.rank)
    assert alone is not None
    found.append((alone.size, alone.all_reduce(np.array([comm.rank])).tolist()))
    same = comm.split(0, key=comm.rank // 2)
    assert same is not None
    found.append(same.all_gather(np.array([comm.rank])).tolist())
    return found


def test_colours_and_keys(crew: Crews) -> None:
    for rank, (evens, nobody, some, alone, same) in enumerate(crew(colours_and_keys, 5)):
        family = [4, 2, 0] if rank % 2 == 0 else [3, 1]
        assert evens == (family.index(rank), len(family), family)
        assert nobody is None
        assert some == ([5] if rank in (1, 4) else None)
        assert alone == (1, [rank])
        assert same == [0, 1, 2, 3, 4]


def nested(comm: Communicator) -> list[float]:
    """Each half of each half, all alive at once, in any order, with large messages too."""
    families = [comm]
    while families[-1].size > 1:
        half = families[-1].split(families[-1].rank * 2 // families[-1].size)
        assert half is not None
        families.append(half)
    sums = []
    for turn in range(3):
        for family in families if turn % 2 else reversed(families):
            x = np.full(300_001, 1.0 + comm.rank)
            family.all_reduce(x, out=x, algorithm="ring")
            sums.append(float(x[-1]))
    works = [family.all_reduce(np.full(1000, 1.0), async_op=True) for family in families]
    sums += [float(work.wait()[0]) for work in reversed(works)]
    for family in families[:0:-1]:
        family.close()
    return sums


def test_nested(crew: Crews) -> None:
    halves = {0: [10, 3, 1], 1: [10, 3, 2], 2: [10, 7, 3], 3: [10, 7, 4]}
    for rank, sums in enumerate(crew(nested, 4)):
        up, down = [float(s) for s in halves[rank]], [float(s) for s in halves[rank][::-1]]
        assert sums == [*down, *up, *down, 1.0, 2.0, 4.0]


def together(comm: Communicator) -> list[float]:
    """Two communicators of the same ranks, each in its thread, in no agreed order between them."""
    children = [comm.split(0), comm.split(0)]
    totals = [0.0, 0.0]

    def work(which: int) -> None:
        child = children[which]
        assert child is not None
        for turn in range(100):
            x = np.full(1 + 997 * (turn % 3), turn + which, np.float64)
            totals[which] += float(child.all_reduce(x)[-1])
            child.broadcast(x, root=turn % child.size)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads if comm.rank % 2 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return totals


def test_two_at_the_same_time(crew: Crews) -> None:
    for totals in crew(together, 3):
        assert totals == [3.0 * 4950, 3.0 * 5050]


def dozens(comm: Communicator, how: str) -> float:
    """More, one after the other, than there may be at a time."""
    total, kept = 0.0, []
    for turn in range(ARENAS + 8):
        child = comm.split(0, key=turn * comm.rank)
        assert child is not None
        if how == "nested":
            grandchild = child.split(child.rank)
            assert grandchild is not None
            grandchild.close()
        x = child.zeros(10)
        x[:] = 1
        child.all_reduce(x, out=x)
        if turn % 2:
            child.all_reduce(x, "max", out=x, async_op=True).wait()
        total += float(x[3])
        kept = [x]
        if how != "dropped":
            child.close()
    return total + float(kept[0][0])


@pytest.mark.parametrize("how", ["closed", "dropped", "nested"])
def test_many_in_a_row(crew: Crews, how: str) -> None:
    assert crew(dozens, 2, (how,)) == [2.0 * (ARENAS + 8) + 2.0] * 2


def too_many(comm: Communicator) -> tuple[int, str, float]:
    alive = []
    try:
        for _ in range(ARENAS + 5):
            alive.append(comm.split(0))
    except MemoryError as error:
        told = str(error)
        number = len(alive)
        alive.clear()  # the garbage collector closes them
        child = comm.split(0)
        assert child is not None
        return number, told, float(child.all_reduce(np.ones(1))[0])
    return len(alive), "no error", 0.0


def test_too_many_at_a_time() -> None:
    for number, told, result in collectives.spawn(too_many, 2):  # ranks that no earlier test has left anything to
        assert number == ARENAS
        assert "close those that are done with" in told
        assert result == 2.0


def outlive(comm: Communicator) -> list[str]:
    """An array of a communicator that was closed stays what it is, whatever is allocated after."""
    wrong = []
    kept = []
    for turn in range(5):
        with comm.split(0) as child:  # type: ignore[union-attr]
            x = child.zeros(50_000, np.int64)
            x[...] = turn
            kept.append(x)
    for turn in range(40):
        with comm.split(0) as child:  # type: ignore[union-attr]
            y = child.zeros(100_000, np.int64)
            if y.any():
                wrong.append(f"turn {turn}: memory is not zero")
            y[...] = -1
            child.all_reduce(y, out=y)
    for turn, x in enumerate(kept):
        if not (x == turn).all():
            wrong.append(f"array {turn} was overwritten")
    return wrong


def test_arrays_outlive_their_communicator(crew: Crews) -> None:
    assert crew(outlive, 2) == [[], []]


def ended_by_an_error(comm: Communicator) -> list[str]:
    """A communicator that failed is replaced by another; its parent is not concerned."""
    told = []
    for turn in range(ARENAS + 3):
        child = comm.split(0)
        assert child is not None
        try:
            child.all_reduce(np.ones(2 + (turn % 2) * child.rank))
        except CollectiveError as error:
            told.append(type(error).__name__)
        child.close()
    return told


def test_failed_ones_give_way_too(crew: Crews) -> None:
    assert crew(ended_by_an_error, 2) == [["CollectiveMismatchError"] * (ARENAS // 2 + 1)] * 2


def drops_its_parent(comm: Communicator) -> list[float]:
    """What a communicator was split from lives as long as it does, though nobody else keeps it."""
    child = comm.split(np.int64(0), key=np.int32(-comm.rank))  # type: ignore[arg-type]
    assert child is not None and child.rank == comm.size - 1 - comm.rank
    child = child.split(0)
    gc.collect()
    assert child is not None
    with child:
        return child.all_reduce(np.ones(2)).tolist()  # type: ignore[no-any-return]


def test_a_communicator_keeps_its_parent(crew: Crews) -> None:
    assert crew(drops_its_parent, 2) == [[2.0, 2.0]] * 2


def closed_and_dropped(comm: Communicator) -> list[bool]:
    """Whether anything is left of a communicator that had calls of all sorts, though nobody collects garbage."""
    peer, left = 1 - comm.rank, []
    gc.disable()
    try:
        for closes in (True, False):
            child = comm.split(0)
            assert child is not None
            for _ in range(3):
                child.all_reduce(np.ones(3))
                child.all_reduce(np.ones(3), async_op=True).wait()
                child.all_reduce(child.zeros(100))
                child.sendrecv(np.ones(3), peer, np.empty(3), peer)
                child.signal(peer)
                child.wait_signal(peer)
            engine = weakref.ref(child._backend)
            if closes:
                child.close()
            del child
            left.append(engine() is not None)
    finally:
        gc.enable()
    return left


def test_a_closed_one_goes_at_once(crew: Crews) -> None:
    assert crew(closed_and_dropped, 2) == [[False, False]] * 2


WORLD = """
import gc, sys
import numpy as np
import collectives

comm = collectives.init(rank=int(sys.argv[1]), size=2, address=sys.argv[2], timeout=60)
comm = comm.split(0)
gc.collect()
assert comm.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]
"""


def test_the_world_lives_on_in_its_parts(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", WORLD, str(rank), f"unix:{tmp_path}"]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]


def parents_array(comm: Communicator) -> list[float]:
    """Symmetric memory of one communicator is ordinary memory to another, whose ranks its views count."""
    x = comm.zeros(1000)
    x[:] = comm.rank
    child = comm.split(comm.rank // 2)
    assert child is not None
    comm.barrier()
    seen = float(child.peer(x, 1 - child.rank)[0])
    child.barrier()
    child.all_reduce(x, out=x)
    return [seen, float(x[-1])]


def test_memory_of_the_parent(crew: Crews) -> None:
    assert crew(parents_array, 4) == [[1.0, 1.0], [0.0, 1.0], [3.0, 5.0], [2.0, 5.0]]
