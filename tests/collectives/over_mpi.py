"""One MPI rank of test_mpi: `python over_mpi.py FOLDER HOSTS JOB BACKEND`, where the r-th letter of HOSTS is the host
that rank r plays. It writes what the job returns, or how it failed and when, into FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from expected import REDUCING, ROOTED, UNEVEN, Case, Runner, same_bits
from test_messages import every_size_and_dtype, in_groups, in_shapes, many_unreceived, to_oneself, with_tags
from test_split import colours_and_keys

import collectives
from collectives import CollectiveError, Communicator
from kernels.dtypes import DTYPES, find

TIMEOUT = 3.0  # seconds, of the jobs in which something goes wrong


def every_collective(comm: Communicator) -> list[str]:
    """All collectives, for all dtypes and operations that one of them has; a small call, a large one, odd ones."""
    runner = Runner(comm, pool_bytes=1 << 17)
    for name in (*REDUCING, "broadcast", "all_gather", "gather", "scatter", "all_to_all"):
        for dtype in [dtype.name for dtype in DTYPES] if name == "all_reduce" else ["float32", "bfloat16"]:
            every = find(dtype).operations() if name in REDUCING and dtype in ("float32", "bfloat16") else ["sum"]
            for op in every:
                for number, rows in enumerate((0, 1, 7, 3001)):
                    form = "fresh" if name == "all_to_all" else ("fresh", "out", "in_place")[rows % 3]
                    memory = ("ordinary", "symmetric", "shifted", "mixed")[number]
                    way = ("call", "async", "plan")[(number + len(op)) % 3]
                    root = rows % comm.size if name in ROOTED else 0
                    runner.run(Case(name, dtype, op, rows, root=root, form=form, memory=memory, way=way))
        for scale in (0, 1, 3000) if name in UNEVEN else ():
            counts: Any = [(rank * 7 + 3) % 5 * scale for rank in range(comm.size)]
            if name == "all_to_all":
                counts = [[(i * 3 + j * 2) % 4 * scale for j in range(comm.size)] for i in range(comm.size)]
            for form in ("fresh",) if name == "all_to_all" else ("fresh", "in_place"):
                runner.run(Case(name, "int16", counts=counts, form=form))
    comm.barrier()
    return runner.wrong


def sums(comm: Communicator) -> list[str]:
    """Random numbers: the same bits on every rank, near the exact sum; many calls under way at one time."""
    wrong = []
    for count in (5, 1000, 40_009):
        for dtype in ("float32", "float64", "bfloat16"):
            every = np.random.default_rng(count).standard_normal((comm.size, count)).astype(find(dtype).numpy)
            result = comm.all_reduce(every[comm.rank], "avg")
            exact, bound = every.astype(np.float64).mean(0), {"float32": 1e-5, "float64": 1e-13, "bfloat16": 4e-2}
            if np.abs(result.astype(np.float64) - exact).max() > bound[dtype]:
                wrong.append(f"{count} {dtype}")
            gathered = comm.all_gather(result).reshape(comm.size, count)
            if not all(same_bits(gathered[0], row) for row in gathered):
                wrong.append(f"{count} {dtype}: the bits differ")
    xs = [np.full(1 + 997 * k, comm.rank + k, np.int64) for k in range(20)]
    works = [comm.all_reduce(x, async_op=True) for x in xs]
    total = comm.all_reduce(np.array([1]))  # which comes after them
    for k, work in enumerate(works):
        if not (work.done() and (work.wait() == sum(rank + k for rank in range(comm.size))).all()):
            wrong.append(f"asynchronous call {k}")
    return [*wrong, *([] if total == comm.size else ["the call after them"])]


def messages(comm: Communicator) -> list[Any]:
    told: list[Any] = [every_size_and_dtype(comm), in_groups(comm, 3), to_oneself(comm) == to_oneself(comm)]
    with comm.split(comm.rank // 2) as pair:  # type: ignore[union-attr]
        if pair.size == 2:
            told += [in_shapes(pair), with_tags(pair), many_unreceived(pair)]
            comm.signal(comm.rank)
            comm.wait_signal(comm.rank)
            pair.signal(1 - pair.rank)
            pair.wait_signal(1 - pair.rank)
    return told


def families(comm: Communicator) -> list[Any]:
    told: list[Any] = []
    with comm.split(0, -comm.rank) as back, back.split(back.rank // 2) as half:  # type: ignore[union-attr]
        for family in (half, back, comm):
            x = np.full(3001, 1.0 + comm.rank)
            told.append(family.all_reduce(x, out=x)[-1])
        told.append(half.backend)
    return [*told, colours_and_keys(comm)]


def memory(comm: Communicator) -> list[Any]:
    """Symmetric memory is shared inside a host, and each rank's own elsewhere."""
    x, word = comm.zeros(3000), comm.zeros(1, np.int64)
    told: list[Any] = [same_bits(comm.all_reduce(np.ones_like(x), out=x), np.full(3000, comm.size, np.float32))]
    comm.barrier()
    try:
        comm.fetch_add(word, 1, 0)
        comm.wait_until(word, 1, 0)
        told.append("reached")
    except CollectiveError as error:
        told.append(str(error))
    comm.barrier()
    return told


def everything(comm: Communicator) -> list[Any]:
    return [every_collective(comm), sums(comm), messages(comm), families(comm), memory(comm)]


def mismatch(comm: Communicator) -> None:
    comm.all_reduce(np.ones(3), "max" if comm.rank == 1 else "sum")


def mismatch_in_memory(comm: Communicator) -> None:
    comm.split(0) if comm.rank == 1 else comm.empty(8)


def late(comm: Communicator) -> None:
    """Rank 1 does not come to the third call."""
    comm.barrier()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(TIMEOUT + 4)
    comm.all_reduce(np.ones(3000))


def stuck(comm: Communicator) -> None:
    """Rank 1 comes to the call, as all agree, and then does not do its part: another host's ranks wait in vain, for it
    or for each other."""
    if comm.rank == 1:
        comm._backend.move = lambda *_: time.sleep(TIMEOUT + 4)  # type: ignore[attr-defined]
    comm.all_reduce(np.ones(3000))


def closed(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.close()
        time.sleep(1)
    else:
        comm.barrier()


def aborted(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.abort("the disk is full")
    comm.recv(np.empty(3), 1) if comm.rank else comm.barrier()


def killed(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(3000))


def wrong_algorithm(comm: Communicator) -> None:
    comm.all_reduce(np.ones(3), algorithm="ring")


def given(backend: str) -> Any:
    """A communicator of the user's: the even ranks of all."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(world.Get_rank() % 2, -world.Get_rank())
    with collectives.init(backend, mpi=half) as comm:
        return [comm.backend, comm.rank, int(comm.all_reduce(np.array([world.Get_rank()]))[0])]


def main(folder: str, hosts: str, job: str, backend: str) -> int:
    began = time.monotonic()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    os.environ["MGPU_HOST"] = f"host-{hosts[rank]}"
    place = Path(folder) / str(rank)
    try:
        if job == "given":
            told = given(backend)
        else:
            with collectives.init(backend, timeout=TIMEOUT if job in FAILING else 60.0) as comm:
                began = time.monotonic()
                told = [comm.backend, globals()[job](comm)]
    except Exception as error:
        told = [f"{type(error).__name__}: {error}", time.monotonic() - began]
        place.write_text(json.dumps(told))
        raise
    place.write_text(json.dumps(told))
    return 0


FAILING = ("mismatch", "mismatch_in_memory", "late", "stuck", "closed", "aborted", "killed", "wrong_algorithm")

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
