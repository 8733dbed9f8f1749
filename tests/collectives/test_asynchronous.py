"""Asynchronous calls, in any interleaving with others; and what threads may do."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from crew import Crews
from expected import exact_data, reduced, same_bits

import collectives
from collectives import CollectiveError, CollectiveMismatchError, Communicator
from kernels.progress import QUEUE_CAPACITY


def interleaved(comm: Communicator, seed: int) -> list[str]:
    """All ranks begin the same calls in the same order; each waits when it likes, and computes in between."""
    agreed, own = random.Random(seed), random.Random(seed * 100 + comm.rank)
    wrong: list[str] = []
    under_way: list[tuple[str, Any, Any]] = []

    def finish(index: int) -> None:
        what, work, wanted = under_way.pop(index)
        result = work.wait()
        if not work.done():
            wrong.append(f"{what}: not done after wait")
        if not same_bits(result, wanted):
            wrong.append(f"{what}: {result[:5]}, expected {wanted[:5]}")

    for number in range(100):
        count = agreed.choice([0, 1, 10, 1000, 5000])
        inputs = [exact_data([seed, number], rank, (count,), "float32") for rank in range(comm.size)]
        x = inputs[comm.rank]
        kind = agreed.choice(
            ["all_reduce", "in place", "symmetric", "broadcast", "all_gather", "barrier", "sync", "message"]
        )
        if kind == "all_reduce":
            under_way.append((kind, comm.all_reduce(x, async_op=True), reduced(inputs, "sum")))
        elif kind == "in place":
            wanted = reduced(inputs, "max")  # before the call changes x
            under_way.append((kind, comm.all_reduce(x, "max", out=x, async_op=True), wanted))
        elif kind == "symmetric":
            y = comm.empty(count)  # itself a call of all ranks, in turn with the others
            y[:] = x
            under_way.append((kind, comm.all_reduce(y, out=y, async_op=True), reduced(inputs, "sum")))
        elif kind == "broadcast":
            root = number % comm.size
            under_way.append((kind, comm.broadcast(x.copy(), root=root, async_op=True), inputs[root]))
        elif kind == "all_gather":
            under_way.append((kind, comm.all_gather(x, async_op=True), np.concatenate(inputs)))
        elif kind == "barrier":
            comm.barrier(async_op=True)
        elif kind == "sync":
            wrong += [] if same_bits(comm.all_reduce(x, "min"), reduced(inputs, "min")) else [kind]
        else:
            out = np.empty_like(x)
            comm.sendrecv(x, (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)
            wrong += [] if same_bits(out, inputs[comm.rank - 1]) else [kind]
        while under_way and own.random() < 0.4:
            finish(own.randrange(len(under_way)))
        if own.random() < 0.05:
            time.sleep(0.005)
    while under_way:
        finish(own.randrange(len(under_way)))
    return wrong[:5]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_interleaving(crew: Crews, size: int) -> None:
    assert crew(interleaved, size, (size,)) == [[]] * size


def outstanding(comm: Communicator) -> list[float]:
    """More than the queue holds; and whoever waits for the last has waited for all."""
    xs = [np.full(3, float(i)) for i in range(2 * QUEUE_CAPACITY + 5)]
    works = [comm.all_reduce(x, out=x, async_op=True) for x in xs]
    last = works[-1].wait()
    assert all(work.done() for work in works)
    return [float(sum(x[1] for x in xs)), float(last[0])]


def test_more_than_the_queue_holds(crew: Crews) -> None:
    n = 2 * QUEUE_CAPACITY + 5
    assert crew(outstanding, 2) == [[2.0 * n * (n - 1) / 2, 2.0 * (n - 1)]] * 2


def dropped(comm: Communicator) -> float:
    """Neither arrays nor works that nobody refers to any more disturb a call under way, nor does closing."""
    for _ in range(50):
        comm.all_reduce(np.ones(10_000), async_op=True)
        comm.all_reduce(comm.zeros(10), async_op=True)
    last = comm.all_reduce(np.ones(2), async_op=True)
    comm.close()
    return float(last.wait()[0])


def test_arrays_that_nobody_refers_to_any_more() -> None:
    assert collectives.spawn(dropped, 2) == [2.0, 2.0]


def one_after_another(comm: Communicator) -> list[Any]:
    """Whether arrays live on whose calls have been waited for, or seen to be done, and how many jobs there are."""
    child = comm.split(0)
    assert child is not None
    alive = []
    for turn in range(6):
        if comm.rank == turn % 3:
            time.sleep(0.07)  # the others' executors report that they wait
        x = np.ones(20_000)
        source = weakref.ref(x)
        work = child.all_reduce(x, async_op=True)
        while turn % 2 and not work.done():
            time.sleep(0.001)
        assert turn % 2 or work.wait()[-1] == comm.size
        del x, work
        alive.append(source() is not None)
    jobs = sum(len(free) for free in child._backend._jobs.values())  # type: ignore[attr-defined]
    child.close()
    return [any(alive), jobs]


def test_what_is_waited_for_is_let_go_of_and_its_job_used_again(crew: Crews) -> None:
    assert crew(one_after_another, 2) == [[False, 1]] * 2


def goes_on_while_python_computes(comm: Communicator) -> bool:
    """The other rank's call ends though this one is busy in Python and does not wait."""
    x = np.ones(500_000)
    work = comm.all_reduce(x, out=x, async_op=True)
    deadline = time.monotonic() + 60
    while not work.done() and time.monotonic() < deadline:
        sum(range(1000))
    return work.done() and float(x[-1]) == comm.size


