"""The language model, end to end, on a few files of Python."""

import numpy as np
import pytest

from mgpu_core import Tensor, checkpoint, metrics
from mgpu_core.data import DatasetMissing, text
from mgpu_core.recipes import language_model
from mgpu_core.recipes.language_model import foresee, main, network, write


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.py").write_text("def add(a, b):\n    return a + b\n" * 9)
    return folder


def run(files, out, *options):
    small = ["--epochs", "2", "--batch", "16", "--length", "32", "--size", "16", "--layers", "2", "--heads", "2"]
    return main(["-n", "1", *small, "--data", str(files), "--out", str(out), *options])


def test_it_learns_resumes_exactly_and_writes(files, tmp_path, capfd):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(files, whole, "--epochs", "6") == 0
    said = capfd.readouterr().out
    assert "bits per byte on held-out files" in said and language_model.PROMPT.decode() in said
    epochs = [record for record in metrics.read(whole / "metrics.jsonl") if record["event"] == "epoch"]
    assert epochs[-1]["bits_per_byte"] < 4 < 8.5
    assert epochs[-1]["bits_per_byte"] == pytest.approx(epochs[-1]["test_loss"] / np.log(2))
    for name in ("curves.png", "sample.txt", "metrics.jsonl", "checkpoint.safetensors"):
        assert str(whole / name) in said and (whole / name).stat().st_size > 300

    assert run(files, parts, "--epochs", "6", "--steps", "7") == run(files, parts, "--epochs", "6", "--resume") == 0
    one, other = (checkpoint.load(folder / "checkpoint.safetensors")[0] for folder in (whole, parts))
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
    assert (whole / "sample.txt").read_bytes() == (parts / "sample.txt").read_bytes()


def test_the_first_loss_is_that_of_knowing_nothing():
    model = network(length=16, size=32, layers=2, heads=2, rng=np.random.default_rng(0), dtype=np.float64)
    pieces = np.random.default_rng(1).integers(0, 256, (8, 17))
    bits = language_model.score(model, foresee((pieces,)))["bits_per_byte"]
    assert bits.shape == (8,) and abs(bits.mean() - 8) < 0.5
    loss = language_model.loss(model, foresee((pieces,)))
    assert loss.item() == pytest.approx(bits.sum() * np.log(2), rel=1e-9)


def test_a_byte_sees_none_after_itself():
    model = network(length=16, size=16, layers=2, heads=2, rng=np.random.default_rng(0), dtype=np.float64)
    pieces = np.random.default_rng(1).integers(0, 256, (2, 16))
    changed = pieces.copy()
    changed[:, 10:] = 0
    np.testing.assert_array_equal(model(pieces).data[:, :10], model(changed).data[:, :10])


def test_writing_draws_what_is_likely():
    def after(pieces):  # the byte one larger is nearly sure
        return Tensor(20.0 * np.eye(256)[(pieces + 1) % 256])

    class Counting(language_model.nn.Module):
        forward = staticmethod(after)

    assert write(Counting(), b"abc", 4, 5, seed=0) == b"abcdefgh"
    assert len(write(Counting(), b"a" * 10, 4, 0, seed=0)) == 10


# Text


def test_the_standard_library_is_text_that_is_there():
    source = text.standard_library()
    assert len(source.train) > 5 * len(source.test) > 0 and source.train.dtype == np.uint8
    assert source.files[0] >= 9 * source.files[1] > 0
    np.testing.assert_array_equal(source.train, text.standard_library().train)


@pytest.mark.parametrize("count", [0, 9, 10, 25])
def test_every_tenth_file_is_held_out(tmp_path, count):
    for i in range(count):
        (tmp_path / f"{i:02}.py").write_bytes(bytes([i]))
    (tmp_path / "notes.txt").write_bytes(b"not Python")
    if count < text.HELD_OUT:
        with pytest.raises(DatasetMissing, match=f"holds {count} Python files.*--data"):
            text.standard_library(tmp_path)
        return
    source = text.standard_library(tmp_path)
    assert source.test.tolist() == list(range(9, count, 10))
    assert sorted([*source.train, *source.test]) == list(range(count))


@pytest.mark.parametrize("length", [1, 2, 7, 9])
def test_windows_foresee_every_byte_once(length):
    data = np.arange(10, dtype=np.uint8)
    pieces = text.windows(data, length)
    count = 9 // length
    assert pieces.shape == (count, length + 1)
    assert pieces[:, 1:].ravel().tolist() == list(range(1, count * length + 1))
    np.testing.assert_array_equal(pieces[:, :-1] + 1, pieces[:, 1:])


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="10 bytes has no piece of 10 and one more"):
        text.windows(np.zeros(10, np.uint8), 10)
