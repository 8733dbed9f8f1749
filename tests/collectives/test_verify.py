"""The proofs, on lists written by hand: right ones are accepted, wrong ones refused with the place named.

Nothing here uses the builder or the lowering, so that neither can hide a fault of the other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives.contract import Contract
from collectives.errors import ProgramError
from collectives.program import Buffer, Enter, Instruction, Move, Program, Ref, Signal, Wait
from collectives.verify import verified, verify

E = Enter()


def i(rank: int, chunk: int = 0) -> Ref:
    return Ref(Buffer.INPUT, rank, chunk)


def o(rank: int, chunk: int = 0) -> Ref:
    return Ref(Buffer.OUTPUT, rank, chunk)


def s(rank: int, cell: int = 0) -> Ref:
    return Ref(Buffer.SCRATCH, rank, cell)


def move(dst: Ref | tuple[Ref, ...], *srcs: Ref, chunk: int = 0, raw: bool = True, final: bool = False) -> Move:
    return Move(chunk, (dst,) if isinstance(dst, Ref) else dst, srcs, (raw,) * len(srcs), final)


def program(
    collective: str,
    *bodies: list[Instruction],
    memory: str = "symmetric",
    cells: int = 1,
    slots: int = 2,
    pipelined: bool = True,
    parts: int = 1,
) -> Program:
    contract = Contract(collective, len(bodies), parts=parts)
    return Program(contract, "by hand", memory, slots, pipelined, cells, tuple(map(tuple, bodies)))


def refused(candidate: Program, complaint: str) -> ProgramError:
    with pytest.raises(ProgramError, match=complaint) as caught:
        verify(candidate)
    return caught.value


# --- accepted ---------------------------------------------------------------------------------------------------------

# each rank reduces one half for both
TWO_SHOT = program(
    "all_reduce",
    [E, move((o(0), o(1)), i(0), i(1), final=True), Signal(1), Wait(1, 1)],
    [E, move((o(0, 1), o(1, 1)), i(0, 1), i(1, 1), chunk=1, final=True), Signal(0), Wait(0, 1)],
    parts=2,
)
ONE_SHOT = program(
    "all_reduce",
    [move(s(0), i(0)), E, Signal(1), Wait(1, 1), move(o(0), s(0), s(1), final=True)],
    [move(s(1), i(1)), E, Signal(0), Wait(0, 1), move(o(1), s(0), s(1), final=True)],
    memory="staged",
)
SMALL_ONE_SHOT = program(
    "all_reduce",
    [move(s(0), i(0)), E, move(o(0), s(0), s(1), final=True)],
    [move(s(1), i(1)), E, move(o(1), s(0), s(1), final=True)],
    memory="staged",
    pipelined=False,
)
SEND = program(
    "send_recv",
    [move(s(0), i(0)), E, Signal(1), Wait(1, 1, lag=1)],
    [E, Wait(0, 1), move(o(1), s(0)), Signal(0)],
    memory="staged",
)
CHAIN = program(
    "broadcast",
    [E, Signal(1), Wait(1, 1)],
    [E, Wait(0, 1), move(o(1), i(0)), Signal(0), Signal(2), Wait(2, 1)],
    [E, Wait(1, 1), move(o(2), o(1)), Signal(1)],
)
BARRIER = program("barrier", [E], [E], [E], parts=0)


@pytest.mark.parametrize("good", [TWO_SHOT, ONE_SHOT, SMALL_ONE_SHOT, SEND, CHAIN, BARRIER])
def test_right_lists_are_accepted(good: Program) -> None:
    verify(good)


def test_more_slots_than_the_lag_needs_are_fine() -> None:
    verify(replace(SEND, slots=3))


# --- result -----------------------------------------------------------------------------------------------------------


def test_a_contribution_counted_twice() -> None:
    twice = move((o(0), o(1)), i(0), i(1), i(1), final=True)
    error = refused(replace(TWO_SHOT, bodies=((E, twice, *TWO_SHOT.bodies[0][2:]), TWO_SHOT.bodies[1])), "rank 1 twice")
    assert (error.rank, error.step, error.chunk) == (0, 1, 0)


def test_one_left_out() -> None:
    one = move((o(0), o(1)), i(0))
    error = refused(replace(TWO_SHOT, bodies=((E, one, *TWO_SHOT.bodies[0][2:]), TWO_SHOT.bodies[1])), "not rank 0.1")
    assert (error.rank, error.chunk) == (0, 0)


def test_an_output_left_out() -> None:
    lazy = move(o(0), i(0), i(1), final=True)
    error = refused(replace(TWO_SHOT, bodies=((E, lazy, *TWO_SHOT.bodies[0][2:]), TWO_SHOT.bodies[1])), "never written")
    assert (error.rank, error.chunk) == (1, 0)


def test_the_wrong_ranks_block() -> None:
    refused(
        program("scatter", [E, move(o(0), i(0)), Signal(1), Wait(1, 1)], [E, Signal(0), Wait(0, 1)]), "never written"
    )


def test_another_order_on_another_rank() -> None:
    bodies = list(SMALL_ONE_SHOT.bodies)
    bodies[1] = (move(s(1), i(1)), E, move(o(1), s(1), s(0), final=True))
    refused(replace(SMALL_ONE_SHOT, bodies=tuple(bodies)), "not reduced in the same order as on rank 0")


def test_what_is_left_from_an_earlier_slice() -> None:
    """Race-free, but one slice behind: the receiver gets each slice's predecessor."""
    late: list[Instruction] = [E, Wait(0, 1, lag=2), move(o(1), s(0)), Signal(0)]
    refused(
        program("send_recv", [move(s(0), i(0)), E, Signal(1), Wait(1, 1)], late, memory="staged"), "may still be at"
    )


