"""The bubble and the memory of pipelines: how they are summed up and shown, and one real run."""

from pathlib import Path

import pytest

from bench.diff import read
from bench.pipeline import main, report, summarise
from mgpu_core.parallel.pipeline_schedules import SCHEDULES


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_busiest_rank_sets_the_bubble() -> None:
    ranks = [
        {"gpipe": {"seconds": [1.0, 1.2, 9.0], "busy": [0.5, 0.8, 4.0], "kept": 4.5}},
        {"gpipe": {"seconds": [1.1, 1.1, 8.0], "busy": [0.8, 0.6, 6.0], "kept": 4.2}},
    ]
    found = summarise(ranks)["gpipe"]
    assert found["milliseconds"] == pytest.approx(1200)
    assert found["bubble"] == pytest.approx(1.2 / 0.8 - 1)  # the median of 0.375, 0.5 and 0.5
    assert found["kept"] == [4.5, 4.2]


def test_the_table_has_the_formulas_beside_what_was_found() -> None:
    row = {"milliseconds": 123.456, "bubble": 0.39, "kept": [4.26, 3.3, 2.2, 1.1]}
    lines = list(report(dict.fromkeys(SCHEDULES, row), 4, 8, "sleep"))
    assert lines[0] == "# pipeline: 4 ranks, 8 micro-batches, stages that sleep"
    assert [line.split()[0] for line in lines[3:7]] == list(SCHEDULES)
    assert lines[4].split() == "1f1b 123.5 0.375 0.390 4 3 2 1 4.3 3.3 2.2 1.1".split()


@pytest.mark.parametrize("arguments", [["-n", "1"], ["-n", "2", "-m", "3"], ["--rounds", "0"], ["--work", "play"]])
def test_wrong_flags_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


@pytest.mark.slow  # starts ranks, and steps of many milliseconds
@pytest.mark.parametrize("work", ["sleep", "compute"])
def test_a_real_run_keeps_what_the_formulas_say(work: str, tmp_path: Path) -> None:
    """But for the working memory of a pass, and the gradients that the zero-bubble schedule puts off."""
    file = tmp_path / "x.json"
    assert main(["-n", "2", "-m", "4", "--layers", "3", "--rounds", "1", "--work", work, "--json", str(file)]) == 0
    content = read(file)
    assert [sample["label"] for sample in content["samples"]] == list(SCHEDULES)
    for row in content["rows"]:
        name = row["label"]
        assert row["case"]["work"] == work and row["bubble"] > 0
        for rank, kept in enumerate(row["kept"]):
            peak = SCHEDULES[name].peak(rank, 2, 4)
            put_off = rank if name == "zero-bubble" else 0
            assert 0.9 * peak < kept < peak + put_off + 2.5, (name, rank)
