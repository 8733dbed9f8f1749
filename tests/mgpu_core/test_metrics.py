"""Metrics are readable while a run goes on, after it is killed, and after it is resumed."""

import json
import math

import pytest

from mgpu_core import metrics
from mgpu_core.metrics import Metrics


def test_each_record_is_one_line_of_json_and_there_at_once(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    with Metrics(path) as record:
        record.write("step", samples=64, loss=2.5)
        assert json.loads(path.read_text()) == {"event": "step", "samples": 64, "loss": 2.5}
        record.write("epoch", samples=128, text="two\nlines, ü")
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["samples"] for line in lines] == [64, 128]
    assert metrics.read(path)[1]["text"] == "two\nlines, ü"


def test_a_new_run_starts_a_new_file(tmp_path):
    for samples in (1, 2):
        with Metrics(tmp_path / "m") as record:
            record.write("step", samples=samples)
    assert [r["samples"] for r in metrics.read(tmp_path / "m")] == [2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null(tmp_path, value):
    with Metrics(tmp_path / "m") as record:
        record.write("step", loss=value)
    assert "null" in (tmp_path / "m").read_text()
    assert metrics.read(tmp_path / "m") == [{"event": "step", "loss": None}]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "m").write_text('{"event": "step", "samples": 1}\n{"event": "st')
    assert [r["samples"] for r in metrics.read(tmp_path / "m")] == [1]


def test_resuming_drops_what_will_be_trained_on_again(tmp_path):
    path = tmp_path / "m"
    with Metrics(path) as record:
        record.write("run", ranks=2)
        for samples in (64, 128, 192):
            record.write("step", samples=samples)
    with path.open("a") as file:
        file.write('{"event": "st')
    with Metrics(path, resume_at=128) as record:
        record.write("step", samples=192)
    assert [r.get("samples") for r in metrics.read(path)] == [None, 64, 128, 192]


@pytest.mark.parametrize("steps", [0, 30])
def test_the_curves_become_a_picture(tmp_path, steps):
    with Metrics(tmp_path / "m") as record:
        for step in range(steps):
            loss = math.nan if step == 7 else 2.3 * 0.9**step
            record.write("step", samples=64 * (step + 1), loss=loss, samples_per_second=9000.0 + step)
            if step % 10 == 9:
                record.write("epoch", samples=64 * (step + 1), test_loss=1.0, test_accuracy=0.8)
    metrics.draw_curves(tmp_path / "m", tmp_path / "pictures" / "curves.png", "a run")
    assert (tmp_path / "pictures" / "curves.png").read_bytes().startswith(b"\x89PNG")
