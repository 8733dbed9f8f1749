"""The hooks' benchmark prints one table."""

import numpy as np

from bench import hooks
from bench.diff import read
from mgpu_core import data
from mgpu_core.parallel.hooks import HOOKS


def test_a_short_run_prints_every_hook(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    pictures, labels = rng.integers(0, 256, (300, 28, 28), np.uint8), rng.integers(0, 10, 300)
    fields = {"name": "noise", "origin": "here", "classes": tuple("0123456789")}
    images = data.ImageSet(
        train_images=pictures, train_labels=labels, test_images=pictures[:50], test_labels=labels[:50], **fields
    )
    monkeypatch.setattr(data, "images", lambda folder: images)
    assert hooks.main(["-n", "2", "--steps", "2", "--json", str(tmp_path / "figures.json")]) == 0
    printed = capsys.readouterr().out
    content = read(tmp_path / "figures.json")
    figures = {row["label"]: row for row in content["rows"]}
    assert len(content["samples"]) == len(HOOKS)  # of two steps the first compiles kernels
    assert list(figures) == list(HOOKS) and all(f" {name} " in printed for name in HOOKS)
    assert figures["none"]["bytes"] > figures["bf16"]["bytes"] > figures["int8"]["bytes"] > 0
