"""The all-reduce of small messages: on the CPU, in plain Python and in the simulator; calls by the thousand, any rank
ahead, numbers that wrap; what goes wrong with less; and the machine code for GPUs."""

import json
import mmap
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packets
import pytest
from packets import CASE_BYTES, World

from kernels import lowlatency as ll
from kernels import machine_code, native
from kernels.dtypes import DTYPES, find
from kernels.executor import BLOCKED, DONE
from kernels.portable import bind, portable
from kernels.targets import python

SCALE = int(np.float64(1.5).view(np.int64))
WRAP = 2**32
SMALL = [dtype for dtype in DTYPES if dtype.itemsize <= ll.DATA_BYTES]


def plain(dtype: str, operation: str) -> Callable[..., int]:
    """The all-reduce in plain Python."""
    function: Callable[..., int] = bind(ll.all_reduce, python.small(find(dtype), operation), python.as_it_is)
    return function


def compiled(dtype: str, operation: str) -> Callable[..., int]:
    return native.load(f"small-{dtype}-{operation}").call


def reduced(parts: list[Any], dtype: str, operation: str, scale: int) -> Any:
    """What the ordinary reduction makes of every rank's bytes, in order of rank."""
    element = find(dtype)
    result = np.zeros(parts[0].size, np.uint8)
    addresses = np.array([part.ctypes.data for part in parts])
    target = np.array([result.ctypes.data])
    count, raw = result.size // element.itemsize, 2 ** len(parts) - 1
    python.reduction(element, operation)(
        target.ctypes.data, 1, addresses.ctypes.data, len(parts), count, raw, len(parts), scale, 0, 1
    )
    return result


def assert_same(got: Any, wanted: Any, dtype: str) -> None:
    """Equal bits, but for which NaN a NaN is."""
    element = find(dtype)
    got, wanted = got.view(element.numpy), wanted.view(element.numpy)
    same = got.view(f"u{element.itemsize}") == wanted.view(f"u{element.itemsize}")
    if element.kind in ("float", "complex"):
        numbers = [x.view(x.real.dtype) if element.kind == "complex" else x for x in (got, wanted)]
        nan = np.isnan(numbers[0]) & np.isnan(numbers[1])
        same = (numbers[0].view(f"u{numbers[0].itemsize}") == numbers[1].view(f"u{numbers[1].itemsize}")) | nan
    assert same.all(), (dtype, got, wanted)


def take_turns(all_reduce: Callable[..., int], world: World, jobs: list[int], order: Any) -> None:
    """One call of every rank, ranks and channels stepping at random until all have ended."""
    left = {(rank, channel) for rank in range(world.size) for channel in range(world.channels)}
    for _ in range(10_000):
        if not left:
            return
        rank, channel = sorted(left)[order.integers(len(left))]
        if all_reduce(jobs[rank], channel, world.channels, 0, 1) == DONE:
            left.discard((rank, channel))
    pytest.fail(f"{left} never ended")


EVERY = [(dtype.name, operation) for dtype in SMALL for operation in dtype.operations()]
QUICK = [("float32", "sum"), ("float8_e4m3fn", "avg"), ("int64", "sum")]
MORE = [(name, op) for name, op in EVERY if name in ("bfloat16", "int8", "complex64", "bool") or op == "max"]


