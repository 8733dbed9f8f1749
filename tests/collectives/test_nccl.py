"""The nccl backend on an NCCL in memory (`fakenccl.py`): what it asks of NCCL, what comes out, and what becomes of
mistakes and losses. And its numbers and arguments against NCCL's own header and nccl4py's own signatures."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator

pytest.importorskip("nccl.bindings", reason="nccl4py is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from expected import exact_data, reduced, reduction
from fakenccl import OPS, TYPES, FakeNccl, on_nccl
from nccl.bindings import nccl as real

from collectives.backends import nccl
from collectives.call import make_call
from collectives.device_arrays import DeviceArray
from kernels.dtypes import DTYPES, find

REFUSED = {("int16", None), ("uint16", None), ("complex64", "prod"), ("complex128", "prod")}


def is_refused(dtype: str, op: str) -> bool:
    return (dtype, None) in REFUSED or (dtype, op) in REFUSED


def every_collective(comm: Communicator) -> None:
    gpu, driver, _ = on_nccl(comm)
    rank, size = comm.rank, comm.size

    def poisoned(rows: int, dtype: str) -> DeviceArray:
        return driver.array(np.full(rows * find(dtype).itemsize, 0xA5, np.uint8).view(find(dtype).numpy))

    def check(what: Any, got: Any, want: Any) -> None:
        assert driver.values(got).tobytes() == np.ascontiguousarray(want).tobytes(), (what, rank)

    for dtype in DTYPES:
        for op in dtype.operations():
            n = 3 + dtype.code % 3
            mine = [exact_data([dtype.code], r, (n * size,), dtype.name, op) for r in range(size)]
            x = driver.array(mine[rank])
            if is_refused(dtype.name, op):
                with pytest.raises(TypeError, match=rf"NCCL has no {op} of {dtype.name}"):
                    gpu.all_reduce(x, reduction(op), out=x)
                continue
            total = reduced(mine, op)
            block = slice(n * rank, n * rank + n)
            out = gpu.reduce_scatter(x, reduction(op), out=poisoned(n, dtype.name))
            check((dtype.name, op, "reduce_scatter"), out, total[block])
            root = dtype.code % size
            out = gpu.reduce(x, reduction(op), root=root, out=poisoned(n * size, dtype.name))
            assert (out is None) == (rank != root)
            if out is not None:
                check((dtype.name, op, "reduce"), out, total)
            check((dtype.name, op), gpu.all_reduce(x, reduction(op), out=x), total)
    for dtype in DTYPES:
        for n in (0, 1, 5):
            root = (dtype.code + n) % size
            mine = [exact_data([n], r, (n * size,), dtype.name) for r in range(size)]
            block = slice(n * rank, n * rank + n)
            x = driver.array(mine[rank])
            rows = n * size
            check("gather", gpu.all_gather(x, out=poisoned(rows * size, dtype.name)), np.concatenate(mine))
            out = gpu.gather(x, root=root, out=poisoned(rows * size, dtype.name))
            if rank == root:
                check("gather", out, np.concatenate(mine))
            out = gpu.scatter(x if rank == root else None, root=root, out=poisoned(n, dtype.name))
            check("scatter", out, mine[root][block])
            exchanged = np.concatenate([m[block] for m in mine])
            check("all_to_all", gpu.all_to_all(x, out=poisoned(rows, dtype.name)), exchanged)
            check("broadcast", gpu.broadcast(x, root=root), mine[root])
    uneven(gpu, driver)
    assert gpu.all_reduce(np.ones(2)).tolist() == [size, size], "arrays of the CPU go beside"
    assert gpu.broadcast_object({"a": [rank]}) == {"a": [0]}
    gpu.barrier()
    assert not driver.errors
    gpu.close()


def uneven(gpu: Communicator, driver: Any) -> None:
    """Counts, one of them zero; two columns, so that rows are not elements."""
    rank, size = gpu.rank, gpu.size
    counts = [3 * ((r + 1) % size) for r in range(size)]
    starts = np.cumsum([0, *counts])
    data = [exact_data([9], r, (sum(counts), 2), "float32") for r in range(size)]
    part = slice(starts[rank], starts[rank + 1])
    shape = (counts[rank], 2)

    def fresh(*shape: int) -> DeviceArray:
        return driver.array(np.full(shape, 99, np.float32))

    x = driver.array(data[rank])
    out = gpu.reduce_scatter(x, "max", counts=counts, out=fresh(*shape))
    assert (driver.values(out) == np.max(data, 0)[part]).all()
    scaled = gpu.reduce_scatter(x, collectives.premul_sum(2), counts=counts, out=fresh(*shape))
    assert (driver.values(scaled) == 2 * np.sum(data, 0)[part]).all()
    mine, joined = (
        driver.array(data[rank][part]),
        np.concatenate([data[r][starts[r] : starts[r + 1]] for r in range(size)]),
    )
    assert (driver.values(gpu.all_gather(mine, counts=counts, out=fresh(sum(counts), 2))) == joined).all()
    out = gpu.gather(mine, root=size - 1, counts=counts, out=fresh(sum(counts), 2))
    if rank == size - 1:
        assert (driver.values(out) == joined).all()
    out = gpu.scatter(x if rank == 0 else None, counts=counts, out=fresh(*shape))
    assert (driver.values(out) == data[0][part]).all()
    received = [data[r][part] for r in range(size)]
    out = gpu.all_to_all(x, counts=counts, out=fresh(size * counts[rank], 2))
    assert (driver.values(out) == np.concatenate(received)).all()


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3, 4))])
def test_every_collective_with_every_type_and_operation(crew: Any, size: int) -> None:
    crew(every_collective, size)


def in_place_lists_and_plans(comm: Communicator) -> None:
    gpu, driver, library = on_nccl(comm)
    rank, size = comm.rank, comm.size
    whole = driver.array(np.zeros(4 * size, np.int32))
    own = DeviceArray(whole.address + 16 * rank, (4,), np.int32, 0, whole)
    driver.write(own.address, np.full(4, rank, np.int32).tobytes())
    gpu.all_gather(own, out=whole)
    assert driver.values(whole).tolist() == [r for r in range(size) for _ in range(4)]
    gpu.reduce_scatter(whole, out=own)
    assert driver.values(own).tolist() == [size * rank] * 4
    xs = [
        driver.array(np.full(shape, rank + 1, dtype)) for shape, dtype in [((3,), "f4"), ((2, 2), "i4"), ((5,), "f4")]
    ]
    library.log.clear()
    gpu.all_reduce(xs, out=xs)
    assert [name for name, *_ in library.log] == ["all_reduce"] * 2, "one message for each dtype"
    for x in xs:
        assert set(driver.values(x).ravel()) == {size * (size + 1) // 2}
    plan = gpu.plan("all_reduce", xs[0], "avg", out=xs[0])
    for _ in range(3):
        plan()
    assert set(driver.values(xs[0])) == {size * (size + 1) / 2}
    assert not driver.errors
    gpu.close()


def streams(comm: Communicator) -> None:
    gpu, driver, library = on_nccl(comm)
    peer = 1 - comm.rank
    x, y = (driver.array(np.full(5000, comm.rank + 1.0, np.float32), stream=3) for _ in range(2))
    if comm.rank == 0:  # the host goes on, before the peer has made any
        gpu.all_reduce(x, out=x)
        gpu.all_reduce(y, "max", out=y)
        comm.signal(peer)
    else:
        comm.wait_signal(peer)
        gpu.all_reduce(x, out=x)
        gpu.all_reduce(y, "max", out=y)
    assert [entry for entry in library.log if entry[0] == "all_reduce"] == [("all_reduce", 3)] * 2
    assert set(driver.values(x)) == {3.0} and set(driver.values(y)) == {2.0}
    z = DeviceArray(x.address, x.shape, x.dtype, 4, x)
    driver.log.clear()
    gpu.all_reduce(z, out=z)
    assert driver.log[0][:2] == ("wait", 4), "calls on another stream wait for those before"
    driver.log.clear()
    work = gpu.all_reduce(z, out=z, async_op=True)
    side = driver.log[1][1]
    assert side not in (0, 3, 4) and library.log[-1] == ("all_reduce", side)
    work.wait()
    assert driver.log[-1][:2] == ("wait", 4) and set(driver.values(z)) == {12.0} and work.done()
    # Messages, several of them in a group, on streams of their own.
    out = [driver.array(np.zeros(4, np.float32), stream=stream) for stream in (5, 6)]
    with gpu.group():
        for k in range(2):
            gpu.send(driver.array(np.full(4, 10 * comm.rank + k, np.float32), stream=5 + k), peer)
            gpu.recv(out[k], peer)
    assert [driver.values(each)[0] for each in out] == [10 * peer, 10 * peer + 1]
    with pytest.raises(ValueError, match="no tags"):
        gpu.send(x, peer, tag=1)
    assert gpu.sendrecv(np.full(2, comm.rank), peer, np.zeros(2, int), peer, tag=7).tolist() == [peer] * 2
    assert not driver.errors
    gpu.close()


def families_and_memory(comm: Communicator) -> None:
    gpu, driver, library = on_nccl(comm)
    rank, size = comm.rank, comm.size
    one = driver.array(np.ones(1, np.float32))
    part = gpu.split(None if rank == size - 1 else 5, key=-rank)
    if rank == size - 1:
        assert part is None
    else:
        assert (part.rank, part.size) == (size - 2 - rank, size - 1)
        part.all_reduce(one, out=one)
        assert driver.values(one).tolist() == [size - 1]
        with pytest.raises(ValueError, match="peer's view"):
            part.peer(one, 0)
    first = gpu.zeros(64, np.int32)
    address = first.address
    assert not driver.values(first).any() and len(library.windows) == 1
    gpu.barrier()  # before a peer writes there
    gpu.put(driver.array(np.full(64, rank, np.int32)), first, (rank + 1) % size)
    gpu.signal((rank + 1) % size)
    gpu.wait_signal((rank - 1) % size)
    assert set(driver.values(first).tolist()) == {(rank - 1) % size}
    gpu.all_reduce(first, "max", out=first)
    assert set(driver.values(first).tolist()) == {size - 1}
    del first
    gpu.barrier()
    again = gpu.empty(64, np.int32)
    assert again.address == address and len(library.windows) == 1, "given back, and used again"
    gpu.close()
    ends = [name for name, *_ in library.log if name.startswith("comm_")]
    assert ends == ["comm_destroy"] * len(library.comms), "those split from it end with it"
    assert not driver.errors


@pytest.mark.parametrize(
    "part", [in_place_lists_and_plans, streams, families_and_memory], ids=lambda part: part.__name__
)
def test_what_is_asked_of_nccl_and_in_which_stream(crew: Any, part: Any) -> None:
    crew(part, 3 if part is families_and_memory else 2)


# Mistakes and losses


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def fail(comm: Communicator, how: str) -> None:
    if how == "unchecked":
        os.environ["MGPU_NCCL_CHECK"] = "0"
    gpu, driver, library = on_nccl(comm)
    if how in ("late", "unchecked", "late message"):
        gpu._backend.control.timeout = 0.5  # type: ignore[attr-defined]
    y = driver.array(np.zeros(8, np.float32))
    gpu.all_reduce(y, out=y)
    driver.synchronize(0)
    wrong = comm.rank if how == "mismatch" else 0
    x = driver.array(np.zeros(100 + wrong, np.float32))
    if how == "message":
        gpu.send(x, 1) if comm.rank == 0 else gpu.recv(y, 0)
    elif how == "late message" and comm.rank == 0:
        gpu.sendrecv(x, 1, y, 1)
    elif comm.rank == 0 or how == "mismatch":
        gpu.all_reduce(x, out=x)
    elif how == "dead":
        time.sleep(0.3)  # rank 0 is not in any call of the host's by then
        os._exit(7)
    elif how == "remote":
        library.comms[0].result = 6
    else:
        time.sleep(60)  # until spawn ends it
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # the guard finds it, and ends what waits on the GPU
        try:
            gpu.check([])
        except collectives.CollectiveError:
            driver.synchronize(0)
            while ("comm_abort",) not in library.log:  # which the guard does after it has said why
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("mismatch", collectives.CollectiveMismatchError, "rank 0 called .*count 100.*rank 1 called .*count 101"),
        ("late", collectives.CollectiveTimeoutError, "all_reduce.*on the GPU did not finish.*rank 1 did not begin it"),
        slow("unchecked", collectives.CollectiveTimeoutError, "all_reduce.*rank 1 did not begin it"),
        ("dead", collectives.PeerLostError, "rank 1"),
        slow("message", collectives.CollectiveMismatchError, "sent 100 elements of float32, and rank 1 receives 8"),
        slow("late message", collectives.CollectiveTimeoutError, "rank 1"),
        slow("remote", collectives.PeerLostError, "remote process exited.*last words"),
    ],
)
def test_what_goes_wrong_is_raised_on_the_host_and_ends_what_waits_on_the_gpu(how: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        collectives.spawn(fail, 2, (how,), backend="shm")


def begin(comm: Communicator, how: str) -> None:
    if how == "dead":
        if comm.rank == 1:
            FakeNccl.comm_init_rank_config = lambda *_: os._exit(7)  # type: ignore[method-assign]
        on_nccl(comm, stuck=True)
    elif how == "late":
        comm._backend.timeout = 0.5  # type: ignore[attr-defined]
        on_nccl(comm, stuck=True)
    elif how == "old":
        on_nccl(comm, version=22605)
    elif how == "mixed":
        on_nccl(comm, version=23203 + comm.rank)
    elif how == "one GPU":
        on_nccl(comm, uuid="GPU-7")


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("dead", collectives.PeerLostError, "rank 1"),
        slow("late", collectives.CollectiveTimeoutError, "init, in NCCL"),
        slow("old", RuntimeError, r"NCCL 2\.26\.5, and this backend needs 2\.28\.0"),
        slow("mixed", collectives.CollectiveMismatchError, r"2\.32\.4"),
        ("one GPU", RuntimeError, "ranks 0 and 1 have the same GPU"),
    ],
)
def test_what_keeps_nccl_from_beginning_is_raised_on_every_rank(how: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        collectives.spawn(begin, 2, (how,), backend="shm", timeout=30.0)


# NCCL's own words


def header() -> str:
    spec = find_spec("nvidia.nccl")
    found = [Path(place) / "include" / "nccl.h" for place in (spec and spec.submodule_search_locations) or []]
    if not found or not found[0].exists():
        pytest.skip("NCCL's package, with its header, is not installed")
    return found[0].read_text()


def enumerated(name: str) -> dict[str, int]:
    """An enumeration of the header."""
    (body,) = re.findall(r"typedef enum \{([^}]*)\} " + name + ";", header())
    return {key: int(value) for key, value in re.findall(r"(nccl\w+)\s*=\s*(\d+)\s*[,}\n]", body + "\n")}


def test_numbers_of_types_operations_and_errors_are_the_headers() -> None:
    types = enumerated("ncclDataType_t")
    for name, number in nccl.DATATYPES.items():
        assert types["nccl" + name.removesuffix("fn").replace("_", "").capitalize()] == number, name
        assert np.dtype(TYPES[number]) == find(name).numpy
    assert len(nccl.DATATYPES) == types["ncclNumTypes"], "every type that NCCL has is used"
    operations = enumerated("ncclRedOp_t")
    assert {f"nccl{op.capitalize()}": number for op, number in nccl.OPERATIONS.items()}.items() <= operations.items()
    assert [op for op, _ in sorted(nccl.OPERATIONS.items(), key=lambda item: item[1])] == OPS
    results = enumerated("ncclResult_t")
    for name, number in {"Success": 0, "RemoteError": 6, "InProgress": 7, "Timeout": 8}.items():
        assert results[f"nccl{name}"] == number
    assert (nccl.SUCCESS, nccl.REMOTE_ERROR, nccl.IN_PROGRESS, nccl.TIMEOUT) == (0, 6, 7, 8)
    defined = dict(re.findall(r"#define (NCCL_\w+) +(-?\w+)", header()))
    assert int(defined["NCCL_SPLIT_NOCOLOR"]) == nccl._NO_COLOR
    assert int(defined["NCCL_WIN_COLL_SYMMETRIC"], 0) == nccl._COLL_SYMMETRIC
    assert 4096 % int(defined["NCCL_WIN_REQUIRED_ALIGNMENT"]) == 0 and nccl.PAGE == 4096
    assert enumerated("ncclScalarResidence_t")["ncclScalarHostImmediate"] == nccl._HOST_IMMEDIATE


def test_every_type_and_operation_is_translated_or_refused() -> None:
    for dtype in DTYPES:
        for op in dtype.operations():
            call = make_call("all_reduce", dtype, 5, op)
            if is_refused(dtype.name, op):
                with pytest.raises(TypeError, match=dtype.name):
                    nccl.translate(call)
                continue
            terms = nccl.translate(call)
            assert np.dtype(TYPES[terms.datatype]).itemsize * terms.factor == dtype.itemsize
            assert (terms.op is None) == (op == "premul_sum")
        assert nccl.translate(make_call("broadcast", dtype, 5)) == (1, dtype.itemsize, None)


def test_a_scale_is_of_the_type_that_is_added() -> None:
    for name, real_name in [
        ("float16", "float16"),
        ("complex64", "float32"),
        ("int8", "int8"),
        ("bfloat16", "bfloat16"),
    ]:
        dtype = find(name)
        bits = collectives.communicator._reduction(collectives.premul_sum(3), dtype)[1]
        value = nccl.scale(make_call("all_reduce", dtype, 1, "premul_sum", scale=bits))
        assert value.dtype == find(real_name).numpy and float(value[0]) == 3


def calls_of_the_library() -> dict[str, list[int]]:
    """What the backend calls of nccl4py's bindings, with the numbers of arguments."""
    found: dict[str, list[int]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(nccl))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if owner in ("nccl", "self._nccl"):
                found.setdefault(node.func.attr, []).append(len(node.args) + len(node.keywords))
    return found


