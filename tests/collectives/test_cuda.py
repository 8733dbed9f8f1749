"""The cuda backend on a GPU in memory (`fakegpu.py`): what it decides, what it asks of the driver, what comes out."""

from __future__ import annotations

import gc
import inspect
import os
import secrets
import subprocess
import sys
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, arrays, programs, threads

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from fakegpu import FakeDriver, on_gpu

from collectives.backends import cuda
from collectives.backends.cuda import Layout
from collectives.backends.shm import Shm
from collectives.call import make_call
from collectives.device_arrays import DeviceArray
from collectives.environment import place as standing
from collectives.initialise import _gpu, _join, join_all
from collectives.job import Job, Link, relocate
from collectives.lowering import Memory
from kernels import driver as real
from kernels import grid, lowlatency
from kernels.dtypes import find


def every_collective(comm: Communicator) -> None:
    gpu, driver = on_gpu(comm)
    rank, size = comm.rank, comm.size
    rows = 4 * size
    pool = gpu.empty(1 << 16, np.uint8)
    for round, dtype in enumerate(("float32", "int64", "float16")):
        for memory in ("ordinary", "symmetric", "mixed"):
            shared = memory == "symmetric" or (memory == "mixed" and rank == 0)

            def place(values: Any, number: int) -> DeviceArray:
                values = np.asarray(values, dtype)
                if not shared:
                    return driver.array(values)
                array = DeviceArray(pool.address + 8192 * number, values.shape, values.dtype)
                driver.write(array.address, values.tobytes())
                return array

            mine = [(np.arange(rows) + 3 * r + round).astype(dtype) for r in range(size)]
            x, out = place(mine[rank], 0), place(np.full(rows * size, 99), 1)
            total = sum(mine).astype(dtype)
            block = slice(4 * rank, 4 * rank + 4)

            def small(n: int) -> DeviceArray:
                return DeviceArray(out.address, (n,), dtype, 0, out)

            def check(what: str, got: DeviceArray, want: Any) -> None:
                found = driver.values(got)
                assert found.tolist() == np.asarray(want).tolist(), (what, dtype, memory, rank, found, want)

            check("all_reduce", gpu.all_reduce(x, out=small(rows)), total)
            check("reduce", gpu.reduce(x, "max", root=1, out=small(rows)) or x, mine[-1] if rank == 1 else mine[rank])
            check("reduce_scatter", gpu.reduce_scatter(x, out=small(4)), total[block])
            check("all_gather", gpu.all_gather(x, out=out), np.concatenate(mine))
            check("all_to_all", gpu.all_to_all(x, out=small(rows)), np.concatenate([m[block] for m in mine]))
            check("gather", gpu.gather(x, root=1, out=out) or x, np.concatenate(mine) if rank == 1 else mine[rank])
            check("scatter", gpu.scatter(x if rank == 0 else None, out=small(4)), mine[0][block])
            check("in place", gpu.all_reduce(x, out=x), total)
            y = place(mine[rank], 2)
            check("broadcast", gpu.broadcast(y, root=1), mine[1])
    gpu.barrier()
    assert gpu.all_reduce(np.ones(2)).tolist() == [size, size], "arrays of the CPU go beside"
    assert gpu.broadcast_object({"a": [rank]}) == {"a": [0]}
    z = driver.array(np.full(3, rank, np.float32), stream=7)
    into = driver.array(np.zeros(3, np.float32), stream=7)
    gpu.sendrecv(z, (rank + 1) % size, into, (rank - 1) % size)
    assert driver.values(into).tolist() == [(rank - 1) % size] * 3
    counts = list(range(1, size + 1))
    v = driver.array(np.full(rank + 1, rank, np.int32))
    w = gpu.all_gather(v, counts=counts, out=driver.array(np.zeros(sum(counts), np.int32)))
    assert driver.values(w).tolist() == [r for r in range(size) for _ in range(r + 1)]
    with gpu.split(rank % 2) as half:
        one = driver.array(np.ones(1, np.float32))
        half.all_reduce(one, out=one)
        assert driver.values(one).tolist() == [half.size]
    # One-sided, on symmetric memory; what is dropped by all is given back and used again.
    first = gpu.zeros(64, np.int32)
    address = first.address
    gpu.put(np.full(128, rank, np.int32)[::2], first, (rank + 1) % size)
    gpu.signal((rank + 1) % size)
    gpu.wait_signal((rank - 1) % size)
    assert set(driver.values(first).tolist()) == {(rank - 1) % size}
    del first
    gpu.barrier()
    again = gpu.empty(64, np.int32)
    assert again.address == address
    assert not driver.errors
    gpu.close()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_collective_on_ordinary_and_symmetric_memory(size: int) -> None:
    collectives.spawn(every_collective, size, backend="shm")


