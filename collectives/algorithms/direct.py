"""Direct algorithms: every rank talks to every other, in one step or two.

On memory that all ranks share there is no nearer or farther neighbour, and the fewest steps move the fewest bytes.
"""

from __future__ import annotations

from collectives.builder import Chunks, algorithm


@algorithm("all_reduce")
def two_shot(chunks: Chunks, size: int) -> None:
    """Rank r reduces chunk r of everybody, and gives the result to everybody."""
    for r in range(size):
        total = chunks.reduce([chunks(rank=q, index=r) for q in range(size)], rank=r)
        total.copy_to(range(size))


@algorithm("all_reduce")
def one_shot(chunks: Chunks, size: int) -> None:
    """Every rank reduces everything itself: the least waiting, for small messages."""
    for r in range(size):
        chunks.reduce([chunks(rank=q) for q in range(size)], rank=r)
