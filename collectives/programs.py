"""Programs ready to run: built, proven by rank 0, encoded for this rank, and kept."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from collectives.builder import lookup
from collectives.job import Encoded
from collectives.lowering import build
from collectives.verify import verified


def ready(collective: str, algorithm: str, size: int, rank: int, **options: Any) -> Encoded:
    """This rank's part of a program. Rank 0 proves it; the digest, which goes into every call's descriptor, tells the
    others that theirs is the same. `options` are `build`'s.

    Raises ProgramError, on rank 0, for an algorithm that is wrong.
    """
    return _ready(lookup(collective, algorithm), collective, algorithm, size, rank, tuple(sorted(options.items())))


@lru_cache(maxsize=1024)
def _ready(
    function: object, collective: str, algorithm: str, size: int, rank: int, options: tuple[tuple[str, Any], ...]
) -> Encoded:
    make = verified if rank == 0 else build
    return Encoded.of(make(collective, algorithm, size, **dict(options)), rank)
