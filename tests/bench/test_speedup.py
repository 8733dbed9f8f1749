"""Where the time goes that two ranks do not save: reasons that add up."""

import re

import pytest

from bench import speedup
from bench.diff import read


def test_the_reasons_add_up_to_what_is_lost():
    by_rank = [
        {"one": [0.020], "part": [0.011], "together": [0.012], "all": [0.015]},
        {"one": [], "part": [], "together": [0.014], "all": [0.0155]},
    ]
    found = speedup.summarise(by_rank)
    assert found == pytest.approx({"one": 0.020, "part": 0.011, "mean": 0.013, "slowest": 0.014, "all": 0.0155})
    lines = list(speedup.report(found, 2, 128, 1))
    assert "speed-up 1.29" in lines[2] and lines[3].split()[1:] == ["10.00", "2.00"]
    lost = [float(re.search(r"([+-]\d+\.\d\d) ", line).group(1)) for line in lines[4:]]
    assert lost == pytest.approx([1, 2, 1, 1.5])
    assert sum(lost) == pytest.approx(15.5 - 10)


def test_it_measures(tmp_path, capsys):
    assert speedup.main(["--batch", "8", "--rounds", "2", "--json", str(tmp_path / "found.json")]) == 0
    found = read(tmp_path / "found.json")
    assert len(found["samples"]) == 2 * len(speedup.WAYS)
    assert all(row["microseconds"] > 0 for row in (*found["rows"], *found["samples"]))
    assert "speed-up" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["-n", "1"], ["--rounds", "0"], ["--batch", "1"]], ids=str)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(SystemExit):
        speedup.main(wrong)
