"""Processes joined by MPI, on any number of hosts, through mpi4py.

MPI moves bytes, by calls that return at once and are then tested, so that a wait can raise; all arithmetic is done by
our own kernels, so every dtype and operation gives what it gives on one host. A call begins with an exchange of its
descriptors, which carry a small call's data along. A large reduction goes in two steps: each rank sums its own part of
all contributions, then the parts are gathered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from collectives import wire
from collectives.arrays import Array, address
from collectives.backends import agreement
from collectives.backends.apart import Apart
from collectives.backends.base import Backend, Failing
from collectives.call import Call, describe, disagreement
from collectives.contract import split
from collectives.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from collectives.mail import Mail
from collectives.wire import Identity, Peers, Word
from kernels import native
from kernels.executor import SIGNATURE_WORDS

FRAME = 512  # bytes of a descriptor with a small call's data
SMALL = FRAME - 8 * SIGNATURE_WORDS
_EAGER, _NAP = 0.002, 0.001  # seconds for which a wait only yields the core, and its longest sleep after that
_LOOK = 0.05  # seconds between two looks at what may be wrong
_ROLL_CALL = 2.0  # seconds that ranks have to say where they are when one's deadline has passed
_AT_ONCE = 32  # sources that one reduction takes
_LAST_WORDS = 2048  # characters of why a rank failed
_ERRORS = (CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError)


class Mpi(Apart):
    """One communicator of MPI ranks."""

    name = "mpi"

    def __init__(self, comm: Any, words: Any, identities: Sequence[Identity], timeout: float) -> None:
        """`comm` and `words`: two mpi4py communicators of the same ranks that nobody else uses."""
        super().__init__()
        self.comm, self.timeout = comm, timeout
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.peers = Peers(words, identities)
        self.calls = 0
        self._mail = Mail(self)
        self._told = False  # the others, that and why this rank leaves
        self._parent: Mpi | None = None
        self._children: list[Mpi] = []

    # Calls

    def _make(self, call: Call, source: Array | None, target: Array | None) -> None:
        with Failing(self):
            frames = self._agree(call, source)
            if call.algorithm is None:
                self.move(call, source, target, frames)
        if call.algorithm is not None:  # on every rank alike
            raise ValueError(f"algorithm={call.algorithm!r}: the {self.name} backend has no choice of algorithms")

    def _agree(self, call: Call, source: Array | None) -> npt.NDArray[np.uint8]:
        """Every rank's frame of this call. Raises CollectiveMismatchError, on every rank, where signatures differ."""
        self.check_usable()
        self.calls += 1
        frame, frames = np.zeros(FRAME, np.uint8), np.empty((self.size, FRAME), np.uint8)
        frame[:-SMALL].view(np.int64)[:] = call.signature()
        if source is not None and source.nbytes <= SMALL:
            frame[FRAME - SMALL :][: source.nbytes] = as_bytes(source)
        with wire.LOCK:
            request = self.comm.Iallgather(plain(frame), plain(frames))
        self.finish([request], lambda: describe(call.signature()))
        signatures = [tuple(words) for words in frames[:, :-SMALL].copy().view(np.int64).tolist()]
        if len(set(signatures)) > 1:
            raise CollectiveMismatchError(disagreement(self.calls, signatures))
        return frames

    def move(self, call: Call, source: Array | None, target: Array | None, frames: npt.NDArray[np.uint8]) -> None:
        """What a call does, once all have agreed on it. `frames`: every rank's, with the data of a small call."""
        collective, itemsize, root = call.collective, call.dtype.itemsize, call.root
        nbytes = call.count * itemsize
        small = nbytes <= SMALL
        if collective == "barrier":
            return
        if collective in ("all_reduce", "reduce"):
            if not small:
                self._reduce(call, source, target)
            elif target is not None:
                starts = address(frames) + FRAME - SMALL + np.arange(self.size, dtype=np.int64) * FRAME
                combine(call, starts, address(target), call.count, self.size)
        elif collective == "broadcast":
            if small and self.rank != root:
                as_bytes(target)[:] = frames[root, FRAME - SMALL :][:nbytes]
            elif not small:
                self.start_and_finish(call, "Ibcast", plain(as_bytes(target)), root)
        elif collective == "reduce_scatter":
            assert source is not None and target is not None
            self.sum_parts(self.comm, call, source, target, self._bounds(call) * itemsize, self.size)
        else:
            self._copy_blocks(call, source, target)

    def _reduce(self, call: Call, source: Array | None, target: Array | None) -> None:
        assert source is not None
        bounds = split(call.count, self.size, call.dtype.itemsize) * call.dtype.itemsize
        whole = None if target is None else as_bytes(target)
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        part = np.empty(mine.stop - mine.start, np.uint8) if whole is None else whole[mine]
        self.sum_parts(self.comm, call, source, part, bounds, self.size)
        if call.collective == "all_reduce":
            self.start_and_finish(call, "Iallgatherv", IN_PLACE, vector(whole, bounds))
        elif whole is not None:
            self.start_and_finish(call, "Igatherv", IN_PLACE, vector(whole, bounds), call.root)
        else:
            self.start_and_finish(call, "Igatherv", plain(part), None, call.root)

    def sum_parts(
        self,
        comm: Any,
        call: Call,
        source: Array,
        target: Array,
        bounds: npt.NDArray[np.int64],
        ranks: int,
        raw: bool = True,
    ) -> None:
        """The reduction, into `target`, of every rank's part of `source` that is this rank's by `bounds`, in bytes."""
        size, rank = comm.Get_size(), comm.Get_rank()
        mine = int(bounds[rank + 1] - bounds[rank])
        parts = np.empty((size, mine), np.uint8)
        every = np.arange(size + 1) * mine
        self.start_and_finish(call, "Ialltoallv", vector(as_bytes(source), bounds), vector(parts, every), comm=comm)
        starts = address(parts) + every[:-1]
        combine(call, starts, address(target), mine // call.dtype.itemsize, ranks, raw)

    def _copy_blocks(self, call: Call, source: Array | None, target: Array | None) -> None:
        collective, itemsize, rank, root = call.collective, call.dtype.itemsize, self.rank, call.root
        sent = None if source is None else as_bytes(source)
        got = None if target is None else as_bytes(target)
        if collective == "all_to_all":
            table = np.full((self.size, self.size), call.count) if call.counts is None else np.array(call.counts)
            table = table.reshape(self.size, self.size) * itemsize
            self.start_and_finish(
                call, "Ialltoallv", vector(sent, _starts(table[rank])), vector(got, _starts(table[:, rank]))
            )
            return
        bounds = self._bounds(call) * itemsize
        whole: Any
        part: Any
        whole, part = (sent, got) if collective == "scatter" else (got, sent)
        if whole is not None and part is not None and address(part) == address(whole) + bounds[rank]:
            part = IN_PLACE
        elif part is not None:
            part = plain(part)
        if collective == "all_gather":
            self.start_and_finish(call, "Iallgatherv", part, vector(whole, bounds))
        elif collective == "gather":
            self.start_and_finish(call, "Igatherv", part, None if whole is None else vector(whole, bounds), root)
        else:
            self.start_and_finish(call, "Iscatterv", None if whole is None else vector(whole, bounds), part, root)

    def _bounds(self, call: Call) -> npt.NDArray[np.int64]:
        """Where each rank's block begins, and the last one ends, in elements."""
        return _starts(np.full(self.size, call.count) if call.counts is None else np.array(call.counts))

    # Waiting

    def start_and_finish(self, call: Call, name: str, *arguments: Any, comm: Any = None) -> None:
        """Make one of MPI's nonblocking collective calls and wait for its end."""
        from mpi4py import MPI

        with wire.LOCK:
            begin = getattr(self.comm if comm is None else comm, name)
            request = begin(*(MPI.IN_PLACE if argument is IN_PLACE else argument for argument in arguments))
        self.finish([request], lambda: describe(call.signature()))

    def finish(self, requests: Sequence[Any], what: Callable[[], str], peers: Sequence[int] | None = None) -> None:
        """Wait for requests that `peers` (None: all others) have their parts in; `what` says which call it is."""
        self.wait(lambda: wire.ended(requests), what, peers, lambda: requests)

    def wait(
        self,
        ended: Callable[[], bool],
        what: Callable[[], str],
        peers: Sequence[int] | None,
        pending: Callable[[], Sequence[Any]],
    ) -> None:
        """Call `ended` until it says so. Raises what a rank gave up with, PeerLostError for a peer that died or closed,
        and CollectiveTimeoutError; the requests that are `pending` then are abandoned."""
        from mpi4py import MPI

        began = looked = time.monotonic()
        gone: set[int] = set()
        try:
            while not ended():
                now = time.monotonic()
                if now - began < _EAGER:
                    os.sched_yield()
                else:
                    time.sleep(min(_NAP, (now - began) / 20))
                if now - looked >= _LOOK:
                    looked = now
                    gone = self._look(what, peers, gone)
                    if now - began > self.timeout:
                        self._give_up(what(), now - began)
        except MPI.Exception as error:
            wire.abandon(pending())
            silent = self._call_the_roll(what())
            lost = self.peers.name(silent) if silent else "a rank"
            raise PeerLostError(f"{what()}: {lost} was lost: MPI says {error}") from error
        except BaseException:
            wire.abandon(pending())
            raise

    def _look(self, what: Callable[[], str], peers: Sequence[int] | None, gone: set[int]) -> set[int]:
        """Raise if it is in vain to wait for `peers`, or in a collective call for all.

        What a peer did before it went may just have come, so only one that was gone at the last look, too, counts;
        returns those who are gone.
        """
        if self._failure:
            raise CollectiveError(f"{what()}: {self._failure}")
        self.peers.listen()
        for rank, word in self.peers.said.items():
            if word.kind == CollectiveTimeoutError.__name__:
                self._give_up(what(), None)
            if word.kind != "closed":
                error = next(each for each in _ERRORS if each.__name__ == word.kind)(
                    f"{what()}: {self.peers.name([rank])} gave up: {word.text}"
                )
                error.echo = True
                raise error
        dead = self.peers.dead()
        for rank in gone.intersection(self.peers.others if peers is None else peers):
            if rank in dead:
                process = self.peers.identities[rank].pid
                raise PeerLostError(f"{what()}: {self.peers.name([rank])}, process {process}, has died")
            call = self.peers.said[rank].call
            raise PeerLostError(f"{what()}: {self.peers.name([rank])} closed its communicator after call {call}")
        # Who closed after this call has done its part in it; what else it was to do for us, it will not.
        closed = {rank for rank, word in self.peers.said.items() if peers is not None or word.call < self.calls}
        return closed.union(dead)

    def _give_up(self, what: str, waited: float | None) -> NoReturn:
        """The deadline has passed, here (after so many seconds) or elsewhere: find out who is where."""
        silent = self._call_the_roll(what)
        event = (
            "did not finish, as another rank's deadline passed"
            if waited is None
            else f"did not finish in {waited:.1f} s"
        )
        said = self.peers.said
        told = [f"{self.peers.name([rank])} is in {said[rank].text}" for rank in sorted(said)]
        if silent:
            told.append(
                f"{self.peers.name(silent)} did not arrive, and {'does' if len(silent) == 1 else 'do'} not answer"
            )
        raise CollectiveTimeoutError(f"{what} {event}: {'; '.join(told)}")

    def _call_the_roll(self, what: str) -> list[int]:
        """Say where this rank is, and hear where the others are; returns those who do not answer."""
        self._give_word(CollectiveTimeoutError.__name__, f"{what}, call {self.calls}")
        deadline = time.monotonic() + _ROLL_CALL
        silent = self.peers.others
        while silent and time.monotonic() < deadline:
            self.peers.listen()
            self.peers.told()
            silent = [rank for rank in self.peers.others if rank not in self.peers.said]
            time.sleep(0.005)
        return silent

    def _give_word(self, kind: str, text: str) -> None:
        """The one thing that this rank says to the others of this communicator."""
        if not self._told:
            self._told = True
            self.peers.tell(Word(kind, self.calls, text[:_LAST_WORDS]))

    def fail(self, error: BaseException) -> None:
        """This communicator is of no further use: remember why, and let the peers know."""
        mine = error if isinstance(error, CollectiveError) else CollectiveError(f"{type(error).__name__}: {error}")
        self._failure = self._failure or str(mine) or type(mine).__name__
        self._give_word(next(each.__name__ for each in type(mine).__mro__ if each in _ERRORS), self._failure)

    # Messages

    def exchange(self, sends: Sequence[tuple[Array, int, int]], receives: Sequence[tuple[Array, int, int]]) -> None:
        self.check_usable()
        with Failing(self):
            self._mail.exchange(sends, receives)

    def signal(self, rank: int) -> None:
        self.check_usable()
        self._mail.signal(rank)

    def wait_signal(self, rank: int) -> None:
        self.check_usable()
        with Failing(self):
            self._mail.wait_signal(rank)

    def check(self, ranks: Sequence[int]) -> None:
        self.check_usable()
        with Failing(self):
            gone = self._look(lambda: "check", ranks, set())
            self._look(lambda: "check", ranks, gone)

    # Memory: between hosts there is none in common

    def allocate(self, nbytes: int) -> Array:
        agreement.check_sizes(self, agreement.agree(self, "empty", nbytes))
        return agreement.together(self, lambda: self.make_memory(nbytes))

    def make_memory(self, nbytes: int) -> Array:
        """Memory that all ranks make together, of which each has its own."""
        return np.zeros(nbytes, np.uint8)

    def peer_view(self, array: Array, rank: int) -> Array:
        if rank == self.rank:
            return array
        raise CollectiveError(
            f"rank {rank}'s memory cannot be reached from rank {self.rank} over MPI: put, get, locks and counters are "
            f"for ranks that share memory. Use send and recv, or split the ranks by host"
        )

    def wait_until(self, word: Array, value: int, rank: int) -> None:
        view = self.peer_view(word, rank)
        self.wait(lambda: bool(view.item() >= value), lambda: f"wait_until({value}, rank {rank})", [rank], list)

    # Families and endings

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank."""
        return agreement.gather_bytes(self, payload)

    def split(self, color: int | None, key: int) -> Backend | None:
        answers = agreement.agree(self, "split", [color, key])
        family = sorted(
            (rank for rank in range(self.size) if answers[rank][0] == color), key=lambda rank: (answers[rank][1], rank)
        )
        return self.found(color, family)

    def found(self, color: int | None, family: list[int]) -> Backend | None:
        """An engine for the ranks of `family`, in this order, who all gave this color; all ranks call it together."""
        pair = self.split_comms(family if color is not None else [])
        identities = [self.peers.identities[rank] for rank in family]
        return None if color is None else self.adopt(Mpi(*pair, identities, self.timeout))

    def split_comms(self, family: list[int]) -> tuple[Any, Any]:
        """MPI's communicators, for calls and for words, of the ranks of `family`; useless where it is empty."""
        from mpi4py import MPI

        # These block, but all ranks are here: they have just told each other.
        color, key = (min(family), family.index(self.rank)) if family else (MPI.UNDEFINED, 0)
        with wire.LOCK:
            return self.comm.Split(color, key), self.peers.comm.Split(color, key)

    def adopt(self, child: Mpi) -> Mpi:
        """A sub-communicator's engine, which is closed with this one."""
        child._parent = self
        self._children.append(child)
        return child

    def abort(self, reason: str) -> None:
        self.fail(CollectiveError(reason))

    def _close(self) -> None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            return
        for child in list(self._children):
            child.close()
        self._in_turn.close()
        self._closed = True
        self._give_word("closed", "")
        self.peers.close()
        if self._parent is not None:
            self._parent._children.remove(self)


def as_bytes(array: Array | None) -> npt.NDArray[np.uint8]:
    """The same memory."""
    assert array is not None
    return array.reshape(-1).view(np.uint8)


def combine(call: Call, sources: Iterable[int], target: int, count: int, ranks: int, raw: bool = True) -> None:
    """Reduce `count` elements at the addresses `sources`, in this order, to `target`.

    ranks: of whom they hold the contributions. raw: whether each source is one rank's own contribution.
    """
    reduce = native.load(f"reduce-{call.dtype.name}-{call.op}").call
    into, left = np.array([target], np.int64), np.array(sources, np.int64)
    now = left[:_AT_ONCE]
    fresh = (1 << len(now)) - 1 if raw else 0  # a bit for each source
    while len(now):
        left = left[_AT_ONCE:]
        reduce(address(into), 1, address(now), len(now), count, fresh, 0 if len(left) else ranks, call.scale, 0, 1)
        if len(left):
            now = np.concatenate([into, left[:_AT_ONCE]])
            fresh = (1 << len(now)) - 2 if raw else 0
        else:
            now = left


IN_PLACE: Any = object()


def plain(array: Any) -> list[Any]:
    """What mpi4py takes for an array of bytes."""
    from mpi4py import MPI

    return [array, MPI.BYTE]


def vector(array: Any, bounds: npt.NDArray[np.int64]) -> list[Any]:
    """What mpi4py takes for an array of bytes in blocks."""
    from mpi4py import MPI

    return [array, (np.diff(bounds).tolist(), bounds[:-1].tolist()), MPI.BYTE]


def _starts(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
