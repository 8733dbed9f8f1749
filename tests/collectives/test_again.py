"""The short way of calls that are made again: what it recognises, what it leaves to the long way, and what it holds."""

import gc
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
from crew import Crews
from hypothesis import given
from hypothesis import strategies as st

import collectives
from collectives import CollectiveError, Communicator
from collectives.again import Again, Known, Terms
from collectives.call import make_call
from kernels import again as layout
from kernels.dtypes import DTYPES, find


class Counted:
    """Counts the calls that go through the backend from Python, which those of the short way do not."""

    def __init__(self, comm: Communicator) -> None:
        self.calls, self._backend, self._run = 0, comm._backend, comm._backend.run
        self._backend.run = self._counted  # type: ignore[method-assign]

    def _counted(self, *arguments: Any) -> None:
        self.calls += 1
        self._run(*arguments)

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.run = self._run  # type: ignore[method-assign]


def every_call(comm: Communicator) -> list[str]:
    """Which calls still go through Python when they are made for the third time."""
    wrong = []
    for kind in ("ordinary", "symmetric"):
        take = comm.empty if kind == "symmetric" else np.empty
        x, out, long = take(6, np.float32), take(6, np.float32), take(6 * comm.size, np.float32)
        row = take((2, 3), np.float32)
        x[:] = out[:] = long[:] = 1
        row[:] = 1
        at_root = comm.rank == 1
        calls: dict[str, Callable[[], object]] = {
            "in place": lambda: comm.all_reduce(x, out=x),
            "to out": lambda: comm.all_reduce(x, out=out),
            "to out of another shape": lambda: comm.all_reduce(x, out=row),
            "with an op that was put together": lambda: comm.all_reduce(x, "".join(["m", "ax"]), out=out),
            "with a new premul_sum": lambda: comm.all_reduce(x, collectives.premul_sum(0.5), out=out),
            "by an algorithm": lambda: comm.all_reduce(x, out=out, algorithm="ring"),
            "reduce": lambda: comm.reduce(x, root=1, out=out if at_root else None),
            "reduce_scatter": lambda: comm.reduce_scatter(long, out=x),
            "broadcast": lambda: comm.broadcast(x, root=np.int64(1)),  # type: ignore[arg-type]
            "all_gather": lambda: comm.all_gather(x, out=long),
            "gather": lambda: comm.gather(x, root=1, out=long if at_root else None),
            "scatter": lambda: comm.scatter(long if at_root else None, root=1, out=x),
            "all_to_all": lambda: comm.all_to_all(x, out=out),
            "barrier": comm.barrier,
            "an array that was unpickled": lambda: comm.all_reduce(pickle.loads(pickle.dumps(x)), out=out),
        }
        if kind == "ordinary":
            calls["to a new array"] = lambda: comm.all_reduce(x)
            calls["gathered into a new array"] = lambda: comm.all_gather(x)
        for name, call in calls.items():
            call()
            call()
            with Counted(comm) as counted:
                call()
            if counted.calls:
                wrong.append(f"{name}, {kind}")
    return wrong


def test_every_call_has_a_short_way(crew: Crews) -> None:
    assert crew(every_call, 2) == [[], []]


