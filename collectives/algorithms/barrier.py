"""Barriers: nobody leaves before all have come."""

from __future__ import annotations

from collectives.algorithms.recursive import copy_from, powers_of_two
from collectives.builder import Chunks, algorithm


@algorithm("barrier")
def direct(chunks: Chunks, size: int) -> None:
    """Nothing moves: to enter a call is a barrier already, everybody hearing from everybody."""


@algorithm("barrier")
def dissemination(chunks: Chunks, size: int) -> None:
    """An all-gather of empty blocks: log2(p) rounds of one signal each.

    D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", 1988.
    """
    for rank in range(size):
        copy_from(chunks(rank=rank), size, powers_of_two(size))
