"""Ranks killed in the middle of a training, under `mgpu run --restarts`: the losses go on as if nothing had
happened."""

import os
import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mgpu_core import data, metrics
from mgpu_core.recipes.image_classification import main

SCRIPT = """
    import os, signal, sys
    from mgpu_core import data
    from mgpu_core.recipes.image_classification import main
    from mgpu_core.trainer import Trainer

    data.images = lambda *_, **__: data.handwritten_digits()
    deaths = [tuple(map(int, each.split(":"))) for each in os.environ["DEATHS"].split()]
    attempt = int(os.environ["MGPU_RESTART"])
    step = Trainer.training_step

    def dying(self, *arguments):
        if attempt < len(deaths) and (int(os.environ["MGPU_RANK"]), self.steps_done) == deaths[attempt]:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    Trainer.training_step = dying
    sys.exit(main(sys.argv[1:]))
"""


SETTINGS = ["--epochs", "3", "--batch", "96", "--dtype", "float64"]


def steps(folder):
    return [record for record in metrics.read(folder / "metrics.jsonl") if record["event"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 4])
def test_losses_go_on_after_ranks_were_killed_at_random(monkeypatch, tmp_path, deaths):
    monkeypatch.setattr(data, "images", lambda *_, **__: data.handwritten_digits())
    assert main([*SETTINGS, "-n", "1", "--out", str(tmp_path / "whole")]) == 0
    whole = steps(tmp_path / "whole")

    chance = random.Random()
    last = len(whole) - 1  # in the last epoch, which begins from a checkpoint at the latest
    killed = [(chance.randrange(2), chance.randrange(1, last))] + [(k % 2, last) for k in range(deaths - 1)]
    print("killed:", killed)
    (tmp_path / "on_digits.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "mgpu_core", "run", "-n", "2", "--restarts", str(deaths)]
    command += [str(tmp_path / "on_digits.py"), *SETTINGS, "--out", str(tmp_path / "parts")]
    environ = {**os.environ, "DEATHS": " ".join(f"{rank}:{step}" for rank, step in killed)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr

    parts = steps(tmp_path / "parts")
    for name in ("epoch", "step", "samples"):  # no batch was counted twice, and none left out
        assert [record[name] for record in parts] == [record[name] for record in whole]
    np.testing.assert_allclose([record["loss"] for record in parts], [record["loss"] for record in whole], rtol=1e-9)
    said = [line for line in done.stderr.splitlines() if line.startswith("mgpu run:")]
    causes = [f"mgpu run: rank {rank} was killed by SIGKILL" for rank, _ in killed]
    assert [line[: len(cause)] for line, cause in zip(said[::2], causes, strict=True)] == causes
    assert said[1::2] == [f"mgpu run: restart {k + 1} of {deaths}, with 2 ranks" for k in range(deaths)]