def changed(comm: Communicator) -> list[str]:
    """Arrays that change between calls, and arrays that come and go: which results are wrong."""
    wrong = []

    def check(name: str, got: Any, expected: Any) -> None:
        if not np.array_equal(got, expected) or got.dtype != np.asarray(expected).dtype:
            wrong.append(f"{name}: {got}")

    def refused(name: str, call: Callable[[], object], kind: type[Exception] = ValueError) -> None:
        try:
            call()
        except kind:
            return
        wrong.append(f"{name} was taken")

    size, ones = comm.size, np.ones(6, np.int32)
    x = ones.copy()
    for _ in range(3):
        x[:] = 1
        comm.all_reduce(x, out=x)
    x.resize(10, refcheck=False)  # elsewhere, perhaps
    x[:] = 1
    check("resized", comm.all_reduce(x, out=x), np.full(10, size, np.int32))
    x.resize(6, refcheck=False)
    x[:] = 1
    x.shape = (2, 3)
    check("of another shape", comm.all_reduce(x, out=x), np.full((2, 3), size, np.int32))
    check("of another shape, to a new array", comm.all_reduce(x), np.full((2, 3), size * size, np.int32))
    x.shape = (6,)
    x[:] = 1
    check("viewed", comm.all_reduce(x.view(np.int16)), np.array([size, 0] * 6, np.int16))
    x.dtype = np.int16  # type: ignore[misc]
    check("of another dtype", comm.all_reduce(x), np.array([size, 0] * 6, np.int16))
    x.dtype = np.int32  # type: ignore[misc]
    x.setflags(write=False)
    refused("a read-only x in place", lambda: comm.all_reduce(x, out=x))
    check("read-only, to a new array", comm.all_reduce(x), ones * size)
    x.setflags(write=True)
    check("writable again", comm.all_reduce(x, out=x), ones * size)
    wide = np.ones((6, 2), np.int32)
    check("strided", comm.all_reduce(wide[:, 0]), ones * size)
    refused("a strided out", lambda: comm.all_reduce(ones, out=wide[:, 0]))
    refused("an out of another size", lambda: comm.all_reduce(ones, out=np.empty(7, np.int32)))
    refused("an out of another dtype", lambda: comm.all_reduce(ones, out=np.empty(6, np.float32)))
    swapped = ones.astype(ones.dtype.newbyteorder())
    refused("the other byte order", lambda: comm.all_reduce(swapped, out=swapped), TypeError)
    both = np.arange(9, dtype=np.int32)
    check("overlapping", comm.all_reduce(both[:6], out=both[3:]), np.arange(6, dtype=np.int32) * size)
    deep = np.ones((1,) * 12, np.int32)
    for _ in range(3):
        check("of many dimensions", comm.all_reduce(deep), deep * size)

    class Own(np.ndarray):
        """A subclass."""

    check("a subclass's", comm.all_reduce(ones.view(Own)), ones * size)
    for _ in range(2):
        refused("a root that is no integer", lambda: comm.broadcast(ones, root=0.0), TypeError)  # type: ignore[arg-type]
    for turn in range(40):  # new arrays where others have been
        n = 1 + turn % 3
        y = np.full(n, turn, np.float32)
        check(f"new array {turn}", comm.all_reduce(y, out=y), np.full(n, turn * size, np.float32))
        del y
    kept = np.ones(5)
    for _ in range(3):
        comm.all_reduce(kept, out=kept)
    alive = weakref.ref(kept)
    del kept
    gc.collect()
    if alive() is not None:
        wrong.append("an array is kept alive")
    return wrong


def test_an_array_is_looked_at_anew_in_every_call(crew: Crews) -> None:
    assert crew(changed, 2) == [[], []]


class Reduction(str, Enum):
    """Names of operations, as a framework may have them; its texts are not what it equals."""

    SUM = "sum"

    def __str__(self) -> str:
        return "max"


def spelled(comm: Communicator) -> list[float]:
    x, zero = np.ones(1, np.int16), np.ones(1)
    comm.all_reduce(x, "max")
    told = [float(comm.all_reduce(x, Reduction.SUM)[0]) for _ in range(3)]
    told += [float(comm.all_reduce(x, collectives.premul_sum(np.array(3)))[0]) for _ in range(3)]
    return told + [math.copysign(1, comm.all_reduce(zero, collectives.premul_sum(z))[0]) for z in (0.0, -0.0, 0.0)]


def test_operations_are_what_they_equal_however_they_are_written(crew: Crews) -> None:
    assert crew(spelled, 2) == [[2, 2, 2, 6, 6, 6, 1, -1, 1]] * 2


