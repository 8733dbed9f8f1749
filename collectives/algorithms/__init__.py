"""The algorithms that come with the package, each a few lines in the builder's language.

`algorithm` registers one more; imported from here, ours are registered first, and one of the same name takes its place.
"""

from collectives.algorithms import all_to_all, barrier, chain, direct, hierarchical, recursive, ring, tree
from collectives.builder import algorithm

__all__ = ["algorithm", "all_to_all", "barrier", "chain", "direct", "hierarchical", "recursive", "ring", "tree"]
