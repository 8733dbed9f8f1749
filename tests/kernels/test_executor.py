"""The executor, on programs written by hand: ranks are threads that share memory, compiled and in plain Python."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from handmade import (
    ENTER,
    Execute,
    Job,
    World,
    cell,
    chain,
    finish,
    inp,
    move,
    out,
    raw,
    run,
    signal,
    staged_gather,
    two_shot,
    wait,
)

from kernels import executor as x
from kernels import native
from kernels.dtypes import find
from kernels.portable import bind
from kernels.targets import python

PLAIN = bind(x.execute, python.bodies(find("int32"), "sum"), python.as_it_is)


@pytest.fixture(params=["compiled", "python"])
def execute(request: pytest.FixtureRequest) -> Execute:
    """`execute` of the CPU or in plain Python. Reductions are sums of int32."""
    return native.load("execute").call if request.param == "compiled" else PLAIN


@pytest.fixture(params=["all cores", "one core"])
def cores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads started meanwhile share one core, or have them all."""
    before = os.sched_getaffinity(0)
    if request.param == "one core":
        os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def sums() -> int:
    return native.load("reduce-int32-sum").address


def filled(world: World, count: int, seed: int = 0) -> list[Any]:
    """Every rank's input: `count` int32, at random."""
    rng = np.random.default_rng(seed)
    inputs = [world.at(address, count, np.int32) for address in world.inputs]
    for array in inputs:
        array[:] = rng.integers(-1000, 1000, count)
    return inputs


def outputs(world: World, count: int) -> list[Any]:
    return [world.at(address, count, np.int32) for address in world.outputs]


