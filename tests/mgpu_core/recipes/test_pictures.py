"""Pictures of predictions are drawn whatever there is to draw."""

import numpy as np
import pytest

from mgpu_core.recipes.pictures import draw_predictions


@pytest.mark.parametrize(("count", "right"), [(1, 1), (60, 3)])
def test_predictions_become_a_picture(tmp_path, count, right):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, count)
    probabilities = np.eye(3)[np.where(np.arange(count) < right, labels, (labels + 1) % 3)]
    images = rng.integers(0, 255, (count, 8, 8), dtype=np.uint8)
    draw_predictions(images, labels, probabilities, ("a", "b", "c"), tmp_path / "new" / "p.png")
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")
