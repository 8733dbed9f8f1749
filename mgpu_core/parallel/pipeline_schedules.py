"""Which stage of a pipeline works on which micro-batch when: schedules, as programs that are proven before they run.

A model is cut into stages and a batch into micro-batches. A `Schedule` yields, for each rank, the order of its forward
and backward work; that is all there is to an idea like GPipe or 1F1B. `programs` adds what follows from it. 1F1B with
two ranks and two micro-batches becomes, for the first rank,

    LoadMicroBatch(0, 0)   Forward(0, 0)   SendActivation(0, 0)
    LoadMicroBatch(0, 1)   Forward(0, 1)   SendActivation(0, 1)   ReceiveGradient(0, 0)
    Backward(0, 0)   ReceiveGradient(0, 1)   Backward(0, 1)   ReduceGradients()

A message is received when it is needed, if two from each rank to each other can be on their way before (`eager`). If
not, as when messages are large, a send waits for its receiver. Then messages that follow one another run together, so
ranks that send to each other do not block, and a message is received in the first pause of its receiver after it was
sent, by a nominal clock, needed or not: whoever waits waits for an earlier moment of that clock, so nobody waits for
ever. `check` proves it for the very programs, along with everything else that must hold. Every schedule runs the
backward passes of a stage in the order of the micro-batches, so gradients add up in one order, to the same bits.

To make another schedule, derive from `Schedule`, and call `check`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, takewhile
from typing import ClassVar


class ScheduleError(ValueError):
    """A schedule that gives a wrong result, blocks or keeps too much: the message says where."""


class Instruction:
    """One thing that a rank does."""


@dataclass(frozen=True)
class ReduceGradients(Instruction):
    """Wait until the gradients are summed over the data-parallel replicas: the end of a training step's program."""


@dataclass(frozen=True)
class Work(Instruction):
    """What a stage does with a micro-batch; stages are numbered through all ranks."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.stage}, {self.microbatch})"


class LoadMicroBatch(Work):
    """Take the micro-batch's inputs (first stage) and targets (last stage)."""


class Forward(Work):
    """Compute the stage's outputs, in the last stage the loss, and keep what backward needs."""


class Backward(Work):
    """Compute the gradient of the stage's inputs, add to those of its parameters, and drop what was kept."""


class BackwardInput(Work):
    """The half of `Backward` that the stage before waits for: the gradient of the inputs."""


class BackwardWeight(Work):
    """The other half, at any time after: the gradients of the parameters."""


class Message(Work):
    """One end of a transfer between neighbouring stages."""

    sends: ClassVar[bool]
    other: ClassVar[type[Message]]
    step: ClassVar[int]  # from this stage to that of the other end

    @property
    def peer(self) -> Message:
        """The other end."""
        return self.other(self.stage + self.step, self.microbatch)

    @property
    def tag(self) -> int:
        """Tells apart the messages that one rank sends to another: which stages they join, and which way."""
        sender = self if self.sends else self.peer
        return 2 * sender.stage + (sender.step < 0)


class SendActivation(Message):
    """Send the stage's outputs to the next stage."""

    sends, step = True, 1


class ReceiveActivation(Message):
    """Receive the stage's inputs from the stage before."""

    sends, step, other = False, -1, SendActivation


class SendGradient(Message):
    """Send the gradient of the stage's inputs to the stage before."""

    sends, step = True, -1


class ReceiveGradient(Message):
    """Receive the gradient of the stage's outputs from the next stage."""

    sends, step, other = False, 1, SendGradient


SendActivation.other, SendGradient.other = ReceiveActivation, ReceiveGradient


class Schedule(ABC):
    """An order of work. Of its `chunks` * ranks stages, rank r has r, r + ranks, r + 2 ranks, ...

    The formulas are for stages that all take equally long, and messages that take no time.
    """

    name: str
    chunks = 1

    @abstractmethod
    def order(self, rank: int, ranks: int, microbatches: int) -> Iterator[Work]:
        """The rank's `Forward`s, and `Backward`s or both their halves. Raises ScheduleError for unfit numbers."""

    @abstractmethod
    def peak(self, rank: int, ranks: int, microbatches: int) -> int:
        """The most micro-batches whose activations the rank keeps at once; each of its stages counts by itself."""

    @abstractmethod
    def bubble(self, ranks: int, microbatches: int) -> float:
        """How long a rank idles in a step, as a part of the time that it works."""


