"""The executor: runs one rank's instruction list, on any target.

It knows addresses, flags and counters, and nothing of collectives: what to move and whom to wait for are in the
program's words, where things are is in the job, who the others are is in the link. All three are arrays of 64-bit
words, laid out by the constants below, in memory that lives as long as the communicator.

The executor is *resumable*: it keeps its place in the job, and when a flag does not come in about 50 ms it returns
BLOCKED, so that its caller can look at signals, at its peers' health and at the clock, and call again.
"""

from __future__ import annotations

from kernels.portable import portable
from kernels.primitives import (
    await_flag,
    block_bytes,
    combine,
    copy_bytes,
    load_word,
    raise_flag,
    store_word,
    sync,
    take_over,
)

# What execute returns.
DONE = 0
BLOCKED = 1
DIFFERENT = 2  # the ranks' descriptors are not all equal to mine: nothing outside my own scratch was touched

# Opcodes. The words that follow each are in `collectives/program.py`, which writes them.
END, WAIT, SIGNAL, ENTER, MOVE = range(5)
INPUT, OUTPUT, SCRATCH = range(3)
# Flags of a Move; and the bit of a source's word that says which sources TAKES is about.
FINAL = 1  # its result is the first to hold all contributions
TAKES = 2  # of some of its sources it is the only reader but for their owner, who will write over them
SOLE_BIT, RAW_BIT = 61, 62
MOST_SCALED = 64  # sources of a Move, if some are to be scaled: a word has a bit for each

# The link: one rank's view of its communicator. Words, of 8 bytes; "->" marks an address.
LINK_RANK = 0
LINK_SIZE = 1
LINK_SLOTS = 2  # scratch is a ring of slots, one a slice
LINK_SLOT_BYTES = 3
LINK_SPINS = 4  # looks at a flag before yielding the core
LINK_YIELDS = 5  # and before sleeping
LINK_SCRATCH = 6  # -> address of each rank's scratch
LINK_BOARDS = 7  # -> address of each rank's board: for each channel a ring of descriptors, PAGES of PAGE_BYTES
LINK_FLAGS_IN = 8  # -> address of my flag from each rank, for channel 0
LINK_FLAGS_OUT = 9  # -> address of my flag at each rank, for channel 0
LINK_FLAGS_STRIDE = 10  # bytes from one channel's flags to the next one's
LINK_COUNTERS = 11  # -> each channel's counters: COUNTERS + 2 * size words
LINK_FINISHED = 12  # -> the number of calls that have ended, for others to see
LINK_REPORT = 13  # -> REPORT_WORDS words that the host reads (GPU)
LINK_STOPPED = 14  # not zero: a call has failed, and those after it do nothing (GPU)
LINK_WORDS = 15

REPORT_STATUS = 0  # a flag: BLOCKED or DIFFERENT, once a call has failed
REPORT_CALL = 1  # its number
REPORT_PEER = 2  # whom it waited for
REPORT_CHANNEL = 3
REPORT_WORDS = 4

COUNT_CALLS = 0  # collective calls that have ended
COUNT_SLOT = 1  # the scratch slot of the next call's first slice
COUNTERS = 2  # then, per rank: signals received in the calls that have ended; per rank: signals sent

PAGES = 16  # descriptors that a board holds: the last calls of its rank
PAGE_BYTES = 64
DESCRIPTOR_WORDS = 7  # after the page's first word, the call's number, which is a flag
SIGNATURE_WORDS = 4  # of them, that must be equal on every rank

