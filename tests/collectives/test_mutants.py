"""The proofs against their own failures: every mutant of a right program is refused, or shown to be right after all.

Shown by exhaustion: a small model checker, which shares no code with `verify`, the lowering or the oracle, walks
through every interleaving of the ranks' single accesses, in several slices of two calls in a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from collectives import lowering, synchronise
from collectives.builder import Chunks, Value, lookup, trace
from collectives.errors import ProgramError
from collectives.lowering import Memory, build, lower
from collectives.program import Buffer, Enter, Instruction, Move, Program, Ref, Signal, Wait
from collectives.verify import verify

# --- the model checker ------------------------------------------------------------------------------------------------

Micro = tuple[Any, ...]


def unrolled(program: Program, rank: int, slices: int, calls: int) -> list[Micro]:
    """One rank's single steps: in each of `calls` calls, `slices` slices of its list, every access by itself."""
    per_slice = program.signals_in(rank).tolist()
    micro: list[Micro] = []
    for call in range(calls):
        for s in range(slices):
            for instruction in program.bodies[rank]:
                match instruction:
                    case Move(chunk, dsts, srcs):
                        micro += [("read", ref, chunk, call, s) for ref in srcs]
                        micro += [("write", ref, chunk, call, s) for ref in dsts]
                        micro.append(("forget",))
                    case Signal(peer):
                        micro.append(("signal", peer))
                    case Wait(peer, signal, lag) if s >= lag:
                        micro.append(("wait", peer, (call * slices + s - lag) * per_slice[peer] + signal))
                    case Enter() if s == 0:
                        micro += [("arrive",), ("enter", call + 1)]
        micro.append(("leave", call))  # the user looks at the outputs, and then does what he likes with all his arrays
    return micro