class GPipe(Schedule):
    """All forward passes, then all backward passes (Huang et al., "GPipe", NeurIPS 2019). Keeps everything."""

    name = "gpipe"

    def order(self, rank: int, ranks: int, microbatches: int) -> Iterator[Work]:
        yield from (Forward(rank, m) for m in range(microbatches))
        yield from (Backward(rank, m) for m in range(microbatches))

    def peak(self, rank: int, ranks: int, microbatches: int) -> int:
        return microbatches

    def bubble(self, ranks: int, microbatches: int) -> float:
        return (ranks - 1) / microbatches


class OneForwardOneBackward(Schedule):
    """1F1B: a micro-batch goes back as soon as it can, so few are kept; as fast as GPipe.

    Narayanan et al., "PipeDream", SOSP 2019, in the form that updates weights once a batch (PipeDream-Flush, in
    "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021).
    """

    name = "1f1b"

    def order(self, rank: int, ranks: int, microbatches: int) -> Iterator[Work]:
        forward = (Forward(rank, m) for m in range(microbatches))
        backward = (Backward(rank, m) for m in range(microbatches))
        return _alternate(ranks - 1 - rank, forward, backward)

    def peak(self, rank: int, ranks: int, microbatches: int) -> int:
        return min(microbatches, ranks - rank)

    def bubble(self, ranks: int, microbatches: int) -> float:
        return (ranks - 1) / microbatches


class Interleaved(Schedule):
    """1F1B with several smaller stages a rank: a shorter bubble, for more messages and more memory.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021. The
    micro-batches go in groups of as many as there are ranks, each group through all of a rank's stages.
    """

    name = "interleaved"

    def __init__(self, chunks: int = 2) -> None:
        if chunks < 2:
            raise ValueError(f"interleaving needs at least 2 stages a rank, not {chunks}; with 1 it is 1F1B")
        self.chunks = chunks

    def order(self, rank: int, ranks: int, microbatches: int) -> Iterator[Work]:
        if ranks < 2:
            raise ScheduleError("a single rank has nobody to interleave with")
        if microbatches % ranks:
            raise ScheduleError(
                f"interleaving {ranks} ranks needs a multiple of {ranks} micro-batches, not {microbatches}"
            )
        stages = range(rank, self.chunks * ranks, ranks)
        groups = [range(m, m + ranks) for m in range(0, microbatches, ranks)]
        forward = (Forward(stage, m) for group in groups for stage in stages for m in group)
        backward = (Backward(stage, m) for group in groups for stage in reversed(stages) for m in group)
        return _alternate(self._lead(rank, ranks), forward, backward)

    def peak(self, rank: int, ranks: int, microbatches: int) -> int:
        return min(self.chunks * microbatches, self._lead(rank, ranks) + 1)

    def bubble(self, ranks: int, microbatches: int) -> float:
        return (ranks - 1) / (self.chunks * microbatches)

    def _lead(self, rank: int, ranks: int) -> int:
        return 2 * (ranks - 1 - rank) + (self.chunks - 1) * ranks


class ZeroBubble(Schedule):
    """1F1B with backward in halves: the gradients of weights, for which nobody waits, fill a part of the bubble.

    ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. Rank r puts the weights' half off by r
    micro-batches; so every rank keeps as many activations as the first one does in 1F1B.
    """

    name = "zero-bubble"

    def order(self, rank: int, ranks: int, microbatches: int) -> Iterator[Work]:
        forward = (Forward(rank, m) for m in range(microbatches))
        backward = (BackwardInput(rank, m) for m in range(microbatches))
        weight = (BackwardWeight(rank, m) for m in range(microbatches))
        for work in _alternate(ranks - 1 - rank, forward, backward):
            yield work
            if isinstance(work, BackwardInput) and work.microbatch >= rank:
                yield next(weight)
        yield from weight

    def peak(self, rank: int, ranks: int, microbatches: int) -> int:
        return min(microbatches, ranks)

    def bubble(self, ranks: int, microbatches: int) -> float:
        """If forward and both halves take equally long, and there are at least as many micro-batches as ranks."""
        return (ranks - 1) / (3 * microbatches)