def interrupted_twice(comm: Communicator) -> tuple[str, bool]:
    """Ctrl-C as a call waits, and again as the communicator is given up: the error, and whether its lock is free."""
    x, told = np.ones(3), "nothing"
    with comm.split(0) as family:  # type: ignore[union-attr]
        for _ in range(3):
            family.all_reduce(x, out=x)
        comm.barrier()
        if comm.rank == 1:
            comm.recv(x, 0)
            return "", True

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        family._backend.complete = family._backend.abort = stop  # type: ignore[attr-defined, method-assign]
        try:
            family.all_reduce(x, out=x)
        except KeyboardInterrupt as error:
            told = type(error).__name__
        finally:
            del family._backend.complete, family._backend.abort  # type: ignore[attr-defined]
        thread = threading.Thread(target=family.close, daemon=True)
        thread.start()
        thread.join(5)
        comm.send(x, 1)
        return told, not thread.is_alive()


def test_a_second_interruption_leaves_the_lock_to_others(crew: Crews) -> None:
    assert crew(interrupted_twice, 2)[0] == ("KeyboardInterrupt", True)


def late_and_threads(comm: Communicator) -> list[str]:
    """A call that waits long, and threads that call while another's call waits."""
    wrong = []
    x = np.ones(3)
    for _ in range(3):
        comm.all_reduce(x.copy(), out=x)
        comm.barrier()
    x[:] = 1
    if comm.rank == 0:
        time.sleep(0.15)  # the others come back from compiled code, and go on
    comm.all_reduce(x, out=x)
    if x[0] != comm.size:
        wrong.append(f"late: {x}")

    many, results = 50, []

    def work() -> None:
        y = np.ones(3)
        for _ in range(many):
            y[:] = 1
            results.append(comm.all_reduce(y, out=y)[0])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if results != [comm.size] * (3 * many):
        wrong.append("threads")
    if comm.rank == 0:
        time.sleep(0.15)
    waits = threading.Thread(target=comm.barrier)
    waits.start()
    comm.barrier()
    waits.join()
    return wrong


def test_a_call_that_waits_and_threads(crew: Crews) -> None:
    assert crew(late_and_threads, 2) == [[], []]


def beside_a_queue(comm: Communicator) -> tuple[int, int]:
    """Calls through Python: of one made while asynchronous calls are under way, and of those when they have ended."""
    x, y = np.ones(3), np.ones(1 << 20)
    for _ in range(3):
        comm.all_reduce(x, out=x)
    work, found = comm.all_reduce(y, async_op=True), []
    for _ in range(3):
        with Counted(comm) as counted:
            x[:] = 1
            comm.all_reduce(x, out=x)
        found.append(counted.calls)
        assert x[0] == comm.size and work.wait()[0] == comm.size
    return found[0], found[-1]


def test_beside_asynchronous_calls(crew: Crews) -> None:
    assert crew(beside_a_queue, 2) == [(1, 0)] * 2


def ended(comm: Communicator) -> list[str]:
    """What calls that have a short way say on a communicator that is of no further use."""
    told = []
    x = np.ones(3)
    both = [family for family in (comm.split(0), comm.split(0)) if family is not None]
    for family in both:
        for _ in range(3):
            family.all_reduce(x, out=x)
            family.barrier()
    comm.barrier()
    both[0].close()
    both[1].abort("enough")
    for family in both:
        for call in (lambda: family.all_reduce(x, out=x), lambda: family.all_reduce(x), family.barrier):
            try:
                call()
                told.append("nothing")
            except CollectiveError as error:
                told.append(str(error))
    comm.barrier()
    both[1].close()
    return told


def test_nothing_is_called_on_what_has_ended(crew: Crews) -> None:
    for told in crew(ended, 2):
        assert all("is closed" in text for text in told[:3]) and all("enough" in text for text in told[3:]), told


# The table, without ranks


class Nobody:
    """A backend, as far as a table looks at it."""

    rank, heap = 0, (0, 0)


def table() -> Again:
    lock = threading.RLock()
    return Again(Nobody(), lock.acquire, lock.release)  # type: ignore[arg-type]


def learn(again: Again, x: Any, terms: Terms, ahead: int | None = 0) -> bool:
    call = make_call("all_reduce", find(x.dtype), x.size)
    return again.learn(Known(call, True, True, None, x.dtype), terms, x, x.size, ahead)


