"""Strategies side by side: each trained by the recipe itself, and read from what it noted."""

import json

import pytest

from mgpu_core import data, metrics
from mgpu_core.recipes import compare


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.setattr(data, "images", lambda *_, **__: data.handwritten_digits())


def write(path, ranks, tests, **noted):
    """The metrics of a run that was tested after `tests`: (samples, seconds, accuracy)."""
    with metrics.Metrics(path) as file:
        file.write("run", ranks=ranks, settings={"slow_rank": 1, "slow_factor": 3})
        for samples, seconds, accuracy in tests:
            file.write("step", epoch=0, samples=samples, seconds=seconds, loss=1 - accuracy)
            scores = {"test_loss": 1.0, "test_accuracy": accuracy}
            file.write("test", epoch=0, samples=samples, seconds=seconds, **scores, **noted)


def test_speed_is_after_the_first_test_and_scores_are_compared_at_one_time(tmp_path):
    write(tmp_path / "dp", 2, [(100, 10.0, 0.2), (200, 12.0, 0.4), (300, 14.0, 0.6)], share_of_rank_0=0.5)
    write(tmp_path / "async", 2, [(100, 2.0, 0.2), (200, 3.0, 0.3), (300, 13.0, 0.5)], staleness=0.75)
    found = {name: compare.read(tmp_path / name) for name in ("dp", "async")}
    assert found["dp"]["images_per_second"] == 50 and found["dp"]["shares"] == [0.5]
    assert found["async"]["images_per_second"] == pytest.approx(200 / 11) and found["async"]["staleness"] == 0.75
    heading, _, dp, other = compare.report(found, "image-classification")
    assert "2 ranks, rank 1 computes 3 times; test accuracy" in heading
    assert dp.split() == ["dp", "50", "1.00", "0.6000", "0.5000", "0.50"]  # at 13 s, when async had finished
    assert other.split() == ["async", "18", "0.36", "0.75", "0.5000", "0.5000"]


def test_a_run_without_a_test_cannot_be_compared(tmp_path):
    write(tmp_path / "dp", 2, [])
    with pytest.raises(compare.StrategyError, match="--tests"):
        compare.read(tmp_path / "dp")


def test_it_trains_each_and_leaves_files_to_look_at(digits, tmp_path, capfd):
    options = ["-n", "2", "--epochs", "1", "--batch", "96", "--tests", "3", "--slow-rank", "1", "--out", str(tmp_path)]
    assert compare.main(["image-classification", "--strategies", "dp,async", *options, "--steps", "12"]) == 0
    said = capfd.readouterr().out
    assert "== async" in said and "rank 1 computes 3 times" in said and str(tmp_path / "comparison.png") in said
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["dp"]["tests"]["samples"] == found["async"]["tests"]["samples"] == [480, 960]
    assert found["dp"]["staleness"] is None and found["async"]["staleness"] >= 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["speling"], "invalid choice"),
        (["resnet", "--strategies", "dp,sync"], "no strategy sync"),
        (["resnet", "--strategies", "dp,pp", "--slow-rank", "1"], "--slow-rank is for"),
        (["resnet", "-n", "2", "--slow-rank", "2"], "none of the ranks"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_trained(wrong, said, capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main(wrong)
    assert ended.value.code == 2 and said in capsys.readouterr().err
