"""The recipe, end to end, on scikit-learn's digits: small, and there without a network."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest

from mgpu_core import Tensor, checkpoint, data, metrics
from mgpu_core.recipes import image_classification
from mgpu_core.recipes.image_classification import BASE_BATCH, BASE_LR, main, network, parser

ON_DIGITS = """
    import sys
    from dataclasses import replace
    from mgpu_core import data
    from mgpu_core.recipes.image_classification import main
    digits = data.handwritten_digits()
    few = replace(digits, train_images=digits.train_images[:320], train_labels=digits.train_labels[:320])
    data.images = lambda *_, **__: few
    if __name__ == "__main__":
        sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.setattr(data, "images", lambda *_, **__: data.handwritten_digits())


@pytest.fixture
def few_digits(monkeypatch):
    digits = data.handwritten_digits()
    few = replace(digits, train_images=digits.train_images[:320], train_labels=digits.train_labels[:320])
    monkeypatch.setattr(data, "images", lambda *_, **__: few)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "on_digits.py"
    path.write_text(textwrap.dedent(ON_DIGITS))
    return path


def last_line(folder):
    return metrics.read(folder / "metrics.jsonl")[-1]


def test_the_network_maps_images_to_logits():
    for dtype in ("float32", "float64"):
        model = network(np.random.default_rng(0), dtype)
        logits = model(Tensor(np.zeros((3, 1, 28, 28), dtype)))
        assert logits.shape == (3, 10) and logits.dtype == dtype
    assert f"{sum(p.size for p in model.parameters()):,} parameters" in network.__doc__


def test_two_ranks_learn_and_leave_files_to_look_at(digits, tmp_path, capfd):
    assert main(["-n", "2", "--epochs", "4", "--batch", "32", "--out", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert last_line(tmp_path)["test_accuracy"] > 0.85
    assert f"test accuracy {last_line(tmp_path)['test_accuracy']:.2%}" in said
    assert f"learning rate {BASE_LR * 32 / BASE_BATCH:g}" in said and "linear scaling" in said
    for name in ("curves.png", "predictions.png", "metrics.jsonl", "checkpoint.safetensors"):
        assert str(tmp_path / name) in said
        assert (tmp_path / name).stat().st_size > 1000
    assert metrics.read(tmp_path / "metrics.jsonl")[0]["ranks"] == 2


def test_stopped_and_resumed_is_as_if_never_stopped(few_digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(image_classification, "show", lambda *_: None)  # pictures take longer than training
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = ["-n", "1", "--epochs", "2", "--seed", "3", "--dtype", "float64"]
    assert main([*settings, "--out", str(whole)]) == 0
    assert main([*settings, "--out", str(parts), "--steps", "5", "--resume"]) == 0
    said = capsys.readouterr().out
    assert "starting from the beginning" in said and "stopped after 5 steps" in said
    assert main(["-n", "1", "--out", str(parts), "--resume"]) == 0  # with the settings of the run it goes on with
    assert "going on after 5 steps" in capsys.readouterr().out
    (one, meta), (other, other_meta) = (checkpoint.load(folder / "checkpoint.safetensors") for folder in (whole, parts))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    assert meta["settings"] == other_meta["settings"]
    given = {"epochs": 2, "batch": 32, "lr": None, "seed": 3, "dtype": "float64"}
    assert meta["settings"] == {**given, "precision": "float32", "parallel": "dp"}


def test_what_the_hardware_decides_is_said_with_its_reasons(few_digits, tmp_path, capsys):
    assert main(["-n", "1", "--auto", "--prefetch", "5", "--steps", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    batch = int(said.split("\nbatch ")[1].split(":")[0])
    assert "95% of the best speed" in said and "so many keep ahead" in said and "prefetch 5: as given" in said
    assert metrics.read(tmp_path / "metrics.jsonl")[0]["settings"]["batch"] == batch


def test_ctrl_c_stops_all_ranks_and_keeps_the_checkpoint(script, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, str(script), "-n", "2", "--epochs", "1000", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        for line in run.stdout:
            if line.startswith("epoch 1/"):
                break
        run.send_signal(signal.SIGINT)
        said = run.stdout.read()
    assert run.returncode == 130, said
    assert "--resume goes on from" in said and "Traceback" not in said
    steps = checkpoint.load(out / "checkpoint.safetensors")[0]["optimizer.steps"]
    assert f"stopped after {steps:,} steps" in said
    assert last_line(out)["samples"] > 0


def test_a_launcher_may_start_the_ranks(script, tmp_path):
    launch = [sys.executable, "-m", "mgpu_core", "run", "-n", "2"]
    done = subprocess.run(
        [*launch, str(script), "--epochs", "1", "--out", str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and done.stdout.count("test accuracy") == 2  # of the epoch, and at the end
    refused = subprocess.run([*launch, str(script), "-n", "2"], capture_output=True, text=True)
    assert refused.returncode != 0 and "leave -n out" in refused.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ["-n", "0"],
        ["--batch", "-1"],
        ["--epochs", "x"],
        ["--dtype", "int8"],
        ["--lr", "0"],
        ["--lr", "nan"],
        ["--seed", "-1"],
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_help_names_every_option_and_its_default():
    text = parser().format_help()
    assert text.count("(") >= 9 and os.environ.get("HOME", "?") not in text
