"""The recipes on the device "cuda", which is a CuPy in memory (`fakecupy`): the losses of the CPU, and one look at the
GPU's memory in a step, for the loss."""

import fakecupy
import numpy as np
import pytest

from mgpu_core import data, device, metrics
from mgpu_core.data import ImageSet, Recordings
from mgpu_core.data.recordings import RATE
from mgpu_core.recipes import command, image_classification, language_model, resnet, speech
from mgpu_core.recipes.parallel import StrategyError, check
from mgpu_core.trainer import Trainer

RECIPES = {
    "image-classification": (image_classification, "--batch 20 --steps 4"),
    "resnet": (resnet, "--batch 10 --steps 2"),
    "language-model": (language_model, "--batch 8 --steps 3 --length 8 --size 8 --layers 1 --heads 2"),
    "speech": (speech, "--batch 3 --steps 2 --utterances 6 --size 4 --layers 1"),
}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Little of everything that recipes train on."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 90)
    pictures = (labels[:, None, None] * 20 + rng.integers(0, 40, (90, 28, 28))).astype(np.uint8)
    halves = pictures[:80], labels[:80], pictures[80:], labels[80:]
    images = ImageSet("Fashion-MNIST", "here", tuple("abcdefghij"), *halves)
    takes = [(digit, take) for digit in range(10) for take in range(7)]
    waves = tuple((4000 * np.sin(np.arange(800) * (digit + 1) / 9)).astype(np.int16) for digit, _ in takes)
    digits, numbers = (np.array(column) for column in zip(*takes))
    recordings = Recordings("here", waves, digits, np.array(["ada"] * len(takes)), numbers)
    monkeypatch.setattr(data, "images", lambda *_, **__: images)
    monkeypatch.setattr(data, "fashion_mnist", lambda *_, **__: images)
    monkeypatch.setattr(data, "spoken_digits", lambda *_, **__: recordings)
    monkeypatch.setattr(speech, "TEST_UTTERANCES", 4)
    monkeypatch.setattr(device, "missing", lambda: "")
    assert RATE == 8000
    for i in range(20):
        (tmp_path / f"{i:02}.py").write_text("def add(a, b):\n    return a + b\n" * 3)


@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_of_the_cpu_and_all_that_a_step_fetches(name, small, tmp_path, monkeypatch):
    recipe, options = RECIPES[name]
    fetched = []
    step = Trainer.training_step

    def counted(self, *arguments):
        before = fakecupy.counts["to host"]
        done = step(self, *arguments)
        fetched.append(fakecupy.counts["to host"] - before)
        return done

    monkeypatch.setattr(Trainer, "training_step", counted)
    losses = {}
    for where in device.DEVICES:
        out = tmp_path / where
        files = ["--data", str(tmp_path)] if name == "language-model" else []
        with fakecupy.installed():
            given = ["-n", "1", "--device", where, "--dtype", "float64", "--out", str(out), *options.split(), *files]
            assert recipe.main(given) == 0
        records = metrics.read(out / "metrics.jsonl")
        losses[where] = [record["loss"] for record in records if record["event"] == "step"]
    steps = len(losses["cpu"])
    assert fetched == [0] * steps + [1] * steps
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-8)


def test_a_whole_run_on_a_gpu_tests_and_goes_on_on_the_cpu(small, tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(image_classification, "show", lambda images, probabilities, *_: shown.append(probabilities))
    with fakecupy.installed():
        arguments = ["-n", "1", "--out", str(tmp_path), "--batch", "40", "--epochs"]
        assert image_classification.main([*arguments, "1", "--device", "cuda"]) == 0
        assert image_classification.main([*arguments, "2", "--device", "cpu", "--resume"]) == 0
    assert "going on after 2 steps" in capsys.readouterr().out
    last = metrics.read(tmp_path / "metrics.jsonl")[-1]
    assert last["event"] == "epoch" and last["test_loss"] > 0
    assert [type(probabilities) for probabilities in shown] == [np.ndarray] * 2


def test_what_is_for_the_host_alone_is_refused_on_a_gpu_or_chosen_for_it(monkeypatch, capsys):
    parser = image_classification.parser()
    ways = "--parallel async", "--parallel ssp", "--parallel zero3"
    for options in (*ways, "--hook int8", "--hook powersgd", "--speeds auto", "--auto"):
        with pytest.raises(StrategyError, match="give --device cpu"):
            check(parser.parse_args([*options.split(), "--device", "cuda"]), 2)
        check(parser.parse_args([*options.split(), "--device", "cpu"]), 2)
        given = parser.parse_args(options.split())
        monkeypatch.setattr(device, "default", lambda: "cuda")
        command.choose_device(given, print)
        assert given.device == "cpu" and "on the CPU, since --" in capsys.readouterr().out
    for options in ("", "--hook none", "--hook bf16 --parallel hybrid", "--speeds 3,1", "--parallel local"):
        given = parser.parse_args(options.split())
        command.choose_device(given, print)
        assert given.device == "cuda"
    check(parser.parse_args("--hook none --precision float16".split()), 2)
    monkeypatch.setattr(device, "gpus", lambda: 3)
    assert command.default_ranks("cuda") == 3


def test_without_a_gpu_the_command_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device, "gpus", lambda: 0)
    with pytest.raises(SystemExit):
        image_classification.main(["-n", "1", "--device", "cuda", "--out", str(tmp_path)])
    assert "--device cuda cannot be: the system shows this process no NVIDIA GPU" in capsys.readouterr().err
