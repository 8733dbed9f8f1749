"""Ranks that die, stop, come late, leave or give up: the others raise, soon, and the error says who and in which call.
Nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import Crews
from leftovers import descriptors, symmetric_maps
from survivors import SOON, Outcome, die, now_it_happens, outcomes, stop

import collectives
from collectives import (
    CollectiveError,
    CollectiveMismatchError,
    Communicator,
    PeerLostError,
)

pytestmark = pytest.mark.usefixtures("nothing_shared_left")


def greet(comm: Communicator) -> int:
    return comm.rank


@pytest.fixture(scope="module", autouse=True)
def started(crew: Crews) -> None:
    """Ranks for the tests that nobody dies in: here before descriptors are counted."""
    for size in (2, 2, 3, 3):  # twice, since the first may find a crew that an earlier file has left of no use
        assert crew(greet, size) == list(range(size))


def lost(found: dict[int, Outcome], size: int, dead: int) -> None:
    """All but the dead one have raised PeerLostError that names it, soon."""
    assert sorted(found) == [rank for rank in range(size) if rank != dead]
    for outcome in found.values():
        assert outcome.kind == "PeerLostError", outcome
        assert f"rank {dead}" in outcome.text
        assert 0 <= outcome.seconds < SOON
    print("survivors raised after", *(f"{outcome.seconds:.2f} s" for outcome in found.values()))


# Death


def dies_while_others_wait(comm: Communicator) -> None:
    comm.all_reduce(np.ones(3))
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        die()
    comm.all_reduce(np.ones(3))


def dies_before_others_call(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 0:
        die()
    time.sleep(0.3)
    comm.barrier()


def dies_in_the_middle(comm: Communicator, seed: int) -> None:
    """While all are busy with large messages."""
    x = np.ones(1_000_003, np.float32) if seed % 2 else comm.zeros(1_000_003)
    if comm.rank == seed % comm.size:
        threading.Timer(0.1 + 0.2 * random.Random(seed).random(), die).start()
    while True:
        comm.all_reduce(x, "max", out=x)


def dies_in_asynchronous_calls(comm: Communicator) -> None:
    xs = [np.ones(100_003, np.float32) for _ in range(20)]
    works = [comm.all_reduce(x, "max", out=x, async_op=True) for x in xs]
    if comm.rank == 1:
        die()
    works += [comm.all_reduce(x, "max", out=x, async_op=True) for x in xs]
    for work in works:
        work.wait()


def dies_before_it_sends(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.2)
        die()
    if comm.rank == 0:
        comm.recv(np.empty(10), 1)
    else:
        comm.barrier()


def dies_in_the_middle_of_a_message(comm: Communicator) -> None:
    if comm.rank == 1:
        threading.Timer(0.1, die).start()
        while True:
            comm.send(np.ones(1_000_003), 0)
    if comm.rank == 0:
        while True:
            comm.recv(np.empty(1_000_003), 1)
    comm.barrier()


def dies_in_the_middle_of_a_large_copy(comm: Communicator) -> None:
    x = comm.empty(4_000_003)
    if comm.rank == 1:
        threading.Timer(0.1, die).start()
    while True:
        comm.send(x, 1) if comm.rank == 0 else comm.recv(np.empty_like(x), 0)


def dies_before_it_receives(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.2)
        die()
    comm.send(np.ones(1_000_003), 1)


def dies_in_compilation(comm: Communicator) -> None:
    comm.all_reduce(np.ones(5))  # nobody else has anything left to compile
    if comm.rank == 1:
        comm._backend.load = lambda *_: die()  # type: ignore[attr-defined]
    comm.all_reduce(np.ones(6))


def dies_in_allocation(comm: Communicator) -> None:
    if comm.rank == 1:
        comm._backend.host.own.commit = lambda *_: die()  # type: ignore[attr-defined]
    comm.empty(1000)


def dies_in_split(comm: Communicator) -> None:
    if comm.rank == 1:
        comm._backend.host.own.commit = lambda *_: die()  # type: ignore[attr-defined]
    comm.split(0)


def dies_with_a_lock(comm: Communicator) -> None:
    word = comm.zeros(1, np.int64)
    if comm.rank == 1:
        with comm.lock(word, 0):
            comm.barrier()
            die()
    comm.barrier()
    with comm.lock(word, 0):
        pass


def dies_before_it_counts(comm: Communicator) -> None:
    word = comm.zeros(1, np.int64)
    if comm.rank == 1:
        time.sleep(0.2)
        die()
    comm.wait_until(word, 1, 1)


def dies_unheard(comm: Communicator) -> None:
    """While the others are busy by themselves, and look now and then."""
    if comm.rank == 1:
        time.sleep(0.2)
        die()
    while True:
        comm.check()
        time.sleep(0.001)


slow = partial(pytest.param, marks=pytest.mark.slow)
DEATHS = [
    (dies_with_a_lock, 3, 1),
    slow(dies_unheard, 2, 1),
    (dies_before_it_counts, 2, 1),
    slow(dies_while_others_wait, 3, 2),
    slow(dies_before_others_call, 3, 0),
    (dies_in_asynchronous_calls, 2, 1),
    slow(dies_before_it_sends, 3, 1),
    (dies_in_the_middle_of_a_message, 3, 1),
    (dies_in_the_middle_of_a_large_copy, 2, 1),
    (dies_before_it_receives, 2, 1),
    (dies_in_compilation, 2, 1),
    slow(dies_in_allocation, 2, 1),
    (dies_in_split, 3, 1),
]


@pytest.mark.parametrize(("fn", "size", "dead"), DEATHS, ids=lambda value: getattr(value, "__name__", None))
def test_a_death(fn: Callable[..., Any], size: int, dead: int, tmp_path: Path) -> None:
    lost(outcomes(fn, size, tmp_path), size, dead)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_death_in_the_middle_of_a_call(seed: int, tmp_path: Path) -> None:
    lost(outcomes(dies_in_the_middle, 3, tmp_path, seed), 3, seed % 3)


@pytest.mark.slow
def test_deaths_at_random_moments(tmp_path: Path) -> None:
    for seed in range(20):
        lost(
            outcomes(dies_in_the_middle, 2 + seed % 3, tmp_path / str(seed), seed), 2 + seed % 3, seed % (2 + seed % 3)
        )


# Silence


def stops(comm: Communicator, where: str) -> None:
    comm.barrier()
    if comm.rank == 1:
        stop()
    try:
        if where == "recv":
            comm.recv(np.empty(3), 1)
        elif where == "asynchronous":
            comm.all_reduce(np.ones(3), async_op=True).wait()
        elif where == "empty":
            comm.empty(10)
        else:
            comm.all_reduce(np.ones(3))
    finally:
        if comm.rank == 0:
            time.sleep(0.5)  # the others notice, too
            os.kill(comm._backend.host.meeting.peers[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["call", "recv", slow("asynchronous"), slow("empty")])
def test_a_rank_that_stops(where: str, tmp_path: Path) -> None:
    found = outcomes(stops, 3, tmp_path, where, timeout=1.0)
    assert sorted(found) == [0, 2]
    for outcome in found.values():
        assert outcome.kind == "CollectiveTimeoutError", outcome
        assert 1.0 <= outcome.seconds < 1.0 + SOON
    if where in ("call", "asynchronous"):
        assert any("ranks 0, 2 arrived, rank 1 did not" in outcome.text for outcome in found.values()), found
        assert all("rank 1 has ended call 1, barrier()" in outcome.text for outcome in found.values())


def comes_late(comm: Communicator) -> None:
    comm.broadcast(np.arange(4))
    if comm.rank == 2:
        now_it_happens()
        time.sleep(3.0)
    comm.reduce(np.ones(7, np.float32), "max", root=1)
    comm.barrier()


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    found = outcomes(comes_late, 3, tmp_path, timeout=1.0)
    for rank in (0, 1):
        assert found[rank].kind == "CollectiveTimeoutError"
        assert "reduce(float32, count 7, max, root 1)" in found[rank].text
    on_time = (
        "ranks 0, 1 arrived, rank 2 did not; rank 0 is in call 2, reduce(float32, count 7, max, root 1), after broad"
    )
    assert any(on_time in found[rank].text for rank in (0, 1)), found
    assert found[2].kind == "CollectiveTimeoutError"  # what the others gave up with
    assert "gave up" in found[2].text


# Disagreement


def differing(comm: Communicator, what: str) -> Any:
    """The call in which rank 1 differs in `what`."""
    odd = comm.rank == 1
    x = np.ones(6 if odd and what == "count" else 4, np.int32 if odd and what == "dtype" else np.float32)
    symmetric = comm.empty(4) if what == "collective, symmetric" else None
    if what in ("count", "dtype"):
        return comm.all_reduce(x)
    if what == "op":
        return comm.all_reduce(x, "max" if odd else "sum", out=x)
    if what == "scale":
        return comm.all_reduce(x, collectives.premul_sum(0.5 if odd else 2.0))
    if what == "algorithm":
        return comm.all_reduce(x, algorithm="one_shot" if odd else "ring")
    if what == "root":
        return comm.broadcast(x, root=int(odd))
    if what == "collective":
        return comm.barrier() if odd else comm.all_reduce(x)
    if what == "collective, symmetric":
        return comm.broadcast(symmetric) if odd else comm.all_reduce(symmetric, out=symmetric)
    if what == "counts":
        return comm.all_gather(np.ones(2), counts=[2] * comm.size if odd else None)
    if what == "table of counts":
        return comm.all_to_all(np.ones((6, 2 if odd else 1)), counts=[6 // comm.size] * comm.size)
    if what == "asynchronous":
        return comm.all_reduce(x, "max" if odd else "sum", async_op=True).wait()
    if what == "list":
        return comm.all_reduce([x, x] if odd else [x])
    if what == "plan":
        return comm.plan("all_reduce", x, "max" if odd else "sum", out=x)()
    if what == "size of symmetric memory":
        return comm.empty(5 if odd else 6)
    if what == "empty or all_reduce":
        return comm.empty(5) if odd else comm.all_reduce(x)
    if what == "empty or all_gather":
        return comm.empty(5) if odd else comm.all_gather(np.ones(1, np.int64))
    if what == "empty or split":
        return comm.empty(5) if odd else comm.split(0)
    raise AssertionError(what)


DIFFERENCES = {
    "count": ["count 6", "count 4"],
    "dtype": ["int32", "float32"],
    "op": ["max", "sum"],
    "scale": ["premul_sum(0.5)", "premul_sum(2.0)"],
    "algorithm": ["algorithm"],
    "root": ["root 1", "root 0"],
    "collective": ["barrier", "all_reduce"],
    "collective, symmetric": ["broadcast", "all_reduce"],
    "counts": ["counts"],
    "table of counts": ["counts"],
    "asynchronous": ["max", "sum"],
    "list": ["count 8", "count 4"],
    "plan": ["max", "sum"],
    "size of symmetric memory": ["20", "24"],
    "empty or all_reduce": ["empty or split", "all_reduce"],
    "empty or all_gather": ["empty or split"],
    "empty or split": ["called empty", "called split"],
}


def disagrees(comm: Communicator) -> list[str]:
    """Every difference, each in a communicator of its own, since it is of no further use then."""
    wrong = []
    for what, expected in DIFFERENCES.items():
        with comm.split(0) as child:  # type: ignore[union-attr]
            child.barrier()
            try:
                differing(child, what)
                wrong.append(f"{what}: no error")
            except CollectiveMismatchError as error:
                missing = [part for part in [*expected, "rank 1"] if part not in str(error)]
                if missing:
                    wrong.append(f"{what}: {missing} not in {error}")
            try:
                child.barrier()
                wrong.append(f"{what}: goes on")
            except CollectiveError as error:
                if "of no further use" not in str(error):
                    wrong.append(f"{what}: then {error}")
        comm.barrier()  # which is not concerned
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_disagreement_is_an_error_on_every_rank(crew: Crews, size: int) -> None:
    assert crew(disagrees, size) == [[]] * size


def writes_nothing(comm: Communicator) -> list[float]:
    x, out = np.ones(4), np.full(4, -7.0)
    with comm.split(0) as child, pytest.raises(CollectiveMismatchError):  # type: ignore[union-attr]
        child.all_reduce(x, "sum" if comm.rank else "max", out=out)
    return [*x.tolist(), *out.tolist()]


def test_disagreement_writes_nothing(crew: Crews) -> None:
    assert crew(writes_nothing, 2) == [[1.0] * 4 + [-7.0] * 4] * 2


# Giving up


def raises_in_with(comm: Communicator) -> str:
    try:
        with comm.split(0) as child:  # type: ignore[union-attr]
            if comm.rank == 1:
                raise KeyError("no such thing")
            child.all_reduce(np.ones(3))
    except CollectiveError as error:
        return str(error)
    except KeyError:
        return "mine"
    return "nothing"


def test_an_exception_inside_with_reaches_the_others(crew: Crews) -> None:
    others = "all_reduce(float64, count 3, sum): rank 1 gave up: KeyError: 'no such thing'"
    first, second, third = crew(raises_in_with, 3)
    assert second == "mine"
    assert first.endswith("rank 1 gave up: KeyError: 'no such thing'"), first
    assert third.endswith("rank 1 gave up: KeyError: 'no such thing'"), third
    assert others in (first, third)


def aborts(comm: Communicator) -> list[str]:
    told = []
    child = comm.split(0)
    assert child is not None
    if comm.rank == 0:
        time.sleep(0.2)
        child.abort("had enough")
    for call in (lambda: child.recv(np.empty(1), 0), lambda: child.all_reduce(np.ones(1)), child.barrier):
        try:
            call()
        except CollectiveError as error:
            told.append(str(error))
    child.close()
    comm.barrier()
    return told


def test_abort_ends_everybodys_calls(crew: Crews) -> None:
    for told in crew(aborts, 3):
        assert len(told) == 3
        assert all("had enough" in text for text in told)


def aborts_from_another_thread(comm: Communicator) -> str:
    with comm.split(0) as child:  # type: ignore[union-attr]
        if comm.rank == 1:
            time.sleep(0.5)
            return ""
        threading.Timer(0.1, child.abort, ["stuck"]).start()
        try:
            child.barrier()
        except CollectiveError as error:
            return str(error)
    return "nothing"


def test_abort_from_another_thread_ends_a_blocked_call(crew: Crews) -> None:
    assert "stuck" in crew(aborts_from_another_thread, 2)[0]


def closes_early(comm: Communicator) -> list[str]:
    told = []
    child = comm.split(0)
    assert child is not None
    child.barrier()
    if comm.rank == 0:
        child.close()
        child.close()
        calls = [
            lambda: child.all_reduce(np.ones(2)), lambda: child.send(np.ones(2), 1), child.barrier,
            lambda: child.empty(3), lambda: child.split(0), lambda: child.all_reduce(np.ones(2), async_op=True),
            lambda: child.plan("all_reduce", np.ones(2)),
        ]  # fmt: skip
    else:
        calls = [lambda: child.all_reduce(np.ones(2)), child.barrier]
    for call in calls:
        try:
            call()
        except CollectiveError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_close_by_one_rank(crew: Crews) -> None:
    first, *others = crew(closes_early, 3)
    assert first == ["CollectiveError: this communicator is closed"] * 7
    for told in others:
        assert told[0].startswith("PeerLostError: all_reduce(float64, count 2, sum): rank ")
        assert "rank 0 closed its communicator after call 1" in told[0]
        assert "of no further use" in told[1]


def leaves_after_the_last_call(comm: Communicator, size: int) -> bool:
    """A rank whose part in a call is over may leave at once; that is no loss for the others, still at it."""
    data = np.ones(size, np.float32) if comm.rank == 0 else np.empty(size, np.float32)
    with comm.split(0) as child:  # type: ignore[union-attr]
        child.broadcast(data, algorithm="chain")
    return bool((data == 1).all())


def test_leaving_after_ones_part_is_no_loss(crew: Crews) -> None:
    assert all(crew(leaves_after_the_last_call, 3, (20_000_003,)))


def closes_the_world(comm: Communicator) -> list[str]:
    child = comm.split(0)
    assert child is not None
    x = child.zeros(10)
    comm.close()
    told = []
    for call in (child.barrier, lambda: comm.all_reduce(np.ones(1))):
        try:
            call()
        except CollectiveError as error:
            told.append(str(error))
    x[:] = comm.rank  # arrays outlive communicators
    told.append(str(x.sum()))
    return told


def test_closing_the_world_closes_what_was_split_from_it() -> None:
    closed = "this communicator is closed"
    assert collectives.spawn(closes_the_world, 2) == [[closed, closed, "0.0"], [closed, closed, "10.0"]]


# Interruption and forks


def is_interrupted(comm: Communicator, after: float, where: str) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with comm.split(0) as child:  # type: ignore[union-attr]
        return waits_for_an_interruption(child, after, where)


def waits_for_an_interruption(comm: Communicator, after: float, where: str) -> str:
    if where == "recv again":
        comm.sendrecv(np.ones(3), 1 - comm.rank, np.empty(3), 1 - comm.rank)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(1.0)
    began = time.monotonic()
    try:
        if comm.rank == 0:
            threading.Timer(after, os.kill, [os.getpid(), signal.SIGINT]).start()
        if where.startswith("recv"):
            comm.recv(np.empty(3), 1 - comm.rank)
        elif where == "wait":
            comm.all_reduce(np.ones(3), async_op=True).wait()
        else:
            comm.all_reduce(np.ones(3))
        comm.barrier()  # rank 0 may have done its part in the call before
        return "nothing"
    except KeyboardInterrupt:
        waited = time.monotonic() - began
        try:
            if where != "wait":
                comm.barrier()
        except CollectiveError as error:
            return f"interrupted, {waited < after + 1}: {error}"
        comm.abort("interrupted while it waited")
        return f"interrupted, {waited < after + 1}"
    except CollectiveError as error:
        return str(error)


@pytest.mark.parametrize(
    ("where", "after"), [("call", 0.02), ("call", 0.3), ("recv", 0.3), ("recv again", 0.3), ("wait", 0.2)]
)
def test_ctrl_c_in_a_blocked_call(crew: Crews, where: str, after: float) -> None:
    """It is heard within moments; the communicator is of no further use then, and the others are told."""
    first, second = crew(is_interrupted, 2, (after, where))
    assert first.startswith("interrupted, True"), first
    if "the ranks disagree" in first:  # it came before the call had begun
        assert "the ranks disagree" in second
        return
    if where != "wait":
        assert "of no further use: KeyboardInterrupt" in first
    assert "rank 0 gave up" in second


def forks(comm: Communicator) -> list[str]:
    comm.all_reduce(np.ones(4), async_op=True).wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(np.ones(3))
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        comm.close()
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 4096).decode()
    return [told, str(comm.all_reduce(np.ones(3)).tolist())]


def test_a_forked_child_may_not_go_on_as_the_rank(crew: Crews) -> None:
    for told, result in crew(forks, 2):
        assert told.startswith("CollectiveError") and "was forked from a rank" in told
        assert result == "[2.0, 2.0, 2.0]"


def waits_in_a_forked_child(comm: Communicator) -> list[str]:
    if comm.rank == 1:
        comm.wait_signal(0)
        return [str(comm.all_reduce(np.ones(3)).tolist())]
    work = comm.all_reduce(np.ones(3), async_op=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work.wait()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    told = os.read(reader, 4096).decode()
    os.close(reader)
    comm.signal(1)
    return [str(work.wait().tolist()), told]


def test_a_forked_child_does_not_wait_for_what_its_parent_began(crew: Crews) -> None:
    """The thread that runs it is the parent's."""
    (result, told), (other,) = crew(waits_in_a_forked_child, 2)
    assert result == other == "[2.0, 2.0, 2.0]"
    assert told.startswith("CollectiveError") and "was forked from a rank" in told


