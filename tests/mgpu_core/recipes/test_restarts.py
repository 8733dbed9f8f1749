"""Ranks killed at random in the middle of a training, under `mgpu run --restarts`: the losses go on as if nothing had
happened."""

import os
import random
import subprocess
import sys
import textwrap

import pytest

from mgpu_core import metrics

pytest.importorskip("sklearn")

EPOCHS, BATCH = 3, 64
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
        if attempt < len(deaths) and (self.comm.rank, self.steps_done) == deaths[attempt]:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    Trainer.training_step = dying
    sys.exit(main(sys.argv[1:]))
"""


def train(folder, deaths, *options):
    """Train two ranks; rank r is killed before step s, for each (r, s) of `deaths` in turn. What was said, and the
    records of the steps."""
    script = folder / "on_digits.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "mgpu_core", "run", "-n", "2", *options, str(script)]
    command += ["--epochs", str(EPOCHS), "--batch", str(BATCH), "--out", str(folder / "run")]
    environ = {**os.environ, "DEATHS": " ".join(f"{rank}:{step}" for rank, step in deaths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stderr, [r for r in metrics.read(folder / "run" / "metrics.jsonl") if r["event"] == "step"]


def test_losses_go_on_after_ranks_were_killed_at_random(tmp_path):
    chance = random.Random()
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    _, whole = train(tmp_path / "whole", [])
    steps_an_epoch = len(whole) // EPOCHS
    deaths = [(chance.randrange(2), chance.randrange(k * steps_an_epoch, len(whole))) for k in range(2)]
    print("deaths", deaths)
    said, killed = train(tmp_path / "killed", deaths, "--restarts", "3")
    places = [(record["epoch"], record["step"]) for record in killed]
    assert len(set(places)) == len(places) == len(whole)  # no batch was counted twice, and none left out
    assert [record["samples"] for record in killed] == [record["samples"] for record in whole]
    assert [record["loss"] for record in killed] == [record["loss"] for record in whole]
    for rank, _ in deaths:
        assert f"mgpu run: rank {rank} was killed by SIGKILL" in said
    assert said.count("mgpu run: restart") == 2
