"""A slow backend for finding mistakes, around any other: after every call it compares a hash of what all ranks must
have alike, and looks for NaN. MGPU_DEBUG_RESULTS=1 puts it in place.

Asynchronous calls run at once, so that what is compared belongs to one call.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.arrays import Array
from collectives.backends.around import Around
from collectives.backends.base import Pending
from collectives.call import Call, describe, make_call
from collectives.errors import CollectiveError
from kernels.dtypes import find

_ALIKE = ("all_reduce", "broadcast", "all_gather")  # what leaves the same on every rank
_FLOATING = ("float", "complex")


class Checked(Around):
    """`inner`, with every result checked. All ranks must use it, or none.

    `run`, `start` and plans also raise, on every rank, FloatingPointError that names the ranks that brought a NaN, or
    else those whose result has one, and CollectiveError where results differ between ranks.
    """

    def run(self, call: Call, source: Any, target: Any) -> None:
        brought = _holds_nan(call, source if _is_read(call, self.rank) else None)
        self._inner.run(call, source, target)
        checksum = zlib.crc32(target.reshape(-1).view(np.uint8)) if call.collective in _ALIKE else 0
        self._compare(call, brought, _holds_nan(call, target), checksum)

    def start(self, call: Call, source: Any, target: Any) -> Pending:
        return _Ended(lambda: self.run(call, source, target))

    def plan(self, call: Call, source: Any, target: Any) -> Callable[..., None]:
        def run(keep: object = None) -> None:
            self.run(call, source, target)

        return run

    def _compare(self, call: Call, brought: bool, got: bool, checksum: int) -> None:
        report = np.array([brought, got, checksum], np.int64)
        reports = np.empty((self.size, len(report)), np.int64)
        self._inner.run(make_call("all_gather", find("int64"), len(report)), report, reports)
        what = describe(call.signature())
        for column, text in ((0, "brought a NaN"), (1, "has a NaN in its result, and nobody brought one")):
            guilty = np.flatnonzero(reports[:, column]).tolist()
            if guilty:
                raise FloatingPointError(f"{what}: rank {', '.join(map(str, guilty))} {text}")
        if len(set(reports[:, 2].tolist())) > 1:
            hashes = ", ".join(f"rank {rank} {value:08x}" for rank, value in enumerate(reports[:, 2].tolist()))
            raise CollectiveError(f"{what}: the results differ between ranks; their hashes: {hashes}")


class _Ended(Pending):
    """A call that was made when it was begun. What it raised is raised by `wait`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._begun = time.monotonic_ns()
        try:
            run()
        except Exception as error:
            self._error = error
        self._ended = time.monotonic_ns()

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True

    def times(self) -> tuple[int, int]:
        return self._begun, self._ended


def _is_read(call: Call, rank: int) -> bool:
    """Whether the rank's source matters: a broadcast's is looked at on the root only."""
    return call.collective != "broadcast" or rank == call.root


def _holds_nan(call: Call, array: Array | None) -> bool:
    return array is not None and call.dtype.kind in _FLOATING and bool(np.isnan(array).any())