def forks_beside_a_call(comm: Communicator) -> str:
    word = comm.zeros(1, np.int64)
    if comm.rank == 1:
        comm.wait_until(word, 1, 0)
        comm.signal(0)
        return ""
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(comm.wait_signal, 1)
        while comm._lock.acquire(blocking=False):  # until the other thread has it
            comm._lock.release()
            time.sleep(0.001)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                comm.barrier()
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}".encode())
            comm.close()
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        told = os.read(reader, 4096).decode()
        os.close(reader)
        comm.fetch_add(word, 1, 0)  # for which no lock is taken
        waits.result()
    return f"{status} {told}"


def test_a_forked_child_does_not_wait_for_its_parents_threads(crew: Crews) -> None:
    told, _ = crew(forks_beside_a_call, 2)
    assert told.startswith("0 CollectiveError") and "was forked from a rank" in told


# While ranks find each other, and afterwards

STARTING = """
import gc, os, sys, time
sys.path.append({folder!r})
from leftovers import descriptors, symmetric_maps
from survivors import die, report
import collectives
from collectives import host, initialise, memory
rank, where = int(sys.argv[1]), {where!r}
if rank == 1:
    fatal = lambda *_, **__: die()
    if where == "meet":
        initialise.meet = fatal
    elif where == "memory":
        memory.Segment.create = fatal
    elif where == "descriptors":
        host.Segment.attach = fatal
    elif where == "scratch":
        initialise.Shm = fatal
before = descriptors()
kind = text = ""
try:
    comm = collectives.init(rank=rank, size=3, address={address!r}, timeout={timeout})
    if where == "call":
        if rank == 1:
            die()
        comm.barrier()
except collectives.CollectiveError as error:
    kind, text = type(error).__name__, str(error)
if where == "call":
    comm.close()
    comm = None
gc.collect()
left = descriptors() - before, symmetric_maps("self")
report(rank, kind, f"left {{left}}: {{text}}")
"""


