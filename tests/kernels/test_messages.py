"""The two ends of a stream of messages: what fits in its slots, who waits for whom, and large data that stay where they
lie."""

import random
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import guarded
import numpy as np
import pytest

from kernels import messages as x
from kernels import native
from kernels.portable import bind
from kernels.targets import python

Advance = Callable[..., int]


@pytest.fixture(params=["compiled", "python"])
def advance(request: pytest.FixtureRequest) -> Advance:
    if request.param == "compiled":
        return native.load("advance").call
    plain: Advance = bind(x.advance, python.PRIMITIVES, python.as_it_is)
    return plain


class Stream:
    """Both ends of a stream, in memory of this process that nobody may go past. `first`: the number of its first slot,
    as if that many had gone before."""

    def __init__(self, advance: Advance, first: int = 0) -> None:
        self._advance = advance
        self.ring = guarded.zeros(x.SLOTS * x.SLOT_BYTES, np.uint8)
        self.open = guarded.zeros(3 << 20, np.uint8)
        self.lines = np.zeros((5, 8), np.int64)  # full, taken, the sender's bell, the receiver's, the sender's state
        self.ends = guarded.zeros(2 * x.END_WORDS).reshape(2, x.END_WORDS)  # the sender's, the receiver's
        full, taken, *bells, state = (int(line.ctypes.data) for line in self.lines)
        self.bells = bells
        self.lines[:2, 0] = first & 0xFFFFFFFF
        for sends, end in ((1, self.ends[0]), (0, self.ends[1])):
            end[x.END_SENDS], end[x.END_RING] = sends, self.ring.ctypes.data
            end[x.END_THEIRS], end[x.END_MINE] = (taken, full) if sends else (full, taken)
            end[x.END_BELL], end[x.END_STATE] = bells[sends], state
            end[x.END_OPEN], end[x.END_OPEN_BYTES] = self.open.ctypes.data, self.open.nbytes
            end[x.END_COUNT], end[x.END_PHASE] = first, x.IDLE

    def put(self, side: int, array: Any, tag: int = 0, phase: int = x.BEGUN) -> None:
        """The message that one side has under way."""
        place = array.ctypes.data, array.nbytes
        self.ends[side, x.END_MESSAGE : x.END_LEFT] = phase, *place, 0, tag, 13, array.size

    def go_on(self, *sides: int) -> int:
        """What `advance` says of these sides."""
        places = np.array([self.ends[side].ctypes.data for side in sides])
        return self._advance(places.ctypes.data, len(places), self.bells[sides[0]], 20, 5)

    def phase(self, side: int) -> int:
        return int(self.ends[side, x.END_PHASE])

    def run(self, side: int, array: Any, tag: int = 0) -> int:
        """Send or receive a message to its end: the phase it is left in."""
        self.put(side, array, tag)
        while self.go_on(side) < 0:
            pass
        return self.phase(side)


SENDS, RECEIVES = 0, 1


