"""Schedules are proven for every number of ranks and micro-batches; spoilt programs are refused; formulas hold."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_core.parallel.pipeline_schedules import (
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GPipe,
    Interleaved,
    LoadMicroBatch,
    Message,
    OneForwardOneBackward,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGradient,
    Work,
    ZeroBubble,
    check,
    check_programs,
    programs,
    simulate,
    steps,
)

ALL = [GPipe(), OneForwardOneBackward(), Interleaved(2), Interleaved(3), ZeroBubble()]
IDS = ["gpipe", "1f1b", "interleaved", "interleaved by 3", "zero-bubble"]
SIZES = [(ranks, m) for ranks in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 6, 8, 10, 16)]


def fits(schedule, ranks, microbatches):
    return schedule.chunks == 1 or (ranks > 1 and microbatches % ranks == 0)


def orders(schedule, ranks, microbatches):
    return [list(schedule.order(rank, ranks, microbatches)) for rank in range(ranks)]


def text(works):
    return " ".join(f"{type(work).__name__[0]}{work.microbatch}" for work in works)


# The orders are those of the papers


def test_gpipe_is_all_forward_then_all_backward():
    assert text(GPipe().order(1, 3, 4)) == "F0 F1 F2 F3 B0 B1 B2 B3"


@pytest.mark.parametrize(
    "rank, expected",
    [
        (0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"),
        (2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"),
        (3, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"),
    ],
)
def test_1f1b_goes_back_as_soon_as_it_can(rank, expected):
    assert text(OneForwardOneBackward().order(rank, 4, 6)) == expected


def test_interleaving_takes_groups_of_micro_batches_through_all_of_a_ranks_stages():
    works = list(Interleaved(2).order(0, 2, 4))
    forwards = [(w.stage, w.microbatch) for w in works if isinstance(w, Forward)]
    backwards = [(w.stage, w.microbatch) for w in works if isinstance(w, Backward)]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert backwards == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]
    assert text(works).startswith("F0 F1 F0 F1 F2 B0 F3 B1")


def test_zero_bubble_puts_off_weights_by_the_rank():
    def halves(rank):
        return [
            type(w).__name__.removeprefix("Backward")[0] + str(w.microbatch) for w in ZeroBubble().order(rank, 3, 4)
        ]

    assert halves(0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3".split()
    assert halves(2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3".split()


def test_the_example_of_the_documentation():
    first, second = programs(OneForwardOneBackward(), 2, 2)
    assert first == [
        LoadMicroBatch(0, 0), Forward(0, 0), SendActivation(0, 0),
        LoadMicroBatch(0, 1), Forward(0, 1), SendActivation(0, 1), ReceiveGradient(0, 0),
        Backward(0, 0), ReceiveGradient(0, 1), Backward(0, 1), ReduceGradients(),
    ]  # fmt: skip
    assert second == [
        ReceiveActivation(1, 0), LoadMicroBatch(1, 0), Forward(1, 0),
        Backward(1, 0), SendGradient(1, 0), ReceiveActivation(1, 1), LoadMicroBatch(1, 1), Forward(1, 1),
        Backward(1, 1), SendGradient(1, 1), ReduceGradients(),
    ]  # fmt: skip
    assert [len(together) for together in steps(first)] == [1] * len(first)


def test_where_sends_may_wait_messages_run_together_and_come_as_soon_as_they_can():
    first, second = programs(OneForwardOneBackward(), 2, 2, eager=False)
    assert [len(together) for together in steps(first, eager=False)] == [1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    assert in_order(first, SendActivation(0, 1), ReceiveGradient(0, 0), Backward(0, 0))
    assert in_order(second, ReceiveActivation(1, 1), Backward(1, 0), Forward(1, 1))  # before it is needed


@pytest.mark.parametrize("ranks", [2, 3])
def test_both_ends_of_a_message_know_each_other(ranks):
    for schedule, eager in itertools.product((OneForwardOneBackward(), Interleaved(2)), (True, False)):
        for program in programs(schedule, ranks, 6, eager=eager):
            for message in program:
                if isinstance(message, Message):
                    assert message.peer.peer == message
                    assert message.peer.sends != message.sends
                    assert message.peer.tag == message.tag
                    assert abs(message.peer.stage - message.stage) == 1
    tags = {SendActivation(0, 0).tag, SendActivation(1, 0).tag, SendGradient(1, 0).tag, SendGradient(2, 0).tag}
    assert len(tags) == 4


# What holds for all of them


@pytest.mark.parametrize("schedule", ALL, ids=IDS)
@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_every_schedule_is_right_ends_and_keeps_what_its_formula_says(schedule, ranks, microbatches):
    if not fits(schedule, ranks, microbatches):
        with pytest.raises(
            ScheduleError, match=f"a multiple of {ranks} micro-batches" if ranks > 1 else "a single rank"
        ):
            check(schedule, ranks, microbatches)
        return
    assert check(schedule, ranks, microbatches) == [schedule.peak(r, ranks, microbatches) for r in range(ranks)]


def test_peaks_in_numbers():
    assert check(GPipe(), 4, 8) == [8, 8, 8, 8]
    assert check(OneForwardOneBackward(), 4, 8) == [4, 3, 2, 1]
    assert check(OneForwardOneBackward(), 4, 2) == [2, 2, 2, 1]
    assert check(ZeroBubble(), 4, 8) == [4, 4, 4, 4]
    assert check(Interleaved(2), 4, 8) == [11, 9, 7, 5]  # of stages half as large


@pytest.mark.parametrize("schedule", ALL, ids=IDS)
@pytest.mark.parametrize("ranks, microbatches", SIZES)
def test_the_replayed_bubble_is_that_of_the_formula(schedule, ranks, microbatches):
    if not fits(schedule, ranks, microbatches) or (schedule.name == "zero-bubble" and microbatches < ranks):
        return
    for forward, backward in [(1.0, 2.0)] if schedule.name == "zero-bubble" else [(1.0, 2.0), (3.0, 1.0)]:
        timeline = simulate(schedule, ranks, microbatches, forward=forward, backward=backward)
        assert timeline.bubble == pytest.approx(schedule.bubble(ranks, microbatches), abs=1e-12)
        work = schedule.chunks * microbatches * (forward + backward)
        assert timeline.busy == pytest.approx([work] * ranks)


def test_bubbles_in_numbers():
    assert simulate(GPipe(), 4, 8).bubble == simulate(OneForwardOneBackward(), 4, 8).bubble == 3 / 8
    assert simulate(Interleaved(2), 4, 8).bubble == 3 / 16
    assert simulate(ZeroBubble(), 4, 8).bubble == 1 / 8


def test_the_slowest_stage_and_messages_lengthen_a_step():
    even = simulate(OneForwardOneBackward(), 2, 8, forward=[1, 1], backward=[2, 2])
    uneven = simulate(OneForwardOneBackward(), 2, 8, forward=[1, 2], backward=[2, 4])
    assert even.seconds == 27
    assert uneven.seconds >= 8 * 6
    assert uneven.busy == [24, 48]
    assert simulate(GPipe(), 2, 4, transfer=0.5).seconds == pytest.approx(5 * 3 + 2 * 0.5)


@pytest.mark.parametrize("schedule", ALL, ids=IDS)
def test_without_training_only_forward_work_is_left(schedule):
    for program in programs(schedule, 2, 4, training=False):
        assert {type(i) for i in program} <= {LoadMicroBatch, ReceiveActivation, Forward, SendActivation}
        assert [i for i in program if isinstance(i, Forward)]


# What is refused


def spoilt(schedule, change, ranks=3, microbatches=3):
    """Checks programs of which `change` has spoilt those of one rank after another."""
    good = programs(schedule, ranks, microbatches)
    for rank, program in enumerate(good):
        for mutant in change(program):
            with pytest.raises(ScheduleError, match=f"rank {rank}"):
                check_programs([*good[:rank], mutant, *good[rank + 1 :]], schedule.chunks * ranks, microbatches)


def without(program):
    return [program[:i] + program[i + 1 :] for i in range(len(program))]


def doubled(program):
    return [program[: i + 1] + program[i:] for i in range(len(program))]


def misdirected(program):
    return [
        program[:i] + [replace(work, microbatch=work.microbatch + 1)] + program[i + 1 :]
        for i, work in enumerate(program)
        if isinstance(work, Work)
    ]


@pytest.mark.parametrize("change", [without, doubled, misdirected])
@pytest.mark.parametrize("schedule", ALL, ids=IDS)
def test_a_program_that_lacks_repeats_or_misdirects_an_instruction_is_refused(schedule, change):
    spoilt(schedule, change)


def reordered(kinds):
    """Mutants in which one of two instructions of these kinds, which belong together, comes after instead of before."""

    def change(program):
        for i, first in enumerate(program):
            for j, second in enumerate(program[i + 1 :], i + 1):
                if (type(first), type(second)) in kinds and (first.stage, first.microbatch) == (
                    second.stage,
                    second.microbatch,
                ):
                    yield [*program[:i], *program[i + 1 : j + 1], first, *program[j + 1 :]]

    return change


@pytest.mark.parametrize("schedule", ALL, ids=IDS)
def test_what_comes_before_its_cause_is_refused(schedule):
    causes = [
        (LoadMicroBatch, Forward), (ReceiveActivation, Forward), (Forward, SendActivation), (Forward, Backward),
        (Forward, BackwardInput), (ReceiveGradient, Backward), (ReceiveGradient, BackwardInput),
        (Backward, SendGradient), (BackwardInput, SendGradient), (BackwardInput, BackwardWeight),
    ]  # fmt: skip
    spoilt(schedule, reordered(causes))


def test_gradients_that_would_add_up_in_another_order_are_refused():
    class Backwards(GPipe):
        def order(self, rank, ranks, microbatches):
            yield from (Forward(rank, m) for m in range(microbatches))
            yield from (Backward(rank, m) for m in reversed(range(microbatches)))

    with pytest.raises(ScheduleError, match=r"rank 0 does Backward\(0, 1\) before Backward\(0, 0\)"):
        check(Backwards(), 2, 2)


def test_reducing_gradients_that_are_not_complete_is_refused():
    first, second = programs(GPipe(), 2, 2)
    with pytest.raises(ScheduleError, match=r"rank 0 .* after ReduceGradients"):
        check_programs([[first[-1], *first[:-1]], second], 2, 2)


def test_ranks_that_wait_for_each_other_are_found_and_named():
    class Late(Schedule):
        """The first stage wants its first gradient before it starts the micro-batch that the second goes back from."""

        name = "late"

        def order(self, rank, ranks, microbatches):
            if rank == 0:
                yield from (w for m in range(microbatches) for w in (Forward(0, m), Backward(0, m)))
            else:
                yield from GPipe().order(rank, ranks, microbatches)

        def peak(self, rank, ranks, microbatches):
            return microbatches

        def bubble(self, ranks, microbatches):
            return 0.0

    with pytest.raises(ScheduleError, match=r"for ever: rank 0 before ReceiveGradient\(0, 0\); rank 1 before Rec"):
        check(Late(), 2, 2)


def test_sends_that_would_block_each_other_are_found():
    """Each sends before it receives: right only if something can be sent before it is asked for."""
    first, second = programs(OneForwardOneBackward(), 2, 3)
    assert in_order(first, SendActivation(0, 1), ReceiveGradient(0, 0), Backward(0, 0), LoadMicroBatch(0, 2))
    first.remove(LoadMicroBatch(0, 2))  # now it sets the two messages apart
    first.insert(first.index(ReceiveGradient(0, 0)), LoadMicroBatch(0, 2))
    second.remove(LoadMicroBatch(1, 1))  # and so does this
    second.insert(second.index(ReceiveActivation(1, 1)), LoadMicroBatch(1, 1))
    assert in_order(second, Backward(1, 0), SendGradient(1, 0), LoadMicroBatch(1, 1), ReceiveActivation(1, 1))
    check_programs([first, second], 2, 3, eager=True)
    blocked = r"rank 0 before SendActivation\(0, 1\); rank 1 before SendGradient\(1, 0\)"
    with pytest.raises(ScheduleError, match=blocked):
        check_programs([first, second], 2, 3, eager=False)


class StageByStage(Interleaved):
    """All micro-batches through a rank's first stage before any goes through its second."""

    def order(self, rank, ranks, microbatches):
        stages = range(rank, self.chunks * ranks, ranks)
        yield from (Forward(stage, m) for stage in stages for m in range(microbatches))
        yield from (Backward(stage, m) for stage in reversed(stages) for m in range(microbatches))


