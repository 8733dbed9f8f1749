"""Samples, and what is reported of them.

A *sample* is one visit to one candidate: some calls in a row, of which the median counts, where a call's time is that
of its slowest rank. A *round* visits every candidate at every size once. A *row* is the median over the rounds' samples
in one state of the machine.
"""

from __future__ import annotations

import csv
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import bandwidth, record, states
from bench.candidates import LIMIT, Candidate, is_ours
from bench.case import Case, placements
from bench.crew import Crew, CrewError
from bench.pace import TRIPS
from collectives.wording import counted

_SAMPLE_SECONDS = 0.05  # a sample makes fewer calls than asked for rather than take much longer
_FEWEST_CALLS = 3
_SMALL = 1 << 20  # bytes: so small that the first sample can make all its calls
_MOST_ROUNDS = 4  # times the rounds asked for, while waiting for a state
LIMIT_FROM = 256 << 10  # bytes: below, `a += b` would measure NumPy's overhead instead of the memory


@dataclass(frozen=True)
class Sample:
    """One visit. `before` and `after` are the round trips beside it in ns, None for one rank."""

    label: str
    case: Case
    round: int
    before: float | None
    after: float | None
    calls: int
    microseconds: float
    wrong: int


@dataclass(frozen=True)
class Row:
    """One candidate at one case. `ratios` is each peer's time over this one's; `of_limit` the memory limit's."""

    label: str
    case: Case
    state: str
    samples: int
    low: float  # lower quartile, us
    microseconds: float
    high: float  # upper quartile, us
    algbw: float
    busbw: float
    wrong: int
    ratios: Mapping[str, float]
    of_limit: float | None


