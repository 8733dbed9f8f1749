"""`mgpu bench predictions`: every algorithm is measured, and held against the model."""

from __future__ import annotations

import pytest
from crew import Crews

from bench import predictions
from bench.predictions import Case, Measured, cases, predict, report
from collectives import Communicator, tune
from collectives.cost import Topology

SIZES = [64 << 10, 256 << 10]


def _run(comm: Communicator) -> tuple[Topology, Measured]:
    predictions.measure = lambda comm: tune.measure(comm, footprints=[256 << 10, 1 << 20])
    return predictions.run(comm, SIZES)


def test_every_case_is_measured_and_predicted(crew: Crews) -> None:
    topology, measured = crew(_run, 2)[0]
    assert list(measured) == list(cases())
    for case, times in measured.items():
        assert [nbytes for nbytes, _ in times] == SIZES
        for nbytes, seconds in times:
            assert seconds > 0 and predict(case, nbytes, topology) > 0


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
