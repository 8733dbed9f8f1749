"""Thousands of random collectives over random sub-communicators that are alive at the same time, some asynchronous:
every result exact, and no memory, map or descriptor more at the end than early on."""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from expected import REDUCING, ROOTED, UNEVEN, Case, Runner, exact_data, reduced, same_bits
from test_end_to_end import COLLECTIVES, FEW_DTYPES, MEMORIES, forms, uneven

import collectives
from collectives import Communicator
from collectives.builder import algorithms
from kernels.dtypes import find

POOL = 1 << 18
NAMED = 0.05  # share of the calls that name an algorithm: each such program has to be proven first
MOST = 8  # families alive at a time, beside the world


class Family(NamedTuple):
    """A communicator, as all ranks of the world know it: its members' numbers there, in its own order."""

    members: list[int]
    runner: Runner | None  # None on ranks that are no members


def live(comm: Communicator, seed: int, calls: int) -> tuple[list[str], list[dict[str, int]]]:
    """Every rank draws the same numbers, for families too that it is not in. What was wrong; what was used, twice."""
    draw = random.Random(seed)
    families = [Family(list(range(comm.size)), Runner(comm, POOL))]
    wrong: list[str] = []
    used = []
    for number in range(calls):
        if draw.random() < 0.05:
            families += split(draw.choice(families), draw, comm.rank)
            while len(families) > 1 + MOST:
                dissolve(families.pop(draw.randrange(1, len(families))), wrong)
        if draw.random() < 0.2:
            wrong += at_the_same_time(draw.sample(families, min(3, len(families))), draw, comm.rank, number)
        else:
            family = draw.choice(families)
            case = random_case(len(family.members), draw)
            if family.runner:
                family.runner.run(case)
        if number in (calls // 5, calls - 1):
            gc.collect()
            used.append(usage())
    while len(families) > 1:
        dissolve(families.pop(), wrong)
    return [*wrong, *families[0].runner.wrong][:20], used  # type: ignore[union-attr]


def split(parent: Family, draw: random.Random, me: int) -> list[Family]:
    chosen = {member: (draw.choice([None, 0, 1, 1]), draw.randrange(4)) for member in parent.members}
    child = None
    if parent.runner:
        child = parent.runner.comm.split(*chosen[me])
    found = []
    for color in (0, 1):
        order = [member for member in parent.members if chosen[member][0] == color]
        order.sort(key=lambda member: chosen[member][1])
        if order:
            found.append(Family(order, Runner(child, POOL) if child and me in order else None))
    return found


def dissolve(family: Family, wrong: list[str]) -> None:
    if family.runner:
        wrong += family.runner.wrong
        family.runner.comm.close()


def random_case(size: int, draw: random.Random) -> Case:
    collective, dtype = draw.choice(COLLECTIVES), draw.choice(FEW_DTYPES)
    return Case(
        collective,
        dtype,
        op=draw.choice(find(dtype).operations()) if collective in REDUCING else "sum",
        rows=draw.choice([0, 1, size - 1, size + 1, 2, 13, 64, 509]),
        width=draw.choice([1, 1, 3]),
        root=draw.randrange(size) if collective in ROOTED else 0,
        counts=uneven(collective, size, draw) if collective in UNEVEN and draw.random() < 0.5 else None,
        algorithm=draw.choice([*algorithms(collective)]) if draw.random() < NAMED else None,
        form=draw.choice(forms(collective)),
        memory=draw.choice(MEMORIES),
    )


def at_the_same_time(families: list[Family], draw: random.Random, me: int, number: int) -> list[str]:
    """An asynchronous call in each, ended in any order."""
    under_way: list[tuple[Any, Any]] = []
    for family in families:
        count, op, dtype = draw.choice([0, 1, 100, 10_000]), draw.choice(["sum", "max"]), draw.choice(FEW_DTYPES)
        if family.runner:
            every = [exact_data([number], rank, (count,), dtype) for rank in range(len(family.members))]
            x = every[family.members.index(me)]
            under_way.append((family.runner.comm.all_reduce(x, op, async_op=True), reduced(every, op)))
    random.shuffle(under_way)
    return [f"asynchronous call {number}" for work, want in under_way if not same_bits(work.wait(), want)]


def usage() -> dict[str, int]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "KiB": int(fields["VmRSS"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": Path("/proc/self/maps").read_text().count("memfd:mgpu"),
        "compilers": "numba" in sys.modules,
    }


def check(size: int, calls: int, seed: int) -> None:
    for rank, (wrong, (early, late)) in enumerate(collectives.spawn(live, size, (seed, calls))):
        assert not wrong, (seed, wrong)
        print(f"rank {rank}: {early} after {calls // 5} calls, {late} after {calls}")
        assert (late["descriptors"], late["segments"]) == (early["descriptors"], early["segments"])
        assert late["threads"] <= 2 + MOST
        compilers = late["compilers"] - early["compilers"]  # who was the first to need a kernel has loaded Numba
        assert late["KiB"] < early["KiB"] + (48 << 10) + compilers * (128 << 10)


def test_random_collectives_over_random_families() -> None:
    check(3, 300, seed=random.randrange(2**32))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [3, 5])
def test_ten_thousand(size: int) -> None:
    check(size, 10_000, seed=size)