def streams_and_graphs(comm: Communicator) -> None:
    gpu, driver = on_gpu(comm)
    peer = 1 - comm.rank
    # The host goes on: both calls are in the stream before the peer has made the first.
    x, y = (driver.array(np.full(5000, comm.rank + 1.0, np.float32), stream=3) for _ in range(2))
    if comm.rank == 0:
        gpu.all_reduce(x, out=x)
        gpu.all_reduce(y, "max", out=y)
        comm.signal(peer)
    else:
        comm.wait_signal(peer)
        gpu.all_reduce(x, out=x)
        gpu.all_reduce(y, "max", out=y)
    assert set(driver.values(x)) == {3.0} and set(driver.values(y)) == {2.0}
    launches = [entry for entry in driver.log if entry[0] == "launch"]
    assert [entry[1:3] for entry in launches] == [((2, 1), 512)] * 2 and {entry[4] for entry in launches} == {3}

    # Another stream waits for the last call; asynchronous calls have a stream of their own, and wait() joins it.
    driver.log.clear()
    z = DeviceArray(x.address, x.shape, x.dtype, 4, x)
    gpu.all_reduce(z, out=z)
    assert [entry[0] for entry in driver.log] == ["wait", "launch", "record"] and driver.log[0][1] == 4
    driver.log.clear()
    work = gpu.all_reduce(z, out=z, async_op=True)
    (record, wait, _, launch, *_), side = driver.log, driver.log[1][1]
    assert record[2] == 4 and wait[:2] == ("wait", side) and launch[4] == side not in (3, 4)
    work.wait()
    assert driver.log[-1][:2] == ("wait", 4)
    assert set(driver.values(z)) == {12.0} and work.done()
    events = len(driver._events)
    for _ in range(3):
        gpu.all_reduce(z, "max", out=z, async_op=True).wait()
    del work
    gc.collect()
    driver.synchronize(4)
    assert len(driver._events) == events - 1, "an event goes with its call"

    # A graph is captured once and replayed, of large calls and small ones; the epochs go on by themselves, and other
    # calls fit between.
    graph = driver.capture(3)
    one = driver.array(np.ones(300, np.float32), stream=3)
    gpu.all_reduce(one, out=one)
    gpu.all_reduce(x, out=x)
    assert len(graph) == 2
    for replay in range(3):
        driver.replay(graph, 3)
        assert set(driver.values(one)) == {2.0 ** (replay + 1)}
        gpu.all_reduce(y, "min", out=y)
        few = driver.array(np.full(3, replay, np.float16), stream=3)
        gpu.all_reduce(few, out=few)
        assert set(driver.values(few)) == {2.0 * replay}
    assert set(driver.values(x)) == {96.0} and not driver.errors
    gpu.close()
    assert ("drop", side) in driver.log


def left_alone(comm: Communicator) -> list[bool]:
    """Whether the array of a call that nobody waits for lives until the call has ended, and no longer."""
    gpu, driver = on_gpu(comm)

    class Owner:
        pass

    owner, x, y = Owner(), *(driver.array(np.ones(5000, np.float32), stream=3) for _ in range(2))
    lent, kept = DeviceArray(x.address, x.shape, x.dtype, 3, owner), weakref.ref(owner)
    if comm.rank == 1:
        comm.barrier()
    gpu.all_reduce(lent, out=lent, async_op=True)
    del lent, owner
    gc.collect()
    alive = [kept() is not None]
    if comm.rank == 0:
        comm.barrier()
    gpu.barrier()
    work = gpu.all_reduce(y, out=y, async_op=True)
    gc.collect()
    alive.append(kept() is not None)
    work.wait()
    events = len(driver._events)
    del work
    gc.collect()
    assert len(driver._events) == events - 1 and set(driver.values(x)) == {2.0}
    gpu.close()
    return alive if comm.rank == 0 else alive[1:]


def test_arrays_of_a_call_that_nobody_waits_for_live_until_it_has_ended() -> None:
    """Else who allocates in the caller's stream would give their memory to somebody else meanwhile."""
    assert collectives.spawn(left_alone, 2, backend="shm") == [[True, False], [False]]


def test_streams_are_honoured_and_graphs_replayed() -> None:
    collectives.spawn(streams_and_graphs, 2, backend="shm")