def test_every_call_fits_nccl4pys_signature_and_the_stand_ins() -> None:
    calls = calls_of_the_library()
    assert {"all_reduce", "comm_init_rank_config", "red_op_create_pre_mul_sum", "send"} <= calls.keys()
    for name, numbers in calls.items():
        function = getattr(real, name)
        if name in ("UniqueId", "Config", "NCCLError"):
            continue
        parameters = list(inspect.signature(function).parameters)
        assert set(numbers) == {len(parameters)}, name
        stand_in = vars(FakeNccl).get(name)
        if stand_in is not None:
            assert list(inspect.signature(stand_in).parameters)[1:] == parameters, name


def test_the_library_that_is_installed_answers() -> None:
    version = real.get_version()
    assert version >= nccl.OLDEST and nccl.told(version).startswith("2.")
    assert nccl.told(22803) == "2.28.3"
    assert "libnccl" in real.get_library_path()
    one, other = (bytes(real.get_unique_id()) for _ in range(2))
    assert len(one) == len(bytes(real.UniqueId())) == 128 and one != other
    assert bytes(real.UniqueId.from_buffer(one)) == one
    assert "in progress" in real.get_error_string(nccl.IN_PROGRESS)
    assert "remote process" in real.get_error_string(nccl.REMOTE_ERROR)
    real.check_status(nccl.IN_PROGRESS)  # which is no error
    config = real.Config()
    config.blocking = 0
    assert real.Config.from_ptr(config.ptr).blocking == 0


