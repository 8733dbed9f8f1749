"""The algorithms that come with the package, each a few lines in the builder's language."""

from collectives.algorithms import all_to_all, barrier, chain, direct, hierarchical, recursive, ring, tree

__all__ = ["all_to_all", "barrier", "chain", "direct", "hierarchical", "recursive", "ring", "tree"]
