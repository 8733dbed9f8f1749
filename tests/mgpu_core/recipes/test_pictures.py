"""Pictures of predictions are drawn whatever there is to draw."""

import numpy as np
import pytest

from mgpu_core.recipes.pictures import draw_confusion, draw_predictions, draw_utterance


@pytest.mark.parametrize(("count", "right"), [(1, 1), (60, 3)])
def test_predictions_become_a_picture(tmp_path, count, right):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, count)
    probabilities = np.eye(3)[np.where(np.arange(count) < right, labels, (labels + 1) % 3)]
    images = rng.integers(0, 255, (count, 8, 8), dtype=np.uint8)
    draw_predictions(images, labels, probabilities, ("a", "b", "c"), tmp_path / "new" / "p.png")
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [0, 1, 60])
def test_a_confusion_matrix_becomes_a_picture(tmp_path, count):
    labels = np.arange(count) % 3
    draw_confusion(labels, labels // 2, ("a", "b", "a long one"), tmp_path / "new" / "c.png")
    assert (tmp_path / "new" / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("spans", [[], [("7", 2, 4), ("0", 5, 6)]])
def test_an_utterance_becomes_a_picture(tmp_path, spans):
    rng = np.random.default_rng(0)
    arrays = rng.uniform(-1, 1, 2000), rng.uniform(-1, 1, (24, 40)), rng.uniform(0, 1, (8, 11))
    draw_utterance(*arrays, spans, tmp_path / "u.png", "somebody says 7 0")
    assert (tmp_path / "u.png").read_bytes().startswith(b"\x89PNG")
