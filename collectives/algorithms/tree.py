"""Trees: few steps, for messages in which starting costs more than moving."""

from __future__ import annotations

from collectives.builder import Chunks, Share, algorithm

Children = dict[int, list[int]]  # of every rank


def binomial(size: int, root: int) -> Children:
    """Counted from the root, the parent of v is v without its lowest bit."""
    children: Children = {rank: [] for rank in range(size)}
    for v in range(1, size):
        children[(root + (v & (v - 1))) % size].append((root + v) % size)
    return children


def binary(ranks: list[int]) -> Children:
    """Numbered from the left: odd places are leaves, multiples of 2 their parents, of 4 theirs, ...; 0 is the root."""
    children: Children = {rank: [] for rank in ranks}
    for v in range(1, len(ranks)):
        bit = v & -v
        right_side_up = (v ^ bit) | bit << 1
        children[ranks[right_side_up if right_side_up < len(ranks) else v ^ bit]].append(ranks[v])
    return children


def reduce_up(chunks: Chunks, children: Children, root: int, index: int = 0) -> Share:
    own = chunks(rank=root, index=index)
    below = [reduce_up(chunks, children, child, index) for child in children[root]]
    return chunks.reduce([own, *below], rank=root) if below else own


def copy_down(share: Share, children: Children) -> None:
    for child in children[share.rank]:
        copy_down(share.copy_to(child), children)


@algorithm("all_reduce")
def double_tree(chunks: Chunks, size: int) -> None:
    """Two binary trees, each for half of the data; who is inside one is a leaf of the other, so that all work alike.

    P. Sanders, J. Speck and J. L. Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
    """
    ranks = list(range(size))
    mirrored = ranks[::-1] if size % 2 == 0 else ranks[1:] + ranks[:1]
    for index, order in enumerate((ranks, mirrored)):
        tree = binary(order)
        copy_down(reduce_up(chunks, tree, order[0], index), tree)


@algorithm("reduce", name="tree")
def tree_reduce(chunks: Chunks, size: int, root: int) -> None:
    reduce_up(chunks, binomial(size, root), root)


@algorithm("broadcast", name="tree")
def tree_broadcast(chunks: Chunks, size: int, root: int) -> None:
    copy_down(chunks(rank=root), binomial(size, root))


@algorithm("gather", name="tree")
def tree_gather(chunks: Chunks, size: int, root: int) -> None:
    for v in range(size):
        share = chunks(rank=(root + v) % size)
        while v:
            v &= v - 1
            share = share.copy_to((root + v) % size)


@algorithm("scatter", name="tree")
def tree_scatter(chunks: Chunks, size: int, root: int) -> None:
    for v in range(size):
        share = chunks(rank=root, index=(root + v) % size)
        for bit in reversed(range(size.bit_length())):  # from the root down to v: the bits of v, highest first
            if v >> bit & 1:
                share = share.copy_to((root + (v >> bit << bit)) % size)