def admitted(again: Again, x: Any, out: Any, terms: Terms) -> tuple[int | None, int | None]:
    """The row's number, or None: as compiled code finds it, and as the same source does in Python."""
    compiled = again.call(x, out, *terms)
    plain = layout.admit(again._table.address, id(x), id(out), *map(id, terms))
    return None if compiled is None else ~compiled // 2, None if plain == layout.UNKNOWN else ~plain // 2


SUM: Terms = ("all_reduce", "sum", None, None, False)
shapes = st.lists(st.integers(0, 4), max_size=layout.MOST_DIMS).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=30))
def test_a_row_is_found_by_what_an_array_is_like(kinds) -> None:
    again, rows = table(), {}
    for shape, dtype in kinds:
        x = np.zeros(shape, dtype.numpy)
        number = rows.get((shape, dtype.name))
        assert admitted(again, x, x, SUM) == (number, number)
        learn(again, x, SUM)
        rows.setdefault((shape, dtype.name), len(rows))
    for (shape, name), number in rows.items():
        x = np.zeros(shape, find(name).numpy)
        assert admitted(again, x, np.zeros(x.size, x.dtype), SUM) == (number, number)
        for other in (("all_reduce", "max", None, None, False), ("all_reduce", "sum", None, None, True)):
            assert admitted(again, x, x, other) == (None, None)


def test_what_is_no_array_is_never_known() -> None:
    again, x = table(), np.zeros(3)
    learn(again, x, SUM)
    for strange in (None, 3, "x", [1.0], x[0], memoryview(x), object()):
        assert admitted(again, strange, x, SUM) == (None, None)
        if strange is not None:
            assert admitted(again, x, strange, SUM) == (None, None)
    assert again.call() is None and again.call(x, x) is None


@pytest.mark.parametrize("ahead", [0, 8, -16, None])
def test_where_the_result_may_lie(ahead: int | None) -> None:
    again, memory = table(), np.zeros(20)
    learn(again, memory[:4], SUM, ahead)
    for start in range(17):
        x, out = memory[8:12], memory[start : start + 4]
        number = 0 if not 4 < start < 12 or 8 * (8 - start) == ahead else None
        assert admitted(again, x, out, SUM) == (number, number), start


def test_a_full_table_says_so_and_still_knows_what_it_holds() -> None:
    again, x = table(), np.zeros(1)
    for n in range(layout.MOST_ROWS):
        assert learn(again, np.zeros(n, np.int8), SUM)
    assert not learn(again, x, SUM)
    assert learn(again, np.zeros(5, np.int8), SUM)
    for n in (0, 1, 500, layout.MOST_ROWS - 1):
        y = np.zeros(n, np.int8)
        assert admitted(again, y, y, SUM) == (n, n)
    assert admitted(again, x, x, SUM) == (None, None)


def test_terms_without_one_object_are_not_learnt() -> None:
    again, x = table(), np.zeros(3)
    for term in (1.0, (1,), 1000):
        learn(again, x, ("broadcast", None, term, None, False))
    assert not again.known
    learn(again, x, ("broadcast", None, np.int64(2), None, False))
    assert admitted(again, x, x, ("broadcast", None, 2, None, False)) == (0, 0)


def test_the_lock_is_held_by_nobody_afterwards_and_while_a_call_is_pending() -> None:
    lock, free = threading.RLock(), []
    again = Again(Nobody(), lock.acquire, lock.release)  # type: ignore[arg-type]

    def is_free() -> None:
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    def look() -> bool:
        thread = threading.Thread(target=is_free)
        thread.start()
        thread.join()
        return free[-1]

    x = np.zeros(3)
    learn(again, x, SUM)
    again.call(x, x, *SUM)
    again.call(None, x, *SUM)
    assert look()
    thread = threading.Thread(target=lambda: again.call(x, x, *SUM))
    with lock:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        assert again.call(x, x, *SUM) == ~0  # its holder may
    thread.join()
    assert look() and again.pending.value == 0
