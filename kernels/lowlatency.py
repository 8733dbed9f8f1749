"""Small messages: an all-reduce in which data and flag travel in one store, with no barrier.

Every rank writes its contribution into every rank's *inbox*, its own included, and sums what arrives. A *packet* is 16
bytes: two words of 8, each of them 4 bytes of data and the call's number, by which a reader knows that the word has
come. It is NCCL's LL protocol, one-shot as in TensorRT-LLM's and vLLM's custom all-reduce. Only words of 8 bytes need
to arrive whole, which CUDA's memory model and the processors promise. (NCCL's LL128 asks for 128 bytes of a warp to
arrive whole, which none of them does.)

**Two halves.** Calls write to the halves of an inbox in turn, and that is enough. Let rank r write packets of call n
+ 2 over those of call n in q's inbox. Then r has ended call n + 1, for which it read a packet that q sent in call n +
1; q sent it after its call n had ended, with all that it read. (Every call sends at least one packet to everybody, so
there is one to read.) A packet that has been read is never looked at again, so no fence is needed either: had a look
at call n's slot found a later packet, the reader would still be waiting, and would not have sent what the overwriting
needed. With one half, r could be a call ahead and overwrite what q is still waiting for.

**The call's number** is counted by the kernel, in memory beside the inbox, so that a captured graph may be replayed. It
wraps around at 2**32. Were a slot not written for exactly so many calls, its old packet would look new; so from time to
time (`REFRESH`) a call fills all of the slots.

Channels are independent: each has its own slots and number, and sends its part of the data. Calls on one inbox follow
each other, with the same channels and capacity every time. A rank that has waited for about 50 ms returns BLOCKED,
and goes on with the same call when it is called again. On a GPU nobody comes back: `run_call` waits until the
deadline, then tells the host, and later calls do nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.dtypes import DType
from kernels.elementwise import apply, finish, premultiply
from kernels.executor import BLOCKED, DONE
from kernels.portable import portable, primitive
from kernels.primitives import doze, load_word, raise_flag, store_word, sync
from kernels.quantize import load_byte, store_byte

PACKET_BYTES = 16
DATA_BYTES = 8  # of a packet
REFRESH = 2**30  # calls after which every slot has been written again
MOST_BYTES = 1 << 16  # above this, other algorithms move fewer bytes

# The job: 64-bit words. "->" marks an address.
JOB_RANK = 0
JOB_SIZE = 1
JOB_SPINS = 2  # see `doze`
JOB_YIELDS = 3
JOB_CAPACITY = 4  # packets that a channel can take from each rank in a call
JOB_INBOXES = 5  # -> address of each rank's inbox: `inbox_bytes` of zeros at first, which no call before 2**32 sends
JOB_STATES = 6  # -> STATE_WORDS words for each channel, zeros at first
JOB_INPUT = 7  # ->
JOB_OUTPUT = 8  # -> the same place, or one that does not overlap
JOB_BYTES = 9  # of the message
JOB_SHARE = 10  # of it, each channel's: `share_of`
JOB_SCALE = 11  # of premul_sum
JOB_AGAIN = 12  # not zero: only channels that are BLOCKED go on, the others have ended
JOB_REPORT = 13  # -> a flag in the host's memory: BLOCKED, once a call has failed (GPU)
JOB_FINISHED = 14  # -> where the host sees how many calls have ended (GPU)
JOB_WORDS = 15

STATE_CALLS = 0  # calls that have ended
STATE_SENT = 1  # whether this call's packets have been sent
STATE_STATUS = 2
STATE_IDLE = 3  # a flag that nobody raises, to wait on
STATE_ENDED = 4  # calls that have ended, of all time (GPU)
STATE_WORDS = 8


def elements(dtype: DType) -> int:
    """How many fit into a packet. Raises ValueError for what does not fit."""
    if dtype.itemsize > DATA_BYTES:
        raise ValueError(f"a packet holds {DATA_BYTES} bytes, and an element of {dtype.name} has {dtype.itemsize}")
    return DATA_BYTES // dtype.itemsize


def share_of(nbytes: int, channels: int) -> int:
    """Bytes of a message that each channel takes, the last ones perhaps fewer: a multiple of a packet's."""
    return -(-nbytes // (DATA_BYTES * channels)) * DATA_BYTES


def capacity_for(nbytes: int, channels: int) -> int:
    """The capacity that messages of up to `nbytes` need."""
    return max(1, share_of(nbytes, channels) // DATA_BYTES)


def inbox_bytes(size: int, channels: int, capacity: int) -> int:
    """Bytes of one rank's inbox."""
    return channels * 2 * size * capacity * PACKET_BYTES


@primitive
def load_pair(address: int) -> tuple[int, int]:
    """The two 64-bit words at `address`, a multiple of 16, each of them whole; they order nothing else."""
    return ctypes.c_int64.from_address(address).value, ctypes.c_int64.from_address(address + 8).value


@primitive
def store_pair(address: int, first: int, second: int) -> None:
    """Write two 64-bit words likewise, in one store where there is one."""
    ctypes.c_int64.from_address(address).value = first
    ctypes.c_int64.from_address(address + 8).value = second


@primitive
def widen(data: int) -> Any:
    """8 bytes of elements as a group, in the accumulator type: see `kernels.elementwise`."""
    raise LookupError("widen is bound to a dtype")


@primitive
def narrow(group: Any) -> int:
    """A group rounded to the element type, as 8 bytes."""
    raise LookupError("narrow is bound to a dtype")


@portable
def half_of(call: int) -> int:
    """Which half of the inboxes a call writes to."""
    return call & 1


@portable
def fills_all(call: int) -> bool:
    """Whether a call writes all slots of its half, needed or not."""
    return call & (REFRESH - 1) < 2


@portable
def slot_of(job: int, owner: int, sender: int, channel: int, call: int) -> int:
    """Where in the owner's inbox the sender's packets of a call begin."""
    inbox = load_word(load_word(job + 8 * JOB_INBOXES) + 8 * owner)
    row = (2 * channel + half_of(call)) * load_word(job + 8 * JOB_SIZE) + sender
    return inbox + row * load_word(job + 8 * JOB_CAPACITY) * PACKET_BYTES


@portable
def read_data(address: int, nbytes: int) -> int:
    """Up to 8 bytes at `address`, and zeros."""
    if nbytes >= 8 and address & 7 == 0:
        return load_word(address)
    data = 0
    for i in range(min(nbytes, 8)):
        data |= load_byte(address + i) << (8 * i)
    return data


@portable
def write_data(address: int, nbytes: int, data: int) -> None:
    """The first `nbytes` bytes of `data`, at most 8."""
    if nbytes >= 8 and address & 7 == 0:
        store_word(address, data)
    else:
        for i in range(min(nbytes, 8)):
            store_byte(address + i, (data >> (8 * i)) & 0xFF)


@portable
def send(job: int, channel: int, call: int, start: int, nbytes: int, lane: int, lanes: int) -> None:
    """Put this channel's bytes of the input, from `start` on, into every inbox."""
    size = load_word(job + 8 * JOB_SIZE)
    rank = load_word(job + 8 * JOB_RANK)
    packets = max(1, (nbytes + 7) >> 3)
    if fills_all(call):
        packets = load_word(job + 8 * JOB_CAPACITY)
    tag = call << 32
    i = lane
    while i < packets:
        data = read_data(load_word(job + 8 * JOB_INPUT) + start + DATA_BYTES * i, nbytes - DATA_BYTES * i)
        owner = rank
        for _ in range(size):  # not all to rank 0 at once, and the own inbox last: it is the nearest
            owner = owner + 1 if owner + 1 < size else 0
            slot = slot_of(job, owner, rank, channel, call) + PACKET_BYTES * i
            store_pair(slot, tag | (data & 0xFFFFFFFF), tag | ((data >> 32) & 0xFFFFFFFF))
        i += lanes


@portable
def is_of(call: int, first: int, second: int) -> bool:
    """Whether both words of a packet are a call's."""
    return (first >> 32) & 0xFFFFFFFF == call and (second >> 32) & 0xFFFFFFFF == call


@portable
def contribution(first: int, second: int, scale: int) -> Any:
    """What a packet brings."""
    return premultiply(widen((first & 0xFFFFFFFF) | (second << 32)), scale)


@portable
def reduce_packets(job: int, slots: int, call: int, idle: int) -> tuple[bool, int]:
    """The sum of the packets that lie in the same place of all senders' slots, from rank 0 on, the same on every rank.

    False: one of them has not come. Four are looked at in one go, since each look takes long.
    """
    size = load_word(job + 8 * JOB_SIZE)
    scale = load_word(job + 8 * JOB_SCALE)
    stride = load_word(job + 8 * JOB_CAPACITY) * PACKET_BYTES
    total = widen(0)
    for q in range(0, size, 4):
        slot = slots + q * stride
        second, third, fourth = min(1, size - 1 - q), min(2, size - 1 - q), min(3, size - 1 - q)
        round = 0
        while True:
            a0, a1 = load_pair(slot)
            b0, b1 = load_pair(slot + second * stride)
            c0, c1 = load_pair(slot + third * stride)
            d0, d1 = load_pair(slot + fourth * stride)
            if is_of(call, a0, a1) and is_of(call, b0, b1) and is_of(call, c0, c1) and is_of(call, d0, d1):
                break
            if not doze(round, idle, 0, load_word(job + 8 * JOB_SPINS), load_word(job + 8 * JOB_YIELDS)):
                return False, 0
            round += 1
        group = contribution(a0, a1, scale)
        total = group if q == 0 else apply(total, group)
        if second == 1:
            total = apply(total, contribution(b0, b1, scale))
        if third == 2:
            total = apply(total, contribution(c0, c1, scale))
        if fourth == 3:
            total = apply(total, contribution(d0, d1, scale))
    return True, narrow(finish(total, size))


@portable
def receive(
    job: int, channel: int, call: int, start: int, nbytes: int, idle: int, lane: int, lanes: int
) -> bool:  # fmt: skip
    """Sum what comes from everybody into this channel's bytes of the output. False: not all has come."""
    slots = slot_of(job, load_word(job + 8 * JOB_RANK), 0, channel, call)
    packets = max(1, (nbytes + 7) >> 3)
    i = lane
    while i < packets:
        come, data = reduce_packets(job, slots + PACKET_BYTES * i, call, idle)
        if not come:
            return False
        write_data(load_word(job + 8 * JOB_OUTPUT) + start + DATA_BYTES * i, nbytes - DATA_BYTES * i, data)
        i += lanes
    return True


@portable
def all_reduce(job: int, channel: int, channels: int, lane: int, lanes: int) -> int:
    """One call, or going on with it: DONE, or BLOCKED. Every lane of every channel calls this with the same job.

    The output is written when all is sent, and what is summed are packets, the own one too: so going on is beginning
    the summing again, and the output may be the input.
    """
    state = load_word(job + 8 * JOB_STATES) + 8 * STATE_WORDS * channel
    call = (load_word(state + 8 * STATE_CALLS) + 1) & 0xFFFFFFFF
    sent = load_word(state + 8 * STATE_SENT)
    if sent == 0 and load_word(job + 8 * JOB_AGAIN) != 0:
        return DONE
    message = load_word(job + 8 * JOB_BYTES)
    share = load_word(job + 8 * JOB_SHARE)
    start = min(message, channel * share)
    nbytes = min(message - start, share)
    if sent == 0:
        send(job, channel, call, start, nbytes, lane, lanes)
    sync()
    if lane == 0:
        store_word(state + 8 * STATE_SENT, 1)
        store_word(state + 8 * STATE_STATUS, DONE)
    sync()
    if not receive(job, channel, call, start, nbytes, state + 8 * STATE_IDLE, lane, lanes):
        store_word(state + 8 * STATE_STATUS, BLOCKED)
    sync()
    status = load_word(state + 8 * STATE_STATUS)
    if status == DONE and lane == 0:
        store_word(state + 8 * STATE_CALLS, call)
        store_word(state + 8 * STATE_SENT, 0)
    return status


@portable
def run_call(job: int, channel: int, channels: int, lane: int, lanes: int) -> None:
    """What a block of threads does on a GPU: one channel's part of a call, unless one has failed before."""
    state = load_word(job + 8 * JOB_STATES) + 8 * STATE_WORDS * channel
    failed = load_word(state + 8 * STATE_STATUS) == BLOCKED
    sync()
    if failed:
        return
    status = all_reduce(job, channel, channels, lane, lanes)
    if lane == 0 and status == BLOCKED:
        raise_flag(load_word(job + 8 * JOB_REPORT), BLOCKED)
    elif lane == 0 and channel == 0:
        ended = load_word(state + 8 * STATE_ENDED) + 1
        store_word(state + 8 * STATE_ENDED, ended)
        store_word(load_word(job + 8 * JOB_FINISHED), ended)
