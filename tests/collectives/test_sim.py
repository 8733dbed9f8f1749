"""The sim backend: the GPU's executor, simulated, in ranks that share memory, gives the CPU's results bit for bit."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, Communicator, PeerLostError
from collectives.builder import algorithms
from collectives.contract import COLLECTIVES
from kernels.dtypes import DTYPES, find

pytest.importorskip("numba_cuda", reason="numba-cuda, which brings the simulator, is not installed")

SHIPPED = [
    (collective, name) for collective in COLLECTIVES if collective != "send_recv" for name in algorithms(collective)
]
QUICK = [pair for pair in SHIPPED if pair[1] in ("ring", "two_shot", "bruck")]
Program = tuple[str, str]


def inputs(seed: int, dtype: str, count: int) -> np.ndarray[Any, Any]:
    """Numbers that every order of adding rounds differently."""
    random = np.random.default_rng(seed)
    kind = find(dtype)
    if kind.kind in ("int", "uint"):
        return random.integers(0, 256, count * kind.itemsize, np.uint8).view(kind.numpy)
    values = random.standard_normal(count) * 2.0 ** random.integers(-4, 5, count)
    return (
        values > 0 if kind.kind == "bool" else values + 1j * values[::-1] if kind.kind == "complex" else values
    ).astype(kind.numpy)


def run_programs(comm: Communicator, programs: list[Program], rounds: int) -> list[bytes]:
    """The bytes that each program leaves on this rank, for dtypes, operations, sizes and memories drawn by chance."""
    results = []
    pool = comm.empty(1 << 17, np.uint8)
    for (collective, name), round in [(program, round) for program in programs for round in range(rounds)]:
        chance = random.Random(f"{collective} {name} {round}")
        dtype = chance.choice([each.name for each in DTYPES])
        rows = chance.choice([0, 1, 3, 17, 64, 257])
        shape = rows * (comm.size if collective in ("reduce_scatter", "scatter", "all_to_all") else 1)
        x = inputs(comm.rank + 10 * round, dtype, shape)
        if chance.random() < 0.5:
            shared = pool[: x.nbytes].view(x.dtype)
            shared[...] = x
            x = shared
        options: dict[str, Any] = {"algorithm": name}
        if COLLECTIVES[collective].source is None and collective != "barrier":
            op = chance.choice(find(dtype).operations())
            options["op"] = collectives.premul_sum(3) if op == "premul_sum" else op
        if collective in ("reduce", "broadcast", "gather", "scatter"):
            options["root"] = chance.randrange(comm.size)
        if collective == "scatter" and comm.rank != options["root"]:
            x, options["out"] = None, np.zeros(rows, find(dtype).numpy)
        result = comm.barrier(algorithm=name) if collective == "barrier" else getattr(comm, collective)(x, **options)
        results.append(b"" if result is None else result.tobytes())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_program_gives_what_the_cpu_gives(size: int) -> None:
    simulated = collectives.spawn(run_programs, size, (SHIPPED, 6), backend="sim")
    assert simulated == collectives.spawn(run_programs, size, (SHIPPED, 6), backend="shm")


def call_everything(comm: Communicator) -> list[Any]:
    """Something of every public call; what it returns is the same on both backends."""
    from numba import cuda

    rank, size = comm.rank, comm.size
    following, before = (rank + 1) % size, (rank - 1) % size
    x = np.arange(6, dtype=np.float32) + rank
    results: list[Any] = [
        comm.all_reduce(x), comm.reduce(x, "max", root=1), comm.broadcast(x.copy(), root=1), comm.all_gather(x),
        comm.reduce_scatter(x, "avg"), comm.gather(x), comm.all_to_all(x), comm.barrier(),
        comm.scatter(x if rank == 0 else None, out=np.zeros(6 // size, np.float32)),
        comm.broadcast_object({"epoch": rank}), comm.all_gather(x[: rank + 1], counts=list(range(1, size + 1))),
        comm.all_reduce([x, np.ones(3, np.int64)]), comm.sendrecv(x, following, np.zeros(6, np.float32), before),
    ]  # fmt: skip
    big = np.full(150_000, rank, np.float32)  # more than a stream's slots hold
    with comm.group():
        comm.send(big, following, tag=5)
        received = comm.recv(np.zeros_like(big), before, tag=5)
    results.append(received[::50_000].copy())
    works = [comm.all_reduce(x * n, async_op=True) for n in range(3)]
    comm.signal(following)
    comm.wait_signal(before)
    results += [work.wait() for work in works]
    shared = comm.zeros(8, np.int32)
    comm.put(np.full(8, rank, np.int32), shared, following)
    comm.barrier()
    results += [shared.copy(), comm.get(shared, following), comm.peer(shared, before).copy()]
    comm.barrier()
    plan = comm.plan("all_reduce", shared, out=shared)
    plan()
    results.append(shared.copy())
    with comm.split(rank % 2, key=-rank) as half:
        results += [half.size, half.all_reduce(x)]
    if comm.backend == "sim":
        # The simulator's device arrays: one over symmetric memory shares it, and results are of the same kind.
        device = type(cuda.to_device(x))(shared)
        shared[:] = rank
        comm.all_reduce(device, out=device)
        total = size * (size - 1) // 2
        assert (shared == total).all() and isinstance(comm.all_reduce(cuda.to_device(x)), type(device))
    return [value.tolist() if isinstance(value, np.ndarray) else repr(value) for value in results]


def do_everything(comm: Communicator) -> tuple[str, list[bytes], list[Any]]:
    return comm.backend, run_programs(comm, QUICK, 1), call_everything(comm)


@functools.cache
def two_ranks(backend: str) -> list[tuple[str, list[bytes], list[Any]]]:
    """What several tests look at."""
    import numba

    assert not numba.config.ENABLE_CUDASIM
    return collectives.spawn(do_everything, 2, backend=backend)


def test_a_program_that_has_imported_numba_can_spawn_simulated_ranks() -> None:
    assert [backend for backend, *_ in two_ranks("sim")] == ["sim"] * 2


def test_some_programs_give_what_the_cpu_gives() -> None:
    assert [found for _, found, _ in two_ranks("sim")] == [found for _, found, _ in two_ranks("shm")]


def test_every_public_call() -> None:
    assert [found for *_, found in two_ranks("sim")] == [found for *_, found in two_ranks("shm")]


def fail_in_every_way(comm: Communicator) -> list[tuple[str, str]]:
    failures: list[tuple[str, str]] = []

    def attempt(expected: type[CollectiveError], call: Any) -> None:
        try:
            call()
        except expected as error:
            failures.append((type(error).__name__, str(error)))

    one, two, three = (comm.split(0) for _ in range(3))
    attempt(CollectiveMismatchError, lambda: one.all_reduce(np.zeros(3 + comm.rank, np.float32)))
    two._backend.timeout = 0.3
    if comm.rank == 0:
        attempt(CollectiveTimeoutError, two.barrier)
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)  # dies without a word
    attempt(PeerLostError, three.barrier)
    print("\n".join(f"{name} {text}" for name, text in failures), flush=True)
    os._exit(0)  # so that the death of rank 1 is no failure of the test's


def test_mistakes_deadlines_and_lost_peers_raise_as_on_the_cpu(tmp_path: Any) -> None:
    call = "collectives.spawn(test_sim.fail_in_every_way, 2, backend='sim')"
    script = f"import collectives, test_sim\nif __name__ == '__main__':\n    {call}"
    path = tmp_path / "script.py"
    path.write_text(script)
    here = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": here}
    )
    lines = done.stdout.splitlines()
    assert "ranks disagree" in lines[0] and "count 3" in lines[0] and "count 4" in lines[0]
    assert "CollectiveTimeoutError barrier() did not finish" in lines[1] and "rank 1 did not" in lines[1]
    assert "PeerLostError" in lines[2] and "rank 1" in lines[2]


def test_without_the_simulator_init_says_what_to_set() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    code = "import numba, collectives\ntry: collectives.init('sim')\nexcept ImportError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "NUMBA_ENABLE_CUDASIM=1" in said.stdout and "spawn" in said.stdout
