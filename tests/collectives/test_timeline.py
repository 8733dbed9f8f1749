"""The timeline: every rank's calls and spans in one file, what is hidden computed from it, and its picture."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import collectives
from collectives import timeline, trace
from collectives.timeline import COMMUNICATION, COMPUTE, span


def work(comm):
    x = np.ones(50_000, np.float32)
    with span("forward"):
        time.sleep(0.01)
    pending = comm.all_reduce(x, out=x, async_op=True)
    with span("backward"):
        time.sleep(0.02)
    pending.wait()
    comm.barrier()
    comm.sendrecv(x, 1 - comm.rank, np.empty_like(x), 1 - comm.rank)
    plan = comm.plan("all_reduce", x, out=x)
    plan()
    half = comm.split(comm.rank)
    half.broadcast(x)


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "folder" / "trace.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_TIMELINE", str(path))
        collectives.spawn(work, 2)
    return trace.read(path)


def of(events, rank, name):
    return [e for e in events if e["pid"] == rank and e["ph"] == "X" and e["name"].startswith(name)]


def test_every_call_of_every_rank_is_there(events):
    for rank in range(2):
        for name in ("forward", "backward", "all_reduce(float32, count 50000", "barrier", "broadcast(float32"):
            assert of(events, rank, name), name
        assert of(events, rank, f"send to {1 - rank}, recv from {1 - rank}")
        assert {"rank 0", "rank 1"} == {e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_an_asynchronous_call_is_beside_what_the_rank_computes(events):
    for rank in range(2):
        (beside,) = [e for e in of(events, rank, "all_reduce") if e["tid"] == COMMUNICATION]
        (forward,), (backward,) = of(events, rank, "forward"), of(events, rank, "backward")
        assert forward["dur"] >= 10_000
        assert forward["ts"] + forward["dur"] <= beside["ts"] and beside["dur"] > 0
        assert beside["ts"] + beside["dur"] <= of(events, rank, "barrier")[0]["ts"]
        share = trace.shares(events)[rank]
        assert 0 <= share.hidden <= share.communicating == pytest.approx(beside["dur"] / 1e6, abs=1e-6)
        assert share.computing == pytest.approx((forward["dur"] + backward["dur"]) / 1e6, abs=1e-6)


def test_ranks_share_one_clock(events):
    barriers = [of(events, rank, "barrier")[0] for rank in range(2)]
    first_end = min(e["ts"] + e["dur"] for e in barriers)
    assert max(e["ts"] for e in barriers) <= first_end + 1000  # nobody leaves a barrier before all have come


def test_the_command_prints_shares_and_draws(events, tmp_path, capsys):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert trace.main([str(file), "--plot", str(tmp_path / "picture.png"), "--seconds", "0.05"]) == 0
    assert "hidden" in capsys.readouterr().out
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    file.write_text("[]")
    assert trace.main([str(file)]) == 1
    file.write_text("no json")
    with pytest.raises(ValueError, match="is no timeline"):
        trace.main([str(file)])


def test_the_file_is_whole_after_every_write(tmp_path):
    notes = [timeline.Timeline(tmp_path / "t.json", rank) for rank in range(3)]
    for turn in range(4):
        for note in notes:
            note.note(f"turn {turn}", "compute", COMPUTE, turn * 1000, turn * 1000 + 500)
            note.write()
            events = json.loads((tmp_path / "t.json").read_text())
    assert len([e for e in events if e["ph"] == "X"]) == 12


def test_a_new_run_begins_the_file_anew(tmp_path):
    for _ in range(2):
        note = timeline.Timeline(tmp_path / "t.json", 0)
        note.note("once", "compute", COMPUTE, 0, 1)
        note.write()
    assert (tmp_path / "t.json").read_text().count("once") == 1


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def moments(intervals):
    return {moment for first, last in intervals for moment in range(first, last)}


@given(INTERVALS, INTERVALS)
def test_arithmetic_of_intervals_is_that_of_sets(one, other):
    a, b = trace.union(one), trace.union(other)
    assert moments(a) == moments(one)
    assert moments(trace.common(a, b)) == moments(one) & moments(other)
    assert moments(trace.without(a, b)) == moments(one) - moments(other)
    assert trace.length(a) == len(moments(one))
