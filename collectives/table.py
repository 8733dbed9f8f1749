"""The table of a short way, which is compiled code that takes its arguments as Python's objects: see `kernels/again.py`
and `kernels/messages.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from collectives.arrays import address
from collectives.backends.base import Backend
from kernels import again as layout


class Table:
    """64-bit words at `address`, zero but for those that all short ways have."""

    def __init__(self, words: int, backend: Backend, acquire: Callable[[], bool], release: Callable[[], None]) -> None:
        """`acquire`, `release`: what takes the communicator's lock, and lets it go."""
        self.words = np.zeros(words, np.int64)
        self.address = address(self.words)
        self.words[: layout.TABLE_PENDING] = (
            id(acquire), id(release), id(None), id(np.ndarray), object.__basicsize__, backend.rank, *backend.heap,
        )  # fmt: skip
        self.pending = ctypes.c_int64.from_address(self.address + 8 * layout.TABLE_PENDING)
        self._keep = acquire, release
