"""What lowering makes of an algorithm: how many Moves, which places, which signals, how many bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from collectives.lowering import build
from collectives.program import Buffer, Enter, Move, Program, Signal, Wait
from collectives.verify import verify


def moves(program: Program, rank: int | None = None) -> Iterator[Move]:
    for body in program.bodies if rank is None else [program.bodies[rank]]:
        yield from (instruction for instruction in body if isinstance(instruction, Move))


def traffic(program: Program) -> float:
    """Bytes loaded and stored by all ranks together, in units of one rank's message."""
    return sum(len(move.srcs) + len(move.dsts) for move in moves(program)) / program.chunks


def shape(program: Program, rank: int) -> str:
    letters = {Move: "M", Signal: "s", Wait: "w", Enter: "E"}
    return "".join(letters[type(instruction)] for instruction in program.bodies[rank])


def all_reduce(algorithm: str, size: int, **options: Any) -> Program:
    return build("all_reduce", algorithm, size, **options)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_the_fewest_bytes(p: int) -> None:
    assert traffic(all_reduce("two_shot", p)) == 2 * p
    assert traffic(all_reduce("two_shot", p, memory="staged")) == 5 * p - 2  # the own part stays where it is
    if p > 2:
        assert traffic(all_reduce("ring", p)) == 5 * (p - 1)
    assert traffic(build("all_gather", "direct", p)) * p == p * (p + 1)  # loads p blocks, stores them p times
    assert traffic(build("reduce_scatter", "direct", p)) == p + 1
    assert traffic(build("send_recv", "direct", 2)) == 2


def test_two_shot_in_symmetric_memory_is_one_move_a_rank() -> None:
    program = all_reduce("two_shot", 3)
    for rank in range(3):
        (move,) = moves(program, rank)
        assert [(ref.buffer, ref.rank, ref.place) for ref in move.srcs] == [(Buffer.INPUT, q, rank) for q in range(3)]
        assert {(ref.buffer, ref.rank, ref.place) for ref in move.dsts} == {(Buffer.OUTPUT, q, rank) for q in range(3)}
        assert move.final and all(move.raw)
        assert shape(program, rank) == "EMssww"  # everybody's arrays are free again when a rank is through


def test_a_small_one_shot_waits_for_nothing_but_enter() -> None:
    for memory in ("symmetric", "staged"):
        program = all_reduce("one_shot", 4, memory=memory, pipelined=False)
        assert {shape(program, rank) for rank in range(4)} == {"MEM"}
        orders = {tuple(ref.rank for ref in move.srcs) for move in moves(program) if move.final}
        assert orders == {(0, 1, 2, 3)}  # the same bits everywhere


def test_a_ring_only_talks_to_its_neighbours() -> None:
    for memory in ("symmetric", "staged"):
        program = all_reduce("ring", 5, memory=memory)
        for rank in range(5):
            neighbours = {(rank - 1) % 5, (rank + 1) % 5}
            assert all({ref.rank for ref in (*m.srcs, *m.dsts)} <= {rank, (rank - 1) % 5} for m in moves(program, rank))
            assert {i.peer for i in program.bodies[rank] if isinstance(i, Signal | Wait)} <= neighbours


def test_a_ring_needs_three_cells_whatever_its_size() -> None:
    assert [all_reduce("ring", p, memory="staged").cells for p in (4, 8, 16)] == [3, 3, 3]
    assert all_reduce("ring", 8).cells == 0


def test_bruck_sends_one_message_a_round() -> None:
    program = build("all_gather", "bruck", 8)
    assert all(program.signals_out(rank).sum() <= 3 + 3 for rank in range(8))  # 3 rounds, and 3 readers to let go


def test_nothing_but_copying_in_precedes_enter() -> None:
    program = all_reduce("two_shot", 4, memory="staged")
    for rank in range(4):
        body = program.bodies[rank]
        for move in body[: body.index(Enter())]:
            assert isinstance(move, Move)
            assert [ref.buffer for ref in move.srcs] == [Buffer.INPUT] and [r.buffer for r in move.dsts] == [
                Buffer.SCRATCH
            ]
        assert shape(program, rank).startswith("MMMEsss")


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_one_way_traffic_gets_credits(slots: int) -> None:
    """Nothing but these would keep a sender from lapping its receiver; they lag, so that it can be slots - 1 ahead."""
    sender, receiver = build("send_recv", "direct", 2, memory="staged", slots=slots).bodies
    assert sender[-1] == Wait(1, 1, lag=slots - 1) and receiver[-1] == Signal(0)
    assert not [w for w in receiver if isinstance(w, Wait) and w.lag]
    single = build("send_recv", "direct", 2, memory="staged", slots=slots, pipelined=False)
    assert not [i for body in single.bodies for i in body if isinstance(i, Wait | Signal)]


def test_mutual_traffic_needs_no_credits() -> None:
    for algorithm in ("ring", "two_shot", "one_shot", "halving_doubling"):
        program = all_reduce(algorithm, 4, memory="staged")
        assert not [i for body in program.bodies for i in body if isinstance(i, Wait) and i.lag]


def test_gather_pushes_and_scatter_pulls() -> None:
    """The root's peers do the work, all at once."""
    for collective in ("gather", "scatter"):
        program = build(collective, "direct", 4, root=1)
        assert Counter(rank for rank in range(4) for _ in moves(program, rank)) == Counter(range(4))
    assert len(list(moves(build("broadcast", "direct", 4), 0))) == 0


def test_one_rank_alone() -> None:
    (move,) = moves(build("all_reduce", "ring", 1))
    assert move.final and move.raw == (True,)  # its contribution may still have to be scaled
    for collective, algorithm in (("broadcast", "tree"), ("barrier", "dissemination"), ("all_gather", "ring")):
        verify(build(collective, algorithm, 1))


def test_unneeded_values_are_dropped() -> None:
    assert len(list(moves(build("all_gather", "direct", 3, memory="staged"), 0))) == 1 + 1 + 2  # stage, own, two others
    assert traffic(build("reduce", "two_shot", 4)) == 4 + 1  # parts go to the root alone


@pytest.mark.parametrize("wrong", [{"memory": "shared"}, {"slots": 1}, {"root": 9}, {"size": 0}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        build("broadcast", "tree", **{"size": 4, **wrong})


def test_programs_are_the_same_every_time() -> None:
    for memory in ("symmetric", "staged"):
        assert len({build("all_reduce", "double_tree", 7, memory=memory).digest() for _ in range(3)}) == 1