@pytest.mark.parametrize(
    ("load", "pairs"),
    [
        (plain, QUICK + MORE), (compiled, QUICK), pytest.param(plain, EVERY, marks=pytest.mark.slow),
        pytest.param(compiled, [(dtype.name, "sum") for dtype in SMALL], marks=pytest.mark.slow),
    ],
    ids=["python", "compiled", "python, everything", "compiled, every dtype"],
)  # fmt: skip
def test_it_reduces_as_the_ordinary_reduction_does(load: Any, pairs: list[tuple[str, str]]) -> None:
    """Every dtype and operation; 1 to 9 ranks; lengths that fill no packet; any alignment."""
    rng = np.random.default_rng(0)
    for name, operation in pairs:
        dtype, all_reduce = find(name), load(name, operation)
        scale = SCALE if dtype.kind in ("float", "complex") else 3
        for size, channels in ((1, 1), (2, 3), (5, 1), (9, 2)) if (name, operation) in QUICK else ((3, 2),):
            world = World(size, channels, scale=scale)
            for count in (0, 1, 7, 8, 29):
                offset = int(rng.integers(0, 5)) * dtype.itemsize
                bits = rng.integers(0, 2 if dtype.kind == "bool" else 256, (size, count * dtype.itemsize))
                parts, in_place = list(bits.astype(np.uint8)), bool(rng.integers(2))
                jobs = [world.give(rank, part, offset, in_place) for rank, part in enumerate(parts)]
                take_turns(all_reduce, world, jobs, rng)
                wanted = reduced(parts, name, operation, scale)
                for rank in range(size):
                    assert_same(world.result(rank), wanted, name)
                    whole = (world.inputs if in_place else world.outputs)[rank]
                    untouched = np.concatenate([whole[:offset], whole[offset + parts[0].size :]])
                    assert (untouched == (0xA5 if in_place else 0x5A)).all()


def test_an_element_must_fit_into_a_packet() -> None:
    with pytest.raises(ValueError, match="holds 8 bytes, and an element of complex128 has 16"):
        ll.elements(find("complex128"))


