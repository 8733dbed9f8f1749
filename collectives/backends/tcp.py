"""Processes on several hosts, joined by the star through which they met: what the nccl backend has beside NCCL where
ranks share no memory.

It agrees on allocations and splits, carries objects, headers and arrays of the CPU, and says who is gone. Every call is
a gather, through the hub, of what ranks bring; each takes its own part of that, or reduces it by our own kernels, so
every dtype and operation gives what it gives on one host. That is right, and meant for little: large arrays of the CPU
are MPI's.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

from collectives.arrays import Array, address
from collectives.backends.agreement import agree, check_sizes
from collectives.backends.apart import Apart
from collectives.backends.base import Failing
from collectives.backends.mpi import as_bytes, combine
from collectives.book import Calls
from collectives.call import INTERNAL, Call, describe, disagreement, make_call
from collectives.contract import Contract, Geometry, geometry
from collectives.errors import CollectiveError, CollectiveMismatchError, PeerLostError
from collectives.post import HUB, LOOK, Box, Farewell, Kind, Post
from collectives.region import CLOSED, FAILED, OPEN
from collectives.rendezvous import meet
from collectives.stream import ToSelf, check_message
from collectives.survivors import regroup
from collectives.watch import Watch
from kernels.dtypes import DTYPES, find
from kernels.executor import SIGNATURE_WORDS

_HEAD = struct.Struct(f"<{SIGNATURE_WORDS}qq")  # a call's signature, and how many bytes the rank brings
_MESSAGE = struct.Struct("<qqq")  # tag, dtype, count
_MOST = 32 << 20  # bytes that come back from one gather
_PIECE = 1 << 20  # bytes of a letter
_LAST_WORDS = 2048  # characters of why a rank failed
_BYTES = make_call("all_gather", find("uint8"), 0, scale=INTERNAL)


class Seat:
    """What is known of how a rank left a communicator, as `collectives.region.Region` says it in shared memory."""

    def __init__(self, box: Box, member: int) -> None:
        self._box, self._member = box, member

    @property
    def _word(self) -> Farewell | None:
        return self._box.left.get(self._member)

    @property
    def state(self) -> int:
        """OPEN, FAILED or CLOSED."""
        return self._word.state if self._word else OPEN

    @property
    def calls_ended(self) -> int:
        """Calls that it had ended when it left."""
        return self._word.ended if self._word else 0

    def reason(self) -> dict[str, object]:
        """What it said when it left."""
        return {"kind": self._word.kind, "text": self._word.text} if self._word else {}


class Tcp(Apart):
    """One communicator of ranks that have a post. `members[r]` is the world's number of this communicator's rank r."""

    name = "tcp"

    def __init__(self, post: Post, members: Sequence[int], timeout: float, path: tuple[int, ...] = ()) -> None:
        """`path` tells a communicator from others of the same ranks: the numbers of the splits that made it."""
        super().__init__()
        self.host, self.members, self.timeout, self._path = post, list(members), timeout, path
        self.rank, self.size = self.members.index(post.rank), len(self.members)
        self._id = hashlib.sha256(json.dumps([path, self.members]).encode()).digest()[:8]
        post.send(Kind.JOIN, self._id, body=json.dumps(self.members).encode())
        post.engines.add(self)
        self._box = post.box(self._id)
        self.regions = [Seat(self._box, member) for member in self.members]
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._calls: Calls | None = None  # of the streams of a GPU
        self._gathers = self._splits = 0
        self._signals_taken = dict.fromkeys(self.members, 0)
        self._to_self = ToSelf(self.rank)
        self._aside: dict[int, list[tuple[int, int, bytes]]] = {}  # messages that have come, by rank: tag, dtype, data
        self._lookout = Watch(self, lambda: "while this rank compiled kernels")

    # Calls

    def _make(self, call: Call, source: Array | None, target: Array | None) -> None:
        contract, layout = _layout(call, self.size)
        brings = source is not None and bool(contract.brings(self.rank)) and call.algorithm is None
        brought = self._gather(call, as_bytes(source).tobytes() if brings else b"")
        if call.algorithm is not None:  # on every rank alike
            raise ValueError(f"algorithm={call.algorithm!r}: between hosts, arrays of the CPU go one way only")
        if target is None or call.collective == "barrier":
            return
        into, itemsize = as_bytes(target), call.dtype.itemsize
        starts = [address(np.frombuffer(part, np.uint8)) for part in brought]
        for block, origin in contract.wants(self.rank).items():
            length, at, to = (int(column[block]) for column in layout)
            nbytes, at, to = length * itemsize, at * itemsize, to * itemsize
            if call.reduces:
                combine(call, [start + at for start in starts], address(into) + to, length, self.size)
            else:
                part = brought[origin.bit_length() - 1]
                into[to : to + nbytes] = np.frombuffer(part, np.uint8, nbytes, at) if nbytes else 0

    def _gather(self, call: Call, mine: bytes) -> list[bytes]:
        """What every rank brings to a call. Raises CollectiveMismatchError, on every rank, where signatures differ."""
        piece = max(64, min(_PIECE, _MOST // self.size))
        what = partial(describe, call.signature())
        with Failing(self):
            parts = self._turn(_HEAD.pack(*call.signature(), len(mine)) + mine[:piece], what)
            heads = [_HEAD.unpack_from(part) for part in parts]
            signatures = [head[:-1] for head in heads]
            if len(set(signatures)) > 1:
                raise CollectiveMismatchError(disagreement(self._gathers, signatures))
            found = [[part[_HEAD.size :]] for part in parts]
            for start in range(piece, max(head[-1] for head in heads), piece):
                for pieces, more in zip(found, self._turn(mine[start : start + piece], what)):
                    pieces.append(more)
        return [b"".join(pieces) for pieces in found]

    def _turn(self, part: bytes, what: Callable[[], str]) -> list[bytes]:
        """One gather of the hub's."""
        self._gathers += 1
        number, gathered = self._gathers, self._box.gathered

        def arrivals() -> str:
            return self.host.ask(self._id, number, "gather")

        self._await(self.host.room, what, self._others, arrivals)
        self.host.send(Kind.GATHER, self._id, number, part)
        self._await(lambda: number in gathered, what, self._others, arrivals)
        return gathered.pop(number)

    def _await(
        self, ready: Callable[[], bool], what: Callable[[], str], peers: Sequence[int], arrivals: Callable[[], str]
    ) -> None:
        """Wait for what letters of `peers`, by way of the hub, make so, or for room for letters to them."""
        post = self.host
        if ready():
            return
        with Watch(self, what) as watch:
            while not post.wait(ready, LOOK):
                watch.look(peers, arrivals)
                if HUB in post.gone and HUB not in (self.members[peer] for peer in peers) and not ready():
                    hub = f"rank {HUB}" if self.members[HUB] == HUB else f"rank {HUB} of the ranks that init joined"
                    raise PeerLostError(f"{what()}: {hub} {post.obituary(HUB)}, and letters go by way of it")

    # Agreement

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank."""
        self.check_usable()
        found: list[bytes] = []
        self._in_turn.run(lambda: found.extend(self._gather(_BYTES, payload)))
        return found

    def ledger(self) -> Calls:
        """Where ranks compare what they put into streams."""
        self._calls = Calls(self.host, self._id, self.members, self.rank)
        return self._calls

    # Messages

    def exchange(self, sends: Sequence[tuple[Array, int, int]], receives: Sequence[tuple[Array, int, int]]) -> None:
        self.check_usable()
        with Failing(self):
            for array, peer, tag in sends:
                if peer == self.rank:
                    self._to_self.send(array, tag)
                    continue
                member = self.members[peer]
                data = memoryview(_MESSAGE.pack(tag, find(array.dtype).code, array.size) + as_bytes(array).tobytes())
                for start in range(0, len(data), _PIECE):
                    piece = bytes(data[start : start + _PIECE])
                    self._await_peer(partial(self.host.room, member), f"send(rank {peer})", peer)
                    self.host.send(Kind.MAIL, self._id, body=piece, target=member)
            for array, peer, tag in receives:
                if peer == self.rank:
                    self._to_self.receive(array, tag)
                else:
                    self._receive(array, peer, tag)

    def _receive(self, out: Array, peer: int, tag: int) -> None:
        aside = self._aside.setdefault(peer, [])
        while True:
            for i, (known, code, data) in enumerate(aside):
                if known == tag:
                    del aside[i]
                    dtype = DTYPES[code]
                    check_message(peer, tag, dtype, len(data) // dtype.itemsize, out)
                    as_bytes(out)[:] = np.frombuffer(data, np.uint8)
                    return
            tag_, code, count = _MESSAGE.unpack((first := self._letter(peer))[: _MESSAGE.size])
            pieces = [first[_MESSAGE.size :]]
            missing = count * DTYPES[code].itemsize - len(pieces[0])
            while missing > 0:
                pieces.append(self._letter(peer))
                missing -= len(pieces[-1])
            aside.append((tag_, code, b"".join(pieces)))

    def _letter(self, peer: int) -> bytes:
        member = self.members[peer]
        self._await_peer(lambda: bool(self._box.mail.get(member)), f"recv(rank {peer})", peer)
        return self._box.mail[member].popleft()

    def _await_peer(self, ready: Callable[[], bool], what: str, peer: int) -> None:
        self._await(ready, lambda: what, [peer], lambda: self.host.ask(self._id, 0, ""))

    def signal(self, rank: int) -> None:
        self.check_usable()
        self.host.send(Kind.SIGNAL, self._id, target=self.members[rank])

    def wait_signal(self, rank: int) -> None:
        self.check_usable()
        member = self.members[rank]
        taken = self._signals_taken[member]
        with Failing(self):
            self._await_peer(lambda: self._box.signals[member] > taken, f"wait_signal({rank})", rank)
        self._signals_taken[member] = taken + 1

    def check(self, ranks: Sequence[int]) -> None:
        self.check_usable()
        with Failing(self), Watch(self, lambda: "check") as watch:
            watch.look(ranks, str)
            watch.look(ranks, str)  # only the second look counts

    # Memory: between hosts there is none in common

    def allocate(self, nbytes: int) -> Array:
        check_sizes(self, agree(self, "empty", nbytes))
        return np.zeros(nbytes, np.uint8)

    def peer_view(self, array: Array, rank: int) -> Array:
        if rank == self.rank:
            return array
        raise CollectiveError(
            f"rank {rank}'s memory cannot be reached from rank {self.rank}: where ranks span hosts, put, get, locks "
            f"and counters are not for arrays of the CPU. Use send and recv, or split the ranks by host"
        )

    def wait_until(self, word: Array, value: int, rank: int) -> None:
        view = self.peer_view(word, rank)
        self._await_peer(lambda: bool(view.item() >= value), f"wait_until({value}, rank {rank})", rank)

    # Families and endings

    def split(self, color: int | None, key: int) -> Tcp | None:
        answers = agree(self, "split", [color, key])
        self._splits += 1
        family = [rank for rank in range(self.size) if answers[rank][0] == color]
        family.sort(key=lambda rank: (answers[rank][1], rank))
        if color is None:
            return None
        return Tcp(self.host, [self.members[rank] for rank in family], self.timeout, (*self._path, self._splits))

    def survivors(self) -> Tcp:
        self.host.probe()
        return regroup(self, self._rejoin)

    def _rejoin(self, left: Sequence[int], seconds: float) -> Tcp:
        """An engine of these ranks, which meet where the first of them is."""
        post, index = self.host, left.index(self.rank)
        place = post.place_of(self.members[left[0]], index, len(left), seconds)
        new = Post(meet(place, post.listener() if index == 0 else None))
        return Tcp(new, range(len(left)), self.timeout)

    def look_out(self) -> None:
        """To be called every now and then while this rank compiles: raises PeerLostError for a rank that has died or
        closed, and what a rank gave up with."""
        with Failing(self):
            self._lookout.see(self._others)

    def fail(self, error: BaseException) -> None:
        """This communicator is of no further use: remember why, and let the peers know."""
        if not self._failure:
            mine = error if isinstance(error, CollectiveError) else CollectiveError(f"{type(error).__name__}: {error}")
            self._failure = str(mine) or type(mine).__name__
            if not self._closed:
                self._leave(Farewell(FAILED, type(mine).__name__, self._failure[:_LAST_WORDS], 0))

    def _leave(self, word: Farewell) -> None:
        self.host.leave(self._id, self.members, word)

    def abort(self, reason: str) -> None:
        self.fail(CollectiveError(reason))

    def disown(self, reason: str) -> None:
        super().disown(reason)
        self.host.disown()

    def _close(self) -> None:
        self._in_turn.close()
        self._closed = True
        if not self._failure:
            self._leave(Farewell(CLOSED, "", "", self._calls.ended(self.rank) if self._calls else self._gathers))
        if not self._path:
            for engine in list(self.host.engines):
                engine.close()
            self.host.close(0.0 if self._failure else self.timeout)


@lru_cache(maxsize=1024)
def _layout(call: Call, size: int) -> tuple[Contract, Geometry]:
    """What a call promises, and where its blocks lie."""
    contract = Contract(call.collective, size, call.root)
    counts = call.count if call.counts is None else np.reshape(call.counts, contract.shape)
    return contract, geometry(contract, counts, call.dtype.itemsize)
