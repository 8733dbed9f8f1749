"""A slow backend for finding mistakes, around any other: after every call it compares a hash of what all ranks must
have alike, and looks for NaN. MGPU_DEBUG_RESULTS=1 puts it in place.

Asynchronous calls run at once, so that what is compared belongs to one call.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import Array
from collectives.backends.base import Backend, Pending
from collectives.call import Call, describe, make_call
from collectives.errors import CollectiveError
from kernels.dtypes import find

_ALIKE = ("all_reduce", "broadcast", "all_gather")  # what leaves the same on every rank
_FLOATING = ("float", "complex")


class Checked(Backend):
    """`inner`, with every result checked. All ranks must use it, or none.

    `run`, `start` and plans also raise, on every rank, FloatingPointError that names the ranks that brought a NaN, or
    else those whose result has one, and CollectiveError where results differ between ranks.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self.eager_bytes = inner.eager_bytes

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

    def exchange(self, sends: Sequence[tuple[Any, int, int]], receives: Sequence[tuple[Any, int, int]]) -> None:
        self._inner.exchange(sends, receives)

    def allocate(self, nbytes: int) -> Any:
        return self._inner.allocate(nbytes)

    def peer_view(self, array: Any, rank: int) -> Any:
        return self._inner.peer_view(array, rank)

    def signal(self, rank: int) -> None:
        self._inner.signal(rank)

    def wait_signal(self, rank: int) -> None:
        self._inner.wait_signal(rank)

    def fetch_add(self, word: Any, value: int, rank: int) -> int:
        return self._inner.fetch_add(word, value, rank)

    def acquire(self, lock: Any, rank: int) -> None:
        self._inner.acquire(lock, rank)

    def release(self, lock: Any, rank: int) -> None:
        self._inner.release(lock, rank)

    def wait_until(self, word: Any, value: int, rank: int) -> None:
        self._inner.wait_until(word, value, rank)

    def check(self, ranks: Sequence[int]) -> None:
        self._inner.check(ranks)

    def split(self, color: int | None, key: int) -> Backend | None:
        child = self._inner.split(color, key)
        return None if child is None else Checked(child)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def disown(self, reason: str) -> None:
        self._inner.disown(reason)

    def close(self) -> None:
        self._inner.close()

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
        try:
            run()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True


def _is_read(call: Call, rank: int) -> bool:
    """Whether the rank's source matters: a broadcast's is looked at on the root only."""
    return call.collective != "broadcast" or rank == call.root


def _holds_nan(call: Call, array: Array | None) -> bool:
    return array is not None and call.dtype.kind in _FLOATING and bool(np.isnan(array).any())
