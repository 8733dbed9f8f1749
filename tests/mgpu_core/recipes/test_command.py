"""What the recipes' commands share: a resumed run's settings are those of the run it goes on with."""

import pytest

from mgpu_core import checkpoint
from mgpu_core.recipes import command
from mgpu_core.trainer import CHECKPOINT

DEFAULTS = {"epochs": 2, "batch": 8, "lr": None, "seed": 0, "dtype": "float32"}


def run(folder, *arguments):
    """The options with which one rank would train; a checkpoint keeps its settings."""
    seen = []

    def train(comm, options, found):
        checkpoint.save(folder / CHECKPOINT, {}, {"settings": command.settle(options, DEFAULTS)})
        seen.append(options)
        return {"interrupted": False}

    parser = command.parser("x", "X.", DEFAULTS, samples="samples", seed="their order")
    assert command.run(parser, ["-n", "1", "--out", str(folder), *arguments], lambda options, say: None, train) == 0
    return seen[0]


@pytest.mark.parametrize("given", [["--slow-rank", "0", "--slow-factor", "5"], ["--every", "3", "--parallel", "local"]])
def test_what_was_given_is_remembered_and_the_rest_has_its_default(tmp_path, given):
    first = run(tmp_path, "--batch", "4", *given)
    again = run(tmp_path, "--resume", "--seed", "7")
    assert vars(again) == {**vars(first), "resume": True, "seed": 7}
    assert (first.batch, first.epochs, first.precision) == (4, 2, "float32")


def test_another_way_to_share_the_work_begins_without_the_options_of_the_first(tmp_path):
    run(tmp_path, "--slow-rank", "0", "--hook", "int8")
    again = run(tmp_path, "--resume", "--parallel", "hybrid", "--mesh", "data=1")
    assert (again.slow_rank, again.hook) == (None, None)


def test_a_checkpoint_without_settings_is_no_obstacle(tmp_path):
    checkpoint.save(tmp_path / CHECKPOINT, {}, {"epoch": 3})
    assert run(tmp_path, "--resume").batch == 8  # and the trainer says what is wrong with it
