"""Messages between two ranks, and the short way of plain ones.

Every ordered pair has a *stream*: a ring of SLOTS slots in the sender's memory. A message begins with a new slot: a
header of HEADER_BYTES, then its data, as if the ring were one piece of memory. It takes a slot for the header and as
many as its data would fill. Two flags count slots, and only grow: the sender's say how many are full, the receiver's
how many have been taken. So a slot is written when the one SLOTS before it has been taken, and read when it is full;
each raise of a flag releases what was done with the slots before it, and each look acquires that.

A message that the receiver may read where it lies (END_OPEN) and that is too large to be left behind in the slots is a
header alone, which says where. The receiver copies the data from there and only then takes the slot, for which the
sender waits. Should the sender give up first, the receiver finds out after its last look at the data, and does not
believe them.

An *end* of a stream is an array of 64-bit words, this rank's alone: where things are, how far it has come, and the
message under way. Ends are advanced together, so a rank that sends and receives does neither first. It sleeps on its
*bell*, one for all streams: it sets the bell to 1 and looks at its flags once more, and who raises one of them sets the
bell to 0 if it is not. Both do a full fence in between, so that one of them sees what the other did.
"""

from __future__ import annotations

from kernels.again import (
    ARRAY_DATA,
    ARRAY_DIMS,
    ARRAY_NDIM,
    READABLE,
    TABLE_HEADER,
    TABLE_NONE,
    TABLE_PENDING,
    UNKNOWN,
    WRITABLE,
    dtype_of,
    is_plain,
)
from kernels.executor import BLOCKED, DONE
from kernels.portable import portable
from kernels.primitives import (
    add_word,
    block_bytes,
    copy_bytes,
    copy_past_caches,
    doze,
    integer_of,
    load_acquire,
    load_word,
    raise_flag,
    store_word,
    take_over,
)

SLOTS = 8
SLOT_BYTES = 64 << 10
EAGER_BYTES = (SLOTS - 1) * SLOT_BYTES  # what the slots hold beside a header
HEADER_BYTES = 64
STEP_BYTES = 256 << 10  # of data that are read where they lie, between two looks at other ends
# From here on a receiver's caller does not find its data in a cache anyway. With one of 32 MB, what was received past
# it and then read took a quarter longer at 8 MB, as long at 16 MB and half as long at 32 MB.
CACHED_BYTES = 16 << 20

# An end. Words; "->" marks an address.
END_SENDS = 0  # whether it is the sender's
END_RING = 1  # -> the slots
END_THEIRS = 2  # -> the flag that the other side raises
END_MINE = 3  # -> the flag that this side raises
END_BELL = 4  # -> the other side's bell
END_OPEN = 5  # -> the sender's memory that the receiver may read
END_OPEN_BYTES = 6
END_STATE = 7  # -> the sender's state: a flag, 0 unless it has given up
END_ASIDE = 8  # messages that this receiver has put aside
END_COUNT = 9  # slots that this side has filled or taken
END_NUMBER = 10  # messages that it has begun
END_HEADER = 11  # HEADER_WORDS: the header of the message that has come
HEADER_NUMBER, HEADER_TAG, HEADER_DTYPE, HEADER_ELEMENTS, HEADER_PLACE = range(5)
HEADER_WORDS = 5  # the message's number from 1, its tag, its dtype's code, its elements, and 1 + where in END_OPEN or 0
END_MESSAGE = END_HEADER + HEADER_WORDS  # MESSAGE_WORDS: the message to send, or the array to receive into
END_PHASE = END_MESSAGE  # see below
END_ARRAY = END_MESSAGE + 1  # -> the array
END_BYTES = END_MESSAGE + 2
END_DONE = END_MESSAGE + 3  # bytes that have been copied
END_TAG = END_MESSAGE + 4
END_DTYPE = END_MESSAGE + 5  # code
END_ELEMENTS = END_MESSAGE + 6
MESSAGE_WORDS = 7
END_LEFT = END_MESSAGE + MESSAGE_WORDS  # slots of the message that this side has not filled or taken
END_WORDS = END_LEFT + 1

# Phases. From IDLE on a message is not under way: Python sees to it, or begins another.
BEGUN = 0  # no header has been written or read
ACCEPTED = 1  # the message whose header has come is for END_ARRAY
DATA = 2
IN_PLACE = 3  # the data are read where they lie
IDLE = 4
STRANGE = 5  # the message that has come is not the one that is asked for
ABANDONED = 6  # the sender has given up while its data were read

