"""Ranks that nobody's launcher ends go on when one of them has died."""

import os
import secrets
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives import Communicator


def on_the_host(comm: Communicator) -> str:
    """First rank 1 dies, in nobody's call, then rank 3, when it should meet the others."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(collectives.PeerLostError, match="rank 1"):
        comm.all_reduce(np.ones(10))
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    left = comm.survivors()
    total = left.all_reduce(np.full(100_000, 10.0**comm.rank))
    shared = left.empty(5, np.int64)
    shared[:] = left.rank
    left.all_reduce(shared, "max", out=shared)
    with left.split(left.rank) as alone:
        size = alone.size
    left.close()
    comm.close()
    return f"{left.rank} of {left.size}: {set(total.tolist())} {set(shared.tolist())} {size}"


def on_nccl(comm: Communicator) -> str:
    from fakenccl import on_nccl

    gpu, driver, library = on_nccl(comm)
    y = driver.array(np.ones(8, np.float32))
    gpu.all_reduce(y, out=y)
    driver.synchronize(0)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gpu.all_reduce(y, out=y)
    with pytest.raises(collectives.PeerLostError, match="rank 1"):
        while True:
            gpu.check([])
            time.sleep(0.01)
    library.carrier = comm.survivors()  # what this NCCL sends its bytes by
    left = gpu.survivors()
    y = driver.array(np.full(8, 10.0**comm.rank, np.float32))
    left.all_reduce(y, out=y)
    found = set(driver.values(y).tolist())
    left.close()
    return f"{left.rank} of {left.size}: {found}"


WHAT = {"shm": on_the_host, "nccl": on_nccl}


def run(what: str, size: int, program: str = __file__, *more: str) -> list[str]:
    """What each of the ranks, which are processes of their own, came to."""
    address = f"unix:{secrets.token_hex(8)}"
    ranks = [
        subprocess.Popen(
            [sys.executable, program, what, str(rank), str(size), address, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(size)
    ]
    answers = [rank.communicate() for rank in ranks]
    for rank, (_, said) in zip(ranks, answers):
        assert rank.returncode in (0, -signal.SIGKILL), said
    return [answer.strip() for answer, _ in answers]


def test_those_that_are_left_have_a_communicator_again() -> None:
    assert run("shm", 4) == ["0 of 2: {101.0} {1} 1", "", "1 of 2: {101.0} {1} 1", ""]


@pytest.mark.skipif(find_spec("nccl") is None or find_spec("cuda.bindings") is None, reason="nccl4py is not installed")
def test_and_a_new_communicator_of_nccl() -> None:
    assert run("nccl", 3) == ["0 of 2: {101.0}", "", "1 of 2: {101.0}"]


def refused(comm: Communicator) -> str:
    """Who is alive and does not come is named at the deadline."""
    over = comm.zeros(1, np.int64)
    theirs = comm.peer(over, 1)
    if comm.rank == 1:
        while not over.item():
            time.sleep(0.01)
        return ""
    comm._backend.timeout = 1.0  # type: ignore[attr-defined]
    with pytest.raises(collectives.CollectiveTimeoutError) as error:
        comm.survivors()
    theirs[0] = 1
    return str(error.value)


def test_who_does_not_come_is_missed() -> None:
    assert "rank 1" in collectives.spawn(refused, 2)[0]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    what, rank, size, address = sys.argv[1:]
    with_them = collectives.init("shm", rank=int(rank), size=int(size), address=address, timeout=60.0)
    print(WHAT[what](with_them))
