"""ResNet, end to end, on a few small images: what changes an image is no rank's doing, and resuming repeats it."""

import numpy as np
import pytest

from mgpu_core import Tensor, checkpoint, data, metrics
from mgpu_core.data import ImageSet
from mgpu_core.nn import functional as F
from mgpu_core.recipes import image_classification, resnet


@pytest.fixture
def few(monkeypatch):
    """A data set called Fashion-MNIST of 60 images, 12 x 12, whose brightness says what they are."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 80)
    images = (labels[:, None, None] * 20 + rng.integers(0, 40, (80, 12, 12))).astype(np.uint8)
    found = ImageSet(
        "Fashion-MNIST", "here", tuple("abcdefghij"), images[:60], labels[:60], images[60:], labels[60:]
    )  # fmt: skip
    monkeypatch.setattr(data, "images", lambda *_, **__: found)
    monkeypatch.setattr(data, "fashion_mnist", lambda *_, **__: found)


def run(out, *options):
    assert resnet.main(["-n", "1", "--batch", "20", "--epochs", "2", "--out", str(out), *options]) == 0
    return checkpoint.load(out / "checkpoint.safetensors")


def test_it_trains_resumes_exactly_and_leaves_files_to_look_at(few, tmp_path, capsys, monkeypatch):
    whole, meta = run(tmp_path / "whole")
    said = capsys.readouterr().out
    assert "ResNet-20: " in said and "mirror image" in said and "test accuracy" in said
    for name in ("curves.png", "predictions.png", "confusion.png", "metrics.jsonl", "checkpoint.safetensors"):
        assert str(tmp_path / "whole" / name) in said and (tmp_path / "whole" / name).stat().st_size > 500
    assert metrics.read(tmp_path / "whole" / "metrics.jsonl")[-1]["test_loss"] > 0
    monkeypatch.setattr(resnet, "show", lambda *_: None)  # pictures take longer than training
    run(tmp_path / "parts", "--steps", "2")
    parts, other = run(tmp_path / "parts", "--resume")
    assert meta["settings"] == other["settings"] and meta["settings"]["depth"] == 20
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)


def test_the_loss_is_cross_entropy_with_smoothed_labels():
    rng = np.random.default_rng(1)
    logits, labels = rng.standard_normal((5, 10)), rng.integers(0, 10, 5)
    log_p = F.log_softmax(Tensor(logits)).data
    smooth = 0.9 * np.eye(10)[labels] + 0.1 / 10
    found = resnet.loss(lambda x: x, (logits, labels))
    assert found.item() == pytest.approx(-(smooth * log_p).sum(), rel=1e-12)


def test_depth_18_is_another_network(few, tmp_path, capsys):
    options = resnet.parser().parse_args(["--depth", "18", "--batch", "4", "--out", str(tmp_path)])
    options.epochs, options.steps = 1, 1
    result = resnet.train(None, options, "Fashion-MNIST")
    assert result["steps"] == 1
    assert "ResNet-18: 11," in capsys.readouterr().out


def test_every_data_set_has_its_defaults():
    assert resnet.DEFAULTS.keys() == image_classification.DEFAULTS.keys()
    for defaults in resnet.DEFAULTS.values():
        assert defaults.keys() == {"depth", "epochs", "batch", "lr", "seed", "dtype"}
