"""The communicator's arguments and results: what kinds of arrays it takes and gives, odd arrays, plans, lists, objects,
and what it says to mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from crew import Crews
from expected import same_bits

import collectives
from collectives import CollectiveError, Communicator, premul_sum
from collectives.builder import Chunks, algorithm


def errors(comm: Communicator, calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each call raises, in words."""
    told = {}
    for name, call in calls.items():
        try:
            told[name] = f"no error, but {call()!r}"
        except (ValueError, TypeError, CollectiveError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


# Odd arrays


def odd_inputs(comm: Communicator) -> list[str]:
    """Any layout may be read; the result is C-contiguous and has the shape of what was read."""
    wrong = []
    base = np.arange(48.0).reshape(6, 8) + comm.rank
    total = sum(np.arange(48.0).reshape(6, 8) + rank for rank in range(comm.size))
    frozen = base.copy()
    frozen.flags.writeable = False
    unaligned = np.empty(base.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(base.shape)
    unaligned[...] = base
    layouts: dict[str, tuple[Any, Any]] = {
        "C": (base, total),
        "Fortran": (np.asfortranarray(base), total),
        "transposed": (base.T, total.T),
        "columns": (base[:, ::3], total[:, ::3]),
        "backwards": (base[::-1, ::-1], total[::-1, ::-1]),
        "broadcast": (np.broadcast_to(base[0], (6, 8)), np.broadcast_to(total[0], (6, 8))),
        "read-only": (frozen, total),
        "unaligned": (unaligned, total),
        "0-d": (base[1, 2, ...], total[1, 2, ...]),
        "scalar": (base[1, 2], total[1, 2]),
        "none": (base[:0], total[:0]),
        "none in a row": (base[:, :0], total[:, :0]),
    }
    for name, (x, wanted) in layouts.items():
        before = np.array(x)
        got = comm.all_reduce(x)
        if not same_bits(got, wanted) or got.shape != np.shape(wanted) or not got.flags.c_contiguous:
            wrong.append(f"all_reduce, {name}")
        rows = np.concatenate([np.atleast_1d(np.array(x))] * comm.size)
        gathered = comm.all_gather(x)
        if gathered.shape != rows.shape:
            wrong.append(f"all_gather, {name}: shape {gathered.shape}")
        out = np.full(np.shape(wanted), -1.0)
        comm.all_reduce(x, "max", out=out)
        if not same_bits(out, np.array(x) + comm.size - 1 - comm.rank):
            wrong.append(f"out, {name}")
        if not same_bits(np.array(x), before):
            wrong.append(f"{name} was changed")
        sent = np.array(x, order="C")
        if comm.rank == 0:
            comm.broadcast(x)  # a root's array is only read
        else:
            comm.broadcast(sent)
            if not same_bits(sent, np.array(x) - comm.rank):
                wrong.append(f"broadcast, {name}")
    return wrong


def test_odd_arrays_to_read(crew: Crews) -> None:
    assert crew(odd_inputs, 3) == [[]] * 3


def odd_outputs(comm: Communicator) -> dict[str, str]:
    x = np.ones((4, 3))
    frozen = np.empty((4, 3))
    frozen.flags.writeable = False
    told = errors(
        comm,
        {
            "read-only": lambda: comm.all_reduce(x, out=frozen),
            "Fortran": lambda: comm.all_reduce(x, out=np.empty((4, 3), order="F")),
            "strided": lambda: comm.all_reduce(x, out=np.empty((4, 6))[:, ::2]),
            "in place, strided": lambda: (lambda y: comm.all_reduce(y, out=y))(np.ones((4, 6))[:, ::2]),
            "too small": lambda: comm.all_reduce(x, out=np.empty((4, 2))),
            "too large": lambda: comm.all_gather(x, out=np.empty((9, 9))),
            "other dtype": lambda: comm.all_reduce(x, out=np.empty((4, 3), np.float32)),
            "big-endian": lambda: comm.all_reduce(x, out=np.empty((4, 3), ">f8")),
            "a list": lambda: comm.all_reduce(x, out=[0.0] * 12),
            "a scalar": lambda: comm.all_reduce(np.float64(1), out=np.float64(1)),
            "objects": lambda: comm.all_reduce(np.array([{}])),
            "strings": lambda: comm.broadcast(np.array(["a"])),
            "masked": lambda: comm.all_reduce(np.ma.masked_equal(x, 1)),
            "broadcast, strided": lambda: comm.broadcast(np.ones((4, 6))[:, ::2], root=1 - comm.rank),
            "recv": lambda: comm.recv(np.empty((4, 3)).T, 0),
        },
    )
    assert comm.all_reduce(x)[0, 0] == comm.size  # which they have not harmed
    return told


def test_odd_arrays_to_write(crew: Crews) -> None:
    for told in crew(odd_outputs, 2):
        for name in ("Fortran", "strided", "in place, strided", "broadcast, strided", "recv"):
            assert "ValueError" in told[name] and "not C-contiguous" in told[name], told[name]
        assert told["read-only"].startswith("ValueError: out is read-only")
        assert told["too small"].startswith(
            "ValueError: out has 8 elements of float64 (shape (4, 2)); the result has 12"
        )
        assert told["too large"].startswith("ValueError: out has 81 elements")
        assert "out has 12 elements of float32" in told["other dtype"]
        assert told["big-endian"].startswith("TypeError: out: dtype >f8")
        assert told["a list"].startswith("TypeError: out is of type list")
        assert told["a scalar"].startswith("ValueError: out is a NumPy scalar")
        assert told["objects"].startswith("TypeError: x: dtype object")
        assert told["strings"].startswith("TypeError: x: dtype <U1")
        assert told["masked"].startswith("TypeError: x is a masked array")


def nan_and_zeros(comm: Communicator) -> list[Any]:
    """Not-a-number wins, and -0 is less than +0, whoever brings them and in whatever order."""
    found: list[Any] = []
    for algorithm_name in (None, "ring", "two_shot"):
        for bringer in range(comm.size):
            x = (
                np.array([np.nan, 1.0, 0.0 if comm.rank == bringer else -0.0])
                if comm.rank == bringer
                else np.array([2.0, 1.0, -0.0])
            )
            for op in ("sum", "prod", "min", "max", "avg", premul_sum(1.0)):
                y = comm.all_reduce(x, op, algorithm=algorithm_name)
                found.append(bool(np.isnan(y[0])) and not np.isnan(y[1:]).any())
            found.append(
                not np.signbit(comm.all_reduce(x[2:], "max")[0]) and bool(np.signbit(comm.all_reduce(x[2:], "min")[0]))
            )
    return found


def test_nan_and_signed_zero(crew: Crews) -> None:
    assert all(all(found) for found in crew(nan_and_zeros, 3))


def overlapping(comm: Communicator) -> list[str]:
    """Where in and out overlap in another way than an in-place call's, the result is right all the same."""
    wrong = []
    for memory in (np.empty(100), comm.empty(100, np.float64)):
        for shift in (1, 3, 10):
            memory[:] = np.arange(100.0)
            wanted = comm.size * memory[:50]
            comm.all_reduce(memory[:50], out=memory[shift : shift + 50])
            if not same_bits(memory[shift : shift + 50], wanted) or memory[shift - 1] != shift - 1:
                wrong.append(f"all_reduce, {shift}")
            memory[:] = np.arange(100.0) + 1000 * comm.rank
            wanted = np.concatenate([np.arange(20.0) + 1000 * rank for rank in range(comm.size)])
            comm.all_gather(memory[:20], out=memory[shift : shift + 20 * comm.size])
            if not same_bits(memory[shift : shift + 20 * comm.size], wanted):
                wrong.append(f"all_gather, {shift}")
            memory[:] = np.arange(100.0)
            wanted = np.tile(memory[10 * comm.rank : 10 * comm.rank + 10], comm.size)
            comm.all_to_all(memory[: 10 * comm.size], out=memory[shift : shift + 10 * comm.size])
            if not same_bits(memory[shift : shift + 10 * comm.size], wanted):
                wrong.append(f"all_to_all, {shift}")
    return wrong


def test_overlapping_arrays(crew: Crews) -> None:
    assert crew(overlapping, 3) == [[]] * 3


# Floating-point accuracy


def sums_of_floats(comm: Communicator) -> list[Any]:
    """The relative error of sums, and the bytes of each result."""
    found: list[Any] = []
    for dtype, eps in (("float64", 2.3e-16), ("float32", 1.2e-7), ("float16", 9.8e-4)):
        for name in ("one_shot", "two_shot", "ring", "halving_doubling", "double_tree"):
            for memory in ("ordinary", "symmetric"):
                every = [
                    np.random.default_rng([7, rank]).standard_normal(10_007).astype(dtype) for rank in range(comm.size)
                ]
                wide = [each.astype(np.longdouble) for each in every]
                x = every[comm.rank]
                if memory == "symmetric":
                    x = comm.empty(10_007, dtype)
                    x[:] = every[comm.rank]
                got = comm.all_reduce(x, out=x, algorithm=name)
                bound = comm.size * eps * sum(abs(each) for each in wide)
                found.append((name, dtype, memory, bool((abs(got - sum(wide)) <= bound).all()), got.tobytes()))
    return found


def test_sums_of_floats_are_accurate_and_the_same_everywhere(crew: Crews) -> None:
    first, *others = crew(sums_of_floats, 4)
    assert all(accurate for _, _, _, accurate, _ in first)
    for other in others:
        assert other == first
    by_call = {entry[:3]: entry[4] for entry in first}
    for name, dtype, memory in by_call:  # where the data lies does not change a bit
        assert by_call[name, dtype, memory] == by_call[name, dtype, "ordinary"]


# Plans, lists, objects


def plans(comm: Communicator) -> list[str]:
    wrong = []
    for memory in (lambda n: np.empty(n), lambda n: comm.empty(n, np.float64)):
        x, out = memory(1000), memory(1000 * comm.size)
        reduce_it = comm.plan("all_reduce", x, "max", out=x)
        gather_it = comm.plan("all_gather", x, out=out)
        fresh = comm.plan("reduce", x, root=1)
        meet = comm.plan("barrier")
        for turn in range(20):
            x[:] = turn * 10 + comm.rank
            reduce_it()
            if not (x == turn * 10 + comm.size - 1).all() or reduce_it.out is not x:  # type: ignore[attr-defined]
                wrong.append(f"all_reduce, turn {turn}")
            x[:] = comm.rank + turn
            gather_it()
            if not same_bits(out, np.repeat(np.arange(comm.size) + float(turn), 1000)):
                wrong.append(f"all_gather, turn {turn}")
            fresh()
            result = fresh.out  # type: ignore[attr-defined]
            if (
                (result is None) != (comm.rank != 1)
                or result is not None
                and result[0] != sum(range(comm.size)) + comm.size * turn
            ):
                wrong.append(f"reduce, turn {turn}")
            work = comm.all_reduce(np.ones(3), async_op=True) if turn % 3 == 0 else None
            meet()
            if work is not None and work.wait()[0] != comm.size:
                wrong.append("asynchronous")
    told = errors(
        comm,
        {
            "a copy": lambda: comm.plan("all_reduce", np.ones((4, 4)).T),
            "overlap": lambda: (lambda x: comm.plan("all_reduce", x[:5], out=x[1:6]))(np.ones(6)),
            "unknown": lambda: comm.plan("all_reduced", np.ones(3)),
            "a list": lambda: comm.plan("all_reduce", [np.ones(3)]),
        },
    )
    for name, part in {
        "a copy": "would have to be copied",
        "overlap": "would have to be copied",
        "unknown": "no collective is called 'all_reduced'",
        "a list": "x is of type list",
    }.items():
        if part not in told[name]:
            wrong.append(f"{name}: {told[name]}")
    kept = comm.split(0).plan("all_reduce", np.ones(3))  # type: ignore[union-attr]
    kept()  # its communicator lives as long as it does
    if kept.out[0] != comm.size:  # type: ignore[attr-defined]
        wrong.append("kept")
    return wrong


def test_plans(crew: Crews) -> None:
    assert crew(plans, 3) == [[]] * 3


def again(comm: Communicator) -> list[str]:
    """Calls like one made before go a short way. Wherever their arrays lie, it does what the long one does."""
    rank, size, n, wrong = comm.rank, comm.size, 12, []
    shared = comm.zeros(40 * n, np.int64)

    def place(kind: str, count: int, turn: int) -> Any:
        if kind == "shared":  # elsewhere on each rank, and in each turn
            start = 3 * n * ((turn + rank) % 4) + rank + (20 * n if count > n else 0)
            return shared[start : start + count]
        return np.empty(count + turn, np.int64)[turn:]

    def check(name: str, got: Any, wanted: Any) -> None:
        if not same_bits(np.array(got), np.array(wanted)):
            wrong.append(name)

    for turn in range(4):
        for kind in ("own", "shared", "own on rank 0 only", "shared on rank 0 only"):
            mine = kind.split()[0]
            if rank and "only" in kind:
                mine = "shared" if mine == "own" else "own"
            everybodys = [np.arange(n) * (r + 2) + 100 * turn for r in range(size)]
            x, long = place(mine, n, turn), place(mine, n * size, turn)
            x[:] = everybodys[rank]
            blocks = np.array(everybodys).reshape(size, size, n // size)
            wanted = {
                "all_reduce": sum(everybodys), "all_to_all": blocks[:, rank].ravel(),
                "reduce_scatter": blocks[:, rank].sum(0), "all_gather": np.concatenate(everybodys),
            }  # fmt: skip
            for name, result in wanted.items():
                check(f"{name}, {kind}, {turn}", getattr(comm, name)(x), result)
                target = long[: len(result)]
                if getattr(comm, name)(x, out=target) is not target:
                    wrong.append(f"{name} gives another array than out")
                check(f"{name} to out, {kind}, {turn}", target, result)
            check(f"x after all, {kind}, {turn}", x, everybodys[rank])
            for root in range(size):
                comm.barrier()
                x[:] = everybodys[rank]
                comm.broadcast(x, root=root)
                check(f"broadcast from {root}, {kind}, {turn}", x, everybodys[root])
                x[:] = everybodys[rank]
                for name, result in {"reduce": sum(everybodys), "gather": np.concatenate(everybodys)}.items():
                    target = long[: len(result)] if rank == root else None
                    for out in (None, target):
                        got = getattr(comm, name)(x, root=root, out=out)
                        if (got is None) != (rank != root) or (out is not None and got is not out):
                            wrong.append(f"{name} to {root} gives {got}")
                        elif got is not None:
                            check(f"{name} to {root}, {kind}, {turn}", got, result)
                parts = np.concatenate(everybodys)
                if rank == root:
                    long[:] = parts
                part = comm.scatter(long if rank == root else None, root=root, out=x)
                if part is not x:
                    wrong.append("scatter gives another array than out")
                check(f"scatter from {root}, {kind}, {turn}", part, everybodys[rank])
            x[:] = everybodys[rank]
            comm.all_reduce(x, out=x)
            check(f"in place, {kind}, {turn}", x, sum(everybodys))
            own, block = long[rank * n : (rank + 1) * n], x[rank * n // size : (rank + 1) * n // size]
            for root in range(size):
                x[:] = everybodys[rank]
                comm.reduce(x, root=root, out=x)
                check(f"reduce in place, {kind}, {turn}", x, sum(everybodys) if rank == root else everybodys[rank])
                own[:] = everybodys[rank]
                comm.gather(own, root=root, out=long)
                check(
                    f"gather in place, {kind}, {turn}",
                    long if rank == root else own,
                    parts if rank == root else everybodys[rank],
                )
                own[:] = 0
                comm.scatter(long if rank == root else None, root=root, out=own)
                check(f"scatter in place, {kind}, {turn}", own, everybodys[rank] if rank != root else 0 * own)
            own[:] = everybodys[rank]
            comm.all_gather(own, out=long)
            check(f"all_gather in place, {kind}, {turn}", long, parts)
            x[:] = everybodys[rank]
            comm.reduce_scatter(x, out=block)
            check(f"reduce_scatter in place, {kind}, {turn}", block, sum(everybodys)[rank * n // size :][: n // size])
    both = np.arange(2 * n)
    check("overlapping", comm.all_reduce(both[:n], out=both[n // 2 : n // 2 + n]), np.arange(n) * size)
    frozen = np.arange(n)
    frozen.flags.writeable = False
    told = errors(
        comm,
        {
            "is read-only": lambda: comm.all_reduce(np.arange(n), out=frozen),
            "read-only, and": lambda: comm.broadcast(frozen, root=(rank + 1) % size),
            "not C-contiguous": lambda: comm.all_reduce(np.arange(n), out=np.arange(2 * n)[::2]),
            "the result has 12 of int64": lambda: comm.all_reduce(np.arange(n), out=np.empty(n)),
        },
    )
    return wrong + [f"{part}: {text}" for part, text in told.items() if part not in text]


def test_calls_made_again(crew: Crews) -> None:
    assert crew(again, 3) == [[]] * 3


def lists(comm: Communicator) -> list[str]:
    wrong = []
    shapes = [(3,), (), (0, 5), (2, 4), (1000,)]
    dtypes = ["float32", "int64", "float32", "float64", "int64"]
    for async_op in (False, True):
        xs = [np.full(shape, comm.rank + i, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes))]
        wanted = [np.full(x.shape, sum(rank + i for rank in range(comm.size)), x.dtype) for i, x in enumerate(xs)]
        before = [x.copy() for x in xs]
        got = comm.all_reduce(xs, async_op=async_op)
        got = got.wait() if async_op else got
        if not all(same_bits(a, b) and a.shape == b.shape for a, b in zip(got, wanted)):
            wrong.append("new arrays")
        if not all(same_bits(a, b) for a, b in zip(xs, before)):
            wrong.append("inputs were changed")
        same = comm.all_reduce(xs, out=xs, async_op=async_op)
        same = same.wait() if async_op else same
        if not all(a is b for a, b in zip(same, xs)) or not all(same_bits(a, b) for a, b in zip(xs, wanted)):
            wrong.append("in place")
    if comm.all_reduce([]) != []:
        wrong.append("nothing")
    told = errors(
        comm,
        {
            "out": lambda: comm.all_reduce([np.ones(3)], out=[np.ones(3)]),
            "layout": lambda: (lambda xs: comm.all_reduce(xs, out=xs))([np.ones((4, 4)).T]),
            "numbers": lambda: comm.all_reduce([1.0, 2.0]),
        },
    )
    for name, part in {"out": "out is the same list", "layout": "x[0]", "numbers": "x[0] is of type float"}.items():
        if part not in told[name]:
            wrong.append(f"{name}: {told[name]}")
    return wrong


def test_lists(crew: Crews) -> None:
    assert crew(lists, 2) == [[], []]


def objects(comm: Communicator) -> list[Any]:
    values: list[Any] = [
        None,
        True,
        3,
        -2.5,
        "naïve ☃",
        [],
        [1, [2, {"a": None}]],
        {"lr": 0.1, "steps": [1, 2]},
        "x" * 3_000_000,
    ]
    return [
        comm.broadcast_object(value if comm.rank == root else "ignored", root=root) == value
        for value in values
        for root in range(comm.size)
    ]


def test_broadcast_object(crew: Crews) -> None:
    assert all(all(found) for found in crew(objects, 2))


def not_json(comm: Communicator) -> str:
    try:
        with comm:
            comm.broadcast_object({1, 2} if comm.rank == 0 else None)
    except (TypeError, CollectiveError) as error:
        return str(error)
    return "nothing"


def texts_of_many_lengths(comm: Communicator) -> int:
    """Jobs that are kept more after objects and agreements of ever new lengths."""
    jobs = comm._backend._jobs  # type: ignore[attr-defined]
    before = len(jobs)
    for length in range(120):
        assert comm.broadcast_object("x" * length) == "x" * length
    arrays = [comm.empty(length) for length in range(0, 120, 8)]
    while arrays:
        arrays.pop()
        comm.empty(1)
    return len(jobs) - before


def test_texts_are_of_few_kinds(crew: Crews) -> None:
    assert max(crew(texts_of_many_lengths, 2)) <= 6


def test_broadcast_object_of_what_json_does_not_hold() -> None:
    first, second = collectives.spawn(not_json, 2)
    assert "set is not JSON serializable" in first
    assert "rank 0 gave up: TypeError" in second


# Mistakes, and one's own algorithms


def numbers_that_are_none(comm: Communicator) -> list[str]:
    """A number that is no integer is refused, and leaves no trace in the calls that follow."""
    x = np.ones(2 * comm.size, np.int32)
    calls: list[Callable[[], object]] = [
        lambda: comm.broadcast(x, root=0.0),  # type: ignore[arg-type]
        lambda: comm.all_gather(x, counts=[2.5] * comm.size),  # type: ignore[list-item]
        lambda: comm.signal(0.0),  # type: ignore[arg-type]
        lambda: comm.send(x, 0.0),  # type: ignore[arg-type]
        lambda: comm.split(0.5),  # type: ignore[arg-type]
        lambda: comm.all_reduce(x, premul_sum(2**70)),
        lambda: comm.all_reduce(x, premul_sum(math.nan)),
        lambda: comm.all_reduce(x, premul_sum(math.inf)),
    ]
    wrong = []
    for i, call in enumerate(calls):
        try:
            call()
            wrong.append(f"call {i} went through")
        except (TypeError, ValueError):
            pass
    for root in (0, np.int64(0), np.uint8(0)):
        comm.broadcast(x, root=root)  # type: ignore[arg-type]
    rows = np.full(comm.size, 2)
    if comm.reduce_scatter(x, counts=rows).tolist() != [comm.size] * 2:  # type: ignore[arg-type]
        wrong.append("counts as an array")
    return wrong


def test_numbers_that_are_none(crew: Crews) -> None:
    assert crew(numbers_that_are_none, 2) == [[], []]


def mistakes(comm: Communicator) -> dict[str, str]:
    x = np.ones(6)
    return errors(
        comm,
        {
            "op": lambda: comm.all_reduce(x, "mean"),
            "premul_sum": lambda: comm.all_reduce(x, "premul_sum"),
            "scale": lambda: comm.all_reduce(np.ones(3, np.int32), premul_sum(0.5)),
            "order of complex": lambda: comm.all_reduce(np.ones(3, np.complex64), "max"),
            "average of bool": lambda: comm.all_reduce(np.ones(3, np.bool_), "avg"),
            "root": lambda: comm.broadcast(x, root=2),
            "negative root": lambda: comm.reduce(x, root=-1),
            "rows": lambda: comm.reduce_scatter(np.ones(7)),
            "counts": lambda: comm.all_gather(x, counts=[6]),
            "negative counts": lambda: comm.all_gather(x, counts=[-1, 7]),
            "own count": lambda: comm.all_gather(x, counts=[5, 5]),
            "sum of counts": lambda: comm.reduce_scatter(x, counts=[4, 3]),
            "scatter": lambda: comm.scatter(x, root=1 - comm.rank),
            "algorithm": lambda: comm.all_gather(x, algorithm="tree"),
            "shape": lambda: comm.empty(-1),
            "dtype": lambda: comm.empty(3, "U4"),
        },
    )


def test_mistakes(crew: Crews) -> None:
    parts = {
        "op": "ValueError: op 'mean' is not known",
        "premul_sum": 'use "sum", "prod", "min", "max", "avg" or collectives.premul_sum(scale)',
        "scale": "the scale of an integer type must be an integer",
        "order of complex": "TypeError: max of complex64 makes no sense",
        "average of bool": "TypeError: avg of bool makes no sense",
        "root": "ValueError: root 2 is not a rank",
        "negative root": "ValueError: root -1 is not a rank",
        "rows": "7 rows cannot be split evenly among 2 ranks; pass counts=",
        "counts": "expected 2 numbers of rows",
        "negative counts": "none negative",
        "own count": "counts says 5 rows for rank",
        "sum of counts": "add up to 7 rows, and x has 6",
        "scatter": "must give out=",
        "algorithm": "ValueError: no all_gather algorithm is called 'tree'; there are ",
        "shape": "negative dimension",
        "dtype": "TypeError: dtype <U4",
    }
    for told in crew(mistakes, 2):
        for name, part in parts.items():
            assert part in told[name], f"{name}: {told[name]}"


def with_ones_own(comm: Communicator) -> list[Any]:
    @algorithm("all_reduce")
    def by_way_of_zero(chunks: Chunks, size: int) -> None:
        total = chunks.reduce([chunks(rank=rank) for rank in range(size)], rank=0)
        total.copy_to(range(size))

    @algorithm("all_reduce")
    def forgetful(chunks: Chunks, size: int) -> None:
        chunks.reduce([chunks(rank=rank) for rank in range(size - 1)], rank=0).copy_to(range(size))

    right = float(comm.all_reduce(np.ones(1000), algorithm="by_way_of_zero")[-1])
    try:
        comm.all_reduce(np.ones(1000), algorithm="forgetful")
        told = "nothing"
    except CollectiveError as error:
        told = f"{type(error).__name__}: {error}"
    return [right, told]


def test_ones_own_algorithm_is_proven_too() -> None:
    """Rank 0 proves it; if it is wrong, everybody is told."""
    found = collectives.spawn(with_ones_own, 3)
    assert [right for right, _ in found] == [3.0] * 3
    assert found[0][1].startswith("ProgramError")
    for _, told in found[1:]:
        assert "ProgramError" in told or "is never made" in told or "gave up" in told


def test_a_communicator_describes_itself() -> None:
    comm = collectives.init(rank=0, size=1)
    with comm:
        assert (comm.rank, comm.size, comm.backend) == (0, 1, "shm")
        assert repr(comm) == "<Communicator rank 0 of 1, shm>"


# Other libraries


def with_torch(comm: Communicator) -> list[str]:
    import torch

    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((2, 3), comm.rank + 1, dtype=dtype)
        got = comm.all_reduce(x)
        if got.dtype != dtype or got.shape != x.shape or got.tolist() != [[3] * 3] * 2 or x[0, 0] != comm.rank + 1:
            wrong.append(f"all_reduce {dtype}")
        if comm.all_reduce(x, out=x) is not x or x.tolist() != [[3] * 3] * 2:
            wrong.append(f"in place {dtype}")
        y = torch.full((4,), comm.rank, dtype=dtype)
        if comm.broadcast(y, root=1) is not y or y.tolist() != [1] * 4:
            wrong.append(f"broadcast {dtype}")
        if comm.all_gather(y[:1] + comm.rank).tolist() != [1, 2]:
            wrong.append(f"all_gather {dtype}")
    shared = torch.from_numpy(comm.empty(10))  # symmetric memory, in PyTorch's hands
    shared[:] = 1
    comm.all_reduce(shared, out=shared)
    if shared.tolist() != [2.0] * 10:
        wrong.append("symmetric")
    grads = [torch.ones(3), torch.ones(2, 2)]
    comm.all_reduce(grads, out=grads)
    if grads[1].tolist() != [[2.0] * 2] * 2:
        wrong.append("list")
    return wrong


def test_pytorch(crew: Crews) -> None:
    pytest.importorskip("torch")
    assert crew(with_torch, 2) == [[], []]


def with_jax(comm: Communicator) -> list[str]:
    import jax.numpy as jnp

    wrong = []
    x = jnp.full((2, 3), comm.rank + 1.0, jnp.bfloat16)
    got = comm.all_reduce(x)
    if type(got) is not type(x) or got.dtype != x.dtype or got.tolist() != [[3.0] * 3] * 2:
        wrong.append("all_reduce")
    y = comm.broadcast(x, root=1)
    if y.tolist() != [[2.0] * 3] * 2 or x.tolist() != [[comm.rank + 1.0] * 3] * 2:
        wrong.append("broadcast")
    told = errors(comm, {"out": lambda: comm.all_reduce(x, out=x), "recv": lambda: comm.recv(x, 0)})
    return wrong + [text for text in told.values() if "cannot be written to" not in text]


def test_jax(crew: Crews) -> None:
    pytest.importorskip("jax")
    assert crew(with_jax, 2) == [[], []]
