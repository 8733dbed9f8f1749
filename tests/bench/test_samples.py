"""From samples to rows: medians within one state, ratios against peers, more rounds while they are needed."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.candidates import LIMIT, Candidate
from bench.case import Case
from bench.crew import CrewError
from bench.samples import Measurement, Sample, best_peer, summarise, write_csv, write_json
from bench.states import FAR, NEAR

CASE = Case("all_reduce", 1 << 20, 1 << 18, "float32", "sum", -1, True)
NEAR_NS, FAR_NS = 100.0, 500.0


def sample(label: str, us: float, trip: float = NEAR_NS, after: float | None = None, round: int = 0) -> Sample:
    return Sample(label, CASE, round, trip, trip if after is None else after, 20, us, 0)


def test_medians_are_taken_in_one_state_only() -> None:
    samples = [sample("mgpu", us) for us in (10, 11, 12)] + [sample("mpi", us) for us in (20, 22, 24)]
    samples += [sample("mgpu", 100, FAR_NS), sample("mpi", 90, FAR_NS), sample("mpi", 1, NEAR_NS, after=FAR_NS)]
    ours, theirs = summarise(samples, 2, ["mgpu", "mpi"], ["mpi"])
    assert (ours.label, ours.state, ours.samples, ours.microseconds) == ("mgpu", NEAR, 3, 11)
    assert (theirs.samples, theirs.microseconds) == (3, 22)
    assert best_peer(ours) == ours.ratios["mpi"] == 2.0
    far, _ = summarise(samples, 2, ["mgpu", "mpi"], ["mpi"], wanted=FAR)
    assert (far.state, far.samples, best_peer(far)) == (FAR, 1, 0.9)


def test_a_candidate_without_a_sample_in_that_state_has_no_row() -> None:
    samples = [sample("mgpu", 10), sample("mgpu", 10), sample("mpi", 90, FAR_NS)]
    assert [row.label for row in summarise(samples, 2, ["mgpu", "mpi"], ["mpi"], wanted=NEAR)] == ["mgpu"]


def test_the_best_peer_is_the_fastest_and_the_limit_is_no_peer() -> None:
    samples = [sample("gloo", 90), sample(LIMIT, 8), sample("mgpu", 10), sample("mpi", 20)]
    rows = {row.label: row for row in summarise(samples, 2, ["mgpu", "gloo", "mpi", LIMIT], ["gloo", "mpi"])}
    assert list(rows) == ["mgpu", "gloo", "mpi", LIMIT]  # the order asked for, not that of the samples
    assert rows["mgpu"].ratios == {"gloo": 9.0, "mpi": 2.0}
    assert best_peer(rows["mgpu"]) == 2.0
    assert rows["mgpu"].of_limit == 0.8
    assert rows[LIMIT].ratios == {} and rows[LIMIT].of_limit is None


def test_bandwidths_and_wrong_elements_are_those_of_the_row() -> None:
    bad = Sample("mgpu", CASE, 1, NEAR_NS, FAR_NS, 20, 999.0, 7)  # mixed: its time does not count, its errors do
    (row,) = summarise([sample("mgpu", 100.0), bad], 4, ["mgpu"], [])
    assert row.algbw == pytest.approx((1 << 20) / 100 / 1e3)
    assert row.busbw == pytest.approx(1.5 * row.algbw)
    assert row.wrong == 7 and row.microseconds == 100.0


class FakeCrew:
    """Answers like a crew of two ranks whose calls take `ns[rank]` each; `trips` are its ping-pongs."""

    def __init__(self, ns: Sequence[int], trips: Sequence[float] = (NEAR_NS,), fails: bool = False) -> None:
        self.ranks = 2
        self.track = self
        self.requests: list[dict[str, Any]] = []
        self._ns, self._trips, self._fails = ns, list(trips), fails
        self.killed = False

    def take(self, count: int) -> int:
        return 1

    def kill(self) -> None:
        self.killed = True

    def ask(self, request: dict[str, Any], ranks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        if request["do"] == "ping":
            trip = self._trips.pop(0) if len(self._trips) > 1 else self._trips[0]
            return [{"ns": trip}] * 2
        if self._fails:
            raise CrewError("it broke")
        self.requests.append(request.get("with", {}))
        if request["do"] == "allocate":
            return [{}] * 2
        if request["with"]["case"]["dtype"] == "float16":
            return [{"unsupported": "no halves here"}] * 2
        return [{"ns": [ns] * request["with"]["calls"], "wrong": rank} for rank, ns in enumerate(self._ns)]


def measured(crews: dict[str, FakeCrew], cases: Sequence[Case] = (CASE,), **options: Any) -> Measurement:
    candidates = [Candidate(name, "symmetric" if name == "mgpu" else "ordinary") for name in crews]
    measurement = Measurement(crews, candidates, cases)  # type: ignore[arg-type]
    measurement.allocate(CASE.nbytes)
    defaults = {"rounds": 7, "calls": 20, "warmups": 5, "check": True, "wanted": None, "progress": int}
    measurement.run(**{**defaults, **options})
    return measurement


def test_a_call_takes_as_long_as_its_slowest_rank_and_errors_of_all_ranks_add_up() -> None:
    taken = measured({"mgpu": FakeCrew([1000, 3000])}, rounds=1).samples
    assert [(s.microseconds, s.wrong, s.calls) for s in taken] == [(3.0, 1, 20)]


def test_every_round_visits_everybody() -> None:
    samples = measured({"mgpu": FakeCrew([1000, 1000]), "gloo": FakeCrew([5000, 5000])}).samples
    assert len(samples) == 14
    for round in range(7):
        assert {s.label for s in samples if s.round == round} == {"mgpu", "gloo"}
    assert len({tuple(s.label for s in samples if s.round == round) for round in range(7)}) == 2  # in changing order


def test_long_calls_are_made_less_often() -> None:
    crew = FakeCrew([20_000_000, 20_000_000])  # 20 ms
    measured({"mgpu": crew}, rounds=2)
    assert [request["calls"] for request in crew.requests[1:]] == [20, 3]
    large = Case("all_reduce", 128 << 20, 32 << 20, "float32", "sum", -1, True)
    crew = FakeCrew([1000, 1000])
    measured({"mgpu": crew}, [large], rounds=2)
    assert [request["calls"] for request in crew.requests[1:]] == [3, 20]  # cautious until one is known


def test_more_rounds_are_made_for_a_wanted_state_but_not_for_ever() -> None:
    flips = FakeCrew([1000, 1000], trips=[FAR_NS] * 10 + [NEAR_NS])
    assert len(measured({"mgpu": flips}, wanted=NEAR).samples) == 5 + 7
    never = measured({"mgpu": FakeCrew([1000, 1000], trips=[FAR_NS])}, wanted=NEAR)
    assert len(never.samples) == 4 * 7
    assert never.remarks == [
        "the cores were near too seldom in 28 rounds: of 1 figure, with fewer than 7 samples: 1, with none: 1; "
        "run it again, or without --state"
    ]


def test_a_peer_that_fails_is_dropped_with_a_remark_and_ours_ends_the_run() -> None:
    broken = FakeCrew([1, 1], fails=True)
    measurement = measured({"mgpu": FakeCrew([1000, 1000]), "gloo": broken})
    assert {s.label for s in measurement.samples} == {"mgpu"} and len(measurement.samples) == 7
    assert broken.killed and "it broke" in measurement.remarks[0]
    with pytest.raises(CrewError, match="it broke"):
        measured({"mgpu": FakeCrew([1, 1], fails=True)})


def test_what_a_peer_cannot_do_is_remarked_once_and_left_out() -> None:
    half = Case("all_reduce", 1 << 20, 1 << 19, "float16", "sum", -1, True)
    measurement = measured({"mgpu": FakeCrew([1, 1])}, [half, CASE])
    assert measurement.remarks == ["mgpu: no halves here"]
    assert {s.case.dtype for s in measurement.samples} == {"float32"}


def test_the_memory_is_measured_in_place_for_large_sizes_only() -> None:
    small = Case("all_reduce", 8, 2, "float32", "sum", -1, True)
    out = Case("all_reduce", 1 << 20, 1 << 18, "float32", "sum", -1, False)
    samples = measured({"mgpu": FakeCrew([1, 1]), LIMIT: FakeCrew([3000, 3000])}, [small, out, CASE], rounds=1).samples
    assert [(s.case, s.microseconds) for s in samples if s.label == LIMIT] == [(CASE, pytest.approx(4.0))]


def test_files_hold_what_the_table_shows(tmp_path: Path) -> None:
    samples = [sample("mgpu", 10), sample("mpi", 20), sample("mpi", 30, NEAR_NS, after=FAR_NS)]
    rows = summarise(samples, 2, ["mgpu", "mpi"], ["mpi"])
    write_json(tmp_path / "a.json", {"benchmark": "all_reduce"}, rows, samples)
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["benchmark"] == "all_reduce"
    assert content["rows"][0]["case"]["nbytes"] == 1 << 20 and content["rows"][0]["ratios"] == {"mpi": 2.0}
    assert [s["state"] for s in content["samples"]] == ["near", "near", "mixed"]
    write_csv(tmp_path / "a.csv", rows)
    with (tmp_path / "a.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["candidate"] for line in lines] == ["mgpu", "mpi"]
    assert float(lines[0]["mpi / this"]) == 2.0 and float(lines[0]["microseconds"]) == 10.0
