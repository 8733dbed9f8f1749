"""How much of the communication hides behind backward, by time and by timeline."""

import json
import os
from pathlib import Path

import pytest

from bench.overlap import main, report


def test_the_table_says_what_a_step_gains_and_where_communication_was() -> None:
    kinds = {"train": 12.0, "compute": 10.0, "communicate": 4.0}
    _, line = report({"784-8-8-10": kinds}, {"784-8-8-10": 0.75})
    assert line.split() == ["784-8-8-10", "12.00", "10.00", "4.00", "50%", "75%"]


@pytest.mark.slow
def test_two_ranks_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["-n", "2", "--width", "64", "--batch", "4", "--steps", "2", "--rounds", "1"]
    assert main([*short, "--json", f"{tmp_path}/x.json"]) == 0
    assert "784-64-64-10" in capsys.readouterr().out
    content = json.loads((tmp_path / "x.json").read_text())
    assert 0 <= content["beside"]["784-64-64-10"] <= 1
    assert all(row["microseconds"] > 0 for row in content["rows"])
    assert "MGPU_TIMELINE" not in os.environ
