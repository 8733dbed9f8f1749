"""Strategies in turn on one recipe, side by side: `mgpu train compare image-classification -n 2 --slow-rank 1`.

Each strategy trains from the same weights on the same samples in the same order. What is not an option of the
comparison is one of the recipe: `--epochs 2 --batch 64`. With `--slow-rank` one rank computes every step
`--slow-factor` times, which is where strategies differ most: the surveys' comparison of synchronous and asynchronous
training. Each run leaves what the recipe leaves in a folder of --out; beside them `comparison.png` has loss and score
against samples and against time, and `comparison.json` the table.

The speed is that after the first test, before which kernels are compiled. Time is that of training steps, tests left
out. Asynchronous and local runs note the losses that rank 0 sees, of which there are fewer, and which are noisier.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collectives.wording import counted
from mgpu_core import metrics
from mgpu_core.parallel import StrategyError
from mgpu_core.recipes import command, parallel
from mgpu_core.trainer import METRICS

RECIPES = ("image-classification", "resnet", "speech", "language-model")
STRATEGIES = {way: ["--parallel", way] for way in parallel.MESHES}
STRATEGIES["balanced"] = ["--parallel", "dp", "--speeds", "auto"]
STRATEGIES["data-pipeline"] = ["--parallel", "hybrid", "--mesh", "data=-1,pipeline=2"]
STRATEGIES["compensated"] = ["--parallel", "async", "--delay-compensation", "2"]
STRATEGIES["aware"] = ["--parallel", "async", "--staleness-aware"]
USUAL = "dp,balanced,async,ssp,local"
_NOTED = ("event", "epoch", "samples", "seconds", "test_loss")  # of every test; what comes next is the score


def main(argv: list[str] | None = None) -> int:
    """Run the strategies, and return the exit code: that of the first run that did not succeed, or 0."""
    flags = parser()
    options, recipe_options = flags.parse_known_args(argv)
    names = options.strategies.split(",")
    if unknown := [name for name in names if name not in STRATEGIES]:
        flags.error(f"there is no strategy {', '.join(unknown)}; there are {', '.join(STRATEGIES)}")
    out = options.out or Path("runs") / f"compare-{options.recipe}"
    recipe = importlib.import_module(f"mgpu_core.recipes.{options.recipe.replace('-', '_')}")
    runs = {}
    for name in names:
        runs[name] = ["--tests", str(options.tests), "--out", str(out / name), *STRATEGIES[name], *recipe_options]
        settings = recipe.parser().parse_args(runs[name])
        command.choose_device(settings, print)
        command.check(recipe.parser(), settings, settings.ranks or command.default_ranks(settings.device))
    found = {}
    for name, arguments in runs.items():
        print(f"\n== {name}")
        if code := recipe.main(arguments):
            return int(code)
        found[name] = read(out / name / METRICS)
    lines = list(report(found, options.recipe))
    print("", *lines, "", sep="\n")
    (out / "comparison.json").write_text(json.dumps(found) + "\n")
    draw(found, out / "comparison.png", lines[0].removeprefix("# "))
    print(f"look at {out / 'comparison.png'}")
    return 0


def read(path: Path) -> dict[str, Any]:
    """What a run's metrics say.

    "ranks", "settings"; "steps" and "tests", which have "samples", "seconds" and "loss" or "score" by column; the
    score's "name", "images_per_second" after the first test, and the last "staleness" and "shares" where there are any.
    """
    records = metrics.read(path)
    tests = [record for record in records if record["event"] in ("test", "epoch")]
    if not tests:
        raise StrategyError(f"{path} has no test: train for longer, or test more often (--tests)")
    name = next(key for key in tests[-1] if key not in _NOTED)
    steps = [record for record in records if record["event"] == "step"]
    first, last = (tests[0], tests[-1]) if len(tests) > 1 else ({"samples": 0, "seconds": 0.0}, tests[-1])
    return {
        "ranks": records[0]["ranks"],
        "settings": records[0]["settings"],
        "name": name,
        "steps": {key: [step[key] for step in steps] for key in ("samples", "seconds", "loss")},
        "tests": {
            "samples": [test["samples"] for test in tests],
            "seconds": [test["seconds"] for test in tests],
            "score": [test[name] for test in tests],
        },
        "images_per_second": (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"]),
        "staleness": last.get("staleness"),
        "shares": [value for key, value in last.items() if key.startswith("share_of_rank_")],
    }


def report(found: Mapping[str, Mapping[str, Any]], recipe: str) -> Iterator[str]:
    """The table."""
    some = next(iter(found.values()))
    soonest = min(row["tests"]["seconds"][-1] for row in found.values())
    slow = some["settings"].get("slow_rank")
    slowed = "" if slow is None else f", rank {slow} computes {some['settings']['slow_factor']} times"
    yield f"# {recipe}, {counted(some['ranks'], 'rank')}{slowed}; {some['name'].replace('_', ' ')}"
    columns = f"{'samples/s':>9} {'of first':>8} {'staleness':>9} {'all samples':>11} {f'at {soonest:.1f} s':>10}"
    yield f"# {'':10} {columns}   shares"
    for name, row in found.items():
        ratio = row["images_per_second"] / some["images_per_second"]
        stale = "" if row["staleness"] is None else f"{row['staleness']:.2f}"
        then = np.interp(soonest, row["tests"]["seconds"], row["tests"]["score"], left=np.nan)
        shares = " : ".join(f"{share:.2f}" for share in row["shares"])
        yield (
            f"  {name:10} {row['images_per_second']:9.0f} {ratio:8.2f} {stale:>9} "
            f"{row['tests']['score'][-1]:11.4f} {then:10.4f}   {shares}"
        ).rstrip()


def draw(found: Mapping[str, Mapping[str, Any]], picture: Path, title: str) -> None:
    """Loss and score against samples and against seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    axes: Sequence[Sequence[Any]] = figure.subplots(2, 2, sharey="row", sharex="col")
    for column, (key, label) in enumerate((("samples", "samples trained on"), ("seconds", "seconds of training"))):
        for name, row in found.items():
            losses = [np.nan if loss is None else loss for loss in row["steps"]["loss"]]
            axes[0][column].plot(row["steps"][key], metrics.smooth(losses, keep=0.95), label=name, linewidth=1.2)
            axes[1][column].plot(row["tests"][key], row["tests"]["score"], marker=".", label=name)
        axes[1][column].set_xlabel(label)
        for line in axes:
            line[column].grid(alpha=0.25)
    axes[0][0].set(ylabel="training loss, smoothed", ylim=(0, None))
    axes[1][0].set(ylabel=next(iter(found.values()))["name"].replace("_", " "))
    axes[0][1].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(picture, dpi=110)


def parser() -> argparse.ArgumentParser:
    """The command line; what it does not know is the recipe's."""
    it = argparse.ArgumentParser("mgpu train compare", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    it.add_argument("recipe", choices=RECIPES)
    it.add_argument("--strategies", default=USUAL, help="which, in this order (%(default)s)")
    it.add_argument("--tests", type=command.positive, default=4, help="how often to test in an epoch (%(default)s)")
    it.add_argument("--out", type=Path, help="folder for the results (runs/compare-RECIPE)")
    it.epilog = (
        "All other options are the recipe's, as -n, --epochs, --batch, --lr, --steps, --slow-rank, --slow-factor."
    )
    return it


if __name__ == "__main__":
    sys.exit(main())
