"""Microbenchmarks with nccl-tests' flags and columns, and comparisons with peers run side by side.

Each benchmark is a module with a `main`; those of the collectives are all in `collective`. `mgpu bench all_reduce` and
`python -m bench all_reduce` are the same.
"""

__distribution__ = "mgpu-core"  # tells this package from another distribution's `bench`: see collectives.installation