def test_flags() -> None:
    not_final = move((o(0), o(1)), i(0), i(1))
    refused(
        replace(TWO_SHOT, bodies=((E, not_final, *TWO_SHOT.bodies[0][2:]), TWO_SHOT.bodies[1])), "not final, wrongly"
    )
    not_raw = move((o(0), o(1)), i(0), i(1), raw=False, final=True)
    refused(replace(TWO_SHOT, bodies=((E, not_raw, *TWO_SHOT.bodies[0][2:]), TWO_SHOT.bodies[1])), "not raw, wrongly")
    final_copy = move(o(1), i(0), final=True)
    refused(program("send_recv", [E, Signal(1), Wait(1, 1)], [E, Wait(0, 1), final_copy, Signal(0)]), "final, wrongly")


# --- progress ---------------------------------------------------------------------------------------------------------


def test_waiting_in_a_circle() -> None:
    bodies: list[list[Instruction]] = [[E, Wait(1, 1), Signal(1)], [E, Wait(0, 1), Signal(0)]]
    error = refused(program("barrier", *bodies, parts=0), "waits for ever for rank")
    assert error.step == 1


def test_waiting_for_the_credit_of_what_is_not_sent_yet() -> None:
    early = (SEND.bodies[0][0], E, Wait(1, 1), Signal(1))
    refused(replace(SEND, bodies=(early, SEND.bodies[1])), "stuck: rank 0 at step 2, for 1; rank 1 at step 1, for 0")


def test_waiting_for_the_next_slice() -> None:
    refused(replace(SEND, bodies=(SEND.bodies[0], (E, Wait(0, 1, lag=-1), *SEND.bodies[1][2:]))), "later slice")


def test_a_signal_that_is_never_given() -> None:
    error = refused(
        program("barrier", [E, Wait(1, 2)], [E, Signal(0)], parts=0), "rank 1 gives 1 signals, there is no number 2"
    )
    assert (error.rank, error.step) == (0, 1)


# --- races ------------------------------------------------------------------------------------------------------------


def test_reading_before_it_is_there() -> None:
    error = refused(replace(SEND, bodies=(SEND.bodies[0], (E, SEND.bodies[1][2], Wait(0, 1), Signal(0)))), "scratch0")
    assert (error.rank, error.step, error.chunk) == (1, 1, 0)


def test_enter_helps_only_in_the_first_slice() -> None:
    refused(replace(SMALL_ONE_SHOT, pipelined=True), r"uses scratch1\[0\] while rank 1 may still be at its step 0")


def test_overwriting_what_is_still_being_read() -> None:
    """Without its credit, the sender comes back to the slot while the receiver may still read it."""
    refused(
        replace(SEND, bodies=(SEND.bodies[0][:-1], SEND.bodies[1])),
        "uses scratch0.0. while rank 1 may still be at its step 2, 2 slices ago",
    )


def test_a_credit_that_lags_too_far() -> None:
    """Right within one call, wrong at its end: the next call's first write comes before its Enter."""
    lags = replace(SEND, bodies=((*SEND.bodies[0][:-1], Wait(1, 1, lag=2)), SEND.bodies[1]))
    refused(lags, "scratch")
    at_start = replace(SEND, bodies=((SEND.bodies[0][0], E, Wait(1, 1, lag=2), Signal(1)), SEND.bodies[1]))
    refused(at_start, "scratch")
    verify(replace(lags, slots=3))


def test_a_rank_that_leaves_while_its_input_is_read() -> None:
    error = refused(
        replace(CHAIN, bodies=((E, Signal(1)), *CHAIN.bodies[1:])),
        "ends while rank 1 may still be at its step 2, which uses its arrays",
    )
    assert error.rank == 0


