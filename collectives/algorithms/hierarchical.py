"""Two levels: ranks that are close (on one host) first reduce among themselves, so that less goes between groups.

Every chunk is reduced inside each group to one member, then across the groups among these members, and the result goes
back the same way. Each level does its part along a ring, along a tree, or directly. Each of a group's members
is in charge of other chunks, so that all links between groups are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.builder import Chunks, Share, algorithm

Group = Sequence[int]


def reduce_to_last(chunks: Chunks, shares: list[Share], along: str) -> Share:
    """Reduce one share of each rank; the last rank gets the result."""
    if along == "direct":
        return chunks.reduce(shares, rank=shares[-1].rank) if len(shares) > 1 else shares[0]
    while len(shares) > 1:
        if along == "ring":  # the first goes into the second, that into the third, ...
            shares = [chunks.reduce(shares[:2], rank=shares[1].rank), *shares[2:]]
        else:  # all in pairs, at once
            start = len(shares) % 2
            pairs = zip(shares[start::2], shares[start + 1 :: 2], strict=True)
            shares = shares[:start] + [chunks.reduce([a, b], rank=b.rank) for a, b in pairs]
    return shares[0]


def copy_to_all(share: Share, ranks: Group, along: str) -> list[Share]:
    """Copy a share to the others of `ranks`, nearest after its own rank first; returns everybody's."""
    first = list(ranks).index(share.rank)
    shares = [share]
    for i in range(1, len(ranks)):
        source = {"direct": 0, "ring": i - 1, "tree": i & (i - 1)}[along]
        shares.append(shares[source].copy_to(ranks[(first + i) % len(ranks)]))
    return shares


def rotated(items: Sequence, last: int) -> list:
    """`items` in their circular order, so that items[last] comes last."""
    return [items[(last + 1 + i) % len(items)] for i in range(len(items))]


@algorithm("all_reduce")
def hierarchical(
    chunks: Chunks, size: int, groups: int | Sequence[Group] = 2, inner: str = "direct", outer: str = "ring"
) -> None:
    """`groups`: how many groups of consecutive ranks, or each group's ranks. `inner`, `outer`: ring, tree or direct."""
    if isinstance(groups, int):
        bounds = [size * g // groups for g in range(groups + 1)]
        groups = [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
    if sorted(rank for group in groups for rank in group) != list(range(size)):
        raise ValueError(f"every rank must be in one group, got {groups}")
    for c in range(len(groups) * max(map(len, groups))):
        partials = [
            reduce_to_last(chunks, [chunks(rank=r, index=c) for r in rotated(group, c % len(group))], inner)
            for group in groups
        ]
        leaders = [partial.rank for partial in partials]
        total = reduce_to_last(chunks, rotated(partials, c % len(groups)), outer)
        for share in copy_to_all(total, leaders, outer):
            group = next(group for group in groups if share.rank in group)
            copy_to_all(share, group, inner)
