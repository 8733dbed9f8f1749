"""`mgpu bench predictions`: every algorithm is measured, and held against the model."""

from __future__ import annotations

import numpy as np
import pytest
from crew import Crews

from bench import predictions
from bench.predictions import Case, Turn, cases, predict, report, settle
from collectives import Communicator, tune

SIZES = [64 << 10, 256 << 10]


def _run(comm: Communicator) -> list[list[Turn]]:
    return predictions.run(comm, SIZES, footprints=[256 << 10, 1 << 20])


def test_every_case_is_measured_and_predicted(crew: Crews) -> None:
    rounds = crew(_run, 2)[0]
    topology, measured, _ = settle(SIZES, rounds)
    assert list(measured) == list(cases())
    for case, times in measured.items():
        assert [nbytes for nbytes, _ in times] == SIZES
        for nbytes, seconds in times:
            assert seconds > 0 and predict(case, nbytes, topology) > 0


def test_only_turns_of_one_state_count() -> None:
    def turns(trip: float, factor: float) -> list[Turn]:
        times = {n: factor * np.full(2, n * 1e-10) for n in (1 << 20, 16 << 20)}
        constants = tune.Rounds(2, factor * np.full(2, 1e-7), np.full(2, 5e-8), times, times, times)
        return [Turn(trip, trip, constants), *(Turn(trip, trip, dict.fromkeys(cases(), factor * n)) for n in SIZES)]

    near, far, mixed = turns(100.0, 1.0), turns(500.0, 5.0), [each._replace(before=500.0) for each in turns(100.0, 3.0)]
    topology, measured, said = settle(SIZES, [near, far, near, mixed])
    assert said == "# cores near, in at least 2 of 4 turns of each kind"
    assert topology.latency == 1e-7 and all(times == [(n, float(n)) for n in SIZES] for times in measured.values())
    changing = [near[0], far[1], near[2]]
    topology, measured, said = settle(SIZES, [changing])
    assert said == "# cores now near, now far: all turns count"
    assert all(times == [(SIZES[0], 5.0 * SIZES[0]), (SIZES[1], SIZES[1])] for times in measured.values())


def test_the_score_leaves_out_what_was_fitted() -> None:
    fitted = Case("reduce", "one_shot", "symmetric", False)
    others = [Case("reduce", "one_shot", "staged", False), Case("all_reduce", "ring", "symmetric", True)]
    lines = list(report(SIZES, {fitted: [1.0, 1.0], others[0]: [0.7, 1.4], others[1]: [1.25, 1.31]}))
    assert lines[0].split() == ["predicted", "/", "measured", "65,536", "262,144"]
    assert lines[3].split() == ["all_reduce", "ring", "symmetric", "in", "place", "1.25", "1.31"]
    assert lines[-1] == "1 of 4 predictions are within 30% of what was measured"


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(SystemExit):
        predictions.main(["-n", "1"])
