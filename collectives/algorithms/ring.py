"""Ring algorithms: every rank only ever talks to its two neighbours.

Each chunk starts at a different rank, so that all links are busy all the time. An all-reduce puts 2 (p-1)/p of the
message on each link, which is the least possible, but takes 2 (p-1) steps.

P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collectives.builder import Chunks, algorithm


@algorithm("all_reduce")
def ring(chunks: Chunks, size: int) -> None:
    for c in range(size):  # chunk c starts its journey at rank c
        share = chunks(rank=c, index=c)
        for hop in range(1, size):
            share = share.reduce_into(rank=(c + hop) % size)
        for hop in range(size - 1):
            share = share.copy_to(rank=(c + size + hop) % size)


@algorithm("all_reduce")
def bidirectional_ring(chunks: Chunks, size: int) -> None:
    """Half of the chunks go round the other way: where links carry both directions at once, twice as fast."""
    for c in range(size):
        for index, turn in ((c, 1), (size + c, -1)):
            share = chunks(rank=c, index=index)
            for hop in range(1, size):
                share = share.reduce_into(rank=(c + turn * hop) % size)
            for hop in range(size, 2 * size - 1):
                share = share.copy_to(rank=(c + turn * hop) % size)


@algorithm("reduce_scatter", name="ring")
def ring_reduce_scatter(chunks: Chunks, size: int) -> None:
    for c in range(size):  # block c ends its journey at rank c
        share = chunks(rank=(c + 1) % size, index=c)
        for hop in range(2, size + 1):
            share = share.reduce_into(rank=(c + hop) % size)


@algorithm("all_gather", name="ring")
def ring_all_gather(chunks: Chunks, size: int) -> None:
    for c in range(size):
        share = chunks(rank=c)
        for hop in range(1, size):
            share = share.copy_to(rank=(c + hop) % size)