def test_progress_needs_no_caller(crew: Crews) -> None:
    assert crew(goes_on_while_python_computes, 2) == [True, True]


def fails_midway(comm: Communicator) -> list[str]:
    """What ended before the failure has its result; the rest, and all that follows, raises."""
    told = []
    child = comm.split(0)
    assert child is not None
    works = [child.all_reduce(np.full(2, float(i)), async_op=True) for i in range(3)]
    works[2].wait()
    works.append(child.all_reduce(np.ones(2 + child.rank), async_op=True))
    try:
        works.append(child.barrier(async_op=True))
    except CollectiveError:  # it has failed by now
        told.append("mismatch")
    for work in reversed(works):
        try:
            result = work.wait()
            told.append(f"{result.tolist()}")
        except CollectiveMismatchError:
            told.append("mismatch")
        assert work.done()
    try:
        child.barrier(async_op=True).wait()
    except CollectiveError as error:
        told.append(str(error)[:48])
    child.close()
    return told


def test_failure_of_one_of_several(crew: Crews) -> None:
    told = ["mismatch", "mismatch", "[4.0, 4.0]", "[2.0, 2.0]", "[0.0, 0.0]"]
    assert crew(fails_midway, 2) == [[*told, "this communicator is of no further use: the rank"]] * 2


def bad_arguments(comm: Communicator) -> list[str]:
    """They are refused at once, and the communicator goes on."""
    told = []
    for options in ({"out": np.ones(3)[::-1]}, {"out": np.ones(4)}, {"op": "median"}, {"algorithm": "telepathy"}):
        try:
            comm.all_reduce(np.ones(3), async_op=True, **options)  # type: ignore[arg-type]
            told.append("nothing")
        except ValueError as error:
            told.append(str(error))
    told.append(str(comm.all_reduce(np.ones(1), async_op=True).wait()[0]))
    return told


def test_bad_arguments(crew: Crews) -> None:
    for told in crew(bad_arguments, 2):
        assert "not C-contiguous" in told[0]
        assert "out has 4 elements" in told[1]
        assert "op 'median' is not known" in told[2]
        assert "no all_reduce algorithm is called 'telepathy'" in told[3]
        assert told[4] == "2.0"


# Threads


def waits_elsewhere(comm: Communicator) -> list[float]:
    """A work may be waited for in any thread, and in several."""
    works = [comm.all_reduce(np.full(10, float(i)), async_op=True) for i in range(20)]
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.extend(float(work.wait()[0]) for work in works)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


def test_waiting_in_other_threads(crew: Crews) -> None:
    assert crew(waits_elsewhere, 2) == [sorted(3 * [2.0 * i for i in range(20)])] * 2