@pytest.mark.parametrize("shared", [False, True], ids=["a GPU each", "one GPU"])
def test_ranks_of_one_process_are_driven_by_one_thread(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowlatency, "MOST_BYTES", 1 << 11)
    monkeypatch.setattr(cuda.cubin, "load", lambda name, dtype, operation, *_: f"{dtype}-{operation}".encode())
    one = FakeDriver()
    drivers = [one, one] if shared else [one, FakeDriver(1)]
    comms = join_all(drivers, timeout=20.0)
    for power, count in [(0, 500), (1, 500), (0, 5000)]:
        if power == 0:
            xs = [driver.array(np.full(count, rank + 1.0, np.float32), stream=3) for rank, driver in enumerate(drivers)]
        for comm, x in zip(comms, xs, strict=True):
            comm.all_reduce(x, out=x)
        for driver, x in zip(drivers, xs, strict=True):
            assert set(driver.values(x)) == {3.0 * 2**power}
    grids = [entry[1] for entry in one.log if entry[0] == "launch"]
    assert grids == [(1, 2)] * 3 if shared else grids == [(2, 1)] * 3, "ranks on one GPU are one launch"

    # Memory is kept until it is in a stream: an allocator that knows streams may then give it to somebody else.
    class Owner:
        pass

    owner, (first, second) = Owner(), (driver.array(np.ones(5000, np.float32), stream=3) for driver in drivers)
    lent, kept = DeviceArray(first.address, first.shape, first.dtype, 3, owner), weakref.ref(owner)
    comms[0].all_reduce(lent, out=lent)
    del lent, owner
    gc.collect()
    assert (kept() is not None) == shared
    comms[1].all_reduce(second, out=second)
    gc.collect()
    assert kept() is None and set(drivers[1].values(second)) == {2.0}

    # So is what an asynchronous call needs, though nobody waits for it.
    before = [len(driver._events) for driver in drivers]
    for driver, comm in zip(drivers, comms, strict=True):
        lent = driver.array(np.ones(5000, np.float32), stream=3)
        comm.all_reduce(lent, out=lent, async_op=True)
        del lent
        gc.collect()
    for driver, comm in zip(drivers, comms, strict=True):
        engine: Any = comm._backend
        driver.synchronize(engine._side)
        engine._let_go()
    assert [len(driver._events) for driver in drivers] == before

    def on_the_host(comm: Communicator) -> list[int]:
        with comm.split(0) as half:
            shape = half.empty(12, np.float32).shape
        comm.barrier()
        return [half.size, *shape, int(comm.all_reduce(np.ones(1))[0])]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(on_the_host, comms)) == [[2, 12, 2]] * 2
        list(pool.map(Communicator.close, comms))
    assert not one.errors


def test_an_array_of_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that touched it would end every call of CUDA in the process."""
    monkeypatch.setattr(cuda.cubin, "load", lambda name, dtype, operation, *_: f"{dtype}-{operation}".encode())
    monkeypatch.setattr(cuda.cubin, "load_pack", lambda dtype, *_: f"pack-{dtype.name}".encode())
    drivers = [FakeDriver(), FakeDriver(1)]
    comms = join_all(drivers, timeout=20.0)
    values = np.ones(5000, np.float32)
    mine, other = (driver.array(values) for driver in drivers)
    host = DeviceArray(values.ctypes.data, values.shape, values.dtype)
    for array in other, host:
        with pytest.raises(ValueError, match="lies in no memory of a GPU, and rank 0 .* has GPU 0; .*set_device"):
            comms[0].all_reduce(array, out=mine)
        with pytest.raises(ValueError, match="lies in"):
            comms[0].all_reduce([mine, array])
    monkeypatch.setattr(drivers[0], "owner", lambda address: 1)
    with pytest.raises(ValueError, match="lies in memory of GPU 1, and rank 0"):
        comms[0].all_reduce(other, out=mine)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Communicator.close, comms))
    assert not [entry for driver in drivers for entry in driver.log if entry[0] == "launch"]


@pytest.mark.parametrize(("given", "number"), [(None, 1), (0, 0)])
def test_a_ranks_gpu_becomes_its_threads(given: int | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the arrays that the caller makes without more ado would all be in GPU 0's memory."""
    monkeypatch.setattr(real, "Driver", FakeDriver)
    monkeypatch.setattr(real, "devices", lambda: 2)
    monkeypatch.setattr(cuda, "Cuda", lambda control, driver: driver)
    peers = [SimpleNamespace(local=True, rank=rank) for rank in range(4)]
    control: Any = SimpleNamespace(rank=3, host=SimpleNamespace(meeting=SimpleNamespace(peers=peers)))
    driver: Any = _gpu(given, "cuda", control)
    assert driver.device == number and driver.log == [("use",)]


