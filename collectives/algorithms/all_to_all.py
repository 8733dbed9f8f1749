"""All-to-all: every rank has a block for every other."""

from __future__ import annotations

from collectives.builder import Chunks, algorithm


@algorithm("all_to_all")
def direct(chunks: Chunks, size: int) -> None:
    for source in range(size):
        for target in range(size):
            chunks(rank=source, index=target).copy_to(target)


@algorithm("all_to_all")
def bruck(chunks: Chunks, size: int) -> None:
    """A block goes the binary digits of its distance, one after another: log2(p) messages a rank instead of p - 1.

    J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.
    """
    for source in range(size):
        for distance in range(size):
            share = chunks(rank=source, index=(source + distance) % size)
            for bit in range(size.bit_length()):
                if distance >> bit & 1:
                    share = share.copy_to((share.rank + (1 << bit)) % size)