STILL, MOVED, ENDED = range(3)  # what came of a look at an end

# The table of the short way. Up to TABLE_PENDING it is as `kernels/again.py` has it.
TABLE_STOPPED = TABLE_PENDING + 1  # not 0: the communicator has failed or is closed
TABLE_INTEGER = TABLE_PENDING + 2  # object: the type int
TABLE_BELL = TABLE_PENDING + 3  # -> this rank's
TABLE_SPINS = TABLE_PENDING + 4
TABLE_YIELDS = TABLE_PENDING + 5
TABLE_ENDS = TABLE_PENDING + 6  # the ends of the call under way, at most two
TABLE_SIZE = TABLE_PENDING + 8  # ranks
TABLE_PEERS = TABLE_PENDING + 9  # -> for each rank the ends that send to it and that receive from it, or 0
TABLE_DTYPES = TABLE_PENDING + 10  # number of dtypes; for each: the word that tells it, its code, bytes per element
MOST_DTYPES = 32
DTYPE_WORDS = 3
TABLE_WORDS = TABLE_DTYPES + 1 + DTYPE_WORDS * MOST_DTYPES


@portable
def begin_data(end: int) -> None:
    """A message's header has been written or accepted: how many slots it takes."""
    store_word(end + 8 * END_LEFT, 1 + (load_word(end + 8 * END_BYTES) + SLOT_BYTES - 1) // SLOT_BYTES)
    store_word(end + 8 * END_PHASE, DATA)


@portable
def slot_of(end: int) -> int:
    """Where the slot is that comes next."""
    return load_word(end + 8 * END_RING) + load_word(end + 8 * END_COUNT) % SLOTS * SLOT_BYTES


@portable
def pass_slots(end: int, slots: int) -> None:
    """Hand slots to the other side, and wake it if it sleeps."""
    count = load_word(end + 8 * END_COUNT) + slots
    store_word(end + 8 * END_COUNT, count)
    raise_flag(load_word(end + 8 * END_MINE), count)
    bell = load_word(end + 8 * END_BELL)
    if load_acquire(bell) != 0:
        raise_flag(bell, 0)


@portable
def take_data(array: int, place: int, length: int, nbytes: int) -> None:
    """Copy some of a message's data, which are `nbytes` in all, into the receiver's array."""
    if nbytes < CACHED_BYTES:
        copy_bytes(array, place, length, 0, 1)
    else:
        copy_past_caches(array, place, length)


@portable
def take_slot(array: int, slot: int, length: int, nbytes: int) -> None:
    """`take_data` out of a slot, which the sender will write over."""
    done = 0
    while done < length:
        count = min(length - done, block_bytes())
        take_data(array + done, slot + done, count, nbytes)
        take_over(slot + done, count)
        done += count


@portable
def carry(end: int, ready: int) -> int:
    """Copy what the next slot has of the data, if as many slots are ready as are handed over with it: with the last of
    the data, all that are left."""
    done, nbytes = load_word(end + 8 * END_DONE), load_word(end + 8 * END_BYTES)
    before = HEADER_BYTES if done == 0 else 0
    length = min(nbytes - done, SLOT_BYTES - before)
    left = load_word(end + 8 * END_LEFT)
    slots = left if done + length == nbytes else 1
    if ready < slots:
        return STILL
    slot, array = slot_of(end) + before, load_word(end + 8 * END_ARRAY) + done
    if load_word(end + 8 * END_SENDS) != 0:
        copy_bytes(slot, array, length, 0, 1)
    else:
        take_slot(array, slot, length, nbytes)
    store_word(end + 8 * END_DONE, done + length)
    store_word(end + 8 * END_LEFT, left - slots)
    pass_slots(end, slots)
    if done + length < nbytes:
        return MOVED
    store_word(end + 8 * END_PHASE, IDLE)
    return ENDED


@portable
def send_some(end: int) -> int:
    """Go on with sending, if there is a free slot."""
    full = (load_word(end + 8 * END_COUNT) - load_acquire(load_word(end + 8 * END_THEIRS))) & 0xFFFFFFFF
    phase = load_word(end + 8 * END_PHASE)
    if phase == IN_PLACE:
        if full != 0:
            return STILL
        store_word(end + 8 * END_PHASE, IDLE)
        return ENDED
    if full == SLOTS:
        return STILL
    if phase == DATA:
        return carry(end, SLOTS - full)
    slot, nbytes = slot_of(end), load_word(end + 8 * END_BYTES)
    number = load_word(end + 8 * END_NUMBER) + 1
    store_word(end + 8 * END_NUMBER, number)
    store_word(slot + 8 * HEADER_NUMBER, number)
    store_word(slot + 8 * HEADER_TAG, load_word(end + 8 * END_TAG))
    store_word(slot + 8 * HEADER_DTYPE, load_word(end + 8 * END_DTYPE))
    store_word(slot + 8 * HEADER_ELEMENTS, load_word(end + 8 * END_ELEMENTS))
    offset = load_word(end + 8 * END_ARRAY) - load_word(end + 8 * END_OPEN)
    if nbytes > EAGER_BYTES and 0 <= offset <= load_word(end + 8 * END_OPEN_BYTES) - nbytes:
        store_word(slot + 8 * HEADER_PLACE, 1 + offset)
        store_word(end + 8 * END_PHASE, IN_PLACE)
        pass_slots(end, 1)
        return MOVED
    store_word(slot + 8 * HEADER_PLACE, 0)
    begin_data(end)
    return carry(end, SLOTS - full)


@portable
def receive_some(end: int) -> int:
    """Go on with receiving, if a slot is full."""
    ready = (load_acquire(load_word(end + 8 * END_THEIRS)) - load_word(end + 8 * END_COUNT)) & 0xFFFFFFFF
    if ready == 0:
        return STILL
    phase = load_word(end + 8 * END_PHASE)
    if phase == BEGUN:
        number = load_word(end + 8 * END_NUMBER) + 1
        store_word(end + 8 * END_NUMBER, number)
        slot, header = slot_of(end), end + 8 * END_HEADER
        for i in range(HEADER_WORDS):
            store_word(header + 8 * i, load_word(slot + 8 * i))
        phase = ACCEPTED
        if (
            load_word(header + 8 * HEADER_NUMBER) != number
            or load_word(header + 8 * HEADER_TAG) != load_word(end + 8 * END_TAG)
            or load_word(header + 8 * HEADER_DTYPE) != load_word(end + 8 * END_DTYPE)
            or load_word(header + 8 * HEADER_ELEMENTS) != load_word(end + 8 * END_ELEMENTS)
        ):
            phase = STRANGE
            store_word(end + 8 * END_PHASE, phase)
            return ENDED
    if phase == ACCEPTED:
        if load_word(end + 8 * (END_HEADER + HEADER_PLACE)) == 0:
            begin_data(end)
            phase = DATA
        else:
            store_word(end + 8 * END_PHASE, IN_PLACE)
    if phase == DATA:
        return carry(end, ready)
    return fetch(end)


@portable
def fetch(end: int) -> int:
    """Copy some of the data from where they lie in the sender's memory."""
    done, nbytes = load_word(end + 8 * END_DONE), load_word(end + 8 * END_BYTES)
    place = load_word(end + 8 * END_OPEN) + load_word(end + 8 * (END_HEADER + HEADER_PLACE)) - 1
    length = min(nbytes - done, STEP_BYTES)
    take_data(load_word(end + 8 * END_ARRAY) + done, place + done, length, nbytes)
    add_word(end + 8 * END_DONE, length)  # the full fence between the look at the data and that at the sender
    if done + length < nbytes:
        return MOVED
    if load_acquire(load_word(end + 8 * END_STATE)) != 0:
        store_word(end + 8 * END_PHASE, ABANDONED)
        return ENDED
    store_word(end + 8 * END_PHASE, IDLE)
    pass_slots(end, 1)
    return ENDED


@portable
def advance(ends: int, count: int, bell: int, spins: int, yields: int) -> int:
    """Go on with the messages under way at `count` ends, whose addresses are at `ends`, until the first of them has
    ended or needs Python: its place. -1: none has moved in about 50 ms."""
    round = 0
    while True:
        moved = False
        for i in range(count):
            end = load_word(ends + 8 * i)
            step = send_some(end) if load_word(end + 8 * END_SENDS) != 0 else receive_some(end)
            if step == ENDED:
                return i
            moved = moved or step == MOVED
        if moved:
            round = 0
        elif round >= spins + yields and load_acquire(bell) == 0:
            raise_flag(bell, 1)  # and look once more before sleeping
        elif doze(round, bell, 1, spins, yields):
            round += 1
        else:
            return -1


@portable
def plain_message(table: int, end: int, x: int, flags: int, tag: int) -> bool:
    """Put an array, an object, into an end as the next message, if it is a plain one."""
    if end == 0 or load_word(end + 8 * END_ASIDE) != 0 or not is_plain(table, x, flags):
        return False
    array = x + load_word(table + 8 * TABLE_HEADER)
    kind, known = dtype_of(table, array), table + 8 * (TABLE_DTYPES + 1)
    last = known + 8 * DTYPE_WORDS * load_word(table + 8 * TABLE_DTYPES)
    while known < last and load_word(known) != kind:
        known += 8 * DTYPE_WORDS
    if known == last:
        return False
    dims, count = load_word(array + ARRAY_DIMS), 1
    for i in range(load_word(array + ARRAY_NDIM) & 0xFFFFFFFF):
        count *= load_word(dims + 8 * i)
    store_word(end + 8 * END_ARRAY, load_word(array + ARRAY_DATA))
    store_word(end + 8 * END_BYTES, count * load_word(known + 16))
    store_word(end + 8 * END_DONE, 0)
    store_word(end + 8 * END_TAG, tag)
    store_word(end + 8 * END_DTYPE, load_word(known + 8))
    store_word(end + 8 * END_ELEMENTS, count)
    return True


@portable
def overlap(end: int, other: int) -> bool:
    """Whether the arrays of two ends share memory."""
    array, its = load_word(end + 8 * END_ARRAY), load_word(other + 8 * END_ARRAY)
    return array < its + load_word(other + 8 * END_BYTES) and its < array + load_word(end + 8 * END_BYTES)


@portable
def end_of(table: int, rank: int, receives: int) -> int:
    """An end, given a rank as an object; 0 if there is none."""
    header = load_word(table + 8 * TABLE_HEADER)
    if load_word(rank + header - 8) != load_word(table + 8 * TABLE_INTEGER):
        return 0
    number = integer_of(rank)
    if number < 0 or number >= load_word(table + 8 * TABLE_SIZE):
        return 0
    return load_word(load_word(table + 8 * TABLE_PEERS) + 8 * (2 * number + receives))


@portable
def admit_message(table: int, x: int, out: int, dst: int, src: int, tag: int) -> int:
    """What to do with a call that sends x to `dst` and receives `out` from `src`, either of which may be None: the
    number of its ends, for `go_message`; or UNKNOWN."""
    header, none = load_word(table + 8 * TABLE_HEADER), load_word(table + 8 * TABLE_NONE)
    if load_word(table + 8 * TABLE_STOPPED) != 0 or load_word(tag + header - 8) != load_word(table + 8 * TABLE_INTEGER):
        return UNKNOWN
    number = integer_of(tag)
    if number == UNKNOWN:
        return UNKNOWN
    ends, count = table + 8 * TABLE_ENDS, 0
    if dst != none:
        end = end_of(table, dst, 0)
        if not plain_message(table, end, x, READABLE, number):
            return UNKNOWN
        store_word(ends, end)
        count = 1
    if src != none:
        end = end_of(table, src, 1)
        if not plain_message(table, end, out, WRITABLE, number):
            return UNKNOWN
        store_word(ends + 8 * count, end)
        count += 1
    if count == 0:  # None as the rank of a send or a recv
        return UNKNOWN
    if count == 2 and overlap(load_word(ends), load_word(ends + 8)):
        return UNKNOWN
    for i in range(count):
        store_word(load_word(ends + 8 * i) + 8 * END_PHASE, BEGUN)
    return count


@portable
def go_message(table: int, count: int) -> int:
    """Make the call that was admitted. Returns DONE or BLOCKED: messages under way, or for Python to see to, are left
    at their ends."""
    ends, bell = table + 8 * TABLE_ENDS, load_word(table + 8 * TABLE_BELL)
    spins, yields = load_word(table + 8 * TABLE_SPINS), load_word(table + 8 * TABLE_YIELDS)
    while count > 0:
        ended = advance(ends, count, bell, spins, yields)
        if ended < 0 or load_word(load_word(ends + 8 * ended) + 8 * END_PHASE) != IDLE:
            return BLOCKED
        count -= 1
        if ended < count:
            store_word(ends, load_word(ends + 8))
    return DONE


@portable
def message_way(table: int, number: int, x: int, out: int, dst: int, src: int, tag: int) -> int:
    """The two halves of a call, as `again.short_way` has them."""
    if number == UNKNOWN:
        return admit_message(table, x, out, dst, src, tag)
    return go_message(table, number)