def small_messages(comm: Communicator) -> None:
    """They go as packets, whatever memory they lie in: the reduction of any other call."""
    gpu, driver = on_gpu(comm)
    rng = np.random.default_rng(7)
    for dtype, op in [
        (np.float32, "sum"),
        (np.int8, "max"),
        (np.float16, "avg"),
        (np.float64, collectives.premul_sum(3.0)),
    ]:
        for count in (0, 1, 13, lowlatency.MOST_BYTES // np.dtype(dtype).itemsize):
            both = (8 * rng.standard_normal((comm.size, count))).astype(dtype)
            x = driver.array(both[comm.rank])
            got = gpu.all_reduce(x, op, out=driver.array(np.full(count, 9, dtype)))
            want = gpu.all_reduce(both[comm.rank], op)  # of the CPU
            assert (driver.values(got) == want).all(), (dtype, op, count)
    names = {name for name, *_ in gpu._backend._kernels}
    assert names == {"small"} and not driver.errors
    x = driver.array(np.ones(5, np.complex128))  # no packet holds one
    gpu.all_reduce(x, out=x)
    gpu.all_reduce(y := driver.array(np.ones(5, np.float32)), algorithm="one_shot", out=y)
    assert set(driver.values(x)) == set(driver.values(y)) == {comm.size}
    assert {name for name, *_ in gpu._backend._kernels} == {"small", "execute"}
    gpu.close()


def test_small_messages_go_as_packets() -> None:
    collectives.spawn(small_messages, 2, backend="shm")


def lists(comm: Communicator) -> None:
    """A list of arrays is packed in one launch for each dtype, reduced, and unpacked in one."""
    gpu, driver = on_gpu(comm)
    shapes = [(3, 5), (), (0, 2), (7,), (20_000,), (1,)]

    def make() -> list[DeviceArray]:
        kinds = [np.float32, np.float16, np.float32, np.float16, np.float32, np.int64]
        return [driver.array(np.full(s, comm.rank + i, k), 5) for i, (s, k) in enumerate(zip(shapes, kinds))]

    xs, total = make(), comm.size * (comm.size - 1) // 2
    for repeat in range(2):
        driver.log.clear()
        results = gpu.all_reduce(xs) if repeat == 0 else gpu.all_reduce(xs, out=xs)
        assert len([entry for entry in driver.log if entry[0] == "launch"]) == 3 * 3
        for i, result in enumerate(results):
            assert result.shape == xs[i].shape and result.dtype == xs[i].dtype
            assert (driver.values(result) == total + comm.size * i).all()
        assert results[0] is xs[0] if repeat else (driver.values(xs[0]) == comm.rank).all()
    work = gpu.all_reduce(make(), "max", async_op=True)
    assert all((driver.values(x) == comm.size - 1 + i).all() for i, x in enumerate(work.wait()))
    assert gpu.all_reduce([np.ones(3), np.ones(2)])[0].tolist() == [comm.size] * 3
    arrays.is_immutable = lambda x: True  # as JAX's are: the broadcast one is new
    x = driver.array(np.full(4, comm.rank, np.float32), 5)
    assert (driver.values(gpu.broadcast(x, root=1)) == 1).all() and (driver.values(x) == comm.rank).all()
    assert not driver.errors
    gpu.close()


def test_lists_of_arrays_are_packed_in_one_launch() -> None:
    collectives.spawn(lists, 2, backend="shm")


def test_who_has_no_gpu_is_not_waited_for() -> None:
    """One rank's error in init is everybody's, though its process lives on."""
    address = f"unix:{secrets.token_hex(16)}"

    def engine(_: str, control: Shm) -> Shm:
        if control.rank == 1:
            raise RuntimeError("there is no GPU here")
        control.gather_bytes(b"")
        return control

    def join(rank: int) -> str:
        try:
            _join(standing(rank, 2, address, timeout=60.0), "cuda", Shm, engine)
        except RuntimeError as error:
            return str(error)
        return "no error"

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
    assert second == "there is no GPU here"
    assert "rank 1 gave up: RuntimeError: there is no GPU here" in first


def test_ranks_of_one_process_have_the_pools_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(threads, "limit", counts.append)
    address = f"unix:{secrets.token_hex(16)}"
    with ThreadPoolExecutor(2) as pool:
        places = [standing(rank, 2, address, timeout=60.0) for rank in range(2)]
        for engine in list(pool.map(lambda place: _join(place, "shm", Shm, lambda _, control: control), places)):
            engine.close()
    assert counts == [threads.here(1)] * 2


def without_peer_access(comm: Communicator) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gpu, driver = on_gpu(comm, reachable=False)
    x = driver.array(np.full(100_000, comm.rank + 1.0, np.float32))
    gpu.all_reduce(x, out=x)
    assert set(driver.values(x)) == {3.0}
    shared = gpu.zeros(10, np.float32)
    gpu.all_reduce(shared, out=shared)
    assert not driver.values(shared).any()
    with pytest.raises(ValueError, match="peer's view"):
        gpu.peer(shared, 0)
    gpu.close()
    return [str(warning.message) for warning in said]


def test_without_peer_access_data_goes_through_the_host_and_that_is_said_once() -> None:
    for said in collectives.spawn(without_peer_access, 2, backend="shm"):
        assert len(said) == 1 and "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in said[0] and "host's memory" in said[0]


def fail(comm: Communicator, how: str) -> None:
    gpu, driver = on_gpu(comm)
    more = {"mismatch": 1, "protocols": 50_000}.get(how, 0)
    x = driver.array(np.zeros((5000 if how == "late, large" else 100) + more * comm.rank, np.float32))
    y = driver.array(np.zeros(8, np.float32))
    gpu.all_reduce(y, out=y)
    driver.synchronize(0)
    gpu._backend._panel[cuda._PATIENCE // 8 + grid.PATIENCE_NAPS] = grid.naps(0.3 if how.startswith("late") else 300)
    if comm.rank == 0 or more:
        gpu.all_reduce(x, out=x)
    elif how.startswith("late"):
        time.sleep(60)  # until spawn ends it
    else:
        os._exit(7)
    driver.synchronize(0)  # nobody waits on the host, and yet it comes to an end
    gpu.all_reduce(y, out=y)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("mismatch", collectives.CollectiveMismatchError, "rank 0 called .*count 100.*rank 1 called .*count 101"),
        ("protocols", collectives.CollectiveMismatchError, "rank 0 called .*count 100.*rank 1 called .*count 50100"),
        ("late", collectives.CollectiveTimeoutError, "all_reduce.*on the GPU, call 2, did not finish.*for rank 1"),
        ("late, large", collectives.CollectiveTimeoutError, "count 5000.*, call 2, did not finish.*for rank 1"),
        ("dead", collectives.PeerLostError, "rank 1"),
    ],
)
def test_what_goes_wrong_on_the_gpu_is_raised_on_the_host(how: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        collectives.spawn(fail, 2, (how,), backend="shm")


def gives_up(comm: Communicator, address: str) -> list[tuple[bool, bool]]:
    """Whether the driver was left with the panel, and whether that is mapped, after a good end and after a bad one."""
    found = []
    for bad in (False, True):
        world = collectives.init("shm", rank=comm.rank, size=comm.size, address=f"{address}{bad}")
        gpu, driver = on_gpu(world)
        (panel,) = (entry[1] for entry in driver.log if entry[0] == "register")
        if bad:
            gpu.abort("enough")
        gpu.close()
        kept = ("unregister", panel) not in driver.log
        world.close()
        del gpu, driver, world
        gc.collect()
        with open("/proc/self/maps") as lines:
            spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if "mgpu" in line]
        found.append((kept, any(first <= panel < last for first, last in spans)))
    return found