SCHEDULES: dict[str, Schedule] = {s.name: s for s in (GPipe(), OneForwardOneBackward(), Interleaved(), ZeroBubble())}


def _alternate(lead: int, forward: Iterator[Work], backward: Iterator[Work]) -> Iterator[Work]:
    """`lead` forward passes, then one forward and one backward pass in turn, then what remains."""
    yield from islice(forward, lead)
    for work in backward:
        yield from islice(forward, 1)
        yield work


def programs(
    schedule: Schedule, ranks: int, microbatches: int, *, training: bool = True, eager: bool = True
) -> list[list[Instruction]]:
    """What each rank does in a step.

    Args:
        training: whether there is a way back; otherwise forward passes only.
        eager: whether every rank can send every other two messages before that asks for the first.
    """
    orders = [list(schedule.order(rank, ranks, microbatches)) for rank in range(ranks)]
    if not training:
        orders = [[work for work in order if isinstance(work, Forward)] for order in orders]
    last = schedule.chunks * ranks - 1
    place = _where_needed(orders, last) if eager else _as_soon_as_sent(orders, last)
    return [list(_program(order, inbox, last, training)) for order, inbox in zip(orders, place, strict=True)]


def steps(program: Iterable[Instruction], *, eager: bool = True) -> Iterator[list[Instruction]]:
    """What runs together: without `eager`, messages that follow one another; everything else by itself."""
    for messages, run in groupby(program, key=lambda instruction: isinstance(instruction, Message)):
        if messages and not eager:
            yield list(run)
        else:
            yield from ([instruction] for instruction in run)


def check(schedule: Schedule, ranks: int, microbatches: int) -> list[int]:
    """Proves a schedule for these numbers of ranks and micro-batches, before it runs.

    What `check_programs` proves holds with eager messages and without; forward passes alone end too; and no rank keeps
    more activations than `Schedule.peak` says.

    Returns: the most micro-batches whose activations each rank keeps at once, by rank.

    Raises:
        ScheduleError: naming the rank and the instruction at fault.
    """
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"{ranks} ranks and {microbatches} micro-batches: both must be at least 1")
    for eager in (True, False):
        _check_progress(programs(schedule, ranks, microbatches, training=False, eager=eager), eager)
        training = programs(schedule, ranks, microbatches, eager=eager)
        peaks = check_programs(training, schedule.chunks * ranks, microbatches, eager=eager)
    for rank, peak in enumerate(peaks):
        if peak > (promised := schedule.peak(rank, ranks, microbatches)):
            raise ScheduleError(f"rank {rank} keeps the activations of {peak} micro-batches instead of {promised}")
    return peaks


def check_programs(
    programs: Sequence[Sequence[Instruction]], stages: int, microbatches: int, *, eager: bool = True
) -> list[int]:
    """Proves the programs of one training step, a list for each rank.

    Everything that a rank's stages need is done once, after what it needs and with the backward passes of a stage in
    the order of the micro-batches, and no rank waits for ever. Returns and raises what `check` does.
    """
    for rank, program in enumerate(programs):
        _check_work(rank, program, range(rank, stages, len(programs)), stages - 1, microbatches)
    _check_progress(programs, eager)
    return [_peak(program) for program in programs]


@dataclass(frozen=True)
class Timeline:
    """A step takes `seconds`, and rank r works for `busy[r]` of them."""

    seconds: float
    busy: list[float]

    @property
    def bubble(self) -> float:
        """How long the busiest rank idles, as a part of the time that it works."""
        return self.seconds / max(self.busy) - 1


