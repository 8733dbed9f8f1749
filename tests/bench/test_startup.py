"""How long a first all-reduce takes in a new process."""

import json
from pathlib import Path

import pytest

from bench.startup import STAGES, main, report


def test_the_table_has_cold_beside_warm_and_says_what_was_imported() -> None:
    seconds = {kind: dict.fromkeys(STAGES, value) for kind, value in (("cold", 1.25), ("warm", 0.5))}
    lines = report(seconds, {"cold": ["numba"], "warm": []}, 2)
    assert [line.split()[:2] for line in lines[2:-2]] == [["1250", "500"]] * len(STAGES)
    assert lines[-2].endswith("cold: a rank has imported numba")
    assert lines[-1].endswith("warm: a rank has imported nothing heavy")


@pytest.mark.slow  # compiles the kernels
def test_stages_follow_each_other_in_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "2", "--runs", "1", "--json", str(tmp_path / "x.json")]) == 0
    assert "slowest rank's first all-reduce" in capsys.readouterr().out
    content = json.loads((tmp_path / "x.json").read_text())
    for kind in ("cold", "warm"):
        moments = [row["microseconds"] for row in content["rows"] if row["label"] == kind]
        assert len(moments) == len(STAGES)
        assert moments == sorted(moments)
    assert content["loaded"]["warm"] == []  # neither Numba nor CUDA on a rank whose kernels are in the cache


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["-n", "0"], ["--warm"]])
def test_wrong_flags_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
