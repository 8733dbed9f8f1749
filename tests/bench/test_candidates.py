"""Engines leave what they should: each collective, root, placement and kind of memory, called and planned."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Crews

from bench import inputs, peers
from bench.candidates import Candidate, Collectives, Engine, Gloo, Mpi, UnsupportedError, is_ours
from bench.case import ROOTED, Case, blocks, outcome, placements, reduces, views
from bench.crew import python
from collectives.contract import COLLECTIVES

OURS = [Candidate("mgpu", memory, None, plan) for memory in ("symmetric", "ordinary") for plan in (False, True)]
COUNTS = (1, 5000)


def test_ours_are_known_by_their_name() -> None:
    assert is_ours("mgpu") and is_ours("mgpu shm") and is_ours(Candidate("mgpu mpi", plan=True).label)
    assert not is_ours("gloo") and not is_ours("mgpus")


def cases(ranks: int, op: str) -> list[Case]:
    return [
        Case(name, count * blocks(name, ranks) * 4, count, "float32", op if reduces(name) else "none", root, placed)
        for name in COLLECTIVES
        for count in (COUNTS if name != "barrier" else (0,))
        for root in (range(ranks) if name in ROOTED else (-1,))
        for placed in placements(name)
    ]


def wrong(engine: Engine, ranks: int, candidates: Sequence[Candidate], op: str) -> tuple[list[str], set[str]]:
    """(what a rank finds wrong, what its engine does not support)."""
    memory = {name: [engine.allocate(1 << 16, name) for _ in range(2)] for name in {c.memory for c in candidates}}
    found, unsupported = [], set()
    for case in cases(ranks, op):
        given = inputs.blocks(ranks, np.float32, case.op)
        reduced = inputs.expected(ranks, np.float32, op)
        for candidate in candidates:
            halves = (array[: case.nbytes].view(np.float32) for array in memory[candidate.memory])
            x, out = views(case, engine.rank, ranks, *halves)
            try:
                call = engine.prepare(candidate, case, x, out)
            except UnsupportedError:
                unsupported.add(f"{case.collective}, {'in' if case.in_place else 'out of'} place")
                continue
            for _ in range(2):
                inputs.poison(out)
                inputs.fill(x, given[engine.rank])
                call()
                parts = outcome(case, engine.rank, given, reduced)
                if missed := sum(inputs.count_wrong(out[part], block) for part, block in parts):
                    found.append(f"{missed} of {case} by {candidate}")
    return found, unsupported


def ours(comm: Any) -> tuple[list[str], set[str]]:
    return wrong(Collectives(comm), comm.size, OURS, "max")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ours(ranks: int, crew: Crews) -> None:
    assert crew(ours, ranks) == [([], {"send_recv, out of place"})] * ranks  # which has no plan


def gloo(comm: Any, folder: str, op: str) -> tuple[list[str], set[str]]:
    engine = Gloo(comm.rank, comm.size, folder)
    try:
        return wrong(engine, comm.size, [Candidate("gloo")], op)
    finally:
        engine.close()


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_gloo(op: str, crew: Crews, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert crew(gloo, 2, (str(tmp_path), op)) == [([], set())] * 2


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", peers.MPIS)
def test_mpi(name: str, op: str) -> None:
    found = peers.find_mpis() if peers.has("mpi4py") else {}
    if name not in found:
        pytest.skip(f"there is no {peers.MPIS[name]}")
    code = f"import sys; sys.path += [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]; "
    code += f"import test_candidates; test_candidates.over_mpi({op!r})"
    launch = found[name].launch(2, python(code))
    environment = {**os.environ, **launch.environments[0]}
    ran = subprocess.run(launch.commands[0], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[] {'reduce_scatter, in place'}"] * 2


def over_mpi(op: str) -> None:
    both = " ".join(map(str, wrong(Mpi(), 2, [Candidate("mpi")], op)))
    print(f"{both}\n", end="", flush=True)  # in one piece, also where output has no buffer