def test_memory_that_a_gpu_may_still_use_stays_mapped(crew: Any) -> None:
    for found in crew(gives_up, 2, (f"unix:{secrets.token_hex(16)}",)):
        assert found == [(False, False), (True, True)]


def full(comm: Communicator) -> list[str]:
    """What becomes of the panel where one rank's GPU has no room for flags and scratch."""
    control, driver = comm.split(0), FakeDriver()
    if comm.rank == 1:

        def refuse(nbytes: int) -> int:
            raise real.DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc")

        driver.allocate = refuse  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="rank 1: .*CUDA_ERROR_OUT_OF_MEMORY"):
        cuda.Cuda(control._backend, driver)  # type: ignore[union-attr, arg-type]
    control.close()  # type: ignore[union-attr]
    return [what for what, *_ in driver.log if what in ("register", "unregister")]


def test_a_gpu_that_is_full_leaves_nothing_registered(crew: Any) -> None:
    assert crew(full, 2) == [["register", "unregister"]] * 2


def collected(comm: Communicator) -> bool:
    """Whether a family of GPUs is closed that the garbage collector finds in the thread that looks after its calls."""
    gpu, _ = on_gpu(comm)
    family = gpu.split(0)
    assert family is not None
    engine: Any = family._backend
    cycle: list[Any] = [family]
    cycle.append(cycle)
    gc.disable()
    del family, cycle
    engine._ended = lambda rank: gc.collect() and 0
    engine._guard.join(20)
    gc.enable()
    del engine._ended
    engine.close()  # returns when it is closed, whoever does it
    gpu.close()
    return not engine._guard.is_alive() and engine.control._closed


