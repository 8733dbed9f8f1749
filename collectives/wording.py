"""How messages say counts."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """So many of them: "1 rank", "2 ranks", "1,000 ranks"; for nouns whose plural is an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