def test_nccl_refuses_arguments_with_an_error_that_is_understood() -> None:
    nobody = real.Comm(0)
    for act in (
        lambda: real.all_reduce(0, 0, 1, 7, 0, nobody, 0),
        lambda: real.comm_get_async_error(nobody),
        lambda: real.send(0, 1, 1, 0, nobody, 0),
    ):
        with pytest.raises(real.NCCLError) as caught:
            act()
        assert caught.value.status == 4 and "invalid argument" in real.get_error_string(caught.value.status)
    assert "comm" in real.get_last_error(nobody)


NOT_BLOCKING = """
import ctypes, gc, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from nccl.bindings import nccl

def settle(comm):
    while nccl.comm_get_async_error(comm) == 7:
        gc.collect()

assert nccl.get_library_path() == sys.argv[1]
config = nccl.Config()
config.blocking = 0
unique = nccl.UniqueId.from_buffer(bytes(nccl.get_unique_id()))
comm = nccl.comm_init_rank_config(2, unique, 0, config.ptr)
settle(comm)
child, window = nccl.comm_split(comm, 0, 0, 0), nccl.comm_window_register(comm, 4096, 4096, 1)
assert not child and not window, "they come later"
settle(comm)
assert child and window and child.handle != window.handle
nobody = nccl.comm_split(comm, -1, 0, 0)
settle(comm)
assert not nobody
nccl.all_reduce(0, 0, 1, 7, 0, comm, 0)
try:
    nccl.all_reduce(0, 0, 99, 7, 0, comm, 0)
except nccl.NCCLError as error:
    print(int(error.status), nccl.get_error_string(error.status), nccl.get_last_error(comm))
"""


def test_what_is_in_progress_is_no_error_and_its_results_come_later(tmp_path: Path) -> None:
    """Of nccl4py itself, over a library in C: NCCL writes a child and a window when they are there."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    library = str(tmp_path / "libnccl.so.2")
    stub = str(Path(__file__).with_name("nccl_stub.c"))
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, stub], check=True)
    done = subprocess.run([sys.executable, "-c", NOT_BLOCKING, library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 the peer is gone last words\n"