class Measurement:
    """Crews, the candidates that each of them offers, and the samples taken so far."""

    def __init__(self, crews: Mapping[str, Crew], candidates: Sequence[Candidate], cases: Sequence[Case]) -> None:
        self.crews = dict(crews)
        self.samples: list[Sample] = []
        self.remarks: list[str] = []
        self._visits = [(candidate, case) for case in cases for candidate in candidates if _meant(candidate, case)]

    def allocate(self, nbytes: int) -> None:
        """An input and an output of `nbytes` for each kind of memory that a candidate uses."""
        for name, memory in dict.fromkeys((candidate.crew, candidate.memory) for candidate, _ in self._visits):
            with self._tolerating(name):
                self.crews[name].ask({"do": "allocate", "with": {"memory": memory, "nbytes": nbytes}})

    def run(
        self,
        rounds: int,
        *,
        calls: int,
        warmups: int,
        check: bool,
        wanted: str | None = None,
        progress: Callable[[], object] | None = None,
    ) -> None:
        """Make `rounds` rounds; more, while a case has not as many samples in the wanted state, within reason.

        `progress` is called after every sample.
        """
        for round in range(rounds * (_MOST_ROUNDS if wanted else 1)):
            if round >= rounds and self._enough(rounds, wanted):
                break
            for candidate, case in self._order(round):
                if candidate.crew in self.crews:
                    with self._tolerating(candidate.crew):
                        self._visit(candidate, case, round, calls, warmups, check)
                if progress is not None:
                    progress()
        if wanted and not self._enough(rounds, wanted):
            counts = self._counts(wanted)
            few, none = sum(count < rounds for count in counts), counts.count(0)
            self.remarks.append(
                f"the cores were {wanted} too seldom in {counted(round + 1, 'round')}: of "
                f"{counted(len(counts), 'figure')}, with fewer than {counted(rounds, 'sample')}: {few}, "
                f"with none: {none}; run it again, or without --state"
            )

    @property
    def visits(self) -> int:
        """How many samples a round takes."""
        return len(self._visits)

    def _order(self, round: int) -> Iterator[tuple[Candidate, Case]]:
        """All visits, case by case, the candidates of a case in another order each round."""
        cases: dict[Case, list[Candidate]] = defaultdict(list)
        for candidate, case in self._visits:
            cases[case].append(candidate)
        for case, candidates in cases.items():
            random.Random(round).shuffle(candidates)
            yield from ((candidate, case) for candidate in candidates)

    def _visit(self, candidate: Candidate, case: Case, round: int, calls: int, warmups: int, check: bool) -> None:
        crew = self.crews[candidate.crew]
        calls = self._affordable(candidate, case, calls)
        warmups = min(warmups, calls)
        limit = candidate.crew == LIMIT
        called = Case("all_reduce", case.nbytes, case.nbytes // 4, "float32", "sum", -1, True) if limit else case
        request = {
            "candidate": dataclasses.asdict(candidate),
            "case": dataclasses.asdict(called),
            "warmups": warmups,
            "calls": calls,
            "check": check and not limit,
            "first": crew.track.take(warmups + calls),
        }
        before = _round_trip(crew)
        answers = crew.ask({"do": "sample", "with": request})
        after = _round_trip(crew)
        if "unsupported" in answers[0]:
            self.remarks.append(f"{candidate.label}: {answers[0]['unsupported']}")
            left_out = (candidate, case.dtype, case.op, case.in_place)
            self._visits = [(c, k) for c, k in self._visits if (c, k.dtype, k.op, k.in_place) != left_out]
            return
        microseconds = median(max(times) for times in zip(*(answer["ns"] for answer in answers), strict=True)) / 1e3
        if limit:
            microseconds = bandwidth.memory_limit(case.collective, crew.ranks, microseconds)
        wrong = sum(answer["wrong"] for answer in answers)
        self.samples.append(Sample(candidate.label, case, round, before, after, calls, microseconds, wrong))

    def _affordable(self, candidate: Candidate, case: Case, calls: int) -> int:
        for sample in reversed(self.samples):
            if (sample.label, sample.case) == (candidate.label, case):
                return max(_FEWEST_CALLS, min(calls, int(_SAMPLE_SECONDS * 1e6 / sample.microseconds)))
        return calls if case.nbytes <= _SMALL else min(calls, _FEWEST_CALLS)

    def _enough(self, rounds: int, wanted: str | None) -> bool:
        return all(count >= rounds for count in self._counts(wanted))

    def _counts(self, wanted: str | None) -> list[int]:
        """How many samples each visit has in the wanted state."""
        limit = _threshold(self.samples)
        seen = Counter((s.label, s.case) for s in self.samples if _state(s, limit) == wanted)
        return [seen[c.label, case] for c, case in self._visits if c.crew in self.crews]

    @contextmanager
    def _tolerating(self, name: str) -> Iterator[None]:
        """A peer that fails is dropped with a remark, and the rest go on; ours, failing, ends the run."""
        try:
            yield
        except CrewError as error:
            if is_ours(name):
                raise
            self.remarks.append(f"dropped: {error}")
            self.crews.pop(name).kill()


def summarise(
    samples: Sequence[Sample], ranks: int, labels: Sequence[str], peers: Sequence[str], wanted: str | None = None
) -> list[Row]:
    """A row per case and candidate, these in the order of `labels`; all rows of a case in one state.

    `peers` are the labels that ratios are against. A candidate without a sample in that state has no row.
    """
    limit = _threshold(samples)
    by_case: dict[Case, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        by_case[sample.case][sample.label].append(sample)
    rows = []
    for case, by_label in by_case.items():
        tags = {label: [_state(sample, limit) for sample in seen] for label, seen in by_label.items()}
        common = states.common_state(tags, wanted if ranks > 1 else None)
        times = {
            label: [sample.microseconds for sample in seen if _state(sample, limit) == common]
            for label, seen in by_label.items()
        }
        medians = {label: median(values) for label, values in times.items() if values}
        for label in filter(medians.__contains__, labels):
            low, middle, high = states.quartiles(times[label])
            rows.append(
                Row(
                    label,
                    case,
                    common,
                    len(times[label]),
                    low,
                    middle,
                    high,
                    bandwidth.algorithm_bandwidth(case.nbytes, middle),
                    bandwidth.bus_bandwidth(case.collective, ranks, case.nbytes, middle),
                    max(sample.wrong for sample in by_label[label]),
                    {} if label == LIMIT else {peer: medians[peer] / middle for peer in peers if peer in medians},
                    medians[LIMIT] / middle if LIMIT in medians and label != LIMIT else None,
                )
            )
    return rows


def best_peer(row: Row) -> float | None:
    """The fastest peer's time over this row's: above 1, this row is faster than every peer."""
    return min(row.ratios.values(), default=None)


def write_json(path: Path, about: Mapping[str, Any], rows: Sequence[Row], samples: Sequence[Sample]) -> None:
    """Everything: what was run where, the rows, and every sample with the round trips beside it."""
    limit = _threshold(samples)
    record.write(
        path,
        {**about, "near_below_ns": limit},
        [dataclasses.asdict(row) for row in rows],
        [{**dataclasses.asdict(sample), "state": _state(sample, limit)} for sample in samples],
    )


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """A line per row; each peer's ratio in a column of its own."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.ratios))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        fields = ("collective", "nbytes", "count", "dtype", "op", "root", "in_place")
        plain = ("state", "samples", "low", "microseconds", "high", "algbw", "busbw", "wrong", "of_limit")
        writer.writerow(["candidate", *fields, *plain, *(f"{peer} / this" for peer in peers)])
        for row in rows:
            case = [getattr(row.case, field) for field in fields]
            writer.writerow([row.label, *case, *(getattr(row, name) for name in plain), *map(row.ratios.get, peers)])


def _meant(candidate: Candidate, case: Case) -> bool:
    return candidate.crew != LIMIT or (case.nbytes >= LIMIT_FROM and case.in_place == placements(case.collective)[-1])


def _round_trip(crew: Crew) -> float | None:
    if crew.ranks == 1:
        return None
    return crew.ask({"do": "ping", "with": {"first": crew.track.take(TRIPS)}}, ranks=(0, 1))[0]["ns"]


def _threshold(samples: Sequence[Sample]) -> float:
    return states.threshold([trip for s in samples for trip in (s.before, s.after) if trip is not None])


def _state(sample: Sample, limit: float) -> str:
    if sample.before is None or sample.after is None:
        return states.NEAR  # one rank is never far from itself
    return states.state(sample.before, sample.after, limit)
