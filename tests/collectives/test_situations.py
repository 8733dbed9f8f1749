"""The situations that MPI users know, one by one: every root, in place or not, uneven and zero counts; blocking,
started and waited for, or planned; among all ranks, a copy of them, and one rank alone.

What others test at random, these go through in order, as mpi4py's tests of collectives do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from crew import Crews
from expected import REDUCING, ROOTED, UNEVEN, Case, Runner
from test_end_to_end import COLLECTIVES, forms

from collectives import Communicator

WAYS = ("call", "async", "plan")


def uneven(collective: str, size: int) -> Iterator[Any]:
    """Counts that rise from zero, that fall to it, and that are zero but for one rank, or for all."""
    rows = [list(range(size)), list(range(size, 0, -1)), [0] * (size - 1) + [4], [0] * size]
    for row in rows:
        yield [row[q:] + row[:q] for q in range(size)] if collective == "all_to_all" else row


def situations(size: int, way: str) -> Iterator[Case]:
    for collective in COLLECTIVES:
        for form in forms(collective):
            for root in range(size if collective in ROOTED else 1):
                same = {"collective": collective, "form": form, "root": root, "way": way}
                for rows in range(size + 2):
                    yield Case(**same, rows=rows, dtype=("int16", "float64")[rows % 2])
                for counts in uneven(collective, size) if collective in UNEVEN else ():
                    yield Case(**same, counts=counts, dtype="int32")
                for op in ("prod", "min", "max") if collective in REDUCING else ():
                    yield Case(**same, op=op, rows=3)


def whole_and_copy(comm: Communicator, way: str) -> list[str]:
    with comm.split(0) as copy, comm.split(comm.rank) as alone:  # type: ignore[union-attr]
        runners = [Runner(each, pool_bytes=0) for each in (comm, copy, alone)]
        for runner in runners:
            for case in situations(runner.comm.size, way):
                runner.run(case)
            runner.comm.barrier()
        return [wrong for runner in runners for wrong in runner.wrong]


@pytest.mark.parametrize("way", WAYS)
def test_every_root_form_and_count(crew: Crews, way: str) -> None:
    assert crew(whole_and_copy, 3, (way,)) == [[]] * 3


def others_outputs(comm: Communicator) -> list[str]:
    """Ranks that are not the root may pass an output all the same; it is left alone."""
    wrong = []
    for root in range(comm.size):
        x, out = np.full(4, comm.rank), np.full(4 * comm.size, -1)
        for call, part in ((comm.reduce, out[:4]), (comm.gather, out)):
            part[:] = -1
            call(x, root=root, out=part)
            if (part == -1).all() == (comm.rank == root):
                wrong.append(f"{call.__name__}, root {root}: {part}")
    return wrong


def test_outputs_of_other_ranks_are_left_alone(crew: Crews) -> None:
    assert crew(others_outputs, 3) == [[]] * 3


def root_in_place(comm: Communicator) -> list[str]:
    """The root's array is in place and the others' are not, or they have none."""
    wrong = []
    for root in range(comm.size):
        here = comm.rank == root
        x = np.full(5, comm.rank + 1.0)
        result = comm.reduce(x, root=root, out=x if here else None)
        if (result is x) != here or x[0] != (6.0 if here else comm.rank + 1.0):
            wrong.append(f"reduce, root {root}")
        blocks = np.full((comm.size, 2), -1)
        blocks[comm.rank] = comm.rank
        comm.gather(blocks[comm.rank : comm.rank + 1], root=root, out=blocks if here else None)
        if here and blocks.tolist() != [[rank] * 2 for rank in range(comm.size)]:
            wrong.append(f"gather, root {root}")
        blocks[...] = np.arange(comm.size)[:, None] if here else -1
        mine = blocks[comm.rank : comm.rank + 1]
        comm.scatter(blocks if here else None, root=root, out=mine)
        if mine.tolist() != [[comm.rank] * 2]:
            wrong.append(f"scatter, root {root}")
    return wrong


def test_the_root_alone_is_in_place(crew: Crews) -> None:
    assert crew(root_in_place, 3) == [[]] * 3
