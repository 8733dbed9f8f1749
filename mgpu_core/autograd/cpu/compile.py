"""How kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

LOOSE = frozenset({"reassoc", "contract", "nsz"})  # sums may be reordered, so that they become vector instructions
STRICT = frozenset({"contract"})


def jit(function: Callable[..., Any], *, fastmath: frozenset[str] = LOOSE) -> Callable[..., Any]:
    """Compiles on first use, for each dtype, and keeps the machine code on disk where that is possible."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return numba.njit(**options)(function)