@pytest.mark.parametrize("where", ["meet", slow("memory"), slow("descriptors"), "scratch", slow("call")])
def test_a_death_while_ranks_find_each_other(where: str, tmp_path: Path) -> None:
    """Without a launcher nobody knows a rank that has not come: there the deadline is the answer."""
    script = STARTING.format(
        folder=str(Path(__file__).parent),
        where=where,
        address=f"unix:{tmp_path}",
        timeout=2.0 if where == "meet" else 60.0,
    )
    environ = {**os.environ, "SURVIVORS": str(tmp_path)}
    ranks = [subprocess.Popen([sys.executable, "-c", script, str(rank)], env=environ) for rank in range(3)]
    try:
        for rank in ranks:
            rank.wait(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = written(tmp_path)
    assert sorted(found) == [0, 2]
    for outcome in found.values():
        assert outcome.kind == ("CollectiveTimeoutError" if where == "meet" else "PeerLostError"), outcome
        assert "rank 1" in outcome.text
        assert outcome.text.startswith("left (0, 0)"), outcome
        assert outcome.seconds < SOON
    print("survivors raised after", *(f"{outcome.seconds:.2f} s" for outcome in found.values()))


# A rank of this script, which a launcher starts, is gone before it has said a word to the others.
UNHEARD = """
import sys
sys.path.append({folder!r})
from survivors import die, report
import os, time
rank, dead, moment = int(os.environ["MGPU_RANK"]), {dead}, {moment!r}
if rank == dead:
    if moment == "late":
        time.sleep(1.0)  # the others wait for it already
    if moment == "exits":
        from survivors import now_it_happens
        now_it_happens()
        sys.exit(0)
    if moment == "import":
        sys.modules["numpy"] = None  # its import raises
        import atexit
        atexit.register(die)
    elif moment != "connected":
        die()
    from collectives import rendezvous
    rendezvous.Star.welcome = lambda *_: die()
import collectives
kind = text = ""
try:
    collectives.init(timeout=60)
except collectives.CollectiveError as error:
    kind, text = type(error).__name__, str(error)
    raise
finally:
    if rank != dead:
        report(rank, kind, text)
"""


def starts(comm: Communicator, dead: int) -> None:
    """Never called."""


@pytest.mark.parametrize(
    ("moment", "dead"),
    [("at once", 0), slow("at once", 1), ("late", 1), slow("import", 0), slow("connected", 0), ("exits", 1)],
)
def test_a_launcher_knows_of_ranks_that_were_never_heard_of(moment: str, dead: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNHEARD.format(folder=str(Path(__file__).parent), dead=dead, moment=moment))
    code = "import sys; from collectives.launch import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-n", "3", str(script)]
    environ = {**os.environ, "SURVIVORS": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    found = written(tmp_path)
    lost(found, 3, dead)
    if moment != "connected":
        end = "ended with exit code 0" if moment == "exits" else "was killed by SIGKILL"
        for outcome in found.values():
            assert f"rank {dead} {end}" in outcome.text
            assert "before all 3 ranks had met" in outcome.text
    # What is reported is the death, and not what the others say of it; or that, where there is no death to report.
    said = f"mgpu run: rank {dead} was killed by SIGKILL" if moment != "exits" else "mgpu run: rank "
    assert said in done.stderr
    assert done.returncode == (1 if moment == "exits" else 128 + signal.SIGKILL)


def dies_when_it_is_unpacked(_: object) -> object:
    if os.environ.get("MGPU_RANK") == "1":
        die()
    return None


class DiesWhenUnpacked:
    def __reduce__(self) -> Any:
        return dies_when_it_is_unpacked, (None,)


def test_spawn_knows_them_too(tmp_path: Path) -> None:
    os.environ["SURVIVORS"] = str(tmp_path)  # which ranks inherit
    try:
        with pytest.raises(PeerLostError, match="rank 1 was killed by SIGKILL") as caught:
            collectives.spawn(starts, 3, (DiesWhenUnpacked(),), timeout=60)
    finally:
        del os.environ["SURVIVORS"]
    story = str(caught.value.__cause__)
    for rank in (0, 2):  # by its own look, or told by another
        (line,) = (line for line in story.splitlines() if line.startswith(f"rank {rank}: PeerLostError: "))
        assert "rank 1 was killed by SIGKILL" in line, story
    assert time.monotonic() - float((tmp_path / "moment").read_text()) < SOON


def written(folder: Path) -> dict[int, Outcome]:
    """What the ranks have reported."""
    return {int(path.stem): Outcome(*json.loads(path.read_text())) for path in folder.glob("*.json")}


def survives(comm: Communicator, address: str) -> str:
    child = comm.split(0 if comm.rank != 1 else None)
    if comm.rank == 1:
        die()
    with pytest.raises(PeerLostError):
        comm.barrier()
    assert child is not None
    assert child.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]  # it never had the dead one in it
    ranks = [0, 2]
    again = collectives.init(rank=ranks.index(comm.rank), size=2, address=address, timeout=30)
    result = again.all_reduce(np.array([float(comm.rank)]))
    again.close()
    return str(result)


