"""Every collective, end to end, between processes: pairwise combinations of dtypes, operations, sizes, roots, uneven
counts, forms, memories and algorithms, with exact data, poisoned outputs and guards around every array."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from crew import Crews
from expected import REDUCING, ROOTED, UNEVEN, Case, Runner

import collectives
from collectives import Communicator
from collectives.builder import algorithms
from kernels.dtypes import DTYPES, DType, find

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
)  # fmt: skip
MEMORIES = ("ordinary", "symmetric", "shifted", "mixed")
OPERATIONS = ("sum", "prod", "min", "max", "avg", "premul_sum")
FEW_DTYPES = ("float32", "int64", "bfloat16", "uint8")


def forms(collective: str) -> Sequence[str]:
    if collective == "broadcast":
        return ("in_place",)
    return ("fresh", "out") if collective == "all_to_all" else ("fresh", "out", "in_place")


def uneven(collective: str, size: int, pick: random.Random) -> Any:
    """Counts with zeros, with everything on one rank, or just different."""
    rows: list[list[int]] = []
    for _ in range(size if collective == "all_to_all" else 1):
        row = [pick.choice([0, 1, 2, 3, 7, 31]) for _ in range(size)]
        if pick.random() < 0.3:
            row = [0] * size
            row[pick.randrange(size)] = pick.choice([0, 1, 50])
        rows.append(row)
    return rows if collective == "all_to_all" else rows[0]


def combinations(size: int, dtypes: Sequence[str], rounds: int, seed: int = 0) -> Iterator[Case]:
    """`rounds` cases of every collective by every algorithm, with everything else drawn at random."""
    pick = random.Random(100 * seed + size)
    for collective in COLLECTIVES:
        named = [None, *algorithms(collective)]
        for algorithm in named:
            for _ in range(rounds):
                dtype = pick.choice(dtypes)
                op = pick.choice(find(dtype).operations()) if collective in REDUCING else "sum"
                counts = uneven(collective, size, pick) if collective in UNEVEN and pick.random() < 0.5 else None
                yield Case(
                    collective,
                    dtype,
                    op,
                    rows=pick.choice([0, 1, size - 1, size + 1, 2, 13, 64, 1009]),
                    width=pick.choice([1, 1, 3]),
                    root=pick.randrange(size) if collective in ROOTED else 0,
                    counts=counts,
                    algorithm=algorithm,
                    form=pick.choice(forms(collective)),
                    memory=pick.choice(MEMORIES),
                )


def share(collective: str, rows: int, size: int) -> int:
    """Rows of a block, such that a rank's larger array has about `rows`."""
    return rows if collective in ("all_reduce", "reduce", "broadcast") else rows // size


def run_all(comm: Communicator, cases: Sequence[Case], pool_bytes: int = 1 << 20) -> list[str]:
    runner = Runner(comm, pool_bytes)
    for case in cases:
        runner.run(case)
    return runner.wrong[:20]


def check(spawn: Any, size: int, cases: Sequence[Case], pool_bytes: int = 1 << 20) -> None:
    wrong = sum(spawn(run_all, size, (cases, pool_bytes)), [])
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 5])
def test_combinations(crew: Crews, size: int) -> None:
    check(crew, size, list(combinations(size, FEW_DTYPES, rounds=8)))


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5))])
def test_messages_longer_than_all_of_scratch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small scratch: several rounds through its slots, from one call straight into the next."""
    monkeypatch.setenv("MGPU_SCRATCH", "16K")
    cases = []
    for collective in COLLECTIVES:
        for algorithm in algorithms(collective):
            for memory in ("ordinary", "symmetric", "mixed"):
                form = forms(collective)[-1]
                rows = share(collective, 10007, size)
                cases.append(Case(collective, "float32", rows=rows, algorithm=algorithm, memory=memory, form=form))
    check(collectives.spawn, size, cases)


@pytest.mark.parametrize("size", [3])
def test_megabytes(crew: Crews, size: int) -> None:
    """Several slices of the real scratch, and all of it."""
    cases = [
        Case(collective, dtype, rows=share(collective, rows, size), memory=memory, form=form)
        for collective in COLLECTIVES
        for dtype, rows in (("float32", 100_003), ("float32", 1_400_011))
        for memory in ("ordinary", "symmetric", "mixed")
        for form in forms(collective)[-1:]
        if rows < 1_000_000 or memory != "mixed"
    ]
    cases += [
        Case("all_reduce", "float32", rows=5_000_011, memory=memory, form="in_place")
        for memory in ("ordinary", "symmetric")
    ]
    check(crew, size, cases, pool_bytes=24 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)  # whose functions may all have to be compiled
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_dtype_and_operation(crew: Crews, size: int, dtype: DType) -> None:
    cases = [
        Case(collective, dtype.name, op, rows=rows, memory=memory, form=form, algorithm=algorithm)
        for collective in COLLECTIVES
        for op in (dtype.operations() if collective in REDUCING else ("sum",))
        for algorithm in (None, *algorithms(collective))
        for rows, memory, form in ((67, "ordinary", forms(collective)[0]), (size + 1, "mixed", forms(collective)[-1]))
    ]
    check(crew, size, cases)


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(4))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_many_combinations(crew: Crews, size: int, piece: int) -> None:
    check(crew, size, list(combinations(size, [dtype.name for dtype in DTYPES], rounds=100, seed=piece)))
