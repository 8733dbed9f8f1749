"""A backend around another, which passes every call on: what looks at calls begins with this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.backends.base import Backend, Pending
from collectives.call import Call


class Around(Backend):
    """`inner`, unchanged; sub-communicators get one of the same kind around them."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self.eager_bytes = inner.eager_bytes

    def run(self, call: Call, source: Any, target: Any) -> None:
        self._inner.run(call, source, target)

    def start(self, call: Call, source: Any, target: Any) -> Pending:
        return self._inner.start(call, source, target)

    def plan(self, call: Call, source: Any, target: Any) -> Callable[..., None]:
        return self._inner.plan(call, source, target)

    def exchange(self, sends: Sequence[tuple[Any, int, int]], receives: Sequence[tuple[Any, int, int]]) -> None:
        self._inner.exchange(sends, receives)

    def allocate(self, nbytes: int) -> Any:
        return self._inner.allocate(nbytes)

    def peer_view(self, array: Any, rank: int) -> Any:
        return self._inner.peer_view(array, rank)

    def view(self, x: Any, role: str = "the array", writable: bool = False) -> Any:
        return self._inner.view(x, role, writable)

    def fresh(self, like: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Callable[[], Any]]:
        return self._inner.fresh(like, shape, dtype)

    def present(self, memory: Any) -> Any:
        return self._inner.present(memory)

    def assign(self, target: Any, source: Any) -> None:
        self._inner.assign(target, source)

    def pack(self, sources: Sequence[Any], bucket: Any) -> None:
        self._inner.pack(sources, bucket)

    def unpack(self, bucket: Any, targets: Sequence[Any]) -> None:
        self._inner.unpack(bucket, targets)

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
        return None if child is None else type(self)(child)

    def survivors(self) -> Backend:
        return type(self)(self._inner.survivors())

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def disown(self, reason: str) -> None:
        self._inner.disown(reason)

    def close(self) -> None:
        self._inner.close()
