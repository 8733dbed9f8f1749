"""The memory of one host's ranks: every rank's segment, mapped here, cut into arenas.

A communicator lives in one *arena* of each of its members' segments, the same arena in all of them, so that what its
ranks allocate together lies at equal offsets. Arena 0 is the world's; the others, smaller, go to sub-communicators.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from collectives import cgroup, measured, threads
from collectives.cost import Topology
from collectives.memory import PAGE, Heap, Segment, heap_bytes, scratch_setting
from collectives.rendezvous import Meeting

if TYPE_CHECKING:
    from collectives.backends.shm import Shm

ARENAS = 32  # for sub-communicators that are alive at one time
SHARE = 4  # each has this fraction of the world's address space; the memory is sparse


class Birth(NamedTuple):
    """What tells one sub-communicator from all others, on all of its ranks alike."""

    path: tuple[int, ...]  # the number of the split that made it, after its parent's path
    arena: int
    members: tuple[int, ...]  # the world's numbers of its ranks


class Host:
    """Every rank's segment, by rank. Made once by all ranks together, which must be on one host."""

    def __init__(self, meeting: Meeting) -> None:
        """Raises RuntimeError naming the ranks of other hosts, MemoryError where memory does not suffice."""
        strangers = [peer for peer in meeting.peers if not peer.local]
        if strangers:
            where = ", ".join(f"rank {peer.rank} on {peer.host}" for peer in strangers)
            raise RuntimeError(
                f"the shm and cuda backends join ranks of one host, and there are others: {where}; where every rank "
                f"has a GPU, use backend='nccl'; else start them by mpirun or srun, with backend='shm+mpi'"
            )
        self.meeting = meeting
        wanted = heap_bytes((1 + ARENAS // SHARE) * meeting.size)
        mine = json.dumps([wanted, scratch_setting(), sorted(os.sched_getaffinity(0)), cgroup.cpu_quota()]).encode()
        answers = [json.loads(answer) for answer in meeting.exchange(mine)]
        world = max(1, min(heap for heap, *_ in answers) // (SHARE * PAGE)) * (SHARE * PAGE)
        # Together: a launcher may have bound each rank to a core of its own.
        cores = threads.share([set().union(*(mask for *_, mask, _ in answers))], 0, answers[0][-1])
        self.crowded = meeting.size > cores
        self.scratch = int(answers[0][1])  # bytes; 0 to let its size follow from the number of ranks
        # What rank 0 knows of this machine, so that all choose alike; None if nobody has measured it.
        known = measured.kept(meeting.size, cores) if meeting.rank == 0 else None
        text, *_ = meeting.exchange(known.text().encode() if known else b"")
        self.tuned = Topology.parse(text.decode()) if text else None
        own = Segment.create(0, 0, world * (1 + ARENAS // SHARE))
        with ExitStack() as undo:
            undo.callback(own.close)
            descriptors = [fd for fd in meeting.exchange_fd(own.fd) if fd is not None]
            os.close(descriptors.pop(meeting.rank))
            undo.callback(_close_all, descriptors)
            self.segments: list[Segment] = []
            for rank in range(meeting.size):
                self.segments.append(own if rank == meeting.rank else own.attach(descriptors.pop(0)))
                undo.callback(self.segments[-1].close)
            undo.pop_all()
        self.own = own
        self.free_arenas = set(range(1, ARENAS + 1))
        self.left: list[tuple[Birth, Heap]] = []  # of sub-communicators closed here, until their arenas are free
        self.engines: weakref.WeakSet[Shm] = weakref.WeakSet()

    def arena(self, index: int) -> tuple[int, int]:
        """(offset, bytes) of an arena in every segment."""
        return arenas(self.own.nbytes)[index]

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks whose process has ended."""
        lost = set(self.meeting.lost())
        return [rank for rank in ranks if rank in lost]

    def where(self, rank: int) -> str:
        """A rank's host, for messages after its number: nothing, since there is one."""
        return ""

    def obituary(self, rank: int) -> str:
        """What is known of a rank's end."""
        return f"(process {self.meeting.peers[rank].pid}) has died"

    def vacated(self) -> list[Birth]:
        """The sub-communicators that this rank has closed and whose arrays are gone."""
        for _, heap in self.left:
            heap.settle(heap.pending())
        return [birth for birth, heap in self.left if heap.used == 0]

    def settle(self, births: Collection[Birth]) -> None:
        """Arenas that all of their ranks have vacated are free again."""
        for birth in births:
            self.free_arenas.add(birth.arena)
        self.left = [(birth, heap) for birth, heap in self.left if birth not in births]

    def close(self) -> None:
        """Take leave of the others. Memory stays mapped as long as arrays over it live."""
        for segment in self.segments:
            segment.close()
        self.meeting.close()


def arenas(nbytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of every arena in a segment of so many bytes."""
    share = nbytes // (SHARE + ARENAS)
    world = share * SHARE
    return [(0, world), *((world + index * share, share) for index in range(ARENAS))]


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