# The job: one call's arguments, and the executor's place in it.
JOB_LINK = 0  # ->
JOB_CODE = 1  # -> the instruction list
JOB_SLICES = 2
JOB_STEP = 3  # elements of a chunk in one slice
JOB_ITEMSIZE = 4
JOB_CELL_BYTES = 5
JOB_LENGTHS = 6  # -> elements of each chunk
JOB_INPUTS = 7  # -> address of each rank's INPUT, as far as this rank may touch it
JOB_OUTPUTS = 8
JOB_IN_STARTS = 9  # -> first element of each position in INPUT
JOB_OUT_STARTS = 10
JOB_COMBINE = 11  # the reduction's address (CPU)
JOB_SCALE = 12  # what premul_sum multiplies by
JOB_RANKS = 13  # what avg divides by
JOB_SIGNALS_IN = 14  # -> signals per slice from each rank
JOB_OPERANDS = 15  # -> room for addresses: 2 * size + 2 words a channel
JOB_ALTERNATIVE = 16  # -> the job to run where the ranks agree in what they call, not in where their arrays lie (GPU)
JOB_BASES = 17  # -> what each rank's places count from, as addresses of this process; 0 if INPUTS and OUTPUTS stand
JOB_BRIEF = 18  # not zero: a rank's scratch holds a line of data at most, which may be fetched with its flag (CPU)
JOB_DESCRIPTOR = 19  # DESCRIPTOR_WORDS words; the last two are the places of INPUT and OUTPUT
JOB_PLACE = JOB_DESCRIPTOR + DESCRIPTOR_WORDS  # for each channel: PLACE_WORDS words
PLACE_PC = 0
PLACE_SLICE = 1
PLACE_PEER = 2  # whom this channel waits for
PLACE_ENTERED = 3  # 0: not yet; 1: published; 2: everybody has
PLACE_STATUS = 4  # see `run_channel`
PLACE_WORDS = 5


@portable
def part(length: int, start: int, step: int) -> int:
    """Elements, of `length` in all, that lie in the part of `step` elements beginning at `start`."""
    return max(0, min(length - start, step))


@portable
def counters_of(link: int, channel: int) -> int:
    """The address of a channel's counters."""
    size = load_word(link + 8 * LINK_SIZE)
    return load_word(link + 8 * LINK_COUNTERS) + 8 * (COUNTERS + 2 * size) * channel


@portable
def locate(job: int, link: int, word: int, start: int, slot: int) -> int:
    """The address that an operand's word stands for, in the slice that starts at element `start`."""
    buffer = (word >> 56) & 3
    rank = (word >> 32) & 0xFFFF
    index = word & 0xFFFFFFFF
    if buffer == SCRATCH:
        base = load_word(load_word(link + 8 * LINK_SCRATCH) + 8 * rank)
        return base + slot * load_word(link + 8 * LINK_SLOT_BYTES) + index * load_word(job + 8 * JOB_CELL_BYTES)
    base = load_word(load_word(job + 8 * (JOB_INPUTS + buffer)) + 8 * rank)
    first = load_word(load_word(job + 8 * (JOB_IN_STARTS + buffer)) + 8 * index)
    return base + (first + start) * load_word(job + 8 * JOB_ITEMSIZE)


@portable
def locate_all(job: int, at: int, slice: int, channel: int, offset: int, operands: int) -> None:
    """Write the addresses of the operands of the Move at `at`, `offset` bytes further, to `operands`."""
    link = load_word(job + 8 * JOB_LINK)
    start = slice * load_word(job + 8 * JOB_STEP)
    first = load_word(counters_of(link, channel) + 8 * COUNT_SLOT)
    slot = (first + slice) % load_word(link + 8 * LINK_SLOTS)
    for i in range(load_word(at + 24) + load_word(at + 32)):
        store_word(operands + 8 * i, locate(job, link, load_word(at + 40 + 8 * i), start, slot) + offset)


@portable
def take_sources(at: int, srcs: int, nbytes: int) -> None:
    """Take over what the Move at `at` has read as the only one."""
    for i in range(load_word(at + 24)):
        if (load_word(at + 40 + 8 * i) >> SOLE_BIT) & 1:
            take_over(load_word(srcs + 8 * i), nbytes)