class World:
    """All states that a program can get into. A state: positions, memory, each rank's registers, who has left what."""

    def __init__(self, program: Program, slices: int, calls: int, in_place: bool) -> None:
        self.program, self.slices, self.in_place = program, slices, in_place
        self.ranks = range(program.size)
        self.lists = [unrolled(program, rank, slices, calls) for rank in self.ranks]
        self.sent = [[[0] * program.size] for _ in self.ranks]  # [rank][position][peer]
        self.arrived = [[0] for _ in self.ranks]
        readers: dict[Any, set[int]] = defaultdict(set)
        writers: dict[Any, set[int]] = defaultdict(set)
        for rank, micro in enumerate(self.lists):
            for step in micro:
                self.sent[rank].append([n + (step == ("signal", peer)) for peer, n in enumerate(self.sent[rank][-1])])
                self.arrived[rank].append(self.arrived[rank][-1] + (step[0] == "arrive"))
                if step[0] in ("read", "write"):
                    (readers if step[0] == "read" else writers)[self.place(step)].add(rank)
        # steps that nobody else can notice, and that notice nobody, may as well come at once
        self.private = [
            [
                step[0] == "forget"
                or (
                    step[0] in ("read", "write")
                    and step[1].rank == rank
                    and writers[self.place(step)] <= {rank}
                    and (step[0] == "read" or readers[self.place(step)] <= {rank})
                )
                for step in micro
            ]
            for rank, micro in enumerate(self.lists)
        ]

    def place(self, step: Micro) -> Any:
        _, ref, _, call, s = step
        if ref.buffer is Buffer.SCRATCH:
            return "scratch", ref.rank, ref.place, (call * self.slices + s) % self.program.slots
        return "array" if self.in_place else ref.buffer.name, ref.rank, ref.place, call, s

    def explore(self) -> str | None:
        """Walk through all interleavings; returns what can go wrong, or None."""
        nobody: frozenset[tuple[int, int]] = frozenset()
        start = self.settled([0] * len(self.ranks), {}, [()] * len(self.ranks), nobody)
        seen, todo = {start}, [start]
        while todo:
            positions, memory, registers, left = todo.pop()
            movable = [rank for rank in self.ranks if self.kind(rank, positions) in ("read", "write", "leave")]
            if not movable and any(self.kind(rank, positions) for rank in self.ranks):
                return f"ranks wait for ever at {positions}"
            for rank in movable:
                try:
                    after = self.settled(*self.step(rank, list(positions), dict(memory), list(registers), left))
                except AssertionError as wrong:
                    return str(wrong)
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return None

    def kind(self, rank: int, positions: Sequence[int]) -> str | None:
        micro = self.lists[rank]
        return str(micro[positions[rank]][0]) if positions[rank] < len(micro) else None

    def settled(self, positions: list[int], memory: Any, registers: Any, left: Any) -> Any:
        """The state after all that may come at once: signals, waits that are over, and steps that nobody can notice."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while positions[rank] < len(self.lists[rank]) and self.passes(rank, positions):
                    positions, memory, registers, left = self.step(rank, positions, memory, registers, left)
                    moved = True
        return tuple(positions), frozenset(memory.items()), tuple(registers), left

    def passes(self, rank: int, positions: list[int]) -> bool:
        step = self.lists[rank][positions[rank]]
        if step[0] == "wait":
            return self.sent[step[1]][positions[step[1]]][rank] >= step[2]
        if step[0] == "enter":
            return min(self.arrived[r][positions[r]] for r in self.ranks) >= step[1]
        return step[0] in ("signal", "arrive") or self.private[rank][positions[rank]]

    def step(self, rank: int, positions: list[int], memory: Any, registers: Any, left: Any) -> Any:
        step = self.lists[rank][positions[rank]]
        positions[rank] += 1
        if step[0] == "forget":
            registers[rank] = ()
        elif step[0] == "leave":
            self.check_outputs(rank, step[1], memory)
            left = left | {(rank, step[1])}
        elif step[0] in ("read", "write"):
            kind, ref, chunk, call, s = step
            place = self.place(step)
            touched_too_late = ref.buffer is not Buffer.SCRATCH and (ref.rank, call) in left
            assert not touched_too_late, f"rank {rank} touches {ref} after its owner has left"
            if kind == "write":
                memory[place] = registers[rank]
            else:
                own = ref.buffer is Buffer.INPUT and ref.place in self.program.contract.brings(ref.rank)
                there = memory.get(place, ((ref.rank, chunk, call, s) if own else (-1,),))
                registers[rank] = tuple(sorted((*registers[rank], *there)))
        return positions, memory, registers, left

    def check_outputs(self, rank: int, call: int, memory: dict[Any, Any]) -> None:
        for chunk, wanted in self.program.contract.wants(rank).items():
            for s in range(self.slices):
                found = memory.get(self.place(("read", Ref(Buffer.OUTPUT, rank, chunk), chunk, call, s)))
                right = tuple((q, chunk, call, s) for q in self.ranks if wanted >> q & 1)
                assert found == right, f"rank {rank} ends call {call} with {found} in slice {s} of chunk {chunk}"


def explore(program: Program, slices: int, calls: int, in_place: bool) -> str | None:
    return World(program, slices, calls, in_place).explore()


def anything_wrong(program: Program) -> str | None:
    slices = (1, program.slots + 1) if program.pipelined and program.size == 2 else (1,)
    for in_place in (False, True):
        for s in slices:
            wrong = explore(program, s, 2, in_place)
            if wrong:
                return wrong
    return None


# --- mutants of instruction lists -------------------------------------------------------------------------------------


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """Everything that one small slip can make of a program."""

    def changed(rank: int, body: list[Instruction]) -> Program:
        return replace(program, bodies=(*program.bodies[:rank], tuple(body), *program.bodies[rank + 1 :]))

    for slots in {program.slots - 1, program.slots + 1} - {0, 1}:
        yield f"{slots} slots", replace(program, slots=slots)
    for rank, body in enumerate(program.bodies):
        for k, instruction in enumerate(body):
            here = f"rank {rank}, step {k}, {instruction}: "
            rest = list(body[:k]), list(body[k + 1 :])
            yield here + "dropped", changed(rank, rest[0] + rest[1])
            yield here + "twice", changed(rank, [*rest[0], instruction, instruction, *rest[1]])
            if rest[1]:
                yield here + "swapped", changed(rank, [*rest[0], rest[1][0], instruction, *rest[1][1:]])
            for what, other in slips(instruction, rank, program):
                yield here + what, changed(rank, [*rest[0], other, *rest[1]])


def slips(instruction: Instruction, rank: int, program: Program) -> Iterator[tuple[str, Instruction]]:
    peers = [peer for peer in range(program.size) if peer != rank]
    match instruction:
        case Signal(peer):
            yield from ((f"signal {other}", Signal(other)) for other in peers if other != peer)
        case Wait(peer, signal, lag):
            yield from ((f"wait for {other}", Wait(other, signal, lag)) for other in peers if other != peer)
            yield from ((f"signal {n}", Wait(peer, n, lag)) for n in (signal - 1, signal + 1))
            yield from ((f"lag {n}", Wait(peer, signal, n)) for n in (lag - 1, lag + 1))
        case Move(chunk, dsts, srcs, raw, final):
            yield "another chunk", instruction._replace(chunk=(chunk + 1) % max(2, program.chunks))
            yield "final flipped", instruction._replace(final=not final)
            yield "added twice", instruction._replace(srcs=(*srcs, srcs[0]), raw=(*raw, raw[0]))
            yield "last left out", instruction._replace(srcs=srcs[:-1], raw=raw[:-1])
            yield "one destination less", instruction._replace(dsts=dsts[1:])
            yield "other order", instruction._replace(srcs=srcs[::-1], raw=raw[::-1])
            for j, ref in enumerate(srcs):
                yield f"raw {j} flipped", instruction._replace(raw=(*raw[:j], not raw[j], *raw[j + 1 :]))
                for other in wrong_refs(ref, program):
                    yield f"from {other}", instruction._replace(srcs=(*srcs[:j], other, *srcs[j + 1 :]))
            for j, ref in enumerate(dsts):
                for other in wrong_refs(ref, program):
                    yield f"to {other}", instruction._replace(dsts=(*dsts[:j], other, *dsts[j + 1 :]))


def wrong_refs(ref: Ref, program: Program) -> Iterator[Ref]:
    yield from (ref._replace(rank=rank) for rank in range(program.size) if rank != ref.rank)
    yield from (ref._replace(buffer=buffer) for buffer in Buffer if buffer is not ref.buffer)
    yield from (ref._replace(place=place) for place in range(max(program.cells, program.chunks)) if place != ref.place)


PROGRAMS = [
    build(collective, algorithm, size, memory=memory, pipelined=pipelined)
    for collective, algorithm, size in [
        ("all_reduce", "ring", 2),
        ("all_reduce", "ring", 3),
        ("all_reduce", "two_shot", 2),
        ("all_reduce", "two_shot", 3),
        ("all_reduce", "one_shot", 2),
        ("all_reduce", "one_shot", 3),
        ("all_reduce", "double_tree", 3),
        ("reduce_scatter", "ring", 3),
        ("all_gather", "ring", 3),
        ("all_gather", "direct", 2),
        ("broadcast", "chain", 3),
        ("reduce", "tree", 3),
        ("scatter", "direct", 3),
        ("gather", "direct", 2),
        ("all_to_all", "bruck", 2),
        ("send_recv", "direct", 2),
        ("barrier", "dissemination", 3),
    ]
    for memory in ("symmetric", "staged")
    for pipelined in (True, False)
]


def name(program: Program) -> str:
    return f"{program.collective}-{program.algorithm}-{program.size}-{program.memory}-{program.pipelined}"


def takes_long(program: Program) -> bool:
    return program.size == 3 and program.algorithm in ("ring", "two_shot", "dissemination")


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, id=name(p), marks=[pytest.mark.slow] if takes_long(p) else []) for p in PROGRAMS],
)
def test_every_mutant_is_refused_or_right(program: Program) -> None:
    assert anything_wrong(program) is None
    refused = accepted = 0
    for what, mutant in mutants(program):
        try:
            verify(mutant)
        except ProgramError:
            refused += 1
        else:
            accepted += 1
            assert anything_wrong(mutant) is None, what
    assert refused > accepted


def test_the_model_checker_finds_faults() -> None:
    """It is no empty ceremony: these are wrong for one reason each, and it says which."""
    send = build("send_recv", "direct", 2, memory="staged")
    sender, receiver = send.bodies
    without_credit = replace(send, bodies=(sender[:-1], receiver))
    assert "rank 1 ends call" in (explore(without_credit, 3, 1, False) or "")
    too_long_a_lag = replace(send, bodies=((*sender[:-1], Wait(1, 1, lag=2)), receiver))
    assert "rank 1 ends call" in (explore(too_long_a_lag, 3, 2, False) or "")
    assert explore(replace(send, bodies=(sender, receiver[:-1])), 3, 1, False) is not None
    two_shot = build("all_reduce", "two_shot", 2)
    hasty = replace(two_shot, bodies=(two_shot.bodies[0][:-1], two_shot.bodies[1]))
    assert explore(hasty, 1, 1, False) is not None
    one_shot = build("all_reduce", "one_shot", 2, memory="staged", pipelined=False)
    direct = replace(
        one_shot,
        memory="symmetric",
        bodies=tuple(
            (
                Enter(),
                Move(0, (Ref(Buffer.OUTPUT, r, 0),), (Ref(Buffer.INPUT, 0, 0), Ref(Buffer.INPUT, 1, 0)), (True, True)),
            )
            + ((Signal(1 - r), Wait(1 - r, 1)))
            for r in range(2)
        ),
    )
    assert explore(direct, 1, 1, in_place=False) is None
    assert "with" in (explore(direct, 1, 1, in_place=True) or "")


# --- mutants of what an algorithm says --------------------------------------------------------------------------------


def traced(collective: str, algorithm: str, size: int) -> Chunks:
    return trace(lookup(collective, algorithm), collective, size, 0, {})


def mutant_traces(collective: str, algorithm: str, size: int) -> Iterator[tuple[str, Chunks]]:
    for k, value in enumerate(traced(collective, algorithm, size).values):
        slips: list[tuple[str, Value]] = [
            (f"at rank {rank}", value._replace(rank=rank))
            for rank in range(size)
            if rank != value.rank and value.sources
        ]
        if len(value.sources) > 1:
            slips += [("a source twice", value._replace(sources=(*value.sources, value.sources[0])))]
            slips += [("a source less", value._replace(sources=value.sources[:-1]))]
        if value.sources:
            slips += [(f"from {j}", value._replace(sources=(j, *value.sources[1:]))) for j in range(k)]
        for what, slip in slips:
            chunks = traced(collective, algorithm, size)
            chunks.values[k] = slip
            yield f"value {k} {what}", chunks


@pytest.mark.parametrize("memory", ["symmetric", "staged"])
@pytest.mark.parametrize(
    ("collective", "algorithm", "size"),
    [
        ("all_reduce", "ring", 3), ("all_reduce", "two_shot", 3), ("all_gather", "bruck", 3), ("reduce", "tree", 3),
        ("broadcast", "chain", 3), ("scatter", "direct", 3), ("gather", "direct", 3), ("all_to_all", "bruck", 2),
    ],
)  # fmt: skip
def test_every_slip_of_an_algorithm_is_refused_or_right(
    collective: str, algorithm: str, size: int, memory: Memory
) -> None:
    refused = 0
    for what, chunks in mutant_traces(collective, algorithm, size):
        program = lower(chunks, "mutant", memory, slots=2, pipelined=False)
        try:
            verify(program)
        except ProgramError:
            refused += 1
        else:
            assert anything_wrong(program) is None, what
    assert refused


# --- mutants of the lowering ------------------------------------------------------------------------------------------


def test_a_lowering_that_forgets_something_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the lowering, left out, makes some program that is refused."""
    conflicts = synchronise._conflicts

    def refused(collective: str, algorithm: str, size: int, memory: Memory) -> bool:
        try:
            verify(build(collective, algorithm, size, memory=memory))
        except ProgramError:
            return True
        return False

    with monkeypatch.context() as patch:
        assert not refused("all_reduce", "one_shot", 2, "symmetric")
        patch.setattr(lowering._Value, "lost_to", lambda value, reader: False)
        assert refused("all_reduce", "one_shot", 2, "symmetric")
    examples: list[tuple[str, str, int, Memory]] = [
        ("all_reduce", "ring", 3, "staged"),  # what must be done before a Move
        ("all_reduce", "two_shot", 3, "symmetric"),  # before a rank's end
        ("send_recv", "direct", 2, "staged"),  # before a slot is used again
    ]
    for forgotten, example in enumerate(examples):
        with monkeypatch.context() as patch:
            assert not refused(*example)

            def forgetful(plan: Any, forgotten: int = forgotten) -> Any:
                needs: list[Any] = list(conflicts(plan))
                needs[forgotten] = [[{} for _ in rank] if forgotten == 0 else {} for rank in needs[forgotten]]
                return tuple(needs)

            patch.setattr(synchronise, "_conflicts", forgetful)
            assert refused(*example)