def noise(seed: int, nbytes: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def sizes(seed: int, count: int) -> list[int]:
    """Small ones, and those about the ends of slots."""
    order = random.Random(seed)
    slot = x.SLOT_BYTES
    near = [n * slot + d for n in (1, 2, 7, 8, 9, 20) for d in (-x.HEADER_BYTES - 1, -x.HEADER_BYTES, -1, 0, 1)]
    return [order.choice([0, 1, 8, order.randrange(2000), order.choice(near)]) for _ in range(count)]


@pytest.mark.parametrize("first", [0, 2**32 - 3, 2**40 - 2])
def test_all_sizes_one_after_another(advance: Advance, first: int) -> None:
    """Two threads; the counters of slots wrap."""
    stream, wanted = Stream(advance, first), sizes(1, 4 if isinstance(advance, FunctionType) else 60)
    phases: set[int] = set()

    def send() -> None:
        for i, nbytes in enumerate(wanted):
            phases.add(stream.run(SENDS, noise(i, nbytes), tag=i))

    sender = threading.Thread(target=send)
    sender.start()
    for i, nbytes in enumerate(wanted):
        out = guarded.zeros(nbytes, np.uint8) if nbytes else np.empty(0, np.uint8)
        assert stream.run(RECEIVES, out, tag=i) == x.IDLE
        assert (out == noise(i, nbytes)).all(), f"message {i}, {nbytes} bytes"
    sender.join()
    assert phases == {x.IDLE}
    assert int(stream.lines[0, 0]) & 0xFFFFFFFF == int(stream.lines[1, 0]) & 0xFFFFFFFF  # every slot has been taken


@pytest.mark.parametrize("nbytes", [0, 1, x.SLOT_BYTES, x.SLOT_BYTES + 1, x.EAGER_BYTES])
def test_a_message_takes_a_slot_for_its_header_and_those_that_its_data_fill(advance: Advance, nbytes: int) -> None:
    """As many go into the slots as fit, and the next one waits until enough are taken."""
    stream = Stream(advance)
    each = 1 + -(-nbytes // x.SLOT_BYTES)
    for i in range(x.SLOTS // each):
        assert stream.run(SENDS, noise(i, nbytes)) == x.IDLE
        assert stream.ends[SENDS, x.END_COUNT] == each * (i + 1)
    last = noise(99, nbytes if x.SLOTS % each == 0 else x.SLOTS % each * x.SLOT_BYTES)
    stream.put(SENDS, last)
    assert stream.go_on(SENDS) == -1 and stream.phase(SENDS) < x.IDLE
    out = np.empty(nbytes, np.uint8)
    assert stream.run(RECEIVES, out) == x.IDLE and (out == noise(0, nbytes)).all()
    while stream.go_on(SENDS) < 0:
        pass
    assert stream.phase(SENDS) == x.IDLE


def test_both_sides_of_one_rank_take_turns(advance: Advance) -> None:
    """A message that does not fit in the slots, sent and received by one thread, as a rank does with two streams."""
    stream = Stream(advance)
    sent, out = noise(1, 1_000_003), np.zeros(1_000_003, np.uint8)
    stream.put(SENDS, sent)
    stream.put(RECEIVES, out)
    assert stream.go_on(SENDS, RECEIVES) == SENDS  # all is in the slots
    assert stream.go_on(RECEIVES) == 0
    assert (out == sent).all()


def test_large_data_in_open_memory_stay_there(advance: Advance) -> None:
    stream = Stream(advance)
    sent = stream.open[5 : 5 + x.EAGER_BYTES + 1]
    sent[:] = noise(1, sent.size)
    stream.put(SENDS, sent)
    assert stream.go_on(SENDS) == -1  # it waits for the receiver
    assert stream.ends[SENDS, x.END_COUNT] == 1
    assert not stream.ring[x.HEADER_BYTES :].any()
    out = guarded.zeros(sent.size, np.uint8)
    assert stream.run(RECEIVES, out) == x.IDLE and (out == sent).all()
    assert stream.go_on(SENDS) == 0 and stream.phase(SENDS) == x.IDLE


@pytest.mark.parametrize("odd", [0, 1, 63])
def test_what_is_larger_than_a_cache(advance: Advance, odd: int) -> None:
    """It is written past it, whole lines and what is left at both ends, and nothing beside it."""
    stream, nbytes = Stream(advance), x.CACHED_BYTES + 70 if not isinstance(advance, FunctionType) else 100
    sent, memory = np.resize(noise(odd, 99_991), nbytes), guarded.zeros(nbytes + odd, np.uint8)
    out = memory[odd:]
    stream.put(SENDS, sent)
    stream.put(RECEIVES, out)
    under_way = [SENDS, RECEIVES]
    while under_way:
        place = stream.go_on(*under_way)
        if place >= 0:
            del under_way[place]
    assert (out == sent).all() and not memory[:odd].any()


@pytest.mark.parametrize("where", ["small", "beginning before", "ending behind"])
def test_other_data_go_through_the_slots(advance: Advance, where: str) -> None:
    stream = Stream(advance)
    nbytes = x.EAGER_BYTES + (where != "small")
    sent = stream.open[:nbytes]
    if where == "beginning before":
        for end in stream.ends:
            end[x.END_OPEN] += 1
    if where == "ending behind":
        for end in stream.ends:
            end[x.END_OPEN_BYTES] = nbytes - 1
    stream.put(SENDS, sent)
    place = stream.go_on(SENDS)
    assert (place == 0) == (where == "small")
    assert stream.ends[SENDS, x.END_COUNT] >= x.SLOTS - 1  # the last two go together


def test_data_are_not_believed_if_their_sender_gave_up_while_they_were_read(advance: Advance) -> None:
    stream = Stream(advance)
    stream.put(SENDS, stream.open)
    assert stream.go_on(SENDS) == -1
    stream.lines[4, 0] = 1
    assert stream.run(RECEIVES, np.empty_like(stream.open)) == x.ABANDONED
    assert stream.lines[1, 0] == 0  # nothing was taken


@pytest.mark.parametrize("what", ["tag", "dtype", "elements"])
def test_a_message_that_is_not_asked_for_waits_for_a_place(advance: Advance, what: str) -> None:
    stream = Stream(advance)
    sent = noise(1, 100_000)
    assert stream.run(SENDS, sent, tag=5) == x.IDLE
    stream.put(RECEIVES, np.empty(10 if what == "elements" else 100_000, np.uint8), tag=4 if what == "tag" else 5)
    if what == "dtype":
        stream.ends[RECEIVES, x.END_DTYPE] = 14
    assert stream.go_on(RECEIVES) == 0 and stream.phase(RECEIVES) == x.STRANGE
    assert stream.ends[RECEIVES, x.END_HEADER : x.END_MESSAGE].tolist() == [1, 5, 13, 100_000, 0]
    assert stream.lines[1, 0] == 0  # nothing is taken
    out = np.empty(100_000, np.uint8)
    stream.put(RECEIVES, out, phase=x.ACCEPTED)
    assert stream.go_on(RECEIVES) == 0 and stream.phase(RECEIVES) == x.IDLE
    assert (out == sent).all()


def test_who_sleeps_is_woken_by_the_bell(advance: Advance) -> None:
    stream = Stream(advance)
    stream.put(RECEIVES, np.empty(8, np.uint8))
    assert stream.go_on(RECEIVES) == -1  # about 50 ms
    assert stream.lines[3, 0] & 0xFFFFFFFF == 1  # it has slept
    assert stream.run(SENDS, noise(1, 8)) == x.IDLE
    assert stream.lines[3, 0] & 0xFFFFFFFF == 0
    assert stream.go_on(RECEIVES) == 0