def cut(count: int, parts: int) -> tuple[list[int], list[int]]:
    """Lengths and starts of `count` elements in nearly equal parts, some perhaps empty."""
    starts = [count * part // parts for part in range(parts + 1)]
    return [after - before for before, after in zip(starts, starts[1:])], starts[:-1]


# One rank.


@pytest.mark.parametrize("count", [0, 1, 7, 33, 1000])
def test_a_copy_in_slices_moves_just_what_it_should(execute: Execute, count: int) -> None:
    world = World(1)
    (source,), (result,) = filled(world, 1200), outputs(world, 1200)
    for step in (1000, 16, 7):
        result[:] = -1
        job = world.job(0, [[ENTER, move(0, [out(0)], [inp(0)])]], 4, [count], step=step, starts=[5])
        assert execute(job.address, 0, 1, 0, 1) == x.DONE
        assert (result[5 : 5 + count] == source[5 : 5 + count]).all()
        assert (result[:5] == -1).all() and (result[5 + count :] == -1).all()


def test_chunks_of_different_lengths_end_in_different_slices(execute: Execute) -> None:
    world = World(1)
    (source,), (result,) = filled(world, 40), outputs(world, 40)
    body = [ENTER] + [move(chunk, [out(0, chunk)], [inp(0, chunk)]) for chunk in range(4)]
    job = world.job(0, [body], 4, [20, 0, 3, 11], starts=[0, 20, 20, 23], step=4)
    result[:] = -1
    assert execute(job.address, 0, 1, 0, 1) == x.DONE
    assert (result[:34] == source[:34]).all() and (result[34:] == -1).all()


def test_a_move_reads_all_before_it_writes_anything(execute: Execute) -> None:
    """A destination may be a source, and a copy onto itself is nothing."""
    world = World(1)
    (source,), (result,) = filled(world, 300), outputs(world, 300)
    result[:] = 7
    body = [ENTER, move(0, [out(0), inp(0)], [inp(0), out(0)]), move(0, [out(0)], [out(0)])]
    wanted = source + 7
    assert execute(world.job(0, [body], 4, [300], combine=sums()).address, 0, 1, 0, 1) == x.DONE
    assert (result == wanted).all() and (source == wanted).all()


def test_cells_lie_in_the_slots_of_scratch_and_the_ring_of_slots_goes_on_from_call_to_call(execute: Execute) -> None:
    world = World(1, slots=3, cells=2, cell_bytes=64)
    (source,) = filled(world, 16)
    scratch = world.at(world.scratch[0], 3 * 2 * 16, np.int32).reshape(3, 2, 16)
    job = world.job(0, [[ENTER, move(0, [cell(0, 1)], [inp(0)])]], 4, [8], step=4)
    for call in range(4):
        scratch[:] = 0
        assert execute(job.address, 0, 1, 0, 1) == x.DONE
        for slice in range(2):
            slot = (2 * call + slice) % 3
            assert (scratch[slot, 1, :4] == source[4 * slice : 4 * slice + 4]).all()
        assert not scratch[:, 0].any() and not scratch[(2 * call + 2) % 3].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_what_is_raw_is_scaled_and_what_is_final_is_divided(dtype: str) -> None:
    numpy, size = find(dtype).numpy, 4
    scale = int(np.float64(3).view(np.int64)) if dtype != "int64" else 3
    for operation, wanted in (("avg", 6 / size), ("premul_sum", 2 * 3 + 4), ("sum", 6)):
        world = World(size)
        for address, value in zip(world.inputs, (2, 4)):
            world.at(address, 50, numpy)[:] = value
        body = [move(0, [out(0)], [raw(inp(0)), inp(1)], final=True)]
        kernels = native.load("execute").call, bind(x.execute, python.bodies(find(dtype), operation), python.as_it_is)
        combine = native.load(f"reduce-{dtype}-{operation}").address
        for execute in kernels:
            job = world.job(0, [body] * size, numpy.itemsize, [50], combine=combine, scale=scale)
            assert execute(job.address, 0, 1, 0, 1) == x.DONE
            result = world.at(world.outputs[0], 50, numpy).astype(np.float64)
            assert (result == (int(wanted) if dtype == "int64" else wanted)).all(), operation


def test_one_source_is_a_copy_unless_the_move_is_final() -> None:
    """An average over one rank's contribution alone still divides."""
    world = World(4)
    world.at(world.inputs[0], 50, np.float32)[:] = 6
    combine = native.load("reduce-float32-avg").address
    for final, wanted in ((False, 6), (True, 1.5)):
        job = world.job(0, [[move(0, [out(0)], [raw(inp(0))], final)]] * 4, 4, [50], combine=combine)
        assert native.load("execute").call(job.address, 0, 1, 0, 1) == x.DONE
        assert (world.at(world.outputs[0], 50, np.float32) == wanted).all()


# Several ranks.


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("size", [2, 3])
def test_two_shot_all_reduce_again_and_again(execute: Execute, size: int) -> None:
    world = World(size)
    for call, count in enumerate([1000, 0, 1, 2, 31, 4000] * 2):
        inputs = filled(world, count, seed=call)
        lengths, starts = cut(count, size)
        bodies = two_shot(size)
        jobs = [world.job(r, bodies, 4, lengths, starts=starts, combine=sums()) for r in range(size)]
        assert run(execute, jobs) == [x.DONE] * size
        for result in outputs(world, count):
            assert (result == sum(inputs)).all()


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("slots", [2, 3])
def test_slices_flow_through_scratch(execute: Execute, slots: int) -> None:
    size = 3
    world = World(size, slots=slots, cells=size, cell_bytes=64)
    for call, count in enumerate([5, 300, 0, 47, 96, 1]):
        inputs = filled(world, count, seed=call)
        lengths, starts = cut(count, size)
        bodies = staged_gather(size, slots)
        jobs = [world.job(r, bodies, 4, lengths, starts=starts, step=16) for r in range(size)]
        assert run(execute, jobs) == [x.DONE] * size
        for result in outputs(world, count):
            for rank, (start, length) in enumerate(zip(starts, lengths)):
                assert (result[start : start + length] == inputs[rank][start : start + length]).all()


@pytest.mark.usefixtures("cores")
def test_different_programs_follow_one_another_on_the_same_counters(execute: Execute) -> None:
    size, slots = 3, 2
    world = World(size, slots=slots, cells=size, cell_bytes=64)
    rng = np.random.default_rng(3)
    for call in range(12):
        count = int(rng.integers(0, 200))
        inputs = filled(world, count, seed=call)
        if rng.integers(2):
            lengths, starts = cut(count, size)
            bodies, step = two_shot(size), None
        else:
            lengths, starts, bodies, step = [count], [0], chain(size, slots), 16
        jobs = [world.job(r, bodies, 4, lengths, starts=starts, step=step, combine=sums()) for r in range(size)]
        assert run(execute, jobs) == [x.DONE] * size
        for result in outputs(world, count):
            assert (result == sum(inputs)).all()
    for rank in range(size):
        assert world.counters[rank][0, x.COUNT_CALLS] == 12
        assert world.at(world.finished[rank], 1, np.int64) == [12]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("channels", [2, 3])
def test_channels_share_a_message_each_with_its_own_flags(execute: Execute, channels: int) -> None:
    size, slots = 2, 2
    world = World(size, channels=channels, slots=slots, cells=size, cell_bytes=1024)
    for call, count in enumerate([1, 16, 17, 100, 1000, 0, 333]):
        inputs = filled(world, count, seed=call)
        jobs = [world.job(r, chain(size, slots), 4, [count], step=256, combine=sums()) for r in range(size)]
        assert run(execute, jobs) == [x.DONE] * size * channels
        for result in outputs(world, count):
            assert (result == sum(inputs)).all()


def test_a_channel_never_touches_what_another_one_moves(execute: Execute) -> None:
    """Also with chunks of different lengths, which pass through the same cell."""
    world = World(1, channels=3, cell_bytes=4096)
    lengths = [100, 33, 0, 90]
    body = [move(chunk, [cell(0)], [inp(0)]) for chunk in range(4)]
    touched = []
    for channel in range(3):
        scratch = world.at(world.scratch[0], 2 * 1024, np.int32)
        scratch[:] = 0
        world.at(world.inputs[0], 100, np.int32)[:] = 1
        job = world.job(0, [body], 4, lengths)
        assert execute(job.address, channel, 3, 0, 1) == x.DONE
        touched.append(scratch.copy())
    assert (sum(touched)[:100] == 1).all() and not sum(touched)[100:].any()


@pytest.mark.usefixtures("cores")
def test_in_place_and_staged_into_the_output_itself(execute: Execute) -> None:
    size = 3
    world = World(size)
    lengths, starts = cut(500, size)
    inputs = filled(world, 500)
    for result, values in zip(outputs(world, 500), inputs):
        result[:] = values
    bodies = two_shot(size)
    jobs = [world.job(r, bodies, 4, lengths, starts=starts, combine=sums(), in_place=True) for r in range(size)]
    assert run(execute, jobs) == [x.DONE] * size
    for result in outputs(world, 500):
        assert (result == sum(inputs)).all()


# Waiting, and what a rank's caller sees of it.


def test_a_rank_that_waits_comes_back_blocked_and_goes_on_where_it_was(execute: Execute) -> None:
    """Nothing runs at the same time here: whoever is BLOCKED lets the other one go on."""
    size, slots = 2, 2
    world = World(size, slots=slots, cells=size, cell_bytes=64, patience=(0, 0))
    inputs = filled(world, 40)
    jobs = [world.job(r, chain(size, slots), 4, [40], step=16, combine=sums()) for r in range(size)]
    statuses = [x.BLOCKED, x.BLOCKED]
    turns = 0
    while x.BLOCKED in statuses:
        for rank in range(size):
            if statuses[rank] == x.BLOCKED:
                statuses[rank] = execute(jobs[rank].address, 0, 1, 0, 1)
                if statuses[rank] == x.BLOCKED:
                    assert jobs[rank].place(x.PLACE_PEER) == 1 - rank, "the caller can say whom it waits for"
        turns += 1
        assert turns < 20
    assert statuses == [x.DONE, x.DONE] and turns > 2
    for result in outputs(world, 40):
        assert (result == sum(inputs)).all()


def test_enter_waits_for_everybody_and_names_who_is_late(execute: Execute) -> None:
    world = World(3, patience=(0, 0))
    jobs = [world.job(r, [[ENTER]] * 3, 4, [0]) for r in range(3)]
    assert execute(jobs[0].address, 0, 1, 0, 1) == x.BLOCKED and jobs[0].place(x.PLACE_PEER) == 1
    assert execute(jobs[1].address, 0, 1, 0, 1) == x.BLOCKED and jobs[1].place(x.PLACE_PEER) == 2
    assert execute(jobs[0].address, 0, 1, 0, 1) == x.BLOCKED and jobs[0].place(x.PLACE_PEER) == 2
    assert jobs[0].place(x.PLACE_ENTERED) == 1
    assert execute(jobs[2].address, 0, 1, 0, 1) == x.DONE
    assert [finish(execute, job) for job in jobs[:2]] == [x.DONE] * 2


def entering(world: World, descriptors: Sequence[Sequence[int]]) -> list[Job]:
    bodies = [[ENTER, move(0, [out(r)], [inp(r)])] for r in range(world.size)]
    return [world.job(r, bodies, 4, [20], descriptor=descriptors[r]) for r in range(world.size)]


def test_ranks_whose_descriptors_agree_go_on(execute: Execute) -> None:
    world = World(3)
    filled(world, 20)
    for call in range(2 * x.PAGES + 3):
        jobs = entering(world, [[call, 2, 3, 4, 5, 6, 7]] * 3)
        assert run(execute, jobs) == [x.DONE] * 3
    for rank, result in enumerate(outputs(world, 20)):
        assert (result == world.at(world.inputs[rank], 20, np.int32)).all()


@pytest.mark.parametrize("word", range(x.DESCRIPTOR_WORDS))
def test_ranks_whose_descriptors_differ_all_stop_before_they_touch_anything(execute: Execute, word: int) -> None:
    world = World(3)
    filled(world, 20)
    descriptors = [[1, 2, 3, 4, 5, 6, 7] for _ in range(3)]
    descriptors[1][word] = 99
    jobs = entering(world, descriptors)
    assert run(execute, jobs) == [x.DIFFERENT] * 3
    assert not any(result.any() for result in outputs(world, 20))
    assert run(execute, jobs) == [x.DIFFERENT] * 3, "a second try must not slip through"
    assert not any(result.any() for result in outputs(world, 20))
    page = [world.at(address + x.PAGE_BYTES + 8, x.DESCRIPTOR_WORDS, np.int64) for address in world.boards]
    assert [list(words) for words in page] == descriptors, "the boards tell who called what"


def test_counters_and_calls_wrap_around(execute: Execute) -> None:
    size, slots, start = 2, 2, 2**32 - 5
    world = World(size, slots=slots, cells=size, cell_bytes=64)
    for rank in range(size):
        world.counters[rank][0, x.COUNT_CALLS] = 2**32 - 3
        world.counters[rank][0, x.COUNTERS :] = start
        for peer in range(size):
            world.at(world.flag(rank, peer), 1, np.uint32)[:] = start
    for call in range(6):
        inputs = filled(world, 50, seed=call)
        jobs = [world.job(r, chain(size, slots), 4, [50], step=16, combine=sums()) for r in range(size)]
        assert run(execute, jobs) == [x.DONE] * size
        for result in outputs(world, 50):
            assert (result == sum(inputs)).all()
    assert world.at(world.flag(0, 1), 1, np.uint32)[0] < 100
    assert world.at(world.finished[0], 1, np.int64)[0] == 2**32 + 3


def test_signals_that_nobody_waits_for_are_counted_all_the_same(execute: Execute) -> None:
    """The next call must not take them for its own."""
    world = World(2, patience=(0, 0))
    idle = [[signal(1), signal(1), signal(1)], []]
    for rank in (0, 1):
        assert execute(world.job(rank, idle, 4, [0]).address, 0, 1, 0, 1) == x.DONE
    handshake = [[signal(1)], [wait(0, 1)]]
    late = world.job(1, handshake, 4, [0])
    assert execute(late.address, 0, 1, 0, 1) == x.BLOCKED
    assert execute(world.job(0, handshake, 4, [0]).address, 0, 1, 0, 1) == x.DONE
    assert execute(late.address, 0, 1, 0, 1) == x.DONE


def test_a_wait_with_a_lag_is_for_a_slice_before(execute: Execute) -> None:
    world = World(2, patience=(0, 0))
    filled(world, 3)
    bodies = [[signal(1)], [wait(0, 1, lag=2), move(0, [out(1)], [inp(1)])]]
    behind = world.job(1, bodies, 4, [3], step=1)
    assert execute(behind.address, 0, 1, 0, 1) == x.BLOCKED
    assert behind.place(x.PLACE_SLICE) == 2, "two slices wait for nothing, the third for the first signal"
    assert execute(world.job(0, bodies, 4, [3], step=1).address, 0, 1, 0, 1) == x.DONE
    assert execute(behind.address, 0, 1, 0, 1) == x.DONE
    assert (outputs(world, 3)[1] == world.at(world.inputs[1], 3, np.int32)).all()


def test_run_channel_leaves_finished_channels_alone(execute: Execute) -> None:
    run_channel = bind(x.run_channel, python.bodies(find("int32"), "sum"), python.as_it_is)
    world = World(2, channels=2, patience=(0, 0))
    bodies = [[signal(1)], [wait(0, 1)]]
    jobs = [world.job(rank, bodies, 4, [0]) for rank in range(2)]
    for job in jobs:
        job.renew()
    run_channel(jobs[0].address, 1, 2, 0, 1)  # only channel 1 of rank 0
    for _ in range(2):
        for channel in range(2):
            run_channel(jobs[1].address, channel, 2, 0, 1)
        assert [jobs[1].place(x.PLACE_STATUS, channel) for channel in range(2)] == [x.BLOCKED, x.DONE]
    assert list(world.counters[1][:, x.COUNT_CALLS]) == [0, 1]
    run_channel(jobs[0].address, 0, 2, 0, 1)
    run_channel(jobs[1].address, 0, 2, 0, 1)
    assert list(world.counters[1][:, x.COUNT_CALLS]) == [1, 1]


def test_enter_publishes_only_after_all_lanes_have_put_their_part_into_scratch() -> None:
    """With many lanes, one may be behind: what precedes Enter is complete only after they have met."""
    seen: list[str] = []

    def note(name: str) -> Any:
        return lambda *arguments: seen.append(name)

    bodies = {**python.bodies(find("int32"), "sum"), "sync": note("sync"), "copy_bytes": note("copy")}
    bodies["raise_flag"] = lambda flag, value: (seen.append("raise"), python.PRIMITIVES["raise_flag"](flag, value))
    world = World(1)
    job = world.job(0, [[move(0, [cell(0)], [inp(0)]), ENTER]], 4, [3])
    assert bind(x.execute, bodies, python.as_it_is)(job.address, 0, 1, 0, 1) == x.DONE
    assert "sync" in seen[seen.index("copy") : seen.index("raise")]
