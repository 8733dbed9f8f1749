"""Message sizes: 8, 4K, 128M, and the sweep from one to another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from collectives.memory import parse_bytes

_UNITS = {"G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


def parse_size(text: str) -> int:
    """`collectives.memory.parse_bytes` of a flag: its ValueError becomes argparse's usage message."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def format_size(nbytes: int) -> str:
    """The shortest exact form: 128M, 1K, 1000."""
    for unit, worth in _UNITS.items():
        if nbytes and nbytes % worth == 0:
            return f"{nbytes // worth}{unit}"
    return str(nbytes)


def add_flags(flags: argparse.ArgumentParser, first: str, last: str, factor: float) -> None:
    """A sweep's flags, which are nccl-tests': `minbytes`, `maxbytes` and `stepfactor`, with these defaults."""
    add = flags.add_argument
    add("-b", "--minbytes", type=parse_size, default=first, help=f"first size (8, 4K, 128M; default {first})")
    add("-e", "--maxbytes", type=parse_size, default=last, help=f"last size (default {last})")
    add("-f", "--stepfactor", type=float, default=factor, help=f"factor from one size to the next (default {factor:g})")


def sweep(first: int, last: int, *, factor: float | None = None, step: int | None = None) -> Iterator[int]:
    """Sizes from `first` to at most `last` bytes, each `factor` times the one before, or `step` bytes more.

    Raises ValueError for a sweep that would never end.
    """
    if step is not None:
        if step <= 0:
            raise ValueError(f"a step of {step} bytes never gets to {last}: it must be positive")
        yield from range(first, last + 1, step)
        return
    if factor is None or factor <= 1:
        raise ValueError(f"a factor of {factor} never gets to {last} bytes: it must be above 1")
    size = first
    while size <= last:
        yield size
        size = max(size + 1, int(size * factor))
