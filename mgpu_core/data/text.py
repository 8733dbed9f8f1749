"""Text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mgpu_core.data.sources import DatasetMissing

HELD_OUT = 10  # every tenth file is for testing


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and others to test with, (n,) uint8 each, of how many files, from which folder."""

    origin: str
    files: tuple[int, int]
    train: NDArray[np.uint8]
    test: NDArray[np.uint8]


def standard_library(folder: str | Path | None = None) -> Text:
    """The modules of the standard library that are single files, or of `folder`: *.py in the order of their names.

    Raises:
        DatasetMissing: if there are too few to hold some out.
    """
    place = Path(folder or sysconfig.get_path("stdlib"))
    files = sorted(place.glob("*.py"))
    if len(files) < HELD_OUT:
        raise DatasetMissing(
            f"{place} holds {len(files)} Python files, expected at least {HELD_OUT}. Where a distribution leaves the "
            "library's source out it has a package for it; or name a folder of Python files with --data."
        )
    contents = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    held_out = contents[HELD_OUT - 1 :: HELD_OUT]
    kept = [content for i, content in enumerate(contents) if i % HELD_OUT != HELD_OUT - 1]
    return Text(str(place), (len(kept), len(held_out)), np.concatenate(kept), np.concatenate(held_out))


def windows(text: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    """The text cut into pieces (n, length + 1), each of which begins with the last byte of the one before: a view.

    So every byte but the first is predicted once; what is left at the end, less than `length`, is dropped.

    Raises:
        ValueError: if the text is shorter than one piece.
    """
    if len(text) <= length:
        raise ValueError(f"a text of {len(text)} bytes has no piece of {length} and one more")
    return sliding_window_view(text, length + 1)[::length]
