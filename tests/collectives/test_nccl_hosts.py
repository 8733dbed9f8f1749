"""NCCL across hosts, on an NCCL in memory, and our own kernels inside each: what is asked of whom, what comes out, and
what becomes of mistakes, of ranks that die and of hosts that are gone. Hosts here are identities on one machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("nccl.bindings", reason="nccl4py is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from apart import over_nccl_and_tcp, place_to_meet
from expected import exact_data, reduced, reduction
from fakegpu import FakeDriver, without_compilers
from fakenccl import FakeNccl
from nccl.bindings import nccl as real
from survivors import outcomes

import collectives
import kernels.driver
from collectives import CollectiveError, Communicator, initialise
from collectives.backends import cuda, gpu_hosts, nccl


def joined(comm: Communicator) -> None:
    gpu, driver, library = over_nccl_and_tcp(comm, ["a", "a", "b"])
    rank, size = comm.rank, comm.size
    assert gpu.backend == "nccl"
    for dtype, op in (("float32", "sum"), ("bfloat16", "avg"), ("int64", "max"), ("complex64", "premul_sum")):
        every = [exact_data([7], r, (1000,), dtype, op) for r in range(size)]
        out = gpu.all_reduce(driver.array(every[rank]), reduction(op), out=driver.array(np.zeros_like(every[0])))
        assert driver.values(out).tobytes() == reduced(every, op).tobytes()
    # Beside it, arrays of the CPU, objects, messages with headers, memory, families.
    assert gpu.all_reduce(np.ones(2)).tolist() == [size, size]
    assert gpu.broadcast_object({"a": [rank]}) == {"a": [0]}
    x, peer = driver.array(np.full(5, rank, np.int32)), (rank + 1) % size
    with gpu.group():
        gpu.send(x, peer)
        out = gpu.recv(driver.array(np.zeros(5, np.int32)), (rank - 1) % size)
    assert set(driver.values(out).tolist()) == {(rank - 1) % size}
    memory = gpu.zeros(100, np.float32)
    assert set(driver.values(gpu.all_reduce(memory, out=memory)).tolist()) == {0.0}
    with gpu.split(rank % 2, -rank) as part:  # type: ignore[union-attr]
        assert driver.values(part.all_reduce(x, "max", out=x))[0] == max(range(rank % 2, size, 2))
        assert part.all_gather(np.array([rank])).tolist() == sorted(range(rank % 2, size, 2), reverse=True)
    gpu.barrier()
    assert not driver.errors
    gpu.close()


def in_parts(comm: Communicator, hosts: str) -> None:
    gpu_hosts.SMALL = 1000
    gpu, driver, library = over_nccl_and_tcp(comm, hosts, "cuda+nccl")
    rank, size = comm.rank, comm.size
    assert gpu.backend == "cuda+nccl"
    library.log.clear()
    for number, (dtype, op, count) in enumerate([
        ("float32", "sum", 1001), ("float32", "avg", 3000), ("bfloat16", "max", 999), ("int32", "avg", 1024),
        ("float64", "premul_sum", 160), ("float32", "prod", 16), ("uint8", "sum", 2001),
    ]):  # fmt: skip
        every = [exact_data([number], r, (count,), dtype, op) for r in range(size)]
        mine = driver.array(every[rank])
        out = mine if number % 2 else driver.array(np.full_like(every[0], 1))
        gpu.all_reduce(mine, reduction(op), out=out)
        if (dtype, op) == ("float32", "avg"):  # of parts already divided, as NCCL's
            np.testing.assert_allclose(driver.values(out), reduced(every, op), rtol=1e-6)
        else:
            assert driver.values(out).tobytes() == reduced(every, op).tobytes(), (dtype, op, count)
    neighbours = [r for r in range(size) if hosts[r] == hosts[rank]]
    columns = min(hosts.count(host) for host in set(hosts))
    alone = 2  # an average of integers, rounded once, and a small one; of the five others, parts between hosts
    between = 5 * (neighbours.index(rank) < columns)
    assert [name for name, *_ in library.log] == ["all_reduce"] * (alone + between)
    # Memory that GPUs of one host reach.
    memory = gpu.zeros(4000, np.float32)
    gpu.all_reduce(memory, out=memory)
    assert not driver.values(memory).any()
    for other in range(size):
        if other in neighbours:
            assert not driver.values(gpu.peer(memory, other)).any()
        else:
            with pytest.raises(ValueError, match="cannot be read or written"):
                gpu.peer(memory, other)
    # A family of one host needs no NCCL, one of both does.
    x = driver.array(np.full(600, rank, np.int32))
    with gpu.split(ord(hosts[rank]), -rank) as part:  # type: ignore[union-attr]
        assert part.backend == "cuda"
        assert set(driver.values(part.all_reduce(x, "max", out=x))) == {max(neighbours)}
    with gpu.split(int(rank < 2)) as part:  # type: ignore[union-attr]
        if rank < 2:
            assert part.backend == "cuda+nccl"
            least = min(max(r for r in range(size) if hosts[r] == hosts[first]) for first in range(2))
            assert set(driver.values(part.all_reduce(x, "min", out=x))) == {least}
    assert not driver.errors
    gpu.close()
    assert {name for name, *_ in library.log if name.startswith("comm_")} == {"comm_destroy"}


def test_nccl_across_hosts(crew: Any) -> None:
    crew(joined, 3)


@pytest.mark.parametrize("hosts", ["aba", pytest.param("abaab", marks=pytest.mark.slow)])
def test_all_reduces_in_parts_with_hosts_of_unequal_size(crew: Any, hosts: str) -> None:
    crew(in_parts, len(hosts), (hosts,))


# What `init` chooses


def chosen(comm: Communicator, backend: str, gpus: list[bool]) -> str:
    """Of ranks of which some have GPUs: what comes of `init`, and which of two GPUs this rank takes."""
    address, secret = place_to_meet(comm)
    settings = {"MGPU_HOST": "aab"[comm.rank], "MGPU_SECRET": secret}
    without_compilers()
    library, carrier = FakeNccl(FakeDriver(), comm), comm.split(0)
    assert carrier is not None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, settings))
        stack.enter_context(mock.patch.object(initialise, "_has_gpu", lambda: gpus[comm.rank]))
        stack.enter_context(mock.patch.object(kernels.driver, "Driver", FakeDriver))
        stack.enter_context(mock.patch.object(kernels.driver, "devices", lambda: 2))
        stack.enter_context(mock.patch("nccl.bindings.nccl", library))
        library.carrier = carrier
        try:
            with collectives.init(backend, rank=comm.rank, size=comm.size, address=address, timeout=60.0) as there:
                library.driver = driver = there._backend.driver  # type: ignore[attr-defined]
                return f"{there.backend} {driver.device}"
        except RuntimeError as error:
            return str(error)


def test_init_takes_nccl_where_every_rank_of_several_hosts_has_a_gpu(crew: Any) -> None:
    assert crew(chosen, 3, ("auto", [True] * 3)) == ["nccl 0", "nccl 1", "nccl 0"]
    for backend in ("auto", "nccl", "cuda+nccl"):
        for told in crew(chosen, 3, (backend, [True, True, False])):
            assert "others none: rank 2 (on b)" in told and "mgpu doctor" in told
    for told in crew(chosen, 3, ("cuda", [True] * 3)) + crew(chosen, 3, ("auto", [False] * 3)):
        assert "join ranks of one host" in told and "backend='nccl'" in told


# Mistakes and losses


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def fail(comm: Communicator, how: str, backend: str) -> None:
    gpu_hosts.SMALL = 1000
    timeout = 2.0 if how == "late" else 60.0
    gpu, driver, library = over_nccl_and_tcp(comm, "aab", backend, timeout)
    y = driver.array(np.zeros(5000, np.float32))
    gpu.all_reduce(y, out=y)
    driver.synchronize(0)
    if how == "mismatch":
        y = driver.array(np.zeros(5000 + (comm.rank == 2), np.float32))
    elif comm.rank == 2 and how == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    elif comm.rank == 2:
        time.sleep(6)
    with gpu:
        gpu.all_reduce(y, out=y)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                gpu.check([])
            except collectives.CollectiveError:
                driver.synchronize(0)
                while ("comm_abort",) not in library.log:  # which the guard does after it has said why
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                raise
            time.sleep(0.01)


def failed(comm: Communicator, how: str, backend: str) -> str:
    try:
        fail(comm, how, backend)
    except collectives.CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def test_calls_that_differ_are_told_on_every_rank(crew: Any) -> None:
    for told in crew(failed, 3, ("mismatch", "nccl")):
        assert re.match("CollectiveMismatchError: (?=.*ranks? [01].* called .*5000).*rank 2 called .*5001", told), told


@pytest.mark.parametrize(
    ("how", "backend", "error", "text"),
    [
        slow("dead", "nccl", "PeerLostError", r"rank 2 \(process \d+ on b\) was lost: the connection was closed"),
        slow("dead", "cuda+nccl", "PeerLostError", "rank 2"),
        slow("late", "nccl", "CollectiveTimeoutError", "on the GPU did not finish.*rank 2 did not begin it"),
        slow("late", "cuda+nccl", "CollectiveTimeoutError", "rank 2"),
    ],
)
def test_who_is_late_or_dies_on_another_host_is_named_here(
    how: str, backend: str, error: str, text: str, tmp_path: Path
) -> None:
    told = outcomes(fail, 3, tmp_path, how, backend)
    assert told[0].kind == told[1].kind == error, told
    assert re.search(text, told[0].text) and re.search(text, told[1].text), told


def begin(comm: Communicator, how: str) -> str:
    options: dict[str, dict[str, Any]] = {
        "versions": {"version": 23203 + comm.rank}, "unreachable": {"stuck": True, "timeout": 1.0}, "interface": {}
    }  # fmt: skip
    settings = {"NCCL_SOCKET_IFNAME": "nosuch"} if how == "interface" else {}
    with mock.patch.dict(os.environ, settings):
        try:
            over_nccl_and_tcp(comm, "ab", **options[how])
        except collectives.CollectiveError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing failed"


def test_what_keeps_hosts_from_beginning_says_what_to_do(crew: Any) -> None:
    told = crew(begin, 2, ("versions",))
    assert re.match(r"CollectiveMismatchError: rank 1 \(on b\) has .* 2\.32\.4, and rank 0 \(on a\)", told[0]), told
    for text in crew(begin, 2, ("unreachable",)):
        assert re.match("CollectiveTimeoutError: .*init", text), text
        assert "gave up" in text or re.search(r"at [\d.]+:\d+ on rank 0's host.*127\.0\.0\.1 \(lo\)", text), text


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named_as_nccl_s_setting() -> None:
    """In new processes: NCCL reads it once."""
    for text in collectives.spawn(begin, 2, ("interface",), backend="shm", timeout=30.0):
        assert re.search("NCCL, on rank 0.*finds no way.*NCCL_SOCKET_IFNAME", text), text


def test_an_identifier_tells_where_rank_0_waits() -> None:
    assert nccl.listens_at(bytes(8) + bytes.fromhex("02000bc8c0000202") + bytes(112)) == "192.0.2.2:3016"
    assert nccl.listens_at(bytes(8) + bytes.fromhex("0a000bc800000000") + bytes(15) + b"\1" + bytes(96)) == "[::1]:3016"
    assert nccl.listens_at(bytes(128)) == ""
    host, _, port = nccl.listens_at(bytes(real.get_unique_id())).rpartition(":")
    assert host and 0 < int(port) < 65536, "what is installed still has its address there"


# Survivors


def full(comm: Communicator) -> list[str]:
    """What ranks say where one of them has no room on its GPU for what its host's ranks share: in the world, and in a
    family."""
    allocate, told = FakeDriver.allocate, []

    def refuse(driver: FakeDriver, nbytes: int) -> int:
        if nbytes == cuda.JOB_BYTES and comm.rank == 1:
            raise kernels.driver.DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc")
        return allocate(driver, nbytes)

    errors = CollectiveError, kernels.driver.DriverError
    with mock.patch.object(FakeDriver, "allocate", refuse), pytest.raises(errors) as caught:
        over_nccl_and_tcp(comm, "aab", "cuda+nccl", 30.0)
    told.append(str(caught.value))
    comm.barrier()
    gpu, *_ = over_nccl_and_tcp(comm, "aab", "cuda+nccl", 30.0)
    with mock.patch.object(FakeDriver, "allocate", refuse), pytest.raises(errors) as caught:
        gpu.split(0)
    told.append(str(caught.value))
    gpu.abort()
    gpu.close()
    return told


def test_a_gpu_without_room_ends_the_wait_of_its_host_and_of_the_others() -> None:
    first, full_one, elsewhere = collectives.spawn(full, 3, backend="shm")
    for told in first + elsewhere:
        assert "gave up" in told and "CUDA_ERROR_OUT_OF_MEMORY" in told, told
    assert full_one == ["cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"] * 2


def left_over(comm: Communicator, victim: int) -> str:
    gpu, driver, library = over_nccl_and_tcp(comm, ["a", "b", "b"])
    y = driver.array(np.ones(8, np.float32))
    gpu.all_reduce(y, out=y)
    driver.synchronize(0)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    gpu.all_reduce(y, out=y)
    with pytest.raises(collectives.PeerLostError, match=f"rank {victim}"):
        while True:
            gpu.check([])
            time.sleep(0.01)
    library.carrier = comm.survivors()  # what this NCCL sends its bytes by
    left = gpu.survivors()
    y = driver.array(np.full(8, 10.0**comm.rank, np.float32))
    left.all_reduce(y, out=y)
    found = driver.values(y).tolist()[0]
    left.close()
    return f"{left.rank} of {left.size}: {found}"


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_those_that_are_left_go_on_without_a_host_and_without_the_hub(victim: int) -> None:
    from test_survivors import run

    answers = run("hosts", 3, __file__, str(victim))
    total = 111.0 - 10.0**victim
    alive = [rank for rank in range(3) if rank != victim]
    assert [answers[rank] for rank in alive] == [f"{index} of 2: {total}" for index in range(2)]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _, rank, size, address, victim = sys.argv[1:]
    with_them = collectives.init("shm", rank=int(rank), size=int(size), address=address, timeout=60.0)
    print(left_over(with_them, int(victim)))
