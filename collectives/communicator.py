"""The communicator: what a user's program calls.

Arrays may be NumPy, PyTorch or JAX arrays, or anything with `__array_interface__` or DLPack; what comes back is of the
caller's own kind. An argument of one collective call must agree between ranks in everything that matters (dtype,
count, reduction, root), or every rank raises CollectiveMismatchError. `out=x` reduces in place.

Threads. One thread at a time is in a call of a communicator; others wait for it, whatever it waits for: a receive that
waits keeps other threads' sends waiting, and a `group` all of their calls until its end. All ranks must make the same
calls in the same order, so threads that share a communicator have to agree on that order; give each its own with
`split`: communicators know nothing of each other, and may be used at the same time. Without that lock, and from any
thread at any time: `abort`, which ends the calls that wait; `wait` and `done` of a `Work`, in several threads at once
too; `put`, `get` and `peer`, where the caller sees to it that nobody else writes there. A plan's calls do not take the
lock, for speed: its caller keeps them apart from the communicator's other calls. `close` waits for the call under way.
"""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import index, is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives import arrays
from collectives.again import Again, Known, Terms, the_one_object
from collectives.arrays import Array
from collectives.backends.base import Backend, MessageWay, Pending
from collectives.call import Call, PremulSum, make_call, padded, scale_bits
from collectives.errors import CollectiveError
from collectives.wording import counted
from kernels.dtypes import OPERATIONS, DType, find

Op = str | PremulSum
Message = tuple[Array, int, int]  # array, peer, tag


class Prepared(NamedTuple):
    """A checked call: its arrays as the backend takes them, and what makes the caller's result of them afterwards."""

    call: Call
    source: Array | None
    target: Array | None
    result: Callable[[], Any]


class Work:
    """An asynchronous call under way."""

    def __init__(self, pending: Pending, prepared: Prepared) -> None:
        self._pending, self._prepared = pending, prepared

    def wait(self) -> Any:
        """Wait until the call has ended and return its result. Raises what the call failed with."""
        self._pending.wait()
        return self._prepared.result()

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._pending.done()


