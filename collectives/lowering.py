"""From an algorithm's recorded graph of values to one instruction list per rank.

1. *Moves.* Every value that somebody wants, or that leads to one, is made by one Move of the rank that has it: the
   consumer pulls. Only in symmetric memory can a producer push, and the copies of a fresh value that go no further are
   then extra destinations of the Move that makes it, where this spreads the work at least as evenly as pulling.
2. *Steps.* A value's step is one more than its latest source's. Ranks run their Moves step by step, and all waiting is
   for earlier steps, so nothing can wait in a circle.
3. *Places.* What the collective wants goes to OUTPUT; so do partial results on the way, where they do no harm; the rest
   goes to cells of SCRATCH, which are used again once their last reader's step is past. An input that others need after
   it may be overwritten (a call can be in place), or that they cannot see (staged memory), is copied to SCRATCH first,
   before Enter.
4. *Signals.* Each pair of conflicting accesses by different ranks needs an edge from the first to the second.
   Vector clocks say which edges follow from others; for the rest there is a Signal and a Wait.

Nothing here is trusted: `collectives.verify` proves the resulting lists without knowing how they came about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from collectives.builder import Chunks, lookup, trace
from collectives.contract import Contract
from collectives.program import Buffer, Move, Program, Ref
from collectives.synchronise import Planned, synchronise

Memory = Literal["symmetric", "staged"]

REUSE_AFTER = 1  # steps a scratch cell rests after its last reader's, so that the next writer seldom has to wait


def build(
    collective: str,
    algorithm: str,
    size: int,
    *,
    memory: Memory = "symmetric",
    slots: int = 2,
    root: int = 0,
    pipelined: bool = True,
    **options: Any,
) -> Program:
    """Make the program of one collective among `size` ranks by the named algorithm.

    `memory`: "symmetric" if ranks may read and write each other's arrays, "staged" if only scratch is shared.
    `slots`: how many slices of scratch rotate. `pipelined=False` makes the shorter program for a message that fits in
    one slice. `options` go to the algorithm. Raises ValueError for an unknown name or a wrong size, TypeError for
    options that the algorithm does not have, ProgramError for an algorithm that makes no sense.
    """
    if memory not in ("symmetric", "staged"):
        raise ValueError(f'memory is "symmetric" or "staged", not {memory!r}')
    if slots < 2:
        raise ValueError(f"at least 2 slots must rotate, not {slots}")
    chunks = trace(lookup(collective, algorithm), collective, size, root, options)
    label = f"{algorithm}({', '.join(f'{k}={v}' for k, v in options.items())})" if options else algorithm
    return lower(chunks, label, memory, slots, pipelined)


def lower(chunks: Chunks, label: str, memory: Memory, slots: int, pipelined: bool) -> Program:
    """Lower a recorded graph; see the module's docstring."""
    contract = chunks.contract
    values = _needed(_values(chunks, contract))
    makers = _plan_moves(values, symmetric=memory == "symmetric")
    cells = _place(values, makers, symmetric=memory == "symmetric")
    plan = _plan(makers, contract.size, symmetric=memory == "symmetric")
    bodies = synchronise(plan, slots, pipelined)
    return Program(contract, label, memory, slots, pipelined, cells, bodies)


@dataclass(eq=False)
class _Value:
    """A value of the graph, and where it is put."""

    rank: int
    chunk: int
    sources: tuple[_Value, ...]
    raw: bool  # one rank's untouched contribution
    finished: bool  # all contributions, reduced
    wanted: bool
    step: int = 0
    readers: list[_Maker] = field(default_factory=list)
    maker: _Maker | None = None  # None for a rank's own contribution
    home: bool = False  # it lies in its rank's OUTPUT (a contribution: in INPUT)
    cell: int | None = None  # it lies (also) in this cell of its rank's SCRATCH
    overwritten_by: _Maker | None = None  # the one that puts the final value where this one lies
    returns: _Value | None = None  # its reduction, put back into this one's cell

    @property
    def is_input(self) -> bool:
        return not self.sources

    @property
    def stays(self) -> bool:
        """Whether this is a copy of what its own rank brings: nothing to do if the call is in place."""
        (source, *others) = self.sources
        return not others and source.is_input and source.rank == self.rank and not self.finished

    def lost_to(self, reader: _Maker) -> bool:
        """Whether `reader` may come too late to find this value at home."""
        writer = self.overwritten_by
        return writer is not None and reader is not writer and reader.step >= writer.step


