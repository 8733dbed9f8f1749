"""What an engine offers to a communicator. Arrays are C-contiguous NumPy arrays (or what the backend's arrays are)."""

from __future__ import annotations

import ctypes
import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives import arrays
from collectives.call import Call
from collectives.errors import CollectiveError


class Ready(NamedTuple):
    """A job that compiled code may run on its own."""

    address: int
    resume: Callable[[int], None]  # goes on with it, given the status that the executor returned, to its end


class MessageWay(NamedTuple):
    """Compiled code that makes plain sends and receives on its own, in `native.short_way`'s words."""

    call: Callable[..., object]  # (x, out, dst, src, tag): sends x to dst, receives out from src; not to or from None
    pending: ctypes.c_int64  # the thread that has begun a call and not ended it; 0 if none has
    resume: Callable[..., None]  # goes on with such a call to its end, given the same arguments


class CanFail(Protocol):
    """An engine that remembers why it is of no further use, and lets its peers know."""

    def fail(self, error: BaseException) -> None: ...


class Failing:
    """Around what a communicator does not survive: whatever leaves it, Ctrl-C too, fails the engine."""

    __slots__ = ("_engine",)

    def __init__(self, engine: CanFail) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None:
            self._engine.fail(error)


class Pending(ABC):
    """A call under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the call has ended; raise what it failed with."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""

    @abstractmethod
    def times(self) -> tuple[int, int]:
        """When a call that has ended was begun and ended, in nanoseconds of time.monotonic_ns."""


class Backend(ABC):
    """One communicator's engine. Every method but `done` and `close` may raise a CollectiveError."""

    name: str
    rank: int
    size: int
    eager_bytes: int = 0  # see `Communicator.eager_bytes`
    heap: tuple[int, int] = (0, 0)  # address and bytes of this rank's symmetric memory, where `job` asks for it

    @abstractmethod
    def run(self, call: Call, source: Any, target: Any) -> None:
        """Make a collective call from array `source` into array `target` (None where this rank has none)."""

    @abstractmethod
    def start(self, call: Call, source: Any, target: Any) -> Pending:
        """Begin a collective call. Calls run in the order in which they were begun."""

    @abstractmethod
    def plan(self, call: Call, source: Any, target: Any) -> Callable[..., None]:
        """A function that makes this very call each time it is called, with these arrays. It does not keep them: the
        caller does, or gives them (or what owns them) with each call, to be kept until that call has ended."""

    def job(self, call: Call, source: Any, target: Any) -> Ready | None:
        """What the short way of `kernels/again.py` needs to make such calls, on any arrays in the same kind of memory;
        None where they are for `run`."""
        return None

    @abstractmethod
    def exchange(self, sends: Sequence[tuple[Any, int, int]], receives: Sequence[tuple[Any, int, int]]) -> None:
        """Send and receive (array, peer, tag) messages at the same time; return when all are done."""

    def message_way(self, acquire: Callable[[], bool], release: Callable[[], None]) -> MessageWay | None:
        """The short way of `kernels/messages.py`, given what takes the communicator's lock and lets it go; None where
        all messages are for `exchange`. Asked for once `exchange` has been called."""
        return None

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Symmetric memory: a zeroed array of bytes at the same place on every rank. All ranks call it together."""

    @abstractmethod
    def peer_view(self, array: Any, rank: int) -> Any:
        """The array of `rank` that corresponds to this rank's symmetric `array`."""

    def view(self, x: Any, role: str = "the array", writable: bool = False) -> Any:
        """The caller's array as this backend takes it: see `collectives.arrays.view`."""
        return arrays.view(x, role, writable)

    def fresh(self, like: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Callable[[], Any]]:
        """A new array for a result as this backend takes it, and what makes of it an array like the caller's `like`."""
        array = np.empty(shape, dtype)
        return array, lambda: arrays.same_kind(like, array)

    def present(self, memory: Any) -> Any:
        """What a user gets of symmetric memory."""
        return memory

    def assign(self, target: Any, source: Any) -> None:
        """Copy one array into another of the same size, as `view` gives them."""
        target[...] = source.reshape(target.shape)

    def pack(self, sources: Sequence[Any], bucket: Any) -> None:
        """Copy arrays of one dtype, as `view` gives them, into a flat one, one after another."""
        arrays.join(sources, bucket)

    def unpack(self, bucket: Any, targets: Sequence[Any]) -> None:
        """The way back."""
        arrays.part(bucket, targets)

    @abstractmethod
    def signal(self, rank: int) -> None:
        """Let `rank` know that all this rank has done so far is done."""

    @abstractmethod
    def wait_signal(self, rank: int) -> None:
        """Return when `rank` has signalled once more; what it did before is visible then."""

    @abstractmethod
    def fetch_add(self, word: Any, value: int, rank: int) -> int:
        """Add to `rank`'s counterpart of a symmetric int64 array of one element, atomically; what it was."""

    @abstractmethod
    def acquire(self, lock: Any, rank: int) -> None:
        """Take the lock that `rank`'s counterpart of a symmetric int64 array of one element is."""

    @abstractmethod
    def release(self, lock: Any, rank: int) -> None:
        """Let that lock go."""

    @abstractmethod
    def wait_until(self, word: Any, value: int, rank: int) -> None:
        """Return when `rank`'s counterpart of a symmetric int64 array of one element is `value` or more."""

    @abstractmethod
    def check(self, ranks: Sequence[int]) -> None:
        """Raise if one of these ranks has died or closed, or any rank has given up. Does not wait."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Backend | None:
        """An engine for the ranks of the same color, in the order of (key, rank); None for color None."""

    def survivors(self) -> Backend:
        """An engine of the ranks that have neither died nor closed; those call it together."""
        raise CollectiveError(f"ranks of the {self.name} backend go on without a lost one only when started again")

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Give up: this rank's and its peers' calls raise, now and later."""

    @abstractmethod
    def disown(self, reason: str) -> None:
        """Refuse every further call without a word to the peers: this process is a fork of the rank's."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Closing twice is fine, also in two threads at once."""

    def drop(self) -> None:
        """Close, as nobody refers to the communicator any more. The garbage collector comes in any thread, in one that
        the engine waits for too, and amid anything, also under a lock that closing takes: then another thread closes.
        """
        if getattr(_collecting, "now", False):
            threading.Thread(target=self.close, name="mgpu close").start()
        else:
            self.close()


_collecting = threading.local()  # now: whether the garbage collector runs in this thread


def _note_collection(phase: str, _: dict[str, int]) -> None:
    _collecting.now = phase == "start"


gc.callbacks.append(_note_collection)
