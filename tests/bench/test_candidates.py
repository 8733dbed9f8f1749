"""Our engine leaves what it should: each collective, root, placement and kind of memory, called and planned."""

from typing import Any

import numpy as np
import pytest
from crew import Crews

from bench import inputs
from bench.candidates import Candidate, Collectives, UnsupportedError, is_ours
from bench.case import ROOTED, Case, blocks, outcome, placements, reduces, views
from collectives.contract import COLLECTIVES


def test_ours_are_known_by_their_name() -> None:
    assert is_ours("mgpu") and is_ours("mgpu shm") and is_ours(Candidate("mgpu mpi", plan=True).label)
    assert not is_ours("gloo") and not is_ours("mgpus")


def wrong(comm: Any, counts: list[int]) -> list[tuple[Case, Candidate, int]]:
    """The cases that a rank finds wrong."""
    engine = Collectives(comm)
    memory = {name: [engine.allocate(1 << 16, name) for _ in range(2)] for name in ("symmetric", "ordinary")}
    found = []
    for name in COLLECTIVES:
        op = "max" if reduces(name) else "none"
        given = inputs.blocks(comm.size, np.int32, op)
        reduced = inputs.expected(comm.size, np.int32, "max")
        for count in counts if name != "barrier" else [0]:
            for root in range(comm.size) if name in ROOTED else (-1,):
                for placed in placements(name):
                    case = Case(name, count * blocks(name, comm.size) * 4, count, "int32", op, root, placed)
                    for candidate in [Candidate("mgpu", kind, None, plan) for kind in memory for plan in (False, True)]:
                        halves = (array[: case.nbytes].view(np.int32) for array in memory[candidate.memory])
                        x, out = views(case, comm.rank, comm.size, *halves)
                        try:
                            call = engine.prepare(candidate, case, x, out)
                        except UnsupportedError:
                            if name != "send_recv" or not candidate.plan:
                                raise
                            continue
                        for _ in range(2):
                            inputs.poison(out)
                            inputs.fill(x, given[comm.rank])
                            comm.barrier()
                            call()
                            parts = outcome(case, comm.rank, given, reduced)
                            if missed := sum(inputs.count_wrong(out[part], block) for part, block in parts):
                                found.append((case, candidate, missed))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_call_leaves_what_it_should(ranks: int, crew: Crews) -> None:
    assert crew(wrong, ranks, ([1, 5000],)) == [[]] * ranks