def test_a_communicator_may_be_collected_in_a_thread_of_its_own(crew: Any) -> None:
    assert crew(collected, 2) == [True, True]


def full_of_jobs(comm: Communicator) -> list[Any]:
    """What a family says that one rank's GPU has no room for, and how many arenas it costs."""
    gpu, driver = on_gpu(comm)
    allocate, host = driver.allocate, comm._backend.host  # type: ignore[attr-defined]

    def refuse(nbytes: int) -> int:
        if nbytes == cuda.JOB_BYTES and comm.rank == 1:
            raise real.DriverError("CUDA_ERROR_OUT_OF_MEMORY", "cuMemAlloc")
        return allocate(nbytes)

    told, free = "", [len(host.free_arenas)]
    driver.allocate = refuse  # type: ignore[method-assign]
    try:
        gpu.split(0)
    except (collectives.CollectiveError, real.DriverError) as error:
        told = str(error)
    gc.collect()
    comm.barrier()  # both have closed it
    with comm.split(0):  # type: ignore[union-attr]
        free.append(len(host.free_arenas) + 1)
    driver.allocate = allocate  # type: ignore[method-assign]
    gpu.close()
    return [told, free[0] - free[1]]


def test_a_family_that_one_gpu_has_no_room_for_is_nobodys() -> None:
    first, second = collectives.spawn(full_of_jobs, 2, backend="shm", timeout=20.0)
    assert "rank 1 gave up: DriverError: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY" in first[0] and first[1] == 0
    assert second == ["cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY", 0]


def test_a_thousand_calls_of_eight_ranks_are_kept() -> None:
    """As graphs of some training steps have: what is captured keeps its job."""
    none, call = [0] * 8, make_call("all_reduce", find("float32"), 1 << 20, algorithm="two_shot")
    link = Link(
        0, scratch=none, boards=none, flags_in=none, flags_out=none, finished=0, slots=4, slot_bytes=4 << 20,
        patience=(1, 1), channels=cuda.CHANNELS,
    )  # fmt: skip
    kinds: tuple[Memory, ...] = ("symmetric", "staged")
    jobs = [Job(link, *programs.for_call(call, link, memory), call.dtype, channels=cuda.CHANNELS) for memory in kinds]
    assert sum(relocate(job.words, job.tables, 0).nbytes for job in jobs) <= cuda.JOB_BYTES / 1000


def test_parts_of_a_ranks_device_memory_lie_apart() -> None:
    for size in (1, 2, 8):
        for channels in (1, cuda.CHANNELS):
            layout = Layout(size, channels, 64 << 10)
            board = channels * 16 * 64
            assert layout.flags >= board and layout.scratch >= layout.flags + channels * layout.flags_stride
            assert layout.inbox >= layout.flags + channels * layout.flags_stride
            assert layout.scratch >= layout.inbox + lowlatency.inbox_bytes(size, channels, layout.capacity)
            assert layout.capacity * 8 * channels >= lowlatency.MOST_BYTES and layout.inbox % 16 == 0
            assert layout.flags % 64 == 0 and layout.scratch % 4096 == 0 and layout.flags_stride >= size * 64


def test_the_stand_in_has_the_drivers_methods_with_the_same_arguments() -> None:
    for name, method in vars(real.Driver).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            assert list(inspect.signature(method).parameters) == list(
                inspect.signature(getattr(FakeDriver, name)).parameters
            ), name


def test_no_rank_on_the_cpu_imports_anything_of_cuda() -> None:
    code = (
        "import numpy, sys, collectives\nwith collectives.init() as comm: comm.all_reduce(numpy.ones(3))\n"
        "print([name for name in ('numba', 'cupy', 'cuda.bindings', 'cuda.core') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