@portable
def move(job: int, at: int, slice: int, channel: int, channels: int, lane: int, lanes: int) -> int:
    """Run the Move whose words begin at `at`, on this channel's part of the slice. Returns the words it takes."""
    flags = load_word(at + 16)
    nsrc = load_word(at + 24)
    ndst = load_word(at + 32)
    itemsize = load_word(job + 8 * JOB_ITEMSIZE)
    step = load_word(job + 8 * JOB_STEP)
    length = load_word(load_word(job + 8 * JOB_LENGTHS) + 8 * load_word(at + 8))
    # Channels take equal shares, multiples of 16 elements so that wide loads stay aligned; the same share of every
    # chunk, long or short, so that none touches what belongs to another.
    share = ((step + channels - 1) // channels + 15) // 16 * 16
    mine = part(part(length, slice * step, step), channel * share, share)
    offset = channel * share * itemsize
    size = load_word(load_word(job + 8 * JOB_LINK) + 8 * LINK_SIZE)
    srcs = load_word(job + 8 * JOB_OPERANDS) + 16 * channel * (size + 1)
    dsts = srcs + 8 * nsrc
    takes = block_bytes() != 0 and flags & TAKES != 0 and mine * itemsize > PAGE_BYTES
    while mine > 0:
        count = min(mine, block_bytes() // itemsize) if takes else mine
        sync()  # the last Move's operands and results are done with
        if lane == 0:
            locate_all(job, at, slice, channel, offset, srcs)
        sync()
        if nsrc == 1 and flags & FINAL == 0:
            src = load_word(srcs)
            for d in range(ndst):
                dst = load_word(dsts + 8 * d)
                if dst != src:
                    copy_bytes(dst, src, count * itemsize, lane, lanes)
        else:
            raw = 0
            for i in range(min(nsrc, 64)):
                raw |= ((load_word(at + 40 + 8 * i) >> RAW_BIT) & 1) << i
            final = load_word(job + 8 * JOB_RANKS) if flags & FINAL else 0
            scale = load_word(job + 8 * JOB_SCALE)
            combine(load_word(job + 8 * JOB_COMBINE), dsts, ndst, srcs, nsrc, count, raw, final, scale, lane, lanes)
        if takes:
            take_sources(at, srcs, count * itemsize)
        offset += count * itemsize
        mine -= count
    return 5 + nsrc + ndst


@portable
def enter(job: int, place: int, channel: int) -> int:
    """Publish this call's descriptor, wait for everybody's, compare. Returns DONE, BLOCKED or DIFFERENT.

    With bases, each rank's arrays may lie elsewhere: their places are read, not compared.
    """
    link = load_word(job + 8 * JOB_LINK)
    call = load_word(counters_of(link, channel) + 8 * COUNT_CALLS) + 1
    page = (channel * PAGES + call % PAGES) * PAGE_BYTES
    boards = load_word(link + 8 * LINK_BOARDS)
    if load_word(place + 8 * PLACE_ENTERED) == 0:
        mine = load_word(boards + 8 * load_word(link + 8 * LINK_RANK)) + page
        for i in range(DESCRIPTOR_WORDS):
            store_word(mine + 8 + 8 * i, load_word(job + 8 * (JOB_DESCRIPTOR + i)))
        raise_flag(mine, call)
        store_word(place + 8 * PLACE_ENTERED, 1)
        store_word(place + 8 * PLACE_PEER, 0)
    size = load_word(link + 8 * LINK_SIZE)
    slot = load_word(counters_of(link, channel) + 8 * COUNT_SLOT) * load_word(link + 8 * LINK_SLOT_BYTES)
    spins, yields = load_word(link + 8 * LINK_SPINS), load_word(link + 8 * LINK_YIELDS)
    brief = load_word(job + 8 * JOB_BRIEF) != 0
    for peer in range(load_word(place + 8 * PLACE_PEER), size):
        store_word(place + 8 * PLACE_PEER, peer)
        theirs = load_word(boards + 8 * peer) + page
        data = load_word(load_word(link + 8 * LINK_SCRATCH) + 8 * peer) + slot if brief else 0
        if not await_flag(theirs, call, spins, yields, data):
            return BLOCKED
    bases = load_word(job + 8 * JOB_BASES)
    agreed = DESCRIPTOR_WORDS if bases == 0 else DESCRIPTOR_WORDS - 2
    for peer in range(size):
        theirs = load_word(boards + 8 * peer) + page
        for i in range(agreed):
            if load_word(theirs + 8 + 8 * i) != load_word(job + 8 * (JOB_DESCRIPTOR + i)):
                return DIFFERENT
        if bases != 0:
            base = load_word(bases + 8 * peer)
            places = theirs + 8 * (DESCRIPTOR_WORDS - 1)
            store_word(load_word(job + 8 * JOB_INPUTS) + 8 * peer, base + load_word(places))
            store_word(load_word(job + 8 * JOB_OUTPUTS) + 8 * peer, base + load_word(places + 8))
    store_word(place + 8 * PLACE_ENTERED, 2)
    return DONE


@portable
def wait(job: int, place: int, at: int, slice: int, channel: int) -> int:
    """The Wait whose words begin at `at`. Returns DONE or BLOCKED."""
    link = load_word(job + 8 * JOB_LINK)
    peer = load_word(at + 8)
    # A lag that reaches back before this call counts on the signals of the calls before it.
    turns = (slice - load_word(at + 24)) * load_word(load_word(job + 8 * JOB_SIGNALS_IN) + 8 * peer)
    target = load_word(counters_of(link, channel) + 8 * (COUNTERS + peer)) + turns + load_word(at + 16)
    flag = load_word(load_word(link + 8 * LINK_FLAGS_IN) + 8 * peer) + channel * load_word(link + 8 * LINK_FLAGS_STRIDE)
    store_word(place + 8 * PLACE_PEER, peer)
    if await_flag(flag, target, load_word(link + 8 * LINK_SPINS), load_word(link + 8 * LINK_YIELDS)):
        return DONE
    return BLOCKED


@portable
def signal(job: int, at: int, channel: int) -> None:
    """The Signal whose words begin at `at`."""
    link = load_word(job + 8 * JOB_LINK)
    peer = load_word(at + 8)
    sent = counters_of(link, channel) + 8 * (COUNTERS + load_word(link + 8 * LINK_SIZE) + peer)
    count = load_word(sent) + 1
    store_word(sent, count)
    flag = load_word(load_word(link + 8 * LINK_FLAGS_OUT) + 8 * peer)
    raise_flag(flag + channel * load_word(link + 8 * LINK_FLAGS_STRIDE), count)


@portable
def leave(job: int, place: int, channel: int) -> None:
    """The end of a call: count what it has received and used, and be ready to run the job again."""
    link = load_word(job + 8 * JOB_LINK)
    counters = counters_of(link, channel)
    slices = load_word(job + 8 * JOB_SLICES)
    for peer in range(load_word(link + 8 * LINK_SIZE)):
        received = counters + 8 * (COUNTERS + peer)
        turns = slices * load_word(load_word(job + 8 * JOB_SIGNALS_IN) + 8 * peer)
        store_word(received, load_word(received) + turns)
    calls = load_word(counters + 8 * COUNT_CALLS) + 1
    store_word(counters + 8 * COUNT_CALLS, calls)
    first = load_word(counters + 8 * COUNT_SLOT)
    store_word(counters + 8 * COUNT_SLOT, (first + slices) % load_word(link + 8 * LINK_SLOTS))
    store_word(place + 8 * PLACE_PC, 0)
    store_word(place + 8 * PLACE_SLICE, 0)
    store_word(place + 8 * PLACE_ENTERED, 0)
    if channel == 0:
        store_word(load_word(link + 8 * LINK_FINISHED), calls)


@portable
def execute(job: int, channel: int, channels: int, lane: int, lanes: int) -> int:
    """Run the job's program, or go on with it. Returns DONE, BLOCKED (call again) or DIFFERENT (see `enter`).

    Every lane of every channel calls this with the same job. Channels are copies of the program on separate parts of
    the data, each with its own place, flags and counters; lanes share one channel's work. What they need again they
    read again: a GPU's lanes are short of registers.
    """
    place = job + 8 * (JOB_PLACE + PLACE_WORDS * channel)
    pc = load_word(place + 8 * PLACE_PC)
    slice = load_word(place + 8 * PLACE_SLICE)
    while slice < load_word(job + 8 * JOB_SLICES):
        at = load_word(job + 8 * JOB_CODE) + 8 * pc
        opcode = load_word(at)
        if opcode == MOVE:
            pc += move(job, at, slice, channel, channels, lane, lanes)
        elif opcode == SIGNAL:
            sync()
            if lane == 0:
                signal(job, at, channel)
            pc += 2
        elif opcode == END:
            pc = 0
            slice += 1
        else:
            if opcode == ENTER:
                sync()  # it releases what the lanes have put into scratch
            if lane == 0:
                status = DONE
                if opcode == WAIT:
                    status = wait(job, place, at, slice, channel)
                elif slice == 0 and load_word(place + 8 * PLACE_ENTERED) < 2:
                    status = enter(job, place, channel)
                store_word(place + 8 * PLACE_PC, pc)
                store_word(place + 8 * PLACE_SLICE, slice)
                store_word(place + 8 * PLACE_STATUS, status)
            sync()
            status = load_word(place + 8 * PLACE_STATUS)
            sync()
            if status != DONE:
                return status
            pc += 4 if opcode == WAIT else 1
    sync()
    if lane == 0:
        leave(job, place, channel)
    return DONE


@portable
def run_channel(job: int, channel: int, channels: int, lane: int, lanes: int) -> None:
    """What a block of threads does: `execute` one channel, and leave the status in PLACE_STATUS.

    A new job's are BLOCKED. When only some channels have ended, launching all of them again goes on with the others.
    """
    status = job + 8 * (JOB_PLACE + PLACE_WORDS * channel + PLACE_STATUS)
    pending = load_word(status) == BLOCKED
    sync()
    if pending:
        result = execute(job, channel, channels, lane, lanes)
        if lane == 0:
            store_word(status, result)


@portable
def agreed(job: int, channel: int) -> bool:
    """Whether all ranks' descriptors of the call that has just turned out DIFFERENT have one signature."""
    link = load_word(job + 8 * JOB_LINK)
    call = load_word(counters_of(link, channel) + 8 * COUNT_CALLS) + 1
    page = (channel * PAGES + call % PAGES) * PAGE_BYTES
    boards = load_word(link + 8 * LINK_BOARDS)
    for peer in range(load_word(link + 8 * LINK_SIZE)):
        theirs = load_word(boards + 8 * peer) + page
        for i in range(SIGNATURE_WORDS):
            if load_word(theirs + 8 + 8 * i) != load_word(job + 8 * (JOB_DESCRIPTOR + i)):
                return False
    return True


@portable
def give_up(job: int, place: int, channel: int) -> None:
    """Count a call that went no further than its entry, and be ready to run its job again."""
    counters = counters_of(load_word(job + 8 * JOB_LINK), channel)
    store_word(counters + 8 * COUNT_CALLS, load_word(counters + 8 * COUNT_CALLS) + 1)
    store_word(place + 8 * PLACE_PC, 0)
    store_word(place + 8 * PLACE_SLICE, 0)
    store_word(place + 8 * PLACE_ENTERED, 0)


@portable
def report(job: int, place: int, channel: int, status: int) -> None:
    """Tell the host how a call has failed, and the calls after it to do nothing."""
    link = load_word(job + 8 * JOB_LINK)
    words = load_word(link + 8 * LINK_REPORT)
    store_word(link + 8 * LINK_STOPPED, status)
    store_word(words + 8 * REPORT_CALL, load_word(counters_of(link, channel) + 8 * COUNT_CALLS) + 1)
    store_word(words + 8 * REPORT_PEER, load_word(place + 8 * PLACE_PEER))
    store_word(words + 8 * REPORT_CHANNEL, channel)
    raise_flag(words + 8 * REPORT_STATUS, status)


@portable
def run_call(job: int, channel: int, channels: int, lane: int, lanes: int) -> None:
    """What a block of threads does on a GPU, where nobody comes back to a launch: one channel's part of a whole call.

    Ranks that call the same with their arrays in different kinds of places run the alternative. A deadline that has
    passed (see the target's `doze`) or a mistake is reported to the host.
    """
    while job != 0:
        place = job + 8 * (JOB_PLACE + PLACE_WORDS * channel)
        if lane == 0:  # for all lanes alike: another channel may fail at this very moment
            store_word(place + 8 * PLACE_STATUS, load_word(load_word(job + 8 * JOB_LINK) + 8 * LINK_STOPPED))
        sync()
        stopped = load_word(place + 8 * PLACE_STATUS)
        sync()
        if stopped != 0:
            return
        status = execute(job, channel, channels, lane, lanes)
        alternative = load_word(job + 8 * JOB_ALTERNATIVE)
        if status != DIFFERENT or not agreed(job, channel):
            alternative = 0
        sync()
        if lane == 0 and alternative != 0:
            give_up(job, place, channel)
        elif lane == 0 and status != DONE:
            report(job, place, channel, status)
        job = alternative
        sync()
