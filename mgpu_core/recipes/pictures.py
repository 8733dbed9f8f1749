"""Pictures of what a network has learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 10


def draw_predictions(
    images: NDArray[np.uint8],
    labels: NDArray[np.integer[Any]],
    probabilities: NDArray[np.floating[Any]],
    classes: Sequence[str],
    picture: str | Path,
) -> None:
    """Draw some images (n, height, width) with what was predicted, and the mistakes the network was surest of.

    `probabilities` are (n, classes). Right predictions are green; wrong ones are red, with the true class below.
    """
    from matplotlib.figure import Figure

    predicted = probabilities.argmax(axis=1)
    sureness = probabilities.max(axis=1)
    wrong = np.flatnonzero(predicted != labels)
    surest = wrong[np.argsort(-sureness[wrong])][: 2 * COLUMNS]
    first = np.arange(min(3 * COLUMNS, len(images)))

    figure = Figure(figsize=(1.25 * COLUMNS, 8.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(3, 2))
    blocks = (
        (top, first, 3, "The first images of the test set"),
        (bottom, surest, 2, f"The surest of {len(wrong):,} mistakes in {len(images):,}"),
    )
    height, width = images.shape[1:]
    down, across = round(1.45 * height), round(1.2 * width)
    for axes, chosen, rows, title in blocks:
        sheet = np.zeros((rows * down, COLUMNS * across), np.uint8)  # one picture: axes for each image take seconds
        for place, i in enumerate(chosen):
            y, x = place // COLUMNS * down, place % COLUMNS * across
            sheet[y : y + height, x : x + width] = images[i]
            right = predicted[i] == labels[i]
            text = f"{classes[predicted[i]]} {sureness[i]:.0%}" + ("" if right else f"\nis {classes[labels[i]]}")
            colour = "#1b7f3b" if right else "#c0392b"
            axes.text(x + width / 2, y + height, text, ha="center", va="top", fontsize=8, color=colour)
        axes.imshow(sheet, cmap="gray_r", interpolation="nearest", vmin=0, vmax=255)
        axes.set_title(title, fontsize=13)
        axes.axis("off")
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def draw_confusion(
    labels: NDArray[np.integer[Any]],
    predicted: NDArray[np.integer[Any]],
    classes: Sequence[str],
    picture: str | Path,
) -> None:
    """Draw how often samples of each class, a row, were taken for each, a column; mistakes are what has colour."""
    from matplotlib.figure import Figure

    count = len(classes)
    counts = np.zeros((count, count), np.int64)
    np.add.at(counts, (labels, predicted), 1)
    mistakes = np.where(np.eye(count, dtype=bool), 0, counts)

    figure = Figure(figsize=(2.2 + 0.62 * count, 1.6 + 0.55 * count), layout="constrained")
    axes = figure.subplots()
    axes.imshow(mistakes, cmap="Reds", vmin=0, vmax=max(1, 2 * mistakes.max()))
    for (row, column), value in np.ndenumerate(counts):
        if value:
            axes.text(column, row, f"{value:,}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(count), classes, rotation=45 if max(map(len, classes)) > 2 else 0, ha="center")
    axes.set_yticks(range(count), classes)
    axes.set(xlabel="predicted", ylabel="true", title=f"{mistakes.sum():,} mistakes in {counts.sum():,}")
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def draw_utterance(
    signal: NDArray[Any],
    features: NDArray[Any],
    probabilities: NDArray[Any],
    spans: Sequence[tuple[str, int, int]],
    picture: str | Path,
    title: str,
) -> None:
    """Draw a signal (samples,), its features (frames, bands), and what a network makes of them, one above the other.

    `probabilities` (steps, classes) begin with the blank's; `spans` say which label is read from which step to which.
    """
    from matplotlib.figure import Figure

    steps = len(probabilities)
    figure = Figure(figsize=(11, 7), layout="constrained")
    wave, bands, classes = figure.subplots(3, 1, height_ratios=(1, 1.6, 1.4))
    wave.plot(np.linspace(0, steps, len(signal)), signal, color="#2a6fb0", linewidth=0.5)
    wave.set(yticks=[], title=title)
    extent = (0, steps, 0, features.shape[1])
    bands.imshow(features.T, origin="lower", aspect="auto", cmap="magma", extent=extent)
    bands.set_ylabel("mel bands")
    for label, first, last in spans:
        for axes in (wave, bands):
            axes.axvspan(first, last, color="#2e8b57", alpha=0.25)
        wave.text((first + last) / 2, wave.get_ylim()[1], label, ha="center", va="top", fontsize=14)
    classes.plot(np.arange(steps) + 0.5, probabilities[:, 0], color="0.7", label="blank")
    for column in sorted({int(label) + 1 for label, _, _ in spans}):
        classes.plot(np.arange(steps) + 0.5, probabilities[:, column], label=str(column - 1))
    classes.set(xlabel="steps of the network", ylabel="probability", ylim=(0, 1.05))
    classes.legend(frameon=False, ncols=8, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    for axes in (wave, bands, classes):
        axes.set_xlim(0, steps)
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