def test_survivors_go_on_together(tmp_path: Path) -> None:
    found = outcomes(survives, 3, tmp_path, f"unix:{tmp_path}")
    assert {rank: (outcome.kind, outcome.text) for rank, outcome in found.items()} == {0: ("", "[2.]"), 2: ("", "[2.]")}


def opens_and_closes(comm: Communicator, address: str) -> list[int]:
    """Descriptors and maps before and after a communicator's life."""
    counts = []
    for number in range(3):
        gc.collect()
        counts.append((descriptors(), symmetric_maps("self")))
        other = collectives.init(rank=comm.rank, size=comm.size, address=f"{address}{number}", timeout=30)
        x = other.zeros(1000)
        other.all_reduce(x, out=x, async_op=True).wait()
        other.plan("all_reduce", x, out=x)()
        other.sendrecv(x, (comm.rank + 1) % comm.size, np.empty_like(x), (comm.rank - 1) % comm.size)
        with other.split(0) as child:  # type: ignore[union-attr]
            child.barrier()
        other.close()
        del other, x, child
    gc.collect()
    counts.append((descriptors(), symmetric_maps("self")))
    return [count for count in counts if count != counts[0]]


def test_close_gives_everything_back(crew: Crews, tmp_path: Path) -> None:
    assert crew(opens_and_closes, 3, (f"unix:{tmp_path}",)) == [[], [], []]
