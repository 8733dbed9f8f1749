"""Signals and waits: the order that a program's Moves need, with as few flags as will do.

Two accesses to one place by different ranks conflict unless both only read; the later must then come after a Wait for a
Signal that followed the earlier. Vector clocks tell which such edges already follow from the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.program import Buffer, Enter, Instruction, Move, Ref, Signal, Wait, untouched_inputs

Clock = npt.NDArray[np.int64]  # for each rank, its last Move known to be done in this slice; -1 if none is
Body = tuple[Instruction, ...]


class Planned(NamedTuple):
    """A Move, and the step at which its rank comes to it. Step 0 is before Enter."""

    step: int
    move: Move


class _Edge(NamedTuple):
    """Before `rank` goes on to its Move `to` (or to its end), it waits until `peer` has done its Move `after`."""

    rank: int
    to: int
    peer: int
    after: int
    lag: int = 0


def synchronise(plan: list[list[Planned]], slots: int, pipelined: bool) -> tuple[Body, ...]:
    """Put Enter, signals and waits between every rank's Moves, which must be in the order of their steps."""
    edges = _edges(plan, slots, pipelined)
    signals: dict[tuple[int, int], list[int]] = defaultdict(list)  # (from, to): the Moves they follow
    for from_, to, after in sorted({(edge.peer, edge.rank, edge.after) for edge in edges}):
        signals[from_, to].append(after)
    waits: dict[tuple[int, int], list[Wait]] = defaultdict(list)
    for edge in edges:
        number = signals[edge.peer, edge.rank].index(edge.after) + 1
        waits[edge.rank, edge.to].append(Wait(edge.peer, number, edge.lag))
    follow: dict[tuple[int, int], list[Signal]] = defaultdict(list)
    for (from_, to), afters in signals.items():
        for after in afters:
            follow[from_, after].append(Signal(to))

    def body(rank: int) -> Iterator[Instruction]:
        first = _first_after_enter(plan[rank])
        held_back: list[Signal] = []  # a rank says nothing before all have agreed on the call
        for i, (_, move) in enumerate(plan[rank]):
            if i == first:
                yield Enter()
                yield from held_back
            yield from waits[rank, i]
            yield move
            nearest_first = sorted(follow[rank, i], key=lambda signal: (signal.peer - rank) % len(plan))
            if i < first:
                held_back += nearest_first
            else:
                yield from nearest_first
        if first == len(plan[rank]):
            yield Enter()
            yield from held_back
        yield from waits[rank, len(plan[rank])]

    return tuple(tuple(body(rank)) for rank in range(len(plan)))


def _first_after_enter(planned: list[Planned]) -> int:
    return next((i for i, (step, _) in enumerate(planned) if step > 0), len(planned))


def _edges(plan: list[list[Planned]], slots: int, pipelined: bool) -> list[_Edge]:
    size = len(plan)
    needs, exits, scratch_readers = _conflicts(plan)
    edges: list[_Edge] = []

    # Enter orders what precedes it, but only in the first slice
    known = np.array([-1 if pipelined else _first_after_enter(planned) - 1 for planned in plan], dtype=np.int64)
    clocks: list[Clock] = [known] * size
    clock_after: list[list[Clock]] = [[] for _ in plan]

    def require(rank: int, to: int, need: dict[int, int]) -> None:
        """Add the edges that are missing before Move `to` of `rank`, which needs each peer's Move need[peer] done."""
        latest_first = sorted(need.items(), key=lambda entry: plan[entry[0]][entry[1]].step, reverse=True)
        for peer, after in latest_first:
            if clocks[rank][peer] < after:
                edges.append(_Edge(rank, to, peer, after))
                joined = np.maximum(clocks[rank], clock_after[peer][after])
                joined[peer] = after
                clocks[rank] = joined

    order = sorted((planned.step, rank, i) for rank, moves in enumerate(plan) for i, planned in enumerate(moves))
    for _, rank, i in order:
        require(rank, i, needs[rank][i])
        clock_after[rank].append(clocks[rank])
    for rank in range(size):
        require(rank, len(plan[rank]), exits[rank])

    # A slot comes round again after `slots` slices. Whoever hears from a reader within each slice knows that the
    # reader is past the slice before, which is enough; the others ask, at the end and not when they next write, so
    # that the call after this one may write too.
    if pipelined:
        for rank in range(size):
            for peer, after in scratch_readers[rank].items():
                if clocks[rank][peer] < 0:
                    edges.append(_Edge(rank, len(plan[rank]), peer, after, lag=slots - 1))
    return edges


def _conflicts(
    plan: list[list[Planned]],
) -> tuple[list[list[dict[int, int]]], list[dict[int, int]], list[dict[int, int]]]:
    """What each rank needs its peers to have done: before each of its Moves, at its end for the sake of its INPUT and
    OUTPUT, and before it may use its SCRATCH again. A need is, for each peer, the number of that peer's Move.
    """
    size = len(plan)
    needs: list[list[dict[int, int]]] = [[{} for _ in moves] for moves in plan]
    exits: list[dict[int, int]] = [{} for _ in plan]
    scratch: list[dict[int, int]] = [{} for _ in plan]
    writer: dict[Ref, tuple[int, int]] = {}
    readers: dict[Ref, list[tuple[int, int]]] = defaultdict(list)
    order = sorted((planned.step, rank, i) for rank, moves in enumerate(plan) for i, planned in enumerate(moves))
    untouched = untouched_inputs(planned.move for moves in plan for planned in moves)

    def memory(ref: Ref) -> Ref:
        """In an in-place call, the INPUT and OUTPUT places of one number are the same memory."""
        shared = ref.buffer is Buffer.INPUT and (ref.rank, ref.place) not in untouched
        return ref._replace(buffer=Buffer.OUTPUT) if shared else ref

    def need(rank: int, i: int, place: tuple[int, int]) -> None:
        peer, after = place
        if peer != rank:
            needs[rank][i][peer] = max(needs[rank][i].get(peer, -1), after)

    for _, rank, i in order:
        move = plan[rank][i].move
        srcs, dsts = list(map(memory, move.srcs)), list(map(memory, move.dsts))
        for place in (*srcs, *dsts):
            if place in writer:
                need(rank, i, writer[place])
        for place in dsts:
            for before in readers.pop(place, []):
                need(rank, i, before)
            writer[place] = rank, i
        for place in srcs:
            readers[place].append((rank, i))
        for ref in (*move.srcs, *move.dsts):
            if ref.rank != rank:
                concerned = scratch if ref.buffer is Buffer.SCRATCH else exits
                concerned[ref.rank][rank] = i

    # one signal per step and pair is enough: wait for the last that this rank will need of the step
    last: dict[tuple[int, int, int], int] = defaultdict(lambda: -1)
    for rank in range(size):
        for need_of in needs[rank]:
            for peer, after in need_of.items():
                key = rank, peer, plan[peer][after].step
                last[key] = max(last[key], after)
    for rank in range(size):
        for need_of in needs[rank]:
            for peer, after in need_of.items():
                need_of[peer] = last[rank, peer, plan[peer][after].step]
    return needs, exits, scratch