def test_a_schedule_that_needs_more_messages_than_two_on_their_way_is_found():
    schedule = StageByStage(2)
    check_programs(programs(schedule, 2, 8, eager=False), 4, 8, eager=False)
    check_programs(programs(schedule, 2, 4), 4, 4)
    blocked = r"rank 0 before SendActivation\(0, 5\); rank 1 before SendActivation\(1, 2\)"
    with pytest.raises(ScheduleError, match=blocked):
        check_programs(programs(schedule, 2, 8), 4, 8)


def in_order(program, *instructions):
    places = [program.index(instruction) for instruction in instructions]
    return places == sorted(places)


def test_keeping_more_than_promised_is_refused():
    class Modest(GPipe):
        def peak(self, rank, ranks, microbatches):
            return 3

    check(Modest(), 2, 3)
    with pytest.raises(ScheduleError, match="rank 0 keeps the activations of 4 micro-batches instead of 3"):
        check(Modest(), 2, 4)


@pytest.mark.parametrize("ranks, microbatches", [(0, 1), (1, 0), (2, -1)])
def test_numbers_below_one_are_refused(ranks, microbatches):
    with pytest.raises(ScheduleError, match="at least 1"):
        check(GPipe(), ranks, microbatches)


def test_interleaving_one_stage_is_1f1b():
    with pytest.raises(ValueError, match="at least 2 stages a rank"):
        Interleaved(1)