def simulate(
    schedule: Schedule,
    ranks: int,
    microbatches: int,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    transfer: float = 0.0,
) -> Timeline:
    """Replays a schedule with a clock, for sends that do not wait for their receivers.

    Args:
        forward, backward: seconds that a stage takes for a micro-batch: one number for all stages, or one for each.
            Both halves of backward take half of it.
        transfer: seconds from the end of a stage's work to the arrival of its message.
    """
    stages = schedule.chunks * ranks
    forwards, backwards = (list(t) if isinstance(t, Sequence) else [t] * stages for t in (forward, backward))

    def seconds(work: Work) -> float:
        if isinstance(work, Forward):
            return forwards[work.stage]
        return backwards[work.stage] / (1 if isinstance(work, Backward) else 2)

    orders = [list(schedule.order(rank, ranks, microbatches)) for rank in range(ranks)]
    times = _timetable(orders, stages - 1, seconds, transfer)
    return Timeline(max(rows[-1][1] for rows in times), [sum(map(seconds, order)) for order in orders])


def _message_before(work: Work, last: int) -> Message | None:
    """What has to be received for this work."""
    if isinstance(work, Forward) and work.stage > 0:
        return ReceiveActivation(work.stage, work.microbatch)
    if isinstance(work, Backward | BackwardInput) and work.stage < last:
        return ReceiveGradient(work.stage, work.microbatch)
    return None


def _message_after(work: Work, last: int) -> Message | None:
    """What is sent of its result."""
    if isinstance(work, Forward) and work.stage < last:
        return SendActivation(work.stage, work.microbatch)
    if isinstance(work, Backward | BackwardInput) and work.stage > 0:
        return SendGradient(work.stage, work.microbatch)
    return None


Inbox = list[list[Message]]  # what a rank receives before each of its works


def _where_needed(orders: Sequence[Sequence[Work]], last: int) -> list[Inbox]:
    needed = [[_message_before(work, last) for work in order] for order in orders]
    return [[[message] if message else [] for message in messages] for messages in needed]


def _as_soon_as_sent(orders: Sequence[Sequence[Work]], last: int) -> list[Inbox]:
    """In the first pause that ends when the message has been sent, or later, by a nominal clock."""
    times = _timetable(orders, last, lambda work: 2.0 if isinstance(work, Backward) else 1.0)
    sent = [
        (end, message.peer)
        for order, rows in zip(orders, times, strict=True)
        for work, (_, end) in zip(order, rows, strict=True)
        if (message := _message_after(work, last))
    ]
    inboxes: list[Inbox] = [[[] for _ in order] for order in orders]
    for end, message in sorted(sent, key=lambda item: item[0]):
        rank = message.stage % len(orders)
        begins = [begin for begin, _ in times[rank]]
        inboxes[rank][bisect_left(begins, end)].append(message)
    return inboxes


def _program(order: Sequence[Work], inbox: Inbox, last: int, training: bool) -> Iterator[Instruction]:
    """A rank's order with all that belongs to it."""
    for work, received in zip(order, inbox, strict=True):
        yield from received
        if isinstance(work, Forward) and work.stage in (0, last):
            yield LoadMicroBatch(work.stage, work.microbatch)
        yield work
        if message := _message_after(work, last):
            yield message
    if training:
        yield ReduceGradients()


def _timetable(
    orders: Sequence[Sequence[Work]], last: int, seconds: Callable[[Work], float], transfer: float = 0.0
) -> list[list[tuple[float, float]]]:
    """When each rank begins and ends each work, if it does it as soon as its message is there."""
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    sent: dict[Message, float] = {}
    moving = True
    while moving:
        moving = False
        for order, rows in zip(orders, times, strict=True):
            for work in order[len(rows) :]:
                needed = _message_before(work, last)
                if needed and needed.peer not in sent:
                    break
                begin = max(rows[-1][1] if rows else 0.0, sent[needed.peer] + transfer if needed else 0.0)
                rows.append((begin, begin + seconds(work)))
                if message := _message_after(work, last):
                    sent[message] = rows[-1][1]
                moving = True
    left = [list(order[len(rows) :]) for order, rows in zip(orders, times, strict=True)]
    if any(left):
        raise _endless(left)
    return times


