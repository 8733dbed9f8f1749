"""`mgpu bench all_reduce`, as `python -m bench.all_reduce` too. See `bench.collective`, which has all of them."""

from __future__ import annotations

import sys

from bench.collective import run


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if one of our results was wrong."""
    return run("all_reduce", sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