@settings(max_examples=60)
@given(
    ranks=st.integers(2, 5),
    groups=st.integers(1, 3),
    chunks=st.integers(1, 3),
    lead=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_any_order_that_works_at_all_gets_programs_that_never_block(ranks, groups, chunks, lead, seed):
    """Orders made at random, valid by construction: each rank's is that of one global sequence of works."""
    microbatches = ranks * groups
    choose = random.Random(seed)
    stages = chunks * ranks
    forward, backward = [0] * stages, [0] * stages
    sequence = []
    while sum(backward) < stages * microbatches:
        can = [
            Forward(s, forward[s])
            for s in range(stages)
            if forward[s] < microbatches
            and (s == 0 or forward[s - 1] > forward[s])
            and forward[s] - backward[s] <= lead
        ] + [
            Backward(s, backward[s])
            for s in range(stages)
            if forward[s] > backward[s] and (s == stages - 1 or backward[s + 1] > backward[s])
        ]
        work = choose.choice(can)
        (forward if isinstance(work, Forward) else backward)[work.stage] += 1
        sequence.append(work)

    class Any(Interleaved):
        def order(self, rank, ranks, microbatches):
            return iter([work for work in sequence if work.stage % ranks == rank])

        def peak(self, rank, ranks, microbatches):
            return stages * microbatches

    schedule = Any(2)
    schedule.chunks = chunks
    check_programs(programs(schedule, ranks, microbatches, eager=False), stages, microbatches, eager=False)


def test_schedules_by_name():
    assert list(SCHEDULES) == ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    assert all(schedule.name == name for name, schedule in SCHEDULES.items())
