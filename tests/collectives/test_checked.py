"""The debug mode: it finds NaN and results that differ, says at whose rank, and otherwise changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crew import Crews
from expected import Case
from test_end_to_end import COLLECTIVES, forms, run_all

from collectives import CollectiveError, Communicator


@pytest.fixture(autouse=True)
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_DEBUG_RESULTS", "1")


def test_results_are_what_they_are_without_it(crew: Crews) -> None:
    cases = [
        Case(collective, dtype, rows=rows, form=form, memory=memory)
        for collective in COLLECTIVES
        for form in forms(collective)
        for dtype, rows, memory in (("float32", 13, "ordinary"), ("bfloat16", 0, "mixed"), ("int32", 999, "symmetric"))
    ]
    assert sum(crew(run_all, 3, (cases,)), []) == []


def with_nan(comm: Communicator) -> list[str]:
    told = []
    bad = np.array([1.0, np.nan if comm.rank == 1 else 2.0])
    huge = np.array([np.inf if comm.rank == 0 else -np.inf])
    child = comm.split(0)
    assert child is not None
    for call in (
        lambda: comm.all_reduce(bad),
        lambda: comm.all_reduce(bad, out=bad.copy()),
        lambda: comm.all_reduce(huge),
        lambda: comm.broadcast(bad.copy(), root=1),
        lambda: comm.gather(bad),
        lambda: comm.all_reduce(bad, async_op=True).wait(),
        lambda: comm.plan("all_reduce", bad)(),
        lambda: child.all_reduce(bad),
        lambda: comm.broadcast(bad.copy(), root=0),  # what others have there before is of no interest
        lambda: comm.all_reduce(np.isnan(bad)),
        comm.barrier,
    ):
        try:
            call()
            told.append("nothing")
        except FloatingPointError as error:
            told.append(str(error))
    return told


def test_nan(crew: Crews) -> None:
    for told in crew(with_nan, 3):
        assert told[0] == told[1] == told[5] == "all_reduce(float64, count 2, sum): rank 1 brought a NaN"
        assert told[2] == (
            "all_reduce(float64, count 1, sum): rank 0, 1, 2 has a NaN in its result, and nobody brought one"
        )
        assert told[3] == "broadcast(float64, count 2, root 1): rank 1 brought a NaN"
        assert told[4] == "gather(float64, count 2, root 0): rank 1 brought a NaN"
        assert told[6] == told[7] == told[0]
        assert told[8:] == ["nothing"] * 3


def nan_in_every_collective(comm: Communicator) -> list[str]:
    """Rank 1 brings it, wherever a call has a place for it."""
    told = []
    bad = np.ones(6, np.float32)
    if comm.rank == 1:
        bad[:] = np.nan
    out = np.empty(2, np.float32)
    for collective, x, options in (
        ("all_reduce", bad, {}),
        ("all_reduce", [bad, np.ones(2)], {}),
        ("all_reduce", [np.ones(2), bad], {}),
        ("reduce", bad, {"root": 2}),
        ("broadcast", bad, {"root": 1}),
        ("all_gather", bad, {}),
        ("reduce_scatter", bad, {}),
        ("gather", bad, {"root": 0}),
        ("scatter", bad if comm.rank == 1 else None, {"root": 1, "out": out}),
        ("all_to_all", bad, {}),
        ("all_to_all", bad, {"counts": [1, 2, 3]}),
    ):
        for asynchronous in (False, True):
            x = [each.copy() for each in x] if isinstance(x, list) else x if x is None else x.copy()
            try:
                result = getattr(comm, collective)(x, **{**options, "async_op": asynchronous})
                if asynchronous:
                    result.wait()
                told.append(f"{collective}: nothing")
            except FloatingPointError as error:
                if not str(error).startswith(collective) or not str(error).endswith("rank 1 brought a NaN"):
                    told.append(str(error))
    comm.barrier()
    return told


def test_nan_in_every_collective(crew: Crews) -> None:
    assert crew(nan_in_every_collective, 3) == [[]] * 3


def with_another_result(comm: Communicator, collective: str, x: Any, asynchronous: bool) -> str:
    """As if rank 2's memory were bad."""
    child: Any = comm.split(0)
    backend = child._backend
    inner = backend._inner.run

    def run(call: Any, source: Any, target: Any) -> None:
        inner(call, source, target)
        if comm.rank == 2 and call.dtype.name == "float64":
            target.reshape(-1)[0] += 1

    backend._inner.run = run
    try:
        result = getattr(child, collective)(x, async_op=asynchronous)
        if asynchronous:
            result.wait()
        return "nothing"
    except CollectiveError as error:
        return str(error)
    finally:
        child.close()


@pytest.mark.parametrize(
    ("collective", "x", "asynchronous"),
    [
        ("all_reduce", np.ones(4), False),
        pytest.param("all_reduce", [np.ones(1), np.ones(3)], True, marks=pytest.mark.slow),
        ("broadcast", np.ones(4), True),
        pytest.param("all_gather", np.ones(4), False, marks=pytest.mark.slow),
    ],
)
def test_results_that_differ(crew: Crews, collective: str, x: Any, asynchronous: bool) -> None:
    for told in crew(with_another_result, 3, (collective, x, asynchronous)):
        assert told.startswith(f"{collective}(float64, count 4")
        assert "the results differ between ranks; their hashes: rank 0 " in told
        assert "rank 2 " in told
