"""Where there are no pidfds, as in some sandboxes, a death is seen all the same: by the sockets of those who met."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from survivors import SOON, reported

SCRIPT = """
import os, sys, time
sys.path.append({folder!r})
from survivors import die, report
import numpy as np
import collectives
del os.pidfd_open
rank, dead = int(sys.argv[1]), {dead}
kind = text = ""
try:
    comm = collectives.init(rank=rank, size=3, address={address!r}, timeout=60)
    comm.all_reduce(np.ones(3))
    if rank == dead:
        if {forks} and os.fork() == 0:  # as workers that read data; it lives on
            ends = time.monotonic() + 30
            while len(os.listdir({address!r}[5:])) < 3 and time.monotonic() < ends:  # the moment, and two reports
                time.sleep(0.05)
            os._exit(0)
        time.sleep(0.3)
        die()
    comm.all_reduce(np.ones(3))
except collectives.CollectiveError as error:
    kind, text = type(error).__name__, str(error)
report(rank, kind, text)
"""


@pytest.mark.parametrize(("dead", "forks"), [(0, False), (1, False), (1, True)])
def test_a_death_is_seen_without_pidfds(dead: int, forks: bool, tmp_path: Path) -> None:
    """Rank 0, through whom all have met, or another, or one whose forked child lives on."""
    script = SCRIPT.format(folder=str(Path(__file__).parent), dead=dead, forks=forks, address=f"unix:{tmp_path}")
    environ = {**os.environ, "SURVIVORS": str(tmp_path)}
    ranks = [subprocess.Popen([sys.executable, "-c", script, str(rank)], env=environ) for rank in range(3)]
    try:
        for rank in ranks:
            rank.wait(90)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = reported(tmp_path)
    assert sorted(found) == [rank for rank in range(3) if rank != dead]
    for outcome in found.values():
        assert outcome.kind == "PeerLostError" and f"rank {dead} (process " in outcome.text, outcome
        assert outcome.seconds < SOON
