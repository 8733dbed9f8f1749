"""The algorithms that come with the package, each a few lines in the builder's language."""

from collectives.algorithms import direct, ring

__all__ = ["direct", "ring"]
