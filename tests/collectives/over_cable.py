"""One rank of test_namespaces: `python over_cable.py FOLDER JOB RANK ADDRESS`. FOLDER takes what the job tells, and
then how the rank fails when the cable is pulled, and when. Rank and address are "-" under MPI.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from expected import exact_data, reduced, same_bits

import collectives
from collectives import Communicator
from collectives.rendezvous import Place, meet

# Seconds, of calls that wait for the other side of the cable. A rank is called silent after 2.5; over MPI it is the
# deadline of the beginning, too.
DEADLINES = {"over_tcp": 1.5, "over_nccl": 3.5, "over_mpi": 5.0}
PATIENCE = 100.0  # of those that nothing is wrong with
SECRET = b"known to this job only"
STEPS, SEED = 25, 3  # more than one epoch


def over_mpi(folder: Path) -> None:
    """All-reduces inside hosts and between them, training, and calls until one fails."""
    from bench.soak_rank import trainer

    with collectives.init(timeout=PATIENCE) as comm:
        training = trainer(comm, folder / "run", SEED)
        training.fit(2, steps=STEPS)
        told = [comm.backend, sums(comm), len(training.scores)]
    with collectives.init(timeout=DEADLINES["over_mpi"]) as comm:
        tell(folder, comm.rank, told)
        until_it_fails(folder, comm.rank, lambda _: comm.all_reduce(np.ones(1000)))


def sums(comm: Communicator) -> list[str]:
    """What was wrong."""
    wrong = []
    for number, count in enumerate((0, 1, 7, 1000, 300_001)):
        for dtype, op in (("float32", "sum"), ("bfloat16", "max"), ("int64", "avg"), ("float64", "prod")):
            every = [exact_data([number], rank, (count,), dtype, op) for rank in range(comm.size)]
            if not same_bits(comm.all_reduce(every[comm.rank], op), reduced(every, op)):
                wrong.append(f"rank {comm.rank}: {op} of {count} {dtype}")
    return wrong


def over_tcp(folder: Path, rank: int, address: str) -> None:
    """What `init` says where nothing but TCP joins the hosts. Then ranks meet, exchange bytes, pass descriptors within
    each host, and exchange until that fails."""
    text = ""
    try:
        collectives.init(rank=rank, size=4, address=address, timeout=PATIENCE)
    except RuntimeError as error:
        text = str(error)
    meeting = meet(Place(rank, 4, address, SECRET, timeout=PATIENCE))
    payloads = [payload.decode() for payload in meeting.exchange(f"from {rank}".encode())]
    descriptors = meeting.exchange_fd(sys.stdin.fileno())
    told = [text, payloads, [peer.local for peer in meeting.peers], [each is not None for each in descriptors]]
    tell(folder, rank, told)
    until_it_fails(folder, rank, lambda late: meeting.exchange(b"", DEADLINES["over_tcp"] if late else PATIENCE))


def over_nccl(folder: Path, rank: int, address: str) -> None:
    """An NCCL in memory between fake GPUs, whose bytes and ours go by TCP; calls until one fails."""
    from fakegpu import FakeDriver, without_compilers
    from fakenccl import FakeNccl

    from collectives.backends.tcp import Tcp
    from collectives.initialise import over_nccl
    from collectives.post import Post

    without_compilers()
    control = Tcp(Post(meet(Place(rank, 4, address, SECRET, timeout=PATIENCE))), range(4), PATIENCE)
    carrier, driver = control.split(0, rank), FakeDriver()
    assert carrier is not None
    library: Any = FakeNccl(driver, Communicator(carrier))
    gpu = Communicator(over_nccl("nccl", control, driver, library))  # type: ignore[arg-type]
    total = gpu.all_reduce(driver.array(np.full(1000, rank, np.float32)), out=driver.array(np.zeros(1000, np.float32)))
    told = [gpu.backend, sorted(set(driver.values(total).tolist())), gpu.broadcast_object([control.host.where(3)])]
    tell(folder, rank, told)

    def call(late: bool) -> None:
        control.timeout = DEADLINES["over_nccl"] if late else PATIENCE
        gpu.all_reduce(total, out=total)
        gpu.barrier()

    until_it_fails(folder, rank, call)


def tell(folder: Path, rank: int, told: Any, what: str = "told") -> None:
    (folder / f"{what} {rank}.new").write_text(json.dumps(told))
    (folder / f"{what} {rank}.new").rename(folder / f"{what} {rank}")


def until_it_fails(folder: Path, rank: int, call: Any) -> None:
    """Make calls; with the short deadline only when the cable is about to be pulled, since ranks may be slow."""
    try:
        while not (folder / "pulling").exists():
            call(False)
            time.sleep(0.01)
        tell(folder, rank, "", "ready")
        while True:
            call(True)
            time.sleep(0.01)
    except Exception as error:
        (folder / f"failed {rank}").write_text(json.dumps([f"{type(error).__name__}: {error}", time.monotonic()]))
        raise


if __name__ == "__main__":
    os.environ["MGPU_SECRET"] = SECRET.decode()
    place, job, *where = sys.argv[1:]
    if job == "over_mpi":
        over_mpi(Path(place))
    else:
        globals()[job](Path(place), int(where[0]), where[1])