def play(all_reduce: Callable[..., int], size: int, channels: int, calls: int, before: int, seed: int) -> None:
    """Calls of random lengths, each rank as far ahead of the others as it can get."""
    rng = np.random.default_rng(seed)
    world = World(size, channels, 96, before)
    lengths = rng.integers(0, 13, calls) * rng.integers(0, 2, calls) * 8
    numbers = rng.integers(0, 1 << 20, (calls, size, 12))
    at = np.zeros((size, channels), int)  # the call that each is in
    jobs = [world.give(rank, numbers[0, rank, : lengths[0] // 8].view(np.uint8)) for rank in range(size)]
    while (at < calls).any():
        rank = int(rng.choice(np.flatnonzero((at < calls).any(axis=1))))
        call = at[rank].min()
        for channel in np.flatnonzero(at[rank] == call):
            at[rank, channel] += all_reduce(jobs[rank], int(channel), channels, 0, 1) == DONE
        if (at[rank] == call + 1).all():
            got = world.result(rank).view(np.int64)
            assert (got == numbers[call, :, : lengths[call] // 8].sum(axis=0)).all(), (rank, call)
            assert at.max() - at.min() <= 1, "nobody gets two calls ahead"
            if call + 1 < calls:
                jobs[rank] = world.give(rank, numbers[call + 1, rank, : lengths[call + 1] // 8].view(np.uint8))
    assert (at == calls).all()


@pytest.mark.parametrize(
    ("before", "calls"),
    [(WRAP - 1000, 2000)]
    + [pytest.param(b, 3000, marks=pytest.mark.slow) for b in (0, WRAP - 1500, WRAP // 2 - 1500, ll.REFRESH - 1500)],
)
def test_thousands_of_calls_in_any_order_of_ranks_and_across_the_wrap(before: int, calls: int) -> None:
    play(compiled("int64", "sum"), 3, 2, calls, before, seed=before % 97)


def test_some_hundred_calls_in_plain_python() -> None:
    play(plain("int64", "sum"), 3, 1, 200, WRAP - 100, seed=1)


@pytest.mark.parametrize("calls", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_threads_that_come_late_at_random(calls: int) -> None:
    size = 3
    all_reduce = compiled("float32", "sum")
    world = World(size, 1, 256, WRAP - calls // 2, patience=(20, -1))
    numbers = np.random.default_rng(0).integers(-1000, 1000, (calls, size, 64)).astype(np.float32)
    wrong: list[Any] = []

    def run(rank: int) -> None:
        late = np.random.default_rng(rank)
        pause = threading.Event()
        for call in range(calls):
            count = call % 65
            job = world.give(rank, numbers[call, rank, :count].view(np.uint8), in_place=call % 3 == 0)
            if late.random() < 0.01:
                pause.wait(late.random() * 0.001)
            while all_reduce(job, 0, 1, 0, 1) == BLOCKED:
                pause.wait(0)
            if (world.result(rank).view(np.float32) != numbers[call, :, :count].sum(axis=0)).any():
                wrong.append((rank, call))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), [state[0] for state in world.states]
    assert not wrong


def in_processes(cases: list[dict[str, Any]], size: int, environment: dict[str, str]) -> None:
    """Every rank a process; what they print is what the ordinary reduction gives."""
    descriptor = os.memfd_create("packets")
    os.ftruncate(descriptor, len(cases) * CASE_BYTES)
    memory = mmap.mmap(descriptor, 0)
    memory[:] = bytes([packets.OLD]) * len(memory)
    command = [sys.executable, str(Path(packets.__file__)), str(descriptor)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), json.dumps(cases)], env={**os.environ, **environment}, pass_fds=[descriptor],
            stdout=-1, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        memory.close()
        os.close(descriptor)
    assert said[0] == said[1] and len(said[0]) == sum(case["calls"] for case in cases)
    lines = iter(said[0])
    for case in cases:
        for call in range(case["calls"]):
            parts = [packets.contribution(case, rank, call) for rank in range(size)]
            wanted = reduced(parts, case["dtype"], case["operation"], case["scale"])
            assert_same(np.frombuffer(bytes.fromhex(next(lines)), np.uint8), wanted, case["dtype"])


def case(dtype: str, operation: str, calls: int, channels: int = 1, lanes: int = 1, **more: Any) -> dict[str, Any]:
    scale = SCALE if find(dtype).kind in ("float", "complex") else 3
    given = {"dtype": dtype, "operation": operation, "calls": calls, "channels": channels, "lanes": lanes}
    return {"size": 2, "count": 60, "scale": scale, "late": 0.01, "before": WRAP - calls // 2, **given, **more}


def test_processes_that_share_memory() -> None:
    in_processes([case("float32", "sum", 60), case("float8_e4m3fn", "avg", 60)], 2, {})


def test_the_simulator_with_many_lanes_and_channels() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda, which brings the simulator, is not installed")
    cases = [
        case("float32", "sum", 6, 2, 3), case("float16", "avg", 3, 1, 4, count=90), case("uint8", "max", 3, 3, 2),
        case("int64", "prod", 3, 1, 2),
    ]  # fmt: skip
    in_processes(cases, 2, {"NUMBA_ENABLE_CUDASIM": "1"})


def test_who_waits_in_vain_is_blocked_and_goes_on_later_even_in_place() -> None:
    for all_reduce in (plain("int64", "sum"), compiled("int64", "sum")):
        world = World(2)
        jobs = [world.give(rank, np.full(30, rank + 1).view(np.uint8), in_place=True) for rank in (0, 1)]
        for _ in range(3):
            assert all_reduce(jobs[0], 0, 1, 0, 1) == BLOCKED
        assert (world.result(0).view(np.int64) == 1).all()
        assert all_reduce(jobs[1], 0, 1, 0, 1) == DONE
        assert all_reduce(jobs[0], 0, 1, 0, 1) == DONE
        assert (world.result(0).view(np.int64) == 3).all()
        assert [int(state[0, ll.STATE_CALLS]) for state in world.states] == [1, 1]


def test_the_wait_of_50_ms_ends_too() -> None:
    world = World(2, patience=(1, 1))
    job = world.give(0, np.zeros(8, np.uint8))
    assert compiled("int64", "sum")(job, 0, 1, 0, 1) == BLOCKED


def test_where_nobody_comes_back_a_failed_call_is_reported_and_later_ones_do_nothing() -> None:
    run_call = bind(ll.run_call, python.small(find("int64"), "sum"), python.as_it_is)
    world, report, finished = World(2), np.zeros(2, np.uint32), np.zeros(1, np.int64)
    jobs = [world.give(rank, np.full(3, rank + 1).view(np.uint8)) for rank in (0, 1)]
    world.jobs[0][ll.JOB_REPORT], world.jobs[0][ll.JOB_FINISHED] = report.ctypes.data, finished.ctypes.data
    run_call(jobs[0], 0, 1, 0, 1)
    assert finished[0] == 0 and report[0] == BLOCKED and world.states[0][0, ll.STATE_CALLS] == 0
    assert plain("int64", "sum")(jobs[1], 0, 1, 0, 1) == DONE, "what the other has sent is there"
    before = world.inboxes.copy()
    world.give(0, np.full(3, 9).view(np.uint8))
    run_call(jobs[0], 0, 1, 0, 1)
    assert (world.inboxes == before).all() and (world.outputs[0] == 0x5A).all()


# Mutants: what each part of the protocol is for.


def ahead(all_reduce: Callable[..., int]) -> int:
    """Rank 0 ends a call and begins the next before rank 1 has read anything; rank 1's status, and its result."""
    world = World(2)
    first = [world.give(rank, np.full(4, 5, np.int32).view(np.uint8)) for rank in (0, 1)]
    assert all_reduce(first[1], 0, 1, 0, 1) == BLOCKED
    assert all_reduce(first[0], 0, 1, 0, 1) == DONE
    assert all_reduce(world.give(0, np.full(4, 7, np.int32).view(np.uint8)), 0, 1, 0, 1) == BLOCKED
    status = all_reduce(first[1], 0, 1, 0, 1)
    if status == DONE:
        assert (world.result(1).view(np.int32) == 10).all()
    return status


def test_one_half_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ahead(plain("int32", "sum")) == DONE
    monkeypatch.setattr(ll, "half_of", portable(lambda call: 0))
    assert ahead(plain("int32", "sum")) == BLOCKED, "its packets are gone, and it waits for ever"


def around(all_reduce: Callable[..., int]) -> int:
    """Slots are written in call 3, most of them in no other, until call 3 comes round again: how many words look like
    its own then. The calls in between are counted, not made, but for those that fill all slots."""
    world = World(2, calls=2)

    def both(value: int, count: int) -> None:
        jobs = [world.give(rank, np.full(count, value, np.int32).view(np.uint8)) for rank in (0, 1)]
        take_turns(all_reduce, world, jobs, np.random.default_rng(0))

    both(5, 8)
    for fill in range(ll.REFRESH, WRAP + 1, ll.REFRESH):
        for state in world.states:
            state[:, ll.STATE_CALLS] = fill - 1
        both(0, 0)
        both(0, 0)
    return int((world.inboxes >> 32 == 3).sum())


def test_without_filling_all_slots_an_old_packet_looks_new_after_the_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert around(plain("int32", "sum")) == 0
    monkeypatch.setattr(ll, "fills_all", portable(lambda call: False))
    assert around(plain("int32", "sum")) > 0, "from four thousand million calls ago"


# For GPUs.

ARCHITECTURES = [(8, 0), *(pytest.param((generation, 0), marks=pytest.mark.slow) for generation in (9, 10))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_machine_code_sends_and_looks_for_packets_16_bytes_at_a_time(architecture: tuple[int, int]) -> None:
    cuda = pytest.importorskip("kernels.targets.cuda", reason="CUDA's compilers are missing", exc_type=ImportError)
    kernel = cuda.compile_small("float32", "sum", architecture)
    assert re.findall(r"\.entry (\w+)", kernel.ptx) == ["small"] and ".extern" not in kernel.ptx
    assert "st.relaxed.sys.global.v2.b64" in kernel.ptx and not re.search(r"\bfma\.", kernel.ptx)
    made = machine_code.assemble(kernel.ptx, architecture, kernel.name)
    assert made.spills == 0 and made.registers * cuda.MOST_LANES <= 65536
    assert re.search(r"\bSTG\.E\.128\.STRONG\.SYS\b", made.code)
    assert len(re.findall(r"\bLDG\.E\.128\.STRONG\.SYS\b", made.code)) == 4, "four looks at once"
