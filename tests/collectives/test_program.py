"""The instruction set: encoding, counting, printing."""

from __future__ import annotations

from dataclasses import replace

from collectives.contract import Contract
from collectives.lowering import build
from collectives.program import Buffer, Enter, Move, Program, Ref, Signal, Wait

# Rank 1 fetches what rank 0 staged, and says when it has.
SEND = Program(
    contract=Contract("send_recv", 2),
    algorithm="by hand",
    memory="staged",
    slots=2,
    pipelined=True,
    cells=1,
    bodies=(
        (
            Move(0, (Ref(Buffer.SCRATCH, 0, 0),), (Ref(Buffer.INPUT, 0, 0),), (True,)),
            Enter(),
            Signal(1),
            Wait(1, 1, lag=1),
        ),
        (Enter(), Wait(0, 1), Move(0, (Ref(Buffer.OUTPUT, 1, 0),), (Ref(Buffer.SCRATCH, 0, 0),), (True,)), Signal(0)),
    ),
)


def test_encoding() -> None:
    scratch, raw = 2 << 56, 1 << 62
    assert SEND.encode(0).tolist() == [4, 0, 0, 1, 1, raw, scratch, 3, 2, 1, 1, 1, 1, 1, 0]
    output_of_1 = 1 << 56 | 1 << 32
    assert SEND.encode(1).tolist() == [3, 1, 0, 1, 0, 4, 0, 2, 1, 1, raw | 1 << 61 | scratch, output_of_1, 2, 0, 0]


def test_final_is_the_lowest_flag() -> None:
    move = Move(7, (Ref(Buffer.OUTPUT, 1, 7),), (Ref(Buffer.INPUT, 0, 7), Ref(Buffer.INPUT, 1, 7)), (True, True), True)
    program = replace(SEND, bodies=((), (move,)))
    assert program.encode(1)[:5].tolist() == [4, 7, 1, 2, 1]


def takes(collective: str, algorithm: str, size: int, rank: int) -> list[bool]:
    """Of a rank's Moves, in order, those that take over what they read."""
    words, at, found = build(collective, algorithm, size, memory="staged").encode(rank).tolist(), 0, []
    lengths = {0: 1, 1: 4, 2: 2, 3: 1}
    while at < len(words):
        if words[at] == 4:
            found.append(bool(words[at + 2] & 2))
        at += lengths.get(words[at]) or 5 + words[at + 3] + words[at + 4]
    return found


def test_the_only_reader_of_a_cell_takes_it_over() -> None:
    assert any(takes("broadcast", "direct", 2, 1)) and any(takes("all_to_all", "direct", 4, 3))
    assert not any(takes("broadcast", "direct", 3, 1)), "two ranks read the root's cell"
    assert not any(takes("all_gather", "direct", 3, 0))
    assert not any(takes("all_reduce", "two_shot", 2, 0)), "it writes its sum there itself"


def test_signals_are_counted_by_ordered_pair() -> None:
    assert SEND.signals_out(0).tolist() == [0, 1] == SEND.signals_in(1).tolist()[::-1]
    assert SEND.signals_in(0).tolist() == [0, 1] and SEND.signals_out(1).tolist() == [1, 0]


def test_equal_digests_mean_equal_programs() -> None:
    assert SEND.digest() == replace(SEND, algorithm="another name").digest()
    for other in (replace(SEND, slots=3), replace(SEND, cells=2), replace(SEND, bodies=SEND.bodies[::-1])):
        assert other.digest() != SEND.digest()


def test_it_prints_readably() -> None:
    assert str(SEND) == (
        "send_recv by by hand: 2 ranks, staged memory, 1 chunk, 1 cell x 2 slots\n"
        "rank 0\n"
        "    0  move   scratch0[0] <- input0[0]\n"
        "    1  enter\n"
        "    2  signal 1\n"
        "    3  wait   1 #1 of 1 slices ago\n"
        "rank 1\n"
        "    0  enter\n"
        "    1  wait   0 #1\n"
        "    2  move   output1[0] <- scratch0[0]\n"
        "    3  signal 0"
    )
