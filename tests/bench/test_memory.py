"""What ranks hold by stage of ZeRO: the formulas, the table, and one real run."""

import json

import pytest

from bench.memory import STAGES, formula, main, report, summarise


def test_the_formulas_are_those_of_zero():
    assert [formula(stage, 12, 2) for stage in STAGES] == [48, 36, 30, 24]
    assert formula(3, 12, 4) == 12


def test_the_table_is_of_the_rank_that_has_most():
    ranks = [[{"between": 1e6 * (rank + stage), "most": 2e6} for stage in STAGES] for rank in (3, 1)]
    found = summarise(ranks)
    assert found[0] == {"between": 3e6, "most": 2e6}
    lines = list(report(found, 2**20, 2))
    assert len(lines) == 2 + len(STAGES)
    assert lines[2].split() == ["0", "4.0", "2.9", "72%", "1.9"]


@pytest.mark.slow  # starts ranks, and needs layers that are large beside all else
def test_a_real_run_holds_what_the_formulas_say(tmp_path):
    file = tmp_path / "x.json"
    assert main(["--layers", "8", "--json", str(file)]) == 0
    for stage, row in zip(STAGES, json.loads(file.read_text())["stages"], strict=True):
        wanted = formula(stage, 8 * 4 * 1024**2, 2)
        assert 0.9 * wanted < row["between"] < 1.2 * wanted, stage
        assert row["between"] < row["most"] + 2**20


@pytest.mark.parametrize("arguments", [["-n", "1"], ["--layers", "0"], ["--width", "0"]])
def test_wrong_flags_are_usage_errors(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