@dataclass(eq=False)
class _Maker:
    """A Move in the making: `rank` makes `makes`, all the same, from `sources`."""

    rank: int
    step: int
    sources: tuple[_Value, ...]
    makes: list[_Value]


def _values(chunks: Chunks, contract: Contract) -> list[_Value]:
    """The graph, with every wanted value marked, and a copy added where a rank wants what it brings."""
    values: list[_Value] = []
    wanted = [dict(contract.wants(rank)) for rank in range(contract.size)]

    def add(rank: int, chunk: int, contributions: int, sources: tuple[_Value, ...]) -> _Value:
        here = bool(sources) and wanted[rank].get(chunk) == contributions
        if here:
            del wanted[rank][chunk]  # the first that will do
        step = 1 + max((source.step for source in sources), default=-1)
        finished = contract.reduces and contributions == contract.everyone and bool(sources)
        raw = contributions.bit_count() == 1 and not finished
        values.append(_Value(rank, chunk, sources, raw, finished, here, step, home=not sources))
        return values[-1]

    recorded: list[_Value] = []
    for value in chunks.values:
        sources = tuple(recorded[number] for number in value.sources)
        recorded.append(add(value.rank, value.block * contract.parts + value.part, value.contributions, sources))
    inputs = {(value.rank, value.chunk): value for value in recorded if value.is_input}
    for rank in range(contract.size):
        for chunk in contract.brings(rank):
            if wanted[rank].get(chunk) == 1 << rank:
                own = inputs.get((rank, chunk)) or add(rank, chunk, 1 << rank, ())
                add(rank, chunk, 1 << rank, (own,))
    return values


def _needed(values: list[_Value]) -> list[_Value]:
    """Those that are wanted or lead to one that is."""
    needed: set[_Value] = set()
    for value in reversed(values):
        if value.wanted or value in needed:
            needed.add(value)
            needed.update(value.sources)
    return [value for value in values if value in needed]


def _plan_moves(values: list[_Value], symmetric: bool) -> list[_Maker]:
    """One Move per value, on the rank that has it; in symmetric memory some copies are pushed instead."""
    makers = []
    for value in values:
        if value.sources:
            value.maker = _Maker(value.rank, value.step, value.sources, [value])
            makers.append(value.maker)
            for source in dict.fromkeys(value.sources):
                source.readers.append(value.maker)
    if symmetric:
        return _push_last_copies(values, makers)
    _put_back_reductions(values)
    return makers


def _put_back_reductions(values: list[_Value]) -> None:
    """Who alone wants a reduction, and had a contribution fetched for it and nothing else, gets it where that lay."""
    for copy in values:
        if len(copy.sources) != 1 or len(copy.sources[0].sources) < 2 or copy.sources[0].rank == copy.rank:
            continue
        (total,) = copy.sources
        came = next((s for s in total.sources if s.rank == copy.rank and s.readers == [total.maker]), None)
        if came is None or total.readers != [copy.maker]:  # for several readers, one cell here takes fewer bytes
            continue
        assert total.maker is not None and copy.maker is not None
        back = _Value(copy.rank, copy.chunk, (total,), total.raw, total.finished, False, total.step, [copy.maker])
        came.returns = back
        total.maker.makes.append(back)
        total.readers.remove(copy.maker)
        copy.sources = copy.maker.sources = (back,)


def _push_last_copies(values: list[_Value], makers: list[_Maker]) -> list[_Maker]:
    at: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    for value in values:
        at[value.rank, value.chunk].append(value)
    candidates: dict[int, list[_Value]] = defaultdict(list)
    for value in values:
        fresh = len(value.sources) == 1 and len(value.sources[0].sources) != 1  # a copy of a reduction or of an input
        if fresh and value.wanted and not value.readers:
            candidates[value.step].append(value)
    pushers: dict[_Value, _Maker] = {}
    replaced = set()
    for step, copies in candidates.items():
        remote = [copy for copy in copies if copy.rank != copy.sources[0].rank]
        if _busiest(copy.sources[0].rank for copy in remote) > _busiest(copy.rank for copy in remote):
            continue
        for copy in copies:
            (source,) = copy.sources
            pusher = source.maker or pushers.get(source) or _Maker(source.rank, step, (source,), [])
            others = [other for value in at[copy.rank, copy.chunk] for other in (value.maker, *value.readers)]
            if not copy.stays and any(o not in (None, pusher, copy.maker) and o.step >= pusher.step for o in others):
                continue  # somebody may still be using the place
            replaced.add(copy.maker)
            source.readers = [reader for reader in source.readers if reader is not copy.maker]
            if source.is_input:
                pushers[source] = pusher
                if pusher not in source.readers:
                    source.readers.append(pusher)
            pusher.makes.append(copy)
            copy.maker = pusher
    return [maker for maker in makers if maker not in replaced] + list(pushers.values())


