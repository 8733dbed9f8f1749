"""Direct algorithms: every rank talks to every other, in one step or two.

In memory that all ranks share nobody is nearer or farther, and the fewest steps move the fewest bytes.
"""

from __future__ import annotations

from collectives.builder import Chunks, algorithm


@algorithm("all_reduce")
def two_shot(chunks: Chunks, size: int) -> None:
    """Rank r reduces everybody's chunk r, and gives the result to everybody."""
    for r in range(size):
        total = chunks.reduce([chunks(rank=q, index=r) for q in range(size)], rank=r)
        total.copy_to(range(size))


@algorithm("all_reduce")
def one_shot(chunks: Chunks, size: int) -> None:
    """Every rank reduces everything itself: the least waiting, for small messages."""
    for r in range(size):
        chunks.reduce([chunks(rank=q) for q in range(size)], rank=r)


@algorithm("reduce", name="one_shot")
def one_shot_reduce(chunks: Chunks, size: int, root: int) -> None:
    """The root reduces everything."""
    chunks.reduce([chunks(rank=q) for q in range(size)], rank=root)


@algorithm("reduce", name="two_shot")
def two_shot_reduce(chunks: Chunks, size: int, root: int) -> None:
    """Rank r reduces everybody's chunk r for the root."""
    for r in range(size):
        chunks.reduce([chunks(rank=q, index=r) for q in range(size)], rank=r).copy_to(root)


@algorithm("reduce_scatter", name="direct")
def direct_reduce_scatter(chunks: Chunks, size: int) -> None:
    for r in range(size):
        chunks.reduce([chunks(rank=q, index=r) for q in range(size)], rank=r)


@algorithm("all_gather", name="direct")
def direct_all_gather(chunks: Chunks, size: int) -> None:
    for r in range(size):
        chunks(rank=r).copy_to(range(size))


@algorithm("broadcast", name="direct")
def direct_broadcast(chunks: Chunks, size: int, root: int) -> None:
    chunks(rank=root).copy_to(range(size))


@algorithm("gather", name="direct")
def direct_gather(chunks: Chunks, size: int, root: int) -> None:
    for r in range(size):
        chunks(rank=r).copy_to(root)


@algorithm("scatter", name="direct")
def direct_scatter(chunks: Chunks, size: int, root: int) -> None:
    for r in range(size):
        chunks(rank=root, index=r).copy_to(r)


@algorithm("send_recv", name="direct")
def direct_send_recv(chunks: Chunks, size: int, root: int) -> None:
    chunks(rank=root).copy_to(1 - root)
