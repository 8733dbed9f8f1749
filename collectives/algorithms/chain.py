"""Chains: the whole message passes from rank to rank, slice after slice.

Once the pipeline is full every link carries every slice once, so that a long message takes little more than the time
of one link, whatever the number of ranks.
"""

from __future__ import annotations

from collectives.builder import Chunks, algorithm


@algorithm("broadcast", name="chain")
def chain_broadcast(chunks: Chunks, size: int, root: int) -> None:
    share = chunks(rank=root)
    for hop in range(1, size):
        share = share.copy_to(rank=(root + hop) % size)


@algorithm("reduce", name="chain")
def chain_reduce(chunks: Chunks, size: int, root: int) -> None:
    share = chunks(rank=(root + 1) % size)
    for hop in range(2, size + 1):
        share = share.reduce_into(rank=(root + hop) % size)


@algorithm("broadcast")
def scatter_all_gather(chunks: Chunks, size: int, root: int) -> None:
    """The root gives each of the others one chunk, and these go round in a ring without it.

    R. van de Geijn et al., "Collective communication: theory, practice, and experience", 2007 (there with the root).
    """
    others = [(root + 1 + i) % size for i in range(size - 1)]
    for c, owner in enumerate(others):
        share = chunks(rank=root, index=c).copy_to(owner)
        for hop in range(1, len(others)):
            share = share.copy_to(others[(c + hop) % len(others)])