def _busiest(ranks: Iterable[int]) -> int:
    count: dict[int, int] = defaultdict(int)
    for rank in ranks:
        count[rank] += 1
    return max(count.values(), default=0)


def _place(values: list[_Value], makers: list[_Maker], symmetric: bool) -> int:
    """Decide where every value lies; returns the number of scratch cells."""
    at: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    for value in values:
        at[value.rank, value.chunk].append(value)
    for here in at.values():
        final = next((value for value in here if value.wanted), None)
        if final is None:
            continue
        final.home = True
        if final.stays:
            continue
        # whoever lies there before must have been read by then
        before: _Value | None = None
        for value in sorted(here, key=lambda v: v.step):
            if value is final:
                continue
            value.overwritten_by = final.maker
            if value.is_input:
                before = value
            elif symmetric and not any(value.lost_to(reader) for reader in value.readers):
                assert value.maker is not None
                if before is None or all(r is value.maker or r.step < value.step for r in before.readers):
                    value.home, before = True, value
    cells = 0
    for rank, here in _group_by_rank(values).items():
        free: list[tuple[int, int]] = []  # (step of the last reader, cell)
        used = 0
        for value in sorted(here, key=lambda v: v.step):
            if not _needs_cell(value, symmetric):
                continue
            rested = [entry for entry in free if entry[0] + REUSE_AFTER < value.step]
            if rested:
                free.remove(rested[0])
                value.cell = rested[0][1]
            else:
                value.cell, used = used, used + 1
            readers = value.readers
            if value.returns:
                value.returns.cell = value.cell
                readers = readers + value.returns.readers
            free.append((max(reader.step for reader in readers), value.cell))
            if value.is_input:
                makers.append(_Maker(rank, 0, (value,), [value]))
        cells = max(cells, used)
    return cells


def _needs_cell(value: _Value, symmetric: bool) -> bool:
    """Whether somebody needs `value` who cannot find it at home."""

    def in_vain(reader: _Maker) -> bool:
        return not value.home or value.lost_to(reader) or not (symmetric or reader.rank == value.rank)

    return any(in_vain(reader) for reader in value.readers)


def _group_by_rank(values: list[_Value]) -> dict[int, list[_Value]]:
    groups: dict[int, list[_Value]] = defaultdict(list)
    for value in values:
        groups[value.rank].append(value)
    return groups


def _plan(makers: list[_Maker], size: int, symmetric: bool) -> list[list[Planned]]:
    """Every rank's Moves in the order of their steps; within a step nearest partner first, to spread out."""

    def distance(maker: _Maker) -> int:
        others = [source.rank for source in maker.sources] + [made.rank for made in maker.makes]
        others += [reader.rank for reader in maker.makes[0].readers]
        partner = next((other for other in others if other != maker.rank), maker.rank)
        return (partner - maker.rank) % size

    def source(value: _Value, reader: _Maker) -> Ref:
        visible = symmetric or reader.rank == value.rank
        if value.home and visible and not value.lost_to(reader):
            return Ref(Buffer.INPUT if value.is_input else Buffer.OUTPUT, value.rank, value.chunk)
        assert value.cell is not None
        return Ref(Buffer.SCRATCH, value.rank, value.cell)

    def destinations(maker: _Maker) -> Iterator[Ref]:
        for value in sorted(maker.makes, key=lambda value: (value.rank - maker.rank) % size):
            if value.home and not value.is_input:
                yield Ref(Buffer.OUTPUT, value.rank, value.chunk)
            if value.cell is not None:
                yield Ref(Buffer.SCRATCH, value.rank, value.cell)

    plan: list[list[Planned]] = [[] for _ in range(size)]
    for maker in sorted(makers, key=lambda maker: (maker.step, distance(maker))):
        result = maker.makes[0]
        move = Move(
            chunk=result.chunk,
            dsts=tuple(destinations(maker)),
            srcs=tuple(source(value, maker) for value in maker.sources),
            raw=tuple(value.raw for value in maker.sources),
            final=result.finished and not any(value.finished for value in maker.sources),
        )
        plan[maker.rank].append(Planned(maker.step, move))
    return plan
