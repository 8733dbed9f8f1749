"""Recursive halving and doubling: the fewest bytes, like a ring, in only log2(p) steps each way.

All chunks do the same, each seen from its owner: the ranks at distance `skip` to `upto` from it hand what they have to
those `skip` nearer; then the farther ones are done, and the next round has half as many. Any number of ranks will do.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", 2005 (powers of
two); J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997;
J. L. Traff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024 (halving for any number).
"""

from __future__ import annotations

from collectives.builder import Chunks, Share, algorithm

Rounds = list[tuple[int, int]]  # (skip, upto), from far to near


def halving(size: int) -> Rounds:
    rounds = []
    upto = size
    while upto > 1:
        skip = (upto + 1) // 2
        rounds.append((skip, upto))
        upto = skip
    return rounds


def powers_of_two(size: int) -> Rounds:
    return [(1 << k, min(2 << k, size)) for k in reversed(range((size - 1).bit_length()))]


def reduce_to(chunks: Chunks, owner: int, size: int, rounds: Rounds) -> Share:
    shares = [chunks(rank=(owner + distance) % size, index=owner) for distance in range(size)]
    for skip, upto in rounds:
        for far in range(skip, upto):
            near = shares[far - skip]
            shares[far - skip] = chunks.reduce([near, shares[far]], rank=near.rank)
    return shares[0]


def copy_from(share: Share, size: int, rounds: Rounds) -> None:
    owner = share.rank
    shares = [share]
    for skip, upto in reversed(rounds):
        shares += [shares[far - skip].copy_to((owner + far) % size) for far in range(skip, upto)]


@algorithm("all_reduce")
def halving_doubling(chunks: Chunks, size: int) -> None:
    for c in range(size):
        copy_from(reduce_to(chunks, c, size, halving(size)), size, halving(size))


@algorithm("reduce_scatter", name="halving")
def halving_reduce_scatter(chunks: Chunks, size: int) -> None:
    for c in range(size):
        reduce_to(chunks, c, size, halving(size))


@algorithm("all_gather", name="doubling")
def doubling_all_gather(chunks: Chunks, size: int) -> None:
    for c in range(size):
        copy_from(chunks(rank=c), size, halving(size))


@algorithm("reduce_scatter", name="bruck")
def bruck_reduce_scatter(chunks: Chunks, size: int) -> None:
    for c in range(size):
        reduce_to(chunks, c, size, powers_of_two(size))


@algorithm("all_gather", name="bruck")
def bruck_all_gather(chunks: Chunks, size: int) -> None:
    for c in range(size):
        copy_from(chunks(rank=c), size, powers_of_two(size))
