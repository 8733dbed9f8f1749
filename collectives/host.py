"""The memory of one host's ranks: every rank's segment, mapped here, cut into arenas.

A communicator lives in one *arena* of each of its members' segments, the same arena in all of them, so that what its
ranks allocate together lies at equal offsets. Arena 0 is the world's; the others, smaller, go to sub-communicators.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from collectives.memory import PAGE, Segment, heap_bytes
from collectives.rendezvous import Meeting

ARENAS = 32  # for sub-communicators that are alive at one time
_SHARE = 4  # each has this fraction of the world's address space; the memory is sparse


class Host:
    """Every rank's segment, by rank. Made once by all ranks together, which must be on one host."""

    def __init__(self, meeting: Meeting) -> None:
        """Raises RuntimeError naming the ranks of other hosts, MemoryError where memory does not suffice."""
        strangers = [peer for peer in meeting.peers if not peer.local]
        if strangers:
            where = ", ".join(f"rank {peer.rank} on {peer.host}" for peer in strangers)
            raise RuntimeError(
                f"the shm backend joins ranks of one host, and there are others: {where}; use backend='mpi' or 'nccl'"
            )
        self.meeting = meeting
        sizes = meeting.exchange(heap_bytes((1 + ARENAS // _SHARE) * meeting.size).to_bytes(8, "little"))
        self._world = min(int.from_bytes(size, "little") for size in sizes) // (_SHARE * PAGE) * (_SHARE * PAGE)
        own = Segment.create(0, 0, self._world * (1 + ARENAS // _SHARE))
        descriptors = meeting.exchange_fd(own.fd)
        self.segments: list[Segment] = []
        for rank, descriptor in enumerate(descriptors):
            assert descriptor is not None
            if rank == meeting.rank:
                os.close(descriptor)
                self.segments.append(own)
            else:
                self.segments.append(own.attach(descriptor))
        self.own = own
        self.free_arenas = set(range(1, ARENAS + 1))

    def arena(self, index: int) -> tuple[int, int]:
        """(offset, bytes) of an arena in every segment."""
        if index == 0:
            return self.own.heap, self._world
        share = self._world // _SHARE
        return self.own.heap + self._world + (index - 1) * share, share

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks whose process has ended."""
        lost = set(self.meeting.lost())
        return [rank for rank in ranks if rank in lost]

    def close(self) -> None:
        """Take leave of the others. Memory stays mapped as long as arrays over it live."""
        for segment in self.segments:
            segment.close()
        self.meeting.close()