def slips_of_an_edge(edge: Any) -> Iterator[tuple[str, list[Any]]]:
    yield "forgotten", []
    yield "a slice later", [edge._replace(lag=edge.lag + 1)]
    if edge.after > 0:
        yield "a Move too early", [edge._replace(after=edge.after - 1)]


@pytest.mark.parametrize("memory", ["symmetric", "staged"])
@pytest.mark.parametrize(
    ("collective", "algorithm", "size"),
    [
        ("all_reduce", "ring", 2), ("all_reduce", "two_shot", 3), ("all_reduce", "double_tree", 3),
        ("reduce", "tree", 3), ("broadcast", "chain", 3), ("all_gather", "bruck", 3), ("reduce_scatter", "ring", 3),
        ("gather", "direct", 3), ("scatter", "direct", 3), ("all_to_all", "bruck", 2), ("send_recv", "direct", 2),
    ],
)  # fmt: skip
def test_every_slip_in_one_order_is_refused_or_right(
    collective: str, algorithm: str, size: int, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orders that the lowering derives, each in turn forgotten or asked for too weakly."""
    edges = synchronise._edges
    derived: list[Any] = []
    monkeypatch.setattr(synchronise, "_edges", lambda *plan: derived.extend(edges(*plan)) or edges(*plan))
    build(collective, algorithm, size, memory=memory)
    refused = 0
    for k, edge in enumerate(derived):
        for what, slip in slips_of_an_edge(edge):
            mutant_edges = [*derived[:k], *slip, *derived[k + 1 :]]
            monkeypatch.setattr(synchronise, "_edges", lambda *plan, edges=mutant_edges: edges)
            mutant = build(collective, algorithm, size, memory=memory)
            try:
                verify(mutant)
            except ProgramError:
                refused += 1
            else:
                assert anything_wrong(mutant) is None, f"{edge} {what}"
    assert refused or not derived
