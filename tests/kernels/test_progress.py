"""The queue of jobs: one thread serves it, another submits and waits."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import guarded
import numpy as np
import pytest
from handmade import ENTER, Job, World, inp, move, out, signal, wait

from kernels import executor as x
from kernels import native, progress
from kernels.dtypes import find
from kernels.portable import bind
from kernels.targets import python

NAMES = ("submit", "serve", "complete", "settle")


class Queue:
    """A queue in this process's memory, and the functions that work on it."""

    def __init__(self, functions: dict[str, Callable[..., int]]) -> None:
        self.words = guarded.zeros(progress.QUEUE_BYTES // 8)
        self.address = int(self.words.ctypes.data)
        self.functions = functions
        self.ticket = 0

    def submit(self, job: Job) -> None:
        self.ticket += 1
        assert self.functions["submit"](self.address, job.address, self.ticket) == x.DONE

    def serve(self) -> int:
        return self.functions["serve"](self.address)

    def settled(self, ticket: int, rounds: int = 400) -> bool:
        flag = self.address + progress.QUEUE_COMPLETED
        return any(self.functions["settle"](flag, ticket, 20, 20) == 0 for _ in range(rounds))

    @property
    def completed(self) -> int:
        return int(self.words[progress.QUEUE_COMPLETED // 8] & 0xFFFFFFFF)

    @property
    def taken(self) -> int:
        return int(self.words[progress.QUEUE_TAKEN // 8])


@pytest.fixture(params=["compiled", "python"])
def queue(request: pytest.FixtureRequest) -> Queue:
    if request.param == "compiled":
        return Queue({name: native.load(name).call for name in NAMES})
    plain = python.bodies(find("int32"), "sum")
    return Queue({name: bind(getattr(progress, name), plain, python.as_it_is) for name in NAMES})


@pytest.fixture
def server(queue: Queue) -> Iterator[list[int]]:
    """A thread that serves the queue until the test ends. Yields what `serve` has returned, but for IDLE."""
    statuses: list[int] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            status = queue.serve()
            if status != progress.IDLE:
                statuses.append(status)

    thread = threading.Thread(target=work)
    thread.start()
    yield statuses
    over.set()
    thread.join()


def copies(world: World, places: int) -> list[Job]:
    """Jobs that each copy one element of rank 0's input."""
    body = [ENTER, move(0, [out(0)], [inp(0)])]
    return [world.job(0, [body], 8, [1], starts=[place]) for place in range(places)]


def data(world: World, count: int) -> tuple[Any, Any]:
    source, result = (world.at(addresses[0], count, np.int64) for addresses in (world.inputs, world.outputs))
    source[:] = np.arange(1, count + 1)
    return source, result


def test_nothing_submitted_is_idle(queue: Queue) -> None:
    assert queue.serve() == progress.IDLE
    assert queue.taken == queue.completed == 0


def test_jobs_run_in_order_and_are_counted(queue: Queue) -> None:
    world = World(1)
    source, result = data(world, 5)
    for job in copies(world, 5):
        queue.submit(job)
    assert not result.any(), "nothing runs but in serve"
    assert queue.serve() == progress.IDLE
    assert (result == source).all()
    assert queue.taken == queue.completed == 5
    assert world.counters[0][0, x.COUNT_CALLS] == 5


def test_each_job_s_beginning_and_end_are_noted(queue: Queue) -> None:
    world = World(1)
    data(world, 3)
    before = time.monotonic_ns()
    for job in copies(world, 3):
        queue.submit(job)
    assert queue.serve() == progress.IDLE
    times = queue.words[progress.QUEUE_TIMES // 8 :][:6].tolist()
    assert times == sorted(times)
    assert before <= times[0] and times[-1] <= time.monotonic_ns()


@pytest.mark.usefixtures("server")
def test_another_thread_serves_while_this_one_computes_and_waits(queue: Queue) -> None:
    world = World(1)
    source, result = data(world, 40)
    jobs = copies(world, 40)
    for job in jobs[:20]:
        queue.submit(job)
    assert queue.settled(20)
    assert (result[:20] == source[:20]).all() and not result[20:].any()
    for ticket, job in enumerate(jobs[20:], 21):
        queue.submit(job)
        assert queue.settled(ticket)
    assert (result == source).all()


@pytest.mark.usefixtures("server")
def test_the_ring_of_jobs_is_used_round_and_round(queue: Queue) -> None:
    world = World(1)
    source, result = data(world, 10)
    jobs = copies(world, 10)
    for turn in range(progress.QUEUE_CAPACITY // 10 + 3):
        result[:] = 0
        for job in jobs:
            queue.submit(job)
        assert queue.settled(queue.ticket), turn
        assert (result == source).all()
    assert queue.ticket > progress.QUEUE_CAPACITY


def test_tickets_wrap_around(queue: Queue) -> None:
    world = World(1)
    source, result = data(world, 6)
    queue.ticket = 2**32 - 3
    queue.words[[progress.QUEUE_SUBMITTED // 8, progress.QUEUE_COMPLETED // 8]] = queue.ticket
    queue.words[progress.QUEUE_TAKEN // 8] = queue.ticket
    for job in copies(world, 6):
        queue.submit(job)
    assert queue.serve() == progress.IDLE
    assert (result == source).all()
    assert queue.settled(queue.ticket, rounds=1) and not queue.settled(queue.ticket + 1, rounds=1)


def test_a_blocked_job_is_gone_on_with_and_those_behind_it_wait(queue: Queue) -> None:
    world = World(2, patience=(0, 0))
    handshake = [[signal(1)], [wait(0, 1)]]
    queue.submit(world.job(1, handshake, 8, [0]))
    queue.submit(world.job(1, [[], [move(0, [out(1)], [inp(1)])]], 8, [1]))
    world.at(world.inputs[1], 1, np.int64)[:] = 5
    assert queue.serve() == x.BLOCKED and queue.serve() == x.BLOCKED
    assert queue.completed == 0 and not world.at(world.outputs[1], 1, np.int64).any()
    assert native.load("execute").call(world.job(0, handshake, 8, [0]).address, 0, 1, 0, 1) == x.DONE
    assert queue.serve() == progress.IDLE
    assert queue.completed == 2 and world.at(world.outputs[1], 1, np.int64) == [5]


def test_a_mismatch_stops_the_queue_until_its_job_is_struck_off(queue: Queue) -> None:
    world = World(2)
    late = world.job(0, [[ENTER]] * 2, 8, [0], descriptor=[1])
    assert native.load("execute").call(late.address, 0, 1, 0, 1) == x.BLOCKED
    queue.submit(world.job(1, [[ENTER]] * 2, 8, [0], descriptor=[2]))
    assert queue.serve() == x.DIFFERENT and queue.serve() == x.DIFFERENT
    assert queue.completed == 0
    queue.functions["complete"](queue.address)
    assert queue.completed == queue.taken == 1
    assert queue.serve() == progress.IDLE


def test_settle_gives_up_in_bounded_time_and_is_woken_early(queue: Queue) -> None:
    flag = queue.address + progress.QUEUE_COMPLETED
    settle = queue.functions["settle"]
    assert settle(flag, 1, 5, 5) == 1
    results: list[int] = []

    def waiting() -> None:
        while not results or results[-1] == 1:
            results.append(settle(flag, 1, 0, 0))

    thread = threading.Thread(target=waiting)
    thread.start()
    queue.functions["complete"](queue.address)
    thread.join(timeout=30)
    assert not thread.is_alive() and results[-1] == 0
