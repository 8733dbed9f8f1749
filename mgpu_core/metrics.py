"""What a run measured: one JSON object a line, and a picture of the curves.

    {"event": "step", "epoch": 0, "step": 20, "samples": 2688, "loss": 0.71, "samples_per_second": 9120.0, ...}
    {"event": "epoch", "epoch": 0, "samples": 60000, "test_accuracy": 0.874, ...}

A line is the system's when `write` returns, so the record of a run that is killed is whole but for the last line at
most. "samples" counts what the run has trained on in all, whatever the number of ranks: it is the horizontal axis on
which runs are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

Record = dict[str, Any]


class Metrics:
    """Writes records to a file, one a line.

    Args:
        path: of the file; a new run replaces it.
        resume_at: go on with the file of an earlier run instead, less its records of what came after that many
            samples, which this run will train on again.
    """

    def __init__(self, path: str | Path, *, resume_at: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_at is not None and path.exists():
            partial = path.with_name(f".{path.name}.partial")
            with open(partial, "w", encoding="utf-8") as kept:
                kept.writelines(_line(record) for record in _records(path) if record.get("samples", 0) <= resume_at)
            partial.replace(path)
        self._file = open(path, "w" if resume_at is None else "a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """Append a record. Numbers that JSON cannot hold (nan, inf) are written as null."""
        self._file.write(_line({"event": event, **values}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _line(record: Record) -> str:
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read(path: str | Path) -> list[Record]:
    """The records of a file in order; a last line that was cut short is left out.

    Raises:
        ValueError: if another line is not a JSON object.
    """
    return list(_records(path))


def _records(path: str | Path) -> Iterator[Record]:
    """One after the other: a long run's do not have to be in memory together."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and line != "\n":
                yield json.loads(line)


def draw_curves(
    metrics: str | Path,
    picture: str | Path,
    title: str = "",
    *,
    loss_title: str = "cross-entropy, nats",
    score: str = "test_accuracy",
    percent: bool = True,
    unit: str = "samples",
) -> None:
    """Draw the loss, a test score after each epoch, and the speed, from a file that `Metrics` wrote.

    `score` names the value that is drawn, a share where `percent`; `unit` is what a sample is called.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    records = read(metrics)
    steps = [record for record in records if record["event"] == "step"]
    epochs = [record for record in records if record["event"] == "epoch"]

    def column(rows: list[Record], key: str) -> list[float]:
        return [math.nan if row.get(key) is None else row[key] for row in rows]

    blue, orange, green = "#2a6fb0", "#d9731a", "#2e8b57"
    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}):
        figure = Figure(figsize=(13, 3.8), layout="constrained")
        loss, result, speed = figure.subplots(1, 3)
        samples, losses = column(steps, "samples"), column(steps, "loss")

        loss.plot(samples, losses, color=blue, alpha=0.3, linewidth=1)
        loss.plot(samples, smooth(losses), color=blue, label="training, smoothed")
        loss.plot(column(epochs, "samples"), column(epochs, "test_loss"), "o", color=orange, label="test")
        loss.set(title="Loss", ylabel=loss_title, ylim=(0, None))
        loss.legend(frameon=False)

        result.plot(column(epochs, "samples"), column(epochs, score), "o-", color=orange)
        shown = "{:.1%}" if percent else "{:.3f}"
        some = epochs[:: -max(1, len(epochs) // 5)]  # the last one, and as many as can be read
        for x, y in zip(column(some, "samples"), column(some, score)):
            result.annotate(shown.format(y), (x, y), (-4, 6), textcoords="offset points", ha="right", fontsize=9)
        result.margins(0.2, 0.2)
        result.set(title=score.replace("_", " ").capitalize())
        if percent:
            result.yaxis.set_major_formatter(PercentFormatter(1))

        speeds = column(steps, "samples_per_second")
        speed.plot(samples, speeds, color=green, alpha=0.3, linewidth=1)
        speed.plot(samples, smooth(speeds), color=green)
        speed.set(title=f"{unit.capitalize()} per second, all ranks", ylim=(0, None))
        speed.yaxis.set_major_formatter(EngFormatter(sep=""))

        for axes in (loss, result, speed):
            axes.set_xlabel(f"{unit} trained on")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.suptitle(title)
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=130)


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """The exponential moving average, less its start-up bias (as in Adam, arXiv:1412.6980)."""
    smooth, total, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(total / weight if weight else math.nan)
    return smooth