def test_a_rank_that_leaves_while_its_output_is_written() -> None:
    bodies: list[list[Instruction]] = [
        [E, move((o(0), o(1)), i(0)), Wait(1, 1)],
        [E, move((o(1, 1), o(0, 1)), i(1, 1), chunk=1), Signal(0)],
    ]
    error = refused(program("all_gather", *bodies), "rank 1: ends while rank 0 may still be at its step 1")
    assert error.rank == 1


def test_an_input_overwritten_in_place() -> None:
    """Right out of place, wrong in place: both ranks read both inputs, and overwrite their own."""
    bodies: list[list[Instruction]] = [
        [E, move(o(0), i(0), i(1), final=True), Signal(1), Wait(1, 1)],
        [E, move(o(1), i(0), i(1), final=True), Signal(0), Wait(0, 1)],
    ]
    refused(program("all_reduce", *bodies), "in place|may be")
    ordered: list[list[Instruction]] = [bodies[0], [E, Wait(0, 1), move(o(1), i(0), i(1), final=True), Signal(0)]]
    refused(program("all_reduce", *ordered), r"input0\[0\] is read, but was overwritten, if the call is in place")


def test_a_block_that_stays_in_place_may_be_read_any_time() -> None:
    bodies: list[list[Instruction]] = [
        [E, move(o(0), i(0)), move(o(0, 1), i(1, 1), chunk=1), Signal(1), Wait(1, 1)],
        [E, move(o(1, 1), i(1, 1), chunk=1), move(o(1), i(0)), Signal(0), Wait(0, 1)],
    ]
    verify(program("all_gather", *bodies))


# --- the rules of a call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bodies", "complaint"),
    [
        ([[], [E]], "enters exactly once, not 0"),
        ([[E, E], [E]], "enters exactly once, not 2"),
        ([[Signal(1), E], [E]], "before all have entered"),
        ([[E, Signal(0)], [E]], "0 is not another rank"),
        ([[E, Signal(2)], [E]], "2 is not another rank"),
        ([[E, move(o(1), i(1))], [E]], "rank wants no chunk|never written"),
        ([[move(o(0), i(0)), E], [E]], "out of bounds before all have entered"),
        ([[move(s(1), i(0)), E], [E]], "out of bounds before all have entered"),
        ([[move(s(0), i(1)), E], [E]], "out of bounds before all have entered"),
        ([[E, move(i(0), i(0))], [E]], "must not be written"),
        ([[E, move(s(0, 1), i(0))], [E]], "scratch0.1. does not exist: there are 1 cells"),
        ([[E, move(s(5), i(0))], [E]], "no rank's"),
        ([[E, move(s(0), i(0, 1))], [E]], "not the place of chunk 0"),
        ([[E, move(s(0), i(0), chunk=2)], [E]], "there are 1 chunks"),
        ([[E, move((s(0), s(0)), i(0))], [E]], "distinct destinations"),
        ([[E, Move(0, (s(0),), (i(0),) * 6, (True,) * 6)], [E]], "at most 6 places, for which the executor has room"),
        ([[E, Move(0, (s(0),), (), ())], [E]], "has sources"),
        ([[E, Move(0, (s(0),), (i(0),), ())], [E]], "each with its flag"),
        ([[E]], "1 instruction lists for 2 ranks"),
    ],
)
def test_broken_rules(bodies: list[list[Instruction]], complaint: str) -> None:
    candidate = program("all_reduce", [E], [E])
    refused(replace(candidate, bodies=tuple(map(tuple, bodies))), complaint)


def test_more_broken_rules() -> None:
    refused(replace(SEND, slots=1), "at least 2 slots")
    refused(replace(SEND, memory="magic"), "not 'magic'")
    refused(replace(CHAIN, memory="staged"), "out of reach in staged memory")
    refused(
        replace(SEND, bodies=(SEND.bodies[0], (E, Wait(0, 1), move(o(1), s(0), s(0)), Signal(0)))), "reduces nothing"
    )
    elsewhere = program("reduce", [E], [E, move(o(1), i(1))])
    refused(elsewhere, r"output1\[0\] does not exist: that rank wants no chunk 0")
    refused(program("scatter", [E], [E, move(o(1, 1), i(1, 1), chunk=1)]), "that rank brings no chunk 1")


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_program_is_proven_once() -> None:
    first = verified("all_reduce", "ring", 3, memory="staged", slots=2)
    assert verified("all_reduce", "ring", 3, slots=2, memory="staged") is first
    assert verified("all_reduce", "ring", 3, memory="staged", slots=3) is not first