def take_turns(comm: Communicator) -> float:
    """Threads may share a communicator where their calls are the same, so that it does not matter whose comes first."""
    total = []

    def work() -> None:
        for _ in range(100):
            total.append(float(comm.all_reduce(np.ones(100))[7]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(total)


def test_threads_that_share_a_communicator_take_turns(crew: Crews) -> None:
    assert crew(take_turns, 2) == [800.0, 800.0]


def each_its_own(comm: Communicator) -> list[float]:
    """A communicator for each thread, and then each does as it likes: here one only receives, and one only sends."""
    families = [comm.split(0), comm.split(0)]
    found = [0.0, 0.0]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def work(which: int) -> None:
        family = families[which]
        assert family is not None
        x, out = np.full(200_000, 1.0 + which), np.empty(200_000)
        for turn in range(10):
            if (comm.rank + which) % 2:
                family.send(x, right, tag=turn)
                family.recv(out, left, tag=turn)
            else:
                family.recv(out, left, tag=turn)
                family.send(x, right, tag=turn)
            with family.group():
                family.send(x[:3], right)
                family.recv(out[:3], left)
            found[which] += float(out.sum())
            family.signal(right)
            family.wait_signal(left)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_communicator_for_each_thread() -> None:
    assert collectives.spawn(each_its_own, 2) == [[2e6, 4e6]] * 2


def sends_behind_a_receive(comm: Communicator) -> str:
    """In one communicator a receive that waits keeps another thread's send waiting: if that happens at both ends, they
    wait for each other, and are told."""
    child = comm.split(0)
    assert child is not None
    other = 1 - comm.rank
    told = []

    def attempt(call: Any) -> None:
        try:
            call()
        except CollectiveError as error:
            told.append(f"{type(error).__name__}: {error}")

    receiver = threading.Thread(target=attempt, args=(lambda: child.recv(np.empty(3), other),))
    receiver.start()
    while receiver.is_alive() and not _held(child._lock):
        time.sleep(0.001)
    attempt(lambda: child.send(np.ones(3), other))
    receiver.join()
    return "; ".join(told)


def _held(lock: Any) -> bool:
    """Whether another thread has it."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def test_a_receive_that_waits_holds_up_other_threads() -> None:
    for told in collectives.spawn(sends_behind_a_receive, 2):
        assert "wait for each other in a circle" in told
        assert "of no further use" in told


def closed_by_another_thread(comm: Communicator) -> list[str]:
    """Whoever comes after a close is told; a call under way ends first."""
    child = comm.split(0)
    assert child is not None
    told: list[str] = []

    def work() -> None:
        try:
            while True:
                child.all_reduce(np.ones(1000))
                time.sleep(0.001)  # who releases a lock and takes it again at once may have it for long
        except CollectiveError as error:
            told.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    child.close()
    thread.join()
    return told


def test_closed_by_another_thread() -> None:
    for (told,) in collectives.spawn(closed_by_another_thread, 2):
        assert "this communicator is closed" in told or "closed its communicator" in told or "gave up" in told


def collect_garbage(comm: Communicator) -> float:
    """Communicators with calls under way that are dropped in another thread, and in the middle of other calls."""
    total = 0.0
    for turn in range(5):
        child = comm.split(0)
        assert child is not None
        works = [child.all_reduce(np.full(1000, float(turn)), async_op=True)]
        holder = [child]
        del child
        thread = threading.Thread(target=holder.clear)
        thread.start()
        comm.barrier()
        thread.join()
        total += float(works[0].wait()[0])
    return total


def test_communicators_dropped_with_calls_under_way(crew: Crews) -> None:
    assert crew(collect_garbage, 2) == [20.0, 20.0]


def collected_by_its_own_thread(comm: Communicator) -> bool:
    """As `collect_garbage`, where the garbage collector runs in the thread that sees to the calls under way: whether
    that thread has ended."""
    child = comm.split(0)
    assert child is not None
    if comm.rank == 1:
        time.sleep(0.2)  # until the other's thread has something to see to
        with suppress(CollectiveError):
            child.all_reduce(np.ones(3))
        return True
    engine: Any = child._backend
    complete = engine.complete

    def collects(*arguments: Any) -> None:
        engine.close()
        complete(*arguments)

    engine.complete = collects
    work: Any = child.all_reduce(np.ones(3), async_op=True)
    thread = work._pending._progress._thread
    thread.join(20)
    return not thread.is_alive()


def test_a_communicator_dropped_in_its_own_thread(crew: Crews) -> None:
    assert crew(collected_by_its_own_thread, 2) == [True, True]


def collected_by_anothers_thread(comm: Communicator) -> float:
    """Where that thread is another communicator's, for whose call the peer waits before it makes the dropped one's."""
    dropped, other = comm.split(0), comm.split(0)
    assert dropped is not None and other is not None
    if comm.rank == 1:
        time.sleep(0.2)  # until the other's thread has something to see to
        total = other.all_reduce(np.ones(1_000_000))[0]
        dropped.all_reduce(np.ones(3))
        return float(total)
    engine: Any = other._backend
    complete = engine.complete

    def collects(*arguments: Any) -> None:
        gc.collect()
        complete(*arguments)

    work = dropped.all_reduce(np.ones(3), async_op=True)
    cycle: list[Any] = [dropped]
    cycle.append(cycle)
    gc.disable()
    del dropped, cycle
    engine.complete = collects
    total = other.all_reduce(np.ones(1_000_000), async_op=True).wait()[0]
    gc.enable()
    return float(total) + float(work.wait()[0]) - comm.size


def test_a_communicator_dropped_in_anothers_thread() -> None:
    assert collectives.spawn(collected_by_anothers_thread, 2, timeout=15.0) == [2.0, 2.0]


def interrupted(comm: Communicator, begun: bool) -> list[Any]:
    """Two sums and whether anything is under way, where Ctrl-C comes between two lines of a call's beginning."""
    results = [comm.all_reduce(np.ones(3), async_op=True).wait()]
    progress = comm._backend._progress  # type: ignore[attr-defined]
    submit = progress._submit

    def cut_off(*arguments: int) -> None:
        if begun:
            submit(*arguments)
        raise KeyboardInterrupt

    progress._submit = cut_off
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(np.ones(3), async_op=True)
    progress._submit = submit
    results.append(comm.all_reduce(np.full(3, 2.0), async_op=True).wait())
    return [*(result.tolist() for result in results), progress.busy]


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_as_a_call_begins(crew: Crews, begun: bool) -> None:
    assert crew(interrupted, 2, (begun,)) == [[[2.0] * 3, [4.0] * 3, False]] * 2
