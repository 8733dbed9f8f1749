"""Who has come to what, where ranks share no memory: each rank notes the calls that it puts into streams, and the hub
of `collectives.post` compares them, while nobody waits."""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collectives.call import describe, name_ranks
from collectives.errors import CollectiveMismatchError
from collectives.star import pack
from kernels.executor import SIGNATURE_WORDS

if TYPE_CHECKING:
    from collectives.post import Post

Signature = tuple[int, ...]
_NEWS = struct.Struct("<qq")  # calls begun before, and by now; their signatures follow
_SIGNATURE = struct.Struct(f"<{SIGNATURE_WORDS}q")


class Calls:
    """One rank's calls: what `collectives.ledger.Ledger` is in shared memory. Of the others it knows what the hub has
    said, so that a difference is found within moments, and who is late when it is asked."""

    def __init__(self, post: Post, comm: bytes, members: Sequence[int], own: int) -> None:
        self._post, self._comm, self._members, self._own = post, comm, members, own
        self._box = post.box(comm)
        self._begun = self._told = self._ended = 0
        self._fresh: list[Signature] = []
        self._lock = threading.Lock()
        post.report(comm, self)

    def begin(self, signature: Signature | None) -> int:
        """Note this rank's next call, or only that there is one, and return its number."""
        with self._lock:
            self._begun += 1
            if signature is not None:
                self._fresh.append(signature)
            return self._begun

    def end(self, number: int) -> None:
        """This rank's calls up to this one have ended."""
        self._ended = number

    def news(self) -> bytes:
        """What the hub has not been told; empty if that is nothing."""
        with self._lock:
            if self._begun == self._told:
                return b""
            head = _NEWS.pack(self._told, self._begun)
            fresh, self._fresh, self._told = self._fresh, [], self._begun
        return head + b"".join(_SIGNATURE.pack(*signature) for signature in fresh)

    def begun(self, rank: int) -> int:
        """Calls that a rank is known to have begun."""
        return self._begun if rank == self._own else 0

    def ended(self, rank: int) -> int:
        """Calls that a rank is known to have ended: of the others, those that have left say so."""
        if rank == self._own:
            return self._ended
        word = self._box.left.get(self._members[rank])
        return word.ended if word else 0

    def behind(self) -> list[int]:
        """Ranks that have to begin another call before this one may: nobody, as the hub keeps what it is told."""
        return []

    def compare(self) -> None:
        """Raises CollectiveMismatchError for what the hub has found."""
        if self._box.different:
            raise CollectiveMismatchError(self._box.different)

    def arrivals(self, number: int) -> str:
        """Who has begun a call and who has not, and what each did last."""
        return self._post.ask(self._comm, number, "call")


class Book:
    """What the hub knows of one communicator. `members` and sources are numbers of the world; texts have the
    communicator's own."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.left: set[int] = set()
        self._parts: dict[int, dict[int, bytes]] = {}  # of gathers under way
        self._gathered = 0
        self._begun: Counter[int] = Counter()
        self._last: dict[int, Signature] = {}
        self._open: dict[int, dict[Signature, list[int]]] = {}  # calls that not all have begun
        self._differ = False

    def gather(self, source: int, number: int, part: bytes) -> bytes:
        """Take a rank's part; all parts, once they are there."""
        parts = self._parts.setdefault(number, {})
        parts[source] = part
        if len(parts) < len(self.members):
            return b""
        del self._parts[number]
        self._gathered = max(self._gathered, number)
        return pack(parts[member] for member in self.members)

    def note(self, source: int, news: bytes) -> str:
        """Take what a rank has put into streams; how calls differ, where that is new."""
        first, begun = _NEWS.unpack_from(news)
        self._begun[source] = begun
        found = ""
        for number, signature in enumerate(_SIGNATURE.iter_unpack(news[_NEWS.size :]), first + 1):
            self._last[source] = signature
            entry = self._open.setdefault(number, {})
            entry.setdefault(signature, []).append(self.members.index(source))
            if len(entry) > 1 and not self._differ:
                self._differ = True
                told = "; ".join(f"{name_ranks(ranks)} called {describe(what)}" for what, ranks in entry.items())
                found = f"the ranks disagree in call {number}: {told}"
            if sum(map(len, entry.values())) == len(self.members):
                del self._open[number]
        return found

    def arrivals(self, number: int, what: str) -> str:
        """Who has come to a gather (`what` is "gather") or begun a call ("call"), of this number."""
        if not what:
            return ""
        if what == "gather":
            parts = self._parts.get(number, {})
            here = [rank for rank, member in enumerate(self.members) if member in parts or number <= self._gathered]
            absent = [rank for rank in range(len(self.members)) if rank not in here]
            return f"{name_ranks(here)} arrived, {name_ranks(absent)} did not"
        late = [rank for rank, member in enumerate(self.members) if self._begun[member] < number]
        absent_text = f"{', '.join(f'rank {rank}' for rank in late) or 'nobody'} did not begin it"
        begun = (f"rank {rank} has begun {self._tell(member)}" for rank, member in enumerate(self.members))
        return "; ".join([absent_text, *begun])

    def _tell(self, member: int) -> str:
        last = self._last.get(member)
        return f"call {self._begun[member]}" + (f", {describe(last)}" if last else "")
