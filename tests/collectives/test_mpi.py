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
BACKENDS = [("mpi", "aaa"), ("auto", "aba"), pytest.param("shm+mpi", "abaab", marks=pytest.mark.slow)]
SOON = 5.0  # seconds after the deadline within which every rank has been told


def start(
    folder: Path, job: str, backend: str, hosts: str, mpi: peers.Mpi | None = None, options: list[str] | None = None
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Run a job of over_mpi on so many ranks as there are hosts. What each said; None for one that said nothing."""
    mpi = mpi or next(iter(MPIS.values()))
    program = [sys.executable, str(HERE / "over_mpi.py"), str(folder), hosts, job, backend]
    launcher, *rest = mpi.command(len(hosts), program)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))
    environ = {**os.environ, **mpi.environment(), "PYTHONPATH": paths}
    done = subprocess.run([launcher, *(options or []), *rest], env=environ, capture_output=True, text=True, timeout=110)
    places = [folder / str(rank) for rank in range(len(hosts))]
    return done, [json.loads(place.read_text()) if place.exists() else None for place in places]


def engine(backend: str, hosts: str) -> str:
    return "mpi" if backend == "mpi" else "shm+mpi"


@pytest.mark.parametrize(("backend", "hosts"), BACKENDS)
@pytest.mark.parametrize("job", ["every_collective", "sums"])
def test_every_collective_gives_what_numpy_gives(tmp_path: Path, job: str, backend: str, hosts: str) -> None:
    done, told = start(tmp_path, job, backend, hosts)
    assert done.returncode == 0, done.stderr
    assert told == [[engine(backend, hosts), []]] * len(hosts)


@pytest.mark.slow
@pytest.mark.parametrize("name", MPIS)
def test_with_every_mpi(tmp_path: Path, name: str) -> None:
    for backend, hosts in (("mpi", "aaa"), ("auto", "abb")):
        for job in ("every_collective", "sums", "messages"):
            done, told = start(tmp_path, job, backend, hosts, MPIS[name])
            assert done.returncode == 0, done.stderr
            assert not any(text for rank in told for text in rank[1] if isinstance(text, str)), told


@pytest.mark.parametrize(("backend", "hosts"), [("mpi", "aaaa"), ("auto", "abab")])
def test_messages(tmp_path: Path, backend: str, hosts: str) -> None:
    done, told = start(tmp_path, "messages", backend, hosts)
    assert done.returncode == 0, done.stderr
    for rank, (_, answers) in enumerate(told):
        tags = [] if rank % 2 == 0 else [2.0**40, 0.0, 5.0, 3.0, 5.0, -1.0, 55.0]
        assert answers == [[], [], True, [], tags, True]


@pytest.mark.parametrize(("backend", "hosts"), [("mpi", "aaaa"), ("auto", "abab")])
def test_families(tmp_path: Path, backend: str, hosts: str) -> None:
    done, told = start(tmp_path, "families", backend, hosts)
    assert done.returncode == 0, done.stderr
    for rank, (name, (half, back, every, inner, colours)) in enumerate(told):
        assert (half, back, every) == (3 if rank < 2 else 7, 10, 10)
        assert name == engine(backend, hosts) and inner == name
        evens, nobody, some, alone, same = colours
        family = [2, 0] if rank % 2 == 0 else [3, 1]
        assert evens == [family.index(rank), 2, family] and nobody is None
        assert some == ([1] if rank == 1 else None) and alone == [1, [rank]] and same == [0, 1, 2, 3]


@pytest.mark.parametrize(("backend", "hosts"), [("mpi", "aaa"), ("auto", "aab")])
def test_symmetric_memory(tmp_path: Path, backend: str, hosts: str) -> None:
    done, told = start(tmp_path, "memory", backend, hosts)
    assert done.returncode == 0, done.stderr
    shared = 1 if backend == "mpi" else 2
    for rank, (_, (summed, reached)) in enumerate(told):
        assert summed
        assert ("reached" if rank < shared else "rank 0's memory cannot be reached") in reached


def test_the_user_s_communicator(tmp_path: Path) -> None:
    done, told = start(tmp_path, "given", "auto", "aabb")
    assert done.returncode == 0, done.stderr
    assert told == [["shm+mpi", 1, 2], ["shm+mpi", 1, 4], ["shm+mpi", 0, 2], ["shm+mpi", 0, 4]]


@pytest.mark.parametrize("backend", ["mpi", "auto"])
@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        ("mismatch", "CollectiveMismatchError", "rank 1 called all_reduce(float64, count 3, max)"),
        ("late", "CollectiveTimeoutError", "rank 1 (on host-"),
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
        if (job, rank) in (("closed", 1), ("late", 1)):
            continue
        message, seconds = said
        assert message.startswith(f"{kind}: ") and text in message, told
        assert seconds < (TIMEOUT if job == "late" else 0) + SOON


@pytest.mark.skipif("mpich" not in MPIS, reason="MPICH's launcher can be told to let the others live")
@pytest.mark.parametrize("backend", ["mpi", "auto"])
def test_a_killed_rank_is_named(tmp_path: Path, backend: str) -> None:
    done, told = start(tmp_path, "killed", backend, "aba", MPIS["mpich"], ["-disable-auto-cleanup"])
    assert done.returncode != 0
    for rank in (0, 2):
        assert told[rank][0].startswith("PeerLostError: ") and "rank 1 (on host-b)" in told[rank][0], told
        assert told[rank][1] < SOON


def test_a_launcher_of_another_mpi(tmp_path: Path) -> None:
    program = "import collectives; collectives.init('mpi')"
    environ = {**os.environ, **next(iter(MPIS.values())).environment(), "PMI_RANK": "0", "PMI_SIZE": "2"}
    environ |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    del environ["PMI_RANK"], environ["PMI_SIZE"]
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert "has started 2 ranks, and MPI knows of 1" in done.stderr
