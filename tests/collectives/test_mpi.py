"""Ranks over MPI, on one host that plays several: every collective, messages, families; and what ranks are told when
something goes wrong. Needs mpi4py and an MPI (see `bench.peers`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import peers

if not peers.has("mpi4py") or not peers.find_mpis():
    pytest.skip("needs mpi4py and an MPI", allow_module_level=True)

MPIS = peers.find_mpis()
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FIRST = next(iter(MPIS))
PATIENCE = 90.0  # seconds for a job
SOON = 5.0  # seconds after the deadline within which every rank has been told


def start(
    folder: Path, job: str, backend: str, hosts: str, mpi: peers.Mpi | None = None, options: list[str] | None = None
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Run a job of over_mpi on so many ranks as there are hosts. What each said; None for one that said nothing."""
    mpi = mpi or MPIS[FIRST]
    program = [sys.executable, str(HERE / "over_mpi.py"), str(folder), hosts, job, backend]
    launcher, *rest = mpi.command(len(hosts), program)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))
    environ = {**os.environ, **mpi.environment(), "PYTHONPATH": paths}
    command = [launcher, *(options or []), *rest]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as late:  # Open MPI's launcher stays, now and then, when its ranks have aborted
        done = subprocess.CompletedProcess(command, 1, "", str(late.stderr))
    places = [folder / str(rank) for rank in range(len(hosts))]
    return done, [json.loads(place.read_text()) if place.exists() else None for place in places]


@pytest.mark.parametrize(
    ("backend", "hosts", "name"),
    [
        ("mpi", "aaaa", FIRST),
        ("auto", "abab", FIRST),
        *(
            pytest.param(*case, name, marks=pytest.mark.slow)
            for case in (("mpi", "ab"), ("shm+mpi", "abaab"))
            for name in MPIS
        ),
    ],
)
def test_everything_gives_what_it_gives_on_one_host(tmp_path: Path, backend: str, hosts: str, name: str) -> None:
    done, told = start(tmp_path, "everything", backend, hosts, MPIS[name])
    assert done.returncode == 0, done.stderr
    engine, size = "mpi" if backend == "mpi" else "shm+mpi", len(hosts)
    for rank, (found, (collective, added, messages, families, memory)) in enumerate(told):
        assert (found, collective, added) == (engine, [], [])
        check_messages(rank, size, messages)
        check_families(rank, hosts, engine, families)
        shared = rank == 0 or (hosts[rank] == hosts[0] and engine == "shm+mpi")
        assert memory[0] is True
        assert ("reached" if shared else "rank 0's memory cannot be reached") in memory[1]


def check_messages(rank: int, size: int, told: list[Any]) -> None:
    tags = [] if rank % 2 == 0 else [2.0**40, 0.0, 5.0, 3.0, 5.0, -1.0, 55.0]
    alone = rank == size - 1 and size % 2 == 1
    assert told == [[], [], True, *([] if alone else [[], tags, True])]


def check_families(rank: int, hosts: str, engine: str, told: list[Any]) -> None:
    size, everybody = len(hosts), list(range(len(hosts)))
    half, back, every, inner, (evens, nobody, some, alone, same) = told
    mine = [other for other in everybody if (size - 1 - other) // 2 == (size - 1 - rank) // 2]
    assert (half, back, every) == (sum(mine) + len(mine), sum(everybody) + size, sum(everybody) + size)
    assert inner == ("shm" if engine == "shm+mpi" and len({hosts[other] for other in mine}) == 1 else engine)
    family = [other for other in reversed(everybody) if other % 2 == rank % 2]
    assert evens == [family.index(rank), len(family), family] and nobody is None
    assert some == ([sum(other for other in (1, 4) if other < size)] if rank in (1, 4) else None)
    assert alone == [1, [rank]] and same == everybody


def test_the_user_s_communicator(tmp_path: Path) -> None:
    done, told = start(tmp_path, "given", "auto", "aabb")
    assert done.returncode == 0, done.stderr
    assert told == [["shm+mpi", 1, 2], ["shm+mpi", 1, 4], ["shm+mpi", 0, 2], ["shm+mpi", 0, 4]]


@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        ("mismatch", "CollectiveMismatchError", "rank 1 called all_reduce(float64, count 3, max)"),
        ("mismatch_in_memory", "CollectiveMismatchError", "the ranks disagree: rank 0 called empty, rank 1 called"),
        ("late", "CollectiveTimeoutError", "rank 1 (on host-"),
        ("stuck", "CollectiveTimeoutError", "rank 1 (on host-b) did not arrive"),
        ("closed", "PeerLostError", "closed its communicator after call 0"),
        ("aborted", "CollectiveError", "the disk is full"),
        ("wrong_algorithm", "ValueError", "algorithm='ring'"),
    ],
)
def test_what_went_wrong_is_raised_on_every_rank(tmp_path: Path, backend: str, job: str, kind: str, text: str) -> None:
    from over_mpi import TIMEOUT

    done, told = start(tmp_path, job, backend, "aba")
    assert done.returncode != 0, done.stderr
    for rank, said in enumerate(told):
        if rank == 1 and job in ("late", "stuck", "closed"):
            continue
        message, seconds = said
        assert message.startswith(f"{kind}: ") and text in message, told
        assert seconds < (TIMEOUT if job in ("late", "stuck") else 0) + SOON


# Where the launcher can be told to let the others live. (MPICH's kills them all when one has died of a signal.)
LET_LIVE = {"openmpi": ["--with-ft", "ulfm"], "impi": ["-disable-auto-cleanup"]}
LETTING = [name for name in MPIS if name in LET_LIVE]


@pytest.mark.skipif(not LETTING, reason="needs Open MPI or Intel MPI, which can be told to let the others live")
@pytest.mark.parametrize("name", [*LETTING[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in LETTING[1:])])
@pytest.mark.parametrize("backend", [pytest.param("mpi", marks=pytest.mark.slow), "auto"])
def test_a_killed_rank_is_named(tmp_path: Path, backend: str, name: str) -> None:
    done, told = start(tmp_path, "killed", backend, "aba", MPIS[name], LET_LIVE[name])
    assert done.returncode != 0
    for rank in (0, 2):
        assert told[rank] is not None, done.stderr
        assert told[rank][0].startswith("PeerLostError: ") and "rank 1 (on host-b)" in told[rank][0], told
        assert told[rank][1] < SOON


def test_a_launcher_of_another_mpi(tmp_path: Path) -> None:
    program = "import collectives; collectives.init('mpi')"
    environ = {**os.environ, **MPIS[FIRST].environment(), "PYTHONPATH": str(ROOT)}
    environ |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert "has started 2 ranks, and MPI knows of 1" in done.stderr