class Communicator:
    """A group of ranks that call collectives together.

    Every collective blocks until this rank's arrays may be used again, or with `async_op=True` returns a `Work`.
    Raised by all: CollectiveMismatchError where ranks disagree, PeerLostError for a rank that died or left,
    CollectiveTimeoutError at the deadline, ValueError and TypeError for bad arguments. After one of the first three the
    communicator is of no further use.

    `algorithm` names the one to use (see `collectives.builder.algorithms`), for those who know better than the choice
    that is made without it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank = backend.rank
        self.size = backend.size
        self._lock = threading.RLock()
        self._again: Again | None = None  # what calls that are made again go by
        self._message_way: MessageWay | None = None  # what makes plain messages
        self._group: tuple[list[Message], list[Message]] | None = None
        self._parent: Communicator | None = None
        self._finalizer = weakref.finalize(self, backend.drop)  # for whoever drops it without closing it
        _alive.add(self)

    @property
    def backend(self) -> str:
        """The engine's name, such as shm, cuda, nccl or shm+mpi."""
        return self._backend.name

    @property
    def eager_bytes(self) -> int:
        """A `send` of at most so many bytes returns without its receiver, if that has received all earlier messages; 0
        where nothing is promised.

        On shm, 448 KiB to each receiver, out of 512: every message that has been sent and not yet received keeps 64 KiB
        for its header, and its own bytes rounded up to 64 KiB. One that a receiver passes over, as it asks for another
        tag, counts as received.
        """
        return self._backend.eager_bytes

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.backend}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    # Reductions

    def all_reduce(
        self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: str | None = None, async_op: bool = False
    ) -> Any:
        """The reduction of every rank's `x`, on every rank: an array like x, or `out`. The same bits on every rank.

        op: "sum", "prod", "min", "max", "avg" or `premul_sum(scale)`. A list of arrays goes as one message per dtype,
        and a list comes back (`out`: the same list, to reduce in place, or None).
        """
        if (result := self._call_again(x, out, "all_reduce", op, None, algorithm, async_op)) is not None:
            return result
        if isinstance(x, (list, tuple)):
            return self._all_reduce_list(x, op, out, algorithm, async_op)
        terms = "all_reduce", op, None, algorithm, async_op
        return self._make(self._all_reduce(x, op, out=out, algorithm=algorithm), async_op, terms, out)

    def reduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        root: int = 0,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """The reduction of every rank's `x` on rank `root`: an array like x, or `out`; None on the others."""
        gets = self.rank == root
        if (result := self._call_again(x, out if gets else x, "reduce", op, root, algorithm, async_op)) is not None:
            return result if gets else None
        terms = "reduce", op, root, algorithm, async_op
        return self._make(self._reduce(x, op, root=root, out=out, algorithm=algorithm), async_op, terms, out)

    def reduce_scatter(
        self,
        x: Any,
        op: Op = "sum",
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """This rank's block of the reduction. `x`, the same shape everywhere, is split on axis 0: into equal blocks, or
        `counts[r]` rows for rank r. Returns an array (rows, ...)."""
        even = counts is None
        if even and (result := self._call_again(x, out, "reduce_scatter", op, None, algorithm, async_op)) is not None:
            return result
        terms = ("reduce_scatter", op, None, algorithm, async_op) if even else None
        prepared = self._reduce_scatter(x, op, out=out, counts=counts, algorithm=algorithm)
        return self._make(prepared, async_op, terms, out)

    # Copies

    def broadcast(self, x: Any, *, root: int = 0, algorithm: str | None = None, async_op: bool = False) -> Any:
        """Rank `root`'s x, on every rank, in place. (JAX arrays cannot be written: there the result is a new one.)"""
        if (result := self._call_again(x, x, "broadcast", None, root, algorithm, async_op)) is not None:
            return result
        terms = "broadcast", None, root, algorithm, async_op
        return self._make(self._broadcast(x, root=root, algorithm=algorithm), async_op, terms, x)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank's x, joined on axis 0: (size * n, ...). With `counts`, rank r brings counts[r] rows."""
        even = counts is None
        if even and (result := self._call_again(x, out, "all_gather", None, None, algorithm, async_op)) is not None:
            return result
        terms = ("all_gather", None, None, algorithm, async_op) if even else None
        return self._make(self._all_gather(x, out=out, counts=counts, algorithm=algorithm), async_op, terms, out)

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Every rank's x, joined on axis 0, on rank `root`; None on the others. `counts` as for all_gather."""
        even, gets = counts is None, self.rank == root
        into = out if gets else x
        if even and (result := self._call_again(x, into, "gather", None, root, algorithm, async_op)) is not None:
            return result if gets else None
        terms = ("gather", None, root, algorithm, async_op) if even else None
        prepared = self._gather(x, root=root, out=out, counts=counts, algorithm=algorithm)
        return self._make(prepared, async_op, terms, out)

    def scatter(
        self,
        x: Any = None,
        *,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """This rank's block of rank `root`'s x, split on axis 0 into equal blocks or `counts[r]` rows for rank r. Other
        ranks pass no x (it is not looked at), and `out`, which says what they expect."""
        even, given = counts is None, x if self.rank == root else out
        if even and (result := self._call_again(given, out, "scatter", None, root, algorithm, async_op)) is not None:
            return result
        terms = ("scatter", None, root, algorithm, async_op) if even else None
        prepared = self._scatter(x, root=root, out=out, counts=counts, algorithm=algorithm)
        return self._make(prepared, async_op, terms, out)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Block q of `x` (axis 0) goes to rank q, and what comes back is everybody's block for this rank, joined in
        rank order. Blocks are equal, or `counts[q]` rows go to rank q (each rank gives its own counts).
        """
        even = counts is None
        if even and (result := self._call_again(x, out, "all_to_all", None, None, algorithm, async_op)) is not None:
            return result
        terms = ("all_to_all", None, None, algorithm, async_op) if even else None
        return self._make(self._all_to_all(x, out=out, counts=counts, algorithm=algorithm), async_op, terms, out)

    def barrier(self, *, algorithm: str | None = None, async_op: bool = False) -> Any:
        """Return when every rank has come."""
        if self._call_again(_NOTHING, _NOTHING, "barrier", None, None, algorithm, async_op) is not None:
            return None
        return self._make(self._barrier(algorithm), async_op, ("barrier", None, None, algorithm, async_op))

    def broadcast_object(self, value: Any = None, *, root: int = 0) -> Any:
        """Rank `root`'s value on every rank: None, booleans, numbers, strings, lists and dicts of them (what JSON
        holds; nothing is unpickled).
        """
        text = json.dumps(value).encode() if self.rank == root else b""
        text = text.ljust(padded(len(text)))  # JSON allows spaces
        length = np.array([len(text)], np.int64)
        self.broadcast(length, root=root)
        data = np.frombuffer(text, np.uint8).copy() if self.rank == root else np.empty(int(length[0]), np.uint8)
        self.broadcast(data, root=root)
        return json.loads(data.tobytes())

    # Messages between two ranks

    def send(self, x: Any, dst: int, *, tag: int = 0) -> None:
        """Send an array to rank `dst`. Returns when x may be used again: a message of up to `eager_bytes` may not have
        been received then. Larger ones are fastest from symmetric memory (`empty`), where the receiver reads them.
        Ranks whose sends wait for each other raise CollectiveMismatchError."""
        if not self._message_again(x, x, dst, None, tag):
            self._messages([self._outgoing(x, dst, tag)], [])

    def recv(self, out: Any, src: int, *, tag: int = 0) -> Any:
        """Receive into `out` the next array that rank `src` sent with this tag: the same dtype and element count."""
        if not self._message_again(out, out, None, src, tag):
            self._messages([], [self._incoming(out, src, tag)])
        return out

    def sendrecv(self, x: Any, dst: int, out: Any, src: int, *, tag: int = 0) -> Any:
        """Send x to `dst` and receive `out` from `src` at the same time: no order of ranks can block. Arrays of the
        CPU may share memory, at the price of a copy; those of a GPU may not, and raise ValueError."""
        # None is no rank, and means another call to the short way.
        if dst is None or src is None or not self._message_again(x, out, dst, src, tag):
            (source, to, number), received = self._outgoing(x, dst, tag), self._incoming(out, src, tag)
            target = received[0]
            start, into = arrays.address(source), arrays.address(target)
            if start < into + target.nbytes and into < start + source.nbytes:
                source = arrays.apart(source)
            self._messages([(source, to, number)], [received])
        return out

    @contextmanager
    def group(self) -> Iterator[None]:
        """Sends and receives made inside run together at its end, in any order: no order of ranks can block.

        The arrays must stay as they are until then. If an error leaves the block, nothing is sent or received.
        """
        with self._lock:
            if self._group is not None:
                raise CollectiveError("a group is open already; groups do not nest")
            self._group = ([], [])
            try:
                yield
                sends, receives = self._group
            finally:
                self._group = None
            self._backend.exchange(sends, receives)

    # Symmetric memory

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> Array:
        """An array in memory that every rank reads and writes directly. All ranks call it together, with equal
        arguments. Its contents are undefined.

        Raises MemoryError on every rank if one has no room. The memory is freed when every rank has dropped its array
        and one more is allocated.
        """
        kind = find(np.dtype(dtype))
        dimensions = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        if any(n < 0 for n in dimensions):
            raise ValueError(f"shape {dimensions} has a negative dimension")
        nbytes = math.prod(dimensions) * kind.itemsize
        with self._lock:
            memory: Array = self._backend.allocate(nbytes)
        array: Array = self._backend.present(memory.view(kind.numpy).reshape(dimensions))
        return array

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> Array:
        """The same, zero: every rank's array is zero before any rank has its own."""
        return self.empty(shape, dtype)

    def peer(self, x: Array, rank: int) -> Array:
        """Rank `rank`'s array that corresponds to this rank's symmetric `x` (or a view of one): shared, not copied.

        When it may be read or written is for the ranks to agree on, by a barrier or a message.
        """
        view: Array = self._backend.peer_view(self._backend.view(x, "x"), self._peer(rank))
        return view

    def put(self, x: Any, symmetric: Array, rank: int) -> None:
        """Copy `x` into rank `rank`'s array that corresponds to this rank's `symmetric` (or a view of one): the same
        dtype and element count. That rank knows nothing of it until a `signal`, or another call, says so.
        """
        target, source = self.peer(symmetric, rank), self._backend.view(x, "x")
        _check_alike("x", source, "the symmetric array", target)
        self._backend.assign(target, source)

    def get(self, symmetric: Array, rank: int, out: Any = None) -> Any:
        """A copy of rank `rank`'s array that corresponds to this rank's `symmetric`: a new array, or `out`."""
        source = self.peer(symmetric, rank)
        if out is None:
            target, result = self._backend.fresh(symmetric, source.shape, source.dtype)
            self._backend.assign(target, source)
            return result()
        target = self._backend.view(out, "out", writable=True)
        _check_alike("out", target, "the symmetric array", source)
        self._backend.assign(target, source)
        return out

    def signal(self, rank: int) -> None:
        """Tell rank `rank` that what this rank has done so far, every `put` too, is done. Does not wait."""
        with self._lock:
            self._backend.signal(self._peer(rank))

    def wait_signal(self, rank: int, count: int = 1) -> None:
        """Wait for the next `count` signals of rank `rank`; what it had done before each is visible then.

        Signals of a rank are counted, and none is lost, whether this rank waits before or after they come.
        """
        if count < 0:
            raise ValueError(f"count {count} is negative")
        with self._lock:
            for _ in range(count):
                self._backend.wait_signal(self._peer(rank))

    def fetch_add(self, word: Any, value: int, rank: int) -> int:
        """Add to rank `rank`'s counterpart of `word`, a symmetric int64 array of one element, and return what it was.

        Atomic: of ranks that count in the same word at the same time, each gets a number of its own. What a rank did
        before is visible to those who find its addition. Does not wait.
        """
        return self._backend.fetch_add(_symmetric_word(word, "word"), int(value), self._peer(rank))

    def wait_until(self, word: Any, value: int, rank: int) -> None:
        """Return when rank `rank`'s counterpart of `word`, a symmetric int64 array of one element that only grows, is
        `value` or more. What was done before the `fetch_add` that made it so is visible then. Looks 2,000 times a
        second, and sleeps between.

        Raises PeerLostError if that rank dies or closes before, CollectiveTimeoutError at the deadline.
        """
        self._backend.wait_until(_symmetric_word(word, "word"), int(value), self._peer(rank))

    @contextmanager
    def lock(self, word: Any, rank: int) -> Iterator[None]:
        """Inside, no other rank holds rank `rank`'s counterpart of `word`, a symmetric int64 array of one element that
        was zero at first and serves no other purpose. What its last holder did is visible. Threads of one rank count
        as one: they must not hold the same lock.

        Raises PeerLostError if the holder has died, CollectiveTimeoutError if it keeps the lock until the deadline.
        """
        lock, rank = _symmetric_word(word, "lock"), self._peer(rank)
        self._backend.acquire(lock, rank)
        try:
            yield
        finally:
            self._backend.release(lock, rank)

    def check(self, ranks: Sequence[int] | None = None) -> None:
        """Raise PeerLostError if one of `ranks` (None: any) has died or closed, or what a rank has given up with; else
        return at once. For ranks that work for a long time without a call that would find out.
        """
        self._backend.check(range(self.size) if ranks is None else [self._peer(rank) for rank in ranks])

    # Plans and families

    def plan(self, collective: str, x: Any = None, *args: Any, **options: Any) -> Callable[[], Any]:
        """A function that makes one fixed call, with these arrays, each time it is called: the cheapest way to call.

        `comm.plan("all_reduce", x, "sum", out=x)`. The result is in `plan.out` (out, or an array that each call
        refills).
        """
        if collective not in _PLANNABLE:
            raise ValueError(f"no collective is called {collective!r}; there are {', '.join(_PLANNABLE)}")
        arguments = args if x is None else (x, *args)
        with self._lock:
            prepared: Prepared = getattr(self, f"_{collective}")(*arguments, **options)
            source = None if x is None else prepared.source
            if source is not None and not _lies_where(source, self._backend.view(x)):
                raise ValueError(
                    f"a plan reads x where it lies, and this x (shape {np.shape(x)}) would have to be copied: make it "
                    f"C-contiguous, writable for broadcast, and apart from out"
                )
            run = self._backend.plan(prepared.call, prepared.source, prepared.target)
        run.out = prepared.result()  # type: ignore[attr-defined]
        run.arrays = prepared.source, prepared.target  # type: ignore[attr-defined]  # which it keeps alive
        run.communicator = self  # type: ignore[attr-defined]  # which lives as long as its plans
        return run

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """A communicator of the ranks that give the same color, ordered by (key, rank); None for those that give None.

        All ranks call it together. Close it, by `close` or `with`, when it is done with. It keeps this one alive.
        """
        color = None if color is None else index(color)  # NumPy's integers, too
        with self._lock:
            engine = self._backend.split(color, self.rank if key is None else index(key))
        if engine is None:
            return None
        child = type(self)(engine)
        child._parent = self  # without which the garbage collector would close both: `comm = comm.split(0)`
        return child

    def survivors(self) -> Communicator:
        """A new communicator of the ranks that are left, in their order, when others have died or closed this one.

        To be called by all that are left, after a PeerLostError or at any time; this communicator is of no further use
        then, and is to be closed. Ranks that a launcher ends when one has died (`mgpu run`, `spawn`) have no time for
        it: there `mgpu run --restarts` is the way.
        Raises CollectiveTimeoutError naming who is alive and has not come, CollectiveError over MPI and `init_all`.
        """
        with self._lock:
            return type(self)(self._backend.survivors())

    def abort(self, reason: str = "abort() was called") -> None:
        """Give up: the calls of this rank and of its peers, under way or yet to come, raise."""
        self._backend.abort(reason)

    def close(self) -> None:
        """Give everything back, after the asynchronous calls under way have ended. Closing twice is fine.

        Arrays from `empty` stay valid. With the communicator that `init` made, those split from it are closed too. One
        that is dropped without `close` is closed by the garbage collector.
        """
        with self._lock:
            self._backend.close()
            self._finalizer.detach()

    # How arguments become a call

    def _all_reduce(self, x: Any, op: Op = "sum", *, out: Any = None, algorithm: str | None = None) -> Prepared:
        source = self._backend.view(x, "x")
        target, result = self._target(x, out, source.shape, source.dtype)
        return self._prepared("all_reduce", source, target, result, source.size, op=op, algorithm=algorithm)

    def _call_again(
        self, x: Any, out: Any, collective: str, op: Any, root: Any, algorithm: Any, async_op: Any
    ) -> Any:  # fmt: skip
        """The result of a call whose like was made before, the short way (`kernels/again.py`), or None.

        What the long way checks and derives is known from the terms and from what x is like, but for where arrays lie.
        """
        again = self._again
        if again is None:
            return None
        try:
            found = again.call(x, out, collective, op, root, algorithm, async_op)
            if found is out and out is not None:
                return out
            return self._go_on(again, found, x, out, (collective, op, root, algorithm, async_op))
        except BaseException as error:
            self._give_up(again, error)
            raise

    def _give_up(self, way: Again | MessageWay, error: BaseException) -> None:
        """An error, Ctrl-C too, which may have come before `resume`, has left a call of a short way."""
        if way.pending.value == threading.get_ident():
            try:
                self._backend.abort(f"{type(error).__name__}: {error}")
            finally:  # a second Ctrl-C
                way.pending.value = 0
                self._lock.release()

    def _go_on(self, again: Again, found: int | None, x: Any, out: Any, terms: Terms) -> Any:
        """The same where the short way has left something to do: see `native.short_way`."""
        if found is None:
            same = the_one_object(terms)
            return None if all(map(is_, same, terms)) else self._call_again(x, out, *same)
        if found >= 0:
            job, status = again.under_way(found)
            job.resume(status)
            again.pending.value = 0
            self._lock.release()
            return out
        number, symmetric = divmod(~found, 2)
        known = again.known[number]
        if out is None:
            return self._call_again(x, np.empty(known.shape or (), known.dtype), *terms)
        source, target = known.arrays(x, out)
        with self._lock:
            self._backend.run(known.call, source, target)
            if again.lacks_job(number, symmetric):
                again.equip(number, symmetric, self._backend.job(known.call, source, target))
        return out

    def _remember(self, terms: Terms, prepared: Prepared, out: Any) -> None:
        """Give calls like this one their short way. To a rank that only brings or only gets, that is one in place."""
        call, source, target, _ = prepared
        given = source if source is not None else target if target is not None else _NOTHING
        if type(given) is not np.ndarray:  # it is on a GPU
            return
        shape = target.shape if out is None and target is not None else None
        known = Known(call, source is not None, target is not None, shape, given.dtype)
        count: int = given.size
        ahead: int | None = 0
        if source is not None and target is not None:
            count, ahead = target.size, self._ahead(call.collective, source, target)
        if self._again is None or not self._again.learn(known, terms, given, count, ahead):
            self._again = Again(self._backend, self._lock.acquire, self._lock.release)
            self._again.learn(known, terms, given, count, ahead)

    def _reduce(self, x: Any, op: Op = "sum", *, root: int = 0, out: Any = None, **terms: Any) -> Prepared:
        source = self._backend.view(x, "x")
        target, result = self._target(x, out, source.shape, source.dtype) if self.rank == root else (None, _nothing)
        return self._prepared("reduce", source, target, result, source.size, op=op, root=root, **terms)

    def _reduce_scatter(
        self, x: Any, op: Op = "sum", *, out: Any = None, counts: Sequence[int] | None = None, **terms: Any
    ) -> Prepared:
        source = self._backend.view(x, "x")
        rows = self._split_rows(source, counts)
        target, result = self._target(x, out, (rows[self.rank], *source.shape[1:]), source.dtype)
        return self._blocks("reduce_scatter", source, target, result, rows, counts, op=op, **terms)

    def _broadcast(self, x: Any, *, root: int = 0, **terms: Any) -> Prepared:
        if arrays.is_immutable(x):
            given = self._backend.view(x, "x")
            array, result = self._backend.fresh(x, given.shape, given.dtype)
            self._backend.assign(array, given)
            return self._prepared("broadcast", array, array, result, array.size, root=root, **terms)
        array = arrays.contiguous(self._backend.view(x, "x", writable=self.rank != root))
        return self._prepared("broadcast", array, array, lambda: x, array.size, root=root, **terms)

    def _all_gather(self, x: Any, *, out: Any = None, counts: Sequence[int] | None = None, **terms: Any) -> Prepared:
        source, rows = self._own_rows(x, counts)
        target, result = self._target(x, out, (sum(rows), *source.shape[1:]), source.dtype)
        return self._blocks("all_gather", source, target, result, rows, counts, **terms)

    def _gather(
        self, x: Any, *, root: int = 0, out: Any = None, counts: Sequence[int] | None = None, **terms: Any
    ) -> Prepared:
        source, rows = self._own_rows(x, counts)
        shape = (sum(rows), *source.shape[1:])
        target, result = self._target(x, out, shape, source.dtype) if self.rank == root else (None, _nothing)
        return self._blocks("gather", source, target, result, rows, counts, root=root, **terms)

    def _scatter(
        self, x: Any = None, *, root: int = 0, out: Any = None, counts: Sequence[int] | None = None, **terms: Any
    ) -> Prepared:
        if self.rank == root:
            source = self._backend.view(x, "x")
            rows = self._split_rows(source, counts)
            target, result = self._target(x, out, (rows[root], *source.shape[1:]), source.dtype)
            return self._blocks("scatter", source, target, result, rows, counts, root=root, **terms)
        if out is None:
            raise ValueError(f"scatter from rank {root}: rank {self.rank} must give out=, an array to receive into")
        target = self._backend.view(out, "out", writable=True)
        shaped = target if target.ndim else target.reshape(1)
        rows = [len(shaped)] * self.size if counts is None else self._checked(counts, len(shaped), "out")
        return self._blocks("scatter", None, target, lambda: out, rows, counts, root=root, like=shaped, **terms)

    def _all_to_all(self, x: Any, *, out: Any = None, counts: Sequence[int] | None = None, **terms: Any) -> Prepared:
        source = self._backend.view(x, "x")
        sent = self._split_rows(source, counts)
        width = math.prod(source.shape[1:])
        if counts is None:
            target, result = self._target(x, out, source.shape, source.dtype)
            return self._prepared("all_to_all", source, target, result, sent[0] * width, **terms)
        table = np.zeros((self.size, self.size), np.int64)
        self.all_gather(np.array(sent, np.int64), out=table)
        target, result = self._target(x, out, (int(table[:, self.rank].sum()), *source.shape[1:]), source.dtype)
        table *= width
        elements = tuple(table.ravel().tolist())
        return self._prepared("all_to_all", source, target, result, int(table.sum()), counts=elements, **terms)

    def _barrier(self, algorithm: str | None = None) -> Prepared:
        return Prepared(make_call("barrier", find("uint8"), 0, algorithm=algorithm), None, None, _nothing)

    def _all_reduce_list(self, xs: Sequence[Any], op: Op, out: Any, algorithm: str | None, async_op: bool) -> Any:
        if out is not None and out is not xs:
            raise ValueError("all_reduce of a list: out is the same list, to reduce in place, or None")
        results: list[Any] = list(xs)
        views = [self._backend.view(x, f"x[{i}]", writable=out is not None) for i, x in enumerate(xs)]
        buckets: list[tuple[list[int], Array]] = []
        works = []
        for kind in dict.fromkeys((view.dtype, type(view)) for view in views):
            members = [i for i, view in enumerate(views) if (view.dtype, type(view)) == kind]
            bucket, _ = self._backend.fresh(xs[members[0]], (sum(views[i].size for i in members),), kind[0])
            self._backend.pack([views[i] for i in members], bucket)
            buckets.append((members, bucket))
            works.append(self.all_reduce(bucket, op, out=bucket, algorithm=algorithm, async_op=async_op))

        def finish() -> list[Any]:
            for members, bucket in buckets:
                if out is not None:
                    self._backend.unpack(bucket, [views[i] for i in members])
                    continue
                made = [self._backend.fresh(xs[i], views[i].shape, bucket.dtype) for i in members]
                self._backend.unpack(bucket, [target for target, _ in made])
                for i, (_, result) in zip(members, made):
                    results[i] = result()
            return results

        return _Many(works, finish) if async_op else finish()

    def _blocks(
        self,
        collective: str,
        source: Array | None,
        target: Array | None,
        result: Callable[[], Any],
        rows: Sequence[int],
        counts: Sequence[int] | None,
        like: Array | None = None,
        **terms: Any,
    ) -> Prepared:
        """A call whose blocks are `rows[r]` rows of arrays like `source` (or `like`)."""
        shaped = source if source is not None else like
        assert shaped is not None
        width = math.prod(shaped.shape[1:])
        elements = None if counts is None else tuple(n * width for n in rows)
        count = rows[0] * width if elements is None else sum(elements)
        return self._prepared(collective, source, target, result, count, counts=elements, **terms)

    def _prepared(
        self,
        collective: str,
        source: Array | None,
        target: Array | None,
        result: Callable[[], Any],
        count: int,
        op: Op = "sum",
        root: int = 0,
        counts: tuple[int, ...] | None = None,
        algorithm: str | None = None,
    ) -> Prepared:
        root = index(root)  # `make_call` takes 0 and 0.0 for the same
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not a rank; this communicator has ranks 0 to {self.size - 1}")
        some = source if source is not None else target
        assert some is not None
        dtype = find(some.dtype)
        name, scale = _reduction(op, dtype)
        if source is not None:
            source = arrays.contiguous(source)
            if target is not None and source is not target and not self._in_place(collective, source, target, counts):
                source = arrays.apart(source)
        return Prepared(
            make_call(collective, dtype, count, name, root, scale, counts, algorithm), source, target, result
        )

    def _in_place(self, collective: str, source: Array, target: Array, counts: tuple[int, ...] | None) -> bool:
        """Whether source and target lie apart, or as a call in place has them."""
        s, t = arrays.address(source), arrays.address(target)
        if s + source.nbytes <= t or t + target.nbytes <= s:
            return True
        return s - t == self._ahead(collective, source, target, counts)

    def _ahead(
        self, collective: str, source: Array, target: Array, counts: tuple[int, ...] | None = None
    ) -> int | None:
        """In place, bytes from the target's beginning to the source's; None if there is no such call."""
        if collective in ("all_reduce", "reduce", "broadcast"):
            return 0
        if collective == "all_to_all":
            return None
        small = min(source.nbytes, target.nbytes)
        before = self.rank * small if counts is None else sum(counts[: self.rank]) * source.itemsize
        return before if collective in ("all_gather", "gather") else -before

    def _target(
        self, like: Any, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> tuple[Array, Callable[[], Any]]:
        """Where the result goes, and what makes the caller's array of it."""
        if out is None:
            return self._backend.fresh(like, shape, dtype)
        target = self._backend.view(out, "out", writable=True)
        if target.dtype != dtype or target.size != math.prod(shape):
            raise ValueError(
                f"out has {counted(target.size, 'element')} of {target.dtype} (shape {target.shape}); the result has "
                f"{math.prod(shape)} of {dtype} (shape {shape})"
            )
        return target, lambda: out

    def _own_rows(self, x: Any, counts: Sequence[int] | None) -> tuple[Array, list[int]]:
        source = self._backend.view(x, "x")
        source = source if source.ndim else source.reshape(1)
        if counts is None:
            return source, [len(source)] * self.size
        return source, self._checked(counts, len(source), "x")

    def _split_rows(self, source: Array, counts: Sequence[int] | None) -> list[int]:
        rows = len(source) if source.ndim else 1
        if counts is not None:
            given = self._checked(counts, None, "x")
            if sum(given) != rows:
                raise ValueError(f"counts {given} add up to {counted(sum(given), 'row')}, and x has {rows}")
            return given
        if rows % self.size:
            raise ValueError(
                f"{counted(rows, 'row')} cannot be split evenly among {counted(self.size, 'rank')}; "
                f"pass counts=, the rows for each rank"
            )
        return [rows // self.size] * self.size

    def _checked(self, counts: Sequence[int], own: int | None, what: str) -> list[int]:
        given = [index(count) for count in counts]
        if len(given) != self.size or min(given) < 0:
            raise ValueError(f"counts {given}: expected {self.size} numbers of rows, none negative, one for each rank")
        if own is not None and given[self.rank] != own:
            raise ValueError(
                f"counts says {counted(given[self.rank], 'row')} for rank {self.rank}, and {what} has {own}"
            )
        return given

    def _outgoing(self, x: Any, dst: int, tag: int) -> Message:
        return arrays.contiguous(self._backend.view(x, "x")), self._peer(dst), _tag(tag)

    def _incoming(self, out: Any, src: int, tag: int) -> Message:
        return self._backend.view(out, "out", writable=True), self._peer(src), _tag(tag)

    def _peer(self, rank: int) -> int:
        rank = index(rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} does not exist; this communicator has ranks 0 to {self.size - 1}")
        return rank

    def _make(self, prepared: Prepared, async_op: bool, terms: Terms | None = None, out: Any = None) -> Any:
        """Make a call. With `terms`, which with dtype and shape of x say all of it, its like goes the short way."""
        call, source, target, result = prepared
        with self._lock:
            if async_op:
                return Work(self._backend.start(call, source, target), prepared)
            self._backend.run(call, source, target)
            if terms is not None:
                self._remember(terms, prepared, out)
        return result()

    def _messages(self, sends: list[Message], receives: list[Message]) -> None:
        if self._group is not None:
            self._group[0].extend(sends)
            self._group[1].extend(receives)
            return
        with self._lock:
            self._backend.exchange(sends, receives)
            if self._message_way is None:
                self._message_way = self._backend.message_way(self._lock.acquire, self._lock.release)

    def _message_again(self, x: Any, out: Any, dst: Any, src: Any, tag: Any) -> bool:
        """Send x to `dst`, unless that is None, and receive `out` from `src` likewise, the short way of
        `kernels/messages.py`. False: it is not for these."""
        way = self._message_way
        if way is None or self._group is not None:
            return False
        try:
            found = way.call(x, out, dst, src, tag)
            if found is None:
                return False
            if found is not out:  # it waits
                way.resume(x, out, dst, src, tag)
                way.pending.value = 0
                self._lock.release()
        except BaseException as error:
            self._give_up(way, error)
            raise
        return True


class _Many:
    """Several `Work`s as one."""

    def __init__(self, works: list[Work], finish: Callable[[], Any]) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        return self._finish()

    def done(self) -> bool:
        return all(work.done() for work in self._works)


def _nothing() -> None:
    return None


def _tag(tag: int) -> int:
    if not isinstance(tag, (int, np.integer)) or not -(2**63) <= tag < 2**63:
        raise ValueError(f"tag {tag!r} is not an integer of 64 bits")
    return int(tag)


def _symmetric_word(word: Any, role: str) -> Array:
    array = arrays.view(word, role, writable=True)
    if (array.dtype, array.size) != (np.dtype(np.int64), 1):
        raise ValueError(f"{role} is a symmetric array of one int64, not of {array.size} {array.dtype}")
    return array


def _check_alike(name: str, x: Array, other: str, y: Array) -> None:
    if (x.dtype, x.size) != (y.dtype, y.size):
        raise ValueError(f"{name} has {counted(x.size, 'element')} of {x.dtype}, and {other} {y.size} of {y.dtype}")


def _lies_where(array: Array, x: Array) -> bool:
    """Whether `array` is x's own memory, not a copy of it."""
    return arrays.address(array) == arrays.address(x)


def _reduction(op: Op, dtype: DType) -> tuple[str, int]:
    """The operation's name and scale. Raises ValueError for an unknown one, TypeError for one without sense."""
    name, scale = ("premul_sum", scale_bits(op.scale, dtype)) if isinstance(op, PremulSum) else (op, 0)
    if name not in OPERATIONS or (name == "premul_sum") != isinstance(op, PremulSum):
        raise ValueError(
            f'op {op!r} is not known; use "sum", "prod", "min", "max", "avg" or collectives.premul_sum(scale)'
        )
    if name not in dtype.operations():
        raise TypeError(f"{name} of {dtype.name} makes no sense; it has {', '.join(dtype.operations())}")
    return OPERATIONS[OPERATIONS.index(name)], scale  # its own text, which some string's subclass may write otherwise


_NOTHING = np.zeros(0, np.uint8)  # a barrier's array
_PLANNABLE = (
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier",
)  # fmt: skip
_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child shares its parent's counters and flags, and would corrupt them: its communicators are unusable."""
    for communicator in list(_alive):
        # Whichever of the parent's threads was in a call does not let its lock go here.
        communicator._lock = threading.RLock()
        communicator._again = communicator._message_way = None
        communicator._backend.disown(
            f"process {os.getpid()} was forked from a rank; only the parent may go on as that rank"
        )


os.register_at_fork(after_in_child=_after_fork)