def _check_progress(programs: Sequence[Iterable[Instruction]], eager: bool) -> None:
    """Replays the programs. A message ends when both its ends have been reached, and an eager send also when of what
    the rank has sent the same receiver before, all but one have been received."""
    left = [deque(steps(program, eager=eager)) for program in programs]
    reached: set[Message] = set()
    sent: dict[tuple[int, int], list[Message]] = {}  # by sender and receiver

    def reach(rank: int, message: Message) -> None:
        if message.sends and message not in reached:
            sent.setdefault((rank, message.peer.stage % len(left)), []).append(message)
        reached.add(message)

    def ends(rank: int, message: Message) -> bool:
        if message.peer in reached or not message.sends or not eager:
            return message.peer in reached
        earlier = takewhile(lambda other: other != message, sent[rank, message.peer.stage % len(left)])
        return sum(other.peer not in reached for other in earlier) < 2

    moving = True
    while moving:
        moving = False
        for rank, ahead in enumerate(left):
            while ahead:
                messages = [instruction for instruction in ahead[0] if isinstance(instruction, Message)]
                for message in messages:
                    reach(rank, message)
                if not all(ends(rank, message) for message in messages):
                    break
                ahead.popleft()
                moving = True
    if any(left):
        raise _endless([[instruction for step in ahead for instruction in step] for ahead in left])


def _endless(left: Sequence[Sequence[Instruction]]) -> ScheduleError:
    """The error for ranks that cannot go on; `left` is what each has not done."""
    stuck = "; ".join(f"rank {rank} before {instructions[0]}" for rank, instructions in enumerate(left) if instructions)
    return ScheduleError(f"these ranks wait for ever: {stuck}")


_AFTER: dict[type[Work], tuple[type[Work], ...]] = {
    Forward: (LoadMicroBatch, ReceiveActivation),
    SendActivation: (Forward,),
    Backward: (Forward, ReceiveGradient),
    BackwardInput: (Forward, ReceiveGradient),
    BackwardWeight: (BackwardInput,),
    SendGradient: (Backward, BackwardInput),
}


def _check_work(rank: int, program: Sequence[Instruction], stages: range, last: int, microbatches: int) -> None:
    """Everything once, and after what it needs."""
    halves = any(isinstance(instruction, BackwardWeight) for instruction in program)
    expected: Counter[Instruction] = Counter([ReduceGradients()])
    for stage in stages:
        kinds: list[type[Work]] = [Forward, *([BackwardInput, BackwardWeight] if halves else [Backward])]
        kinds += [LoadMicroBatch] if stage in (0, last) else []
        kinds += [ReceiveActivation, SendGradient] if stage > 0 else []
        kinds += [SendActivation, ReceiveGradient] if stage < last else []
        expected.update(kind(stage, m) for kind in kinds for m in range(microbatches))
    found = Counter(program)
    for instruction in (expected - found) + (found - expected):
        times = f"{found[instruction]} times instead of {expected[instruction]}"
        raise ScheduleError(f"rank {rank} does {instruction} {times}")
    done: set[Instruction] = set()
    for instruction in program:
        for earlier in _needed(instruction):
            if earlier in expected and earlier not in done:
                raise ScheduleError(f"rank {rank} does {instruction} before {earlier}")
        done.add(instruction)
    if program[-1] != ReduceGradients():
        raise ScheduleError(f"rank {rank} does {program[-1]} after ReduceGradients()")


def _needed(instruction: Instruction) -> Iterator[Work]:
    """What has to come before, where the rank does it at all."""
    if isinstance(instruction, Work):
        stage, microbatch = instruction.stage, instruction.microbatch
        yield from (kind(stage, microbatch) for kind in _AFTER.get(type(instruction), ()))
        if isinstance(instruction, Backward | BackwardInput | BackwardWeight):
            yield type(instruction)(stage, microbatch - 1)


def _peak(program: Sequence[Instruction]) -> int:
    kept = most = 0
    for instruction in program:
        kept += isinstance(instruction, Forward)
        most = max(most, kept)
        kept -= isinstance(instruction, Backward | BackwardWeight)
    return most
