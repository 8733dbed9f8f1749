"""Errors of calls among one host's ranks, within calls of more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from collectives.errors import CollectiveError


@contextmanager
def inside(neighbours: Sequence[int], hostname: str) -> Iterator[None]:
    """What is raised in here names ranks by their numbers on this host, which `neighbours` translates."""
    try:
        yield
    except CollectiveError as error:
        if list(neighbours) == list(range(len(neighbours))):
            raise
        ours = ", ".join(f"{number} is {rank}" for number, rank in enumerate(neighbours))
        told = type(error)(f"among the ranks of {hostname} ({ours}): {error}")
        told.echo = error.echo
        raise told from error
