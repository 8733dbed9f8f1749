"""Ring algorithms: every rank only ever talks to its two neighbours.

Each chunk starts at a different rank, so that all links are busy all the time: the bandwidth is the best possible,
2 (p-1)/p of the message over each link for an all-reduce, but it takes 2 (p-1) steps.

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
