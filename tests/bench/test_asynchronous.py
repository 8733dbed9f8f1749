"""The comparison of synchronous and asynchronous training: what it makes of the ranks' figures, and that it runs."""

import json

import pytest

from bench import asynchronous

RANKS = [
    {
        "sync": {"seconds": [0.0, 9.0, 4.0], "images": [0, 100, 200], "accuracy": [0.1, 0.5, 0.8], "shares": [1, 1]},
        "async": {
            "seconds": [0.0, 3.0, 2.0],
            "images": [0, 100, 200],
            "accuracy": [0.1, 0.4, 0.7],
            "staleness": {1: 3, 0: 1},
        },
    },
    {
        "sync": {"seconds": [0.0, 8.0, 5.0], "images": [0, 100, 200], "accuracy": [0.1, 0.5, 0.8], "shares": [1, 1]},
        "async": {
            "seconds": [0.0, 3.0, 2.5],
            "images": [0, 100, 200],
            "accuracy": [0.1, 0.4, 0.7],
            "staleness": {1: 1, 7: 1},
        },
    },
]


def test_a_part_takes_as_long_as_its_slowest_rank_and_pushes_are_counted_together():
    found = asynchronous.summarise(RANKS)
    assert found["sync"]["seconds"] == [0.0, 9.0, 14.0] and found["async"]["seconds"] == [0.0, 3.0, 5.5]
    assert found["sync"]["images_per_second"] == 20 and found["async"]["images_per_second"] == 40
    assert found["async"]["staleness"] == {0: 1, 1: 4, 7: 1} and found["sync"]["staleness"] is None
    assert found["async"]["accuracy_then"] == 0.7
    assert found["sync"]["accuracy_then"] == pytest.approx(0.1 + 0.4 * 5.5 / 9)  # in the middle of its first part


def test_the_table_has_a_line_for_each_mode():
    arguments = asynchronous.parser().parse_args(["--slow", "1"])
    lines = list(asynchronous.report(asynchronous.summarise(RANKS), arguments, "pictures"))
    sync, overlapped = (line.split() for line in lines[-2:])
    assert sync == ["sync", "20", "1.00", "80.00", "34.44", "1.00", ":", "1.00"]
    assert overlapped == ["async", "40", "2.00", "1.83", "7", "70.00", "70.00"]
    assert "none slowed" in lines[0]


@pytest.mark.parametrize(
    ("argv", "told"), [(["--modes", "sync,fast"], "no mode fast"), (["--slow", "0"], "at least 1")]
)
def test_wrong_usage(argv, told, capsys):
    with pytest.raises(SystemExit):
        asynchronous.main(argv)
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_every_mode_runs(tmp_path, capsys):
    files = {name: tmp_path / f"found.{name}" for name in ("json", "png")}
    argv = [
        "--images",
        "600",
        "--epochs",
        "1",
        "--parts",
        "2",
        "--json",
        str(files["json"]),
        "--plot",
        str(files["png"]),
    ]
    assert asynchronous.main(argv) == 0
    found = json.loads(files["json"].read_text())["modes"]
    assert list(found) == list(asynchronous.MODES)
    assert all(row["images"][-1] == 600 and row["images_per_second"] > 0 for row in found.values())
    assert "images/s" in capsys.readouterr().out and files["png"].stat().st_size > 1000
