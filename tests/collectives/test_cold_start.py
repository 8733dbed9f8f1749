"""Ranks with no compiled kernels at hand: one that dies while the others compile, or wait for one that does, is missed
at once, and not when they have compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from survivors import SOON, Outcome, die, outcomes, reported, waits_for

from collectives import Communicator
from kernels import native


def lost(found: dict[int, Outcome]) -> None:
    """Of three ranks, all but rank 1 have raised PeerLostError that names it, soon."""
    assert sorted(found) == [0, 2]
    for outcome in found.values():
        assert outcome.kind == "PeerLostError", outcome
        assert outcome.text.startswith("while this rank compiled kernels: "), outcome
        assert "rank 1 (process " in outcome.text  # as it saw, or as the other survivor told it
        assert 0 <= outcome.seconds < SOON
    print("survivors raised after", *(f"{outcome.seconds:.2f} s" for outcome in found.values()))


def dies_while_others_compile(comm: Communicator) -> None:
    """One of the others compiles, and one waits for what it makes; neither has any use for it when it is there."""
    comm.barrier()
    folder, rank = Path(os.environ["SURVIVORS"]), comm.rank
    os.environ["MGPU_CACHE"] = str(folder / "empty")
    native._compile = lambda name: waits_for(folder / f"{rank}.json")
    if rank == 1:
        time.sleep(0.5)
        die()
    comm.all_reduce(np.ones(3, np.int16), "min")


def test_a_death_in_the_first_call_of_a_kind(tmp_path: Path) -> None:
    lost(outcomes(dies_while_others_compile, 3, tmp_path))


INIT = """
import os, sys, time
sys.path.append({folder!r})
from pathlib import Path
from survivors import die, report, waits_for
import collectives
from kernels import native
rank, folder = int(sys.argv[1]), Path(os.environ["SURVIVORS"])
os.environ["MGPU_CACHE"] = str(folder / ("dead" if rank == 1 else "others"))
native._compile = lambda name: time.sleep(0.5) or die() if rank == 1 else waits_for(folder / f"{{rank}}.json")
kind = text = ""
try:
    collectives.init(rank=rank, size=3, address={address!r}, timeout=60)
except collectives.CollectiveError as error:
    kind, text = type(error).__name__, str(error)
report(rank, kind, text)
"""


def test_a_death_in_init(tmp_path: Path) -> None:
    script = INIT.format(folder=str(Path(__file__).parent), address=f"unix:{tmp_path}")
    environ = {**os.environ, "SURVIVORS": str(tmp_path)}
    ranks = [subprocess.Popen([sys.executable, "-c", script, str(rank)], env=environ) for rank in range(3)]
    try:
        for rank in ranks:
            rank.wait(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    lost(reported(tmp_path))
