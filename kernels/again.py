"""The short way of a call whose like was made before: compiled code finds out, from the arguments as Python's objects,
that it knows the call, and makes it.

A *table* of 64-bit words has a row for each kind of call: its terms, what x is like, what that says of the result, and
the job for the executor. Terms are compared as objects, for which Python's own must be one: `"sum"`, None, small
numbers. Arrays are not remembered. Each call looks at x and out anew, where NumPy keeps what it knows of an array (as
its C interface lays down): so one that was resized, reshaped or made read-only is seen to be so, and any other array
that is like the first is as good.

"Object" below is an object's address; the layouts are CPython's and NumPy's. Whoever calls `admit` has the
communicator's lock.
"""

from __future__ import annotations

from kernels.executor import JOB_LINK, LINK_STOPPED
from kernels.portable import portable
from kernels.primitives import load_word, store_word
from kernels.progress import execute_on

# A numpy.ndarray, from the end of the header that all objects have; its type is the header's last word.
ARRAY_DATA = 0
ARRAY_NDIM = 8  # 32 bits
ARRAY_DIMS = 16  # ->
ARRAY_DTYPE = 40  # object
ARRAY_FLAGS = 48  # 32 bits
READABLE, WRITABLE = 0x101, 0x501  # C-contiguous and aligned, and writable too
DTYPE_KIND = 8  # from the end of a numpy.dtype's header: the word that tells plain dtypes apart

# The table. Words; "->" marks an address.
TABLE_ACQUIRE = 0  # object: what takes the communicator's lock
TABLE_RELEASE = 1  # object: what lets it go
TABLE_NONE = 2  # object
TABLE_ARRAY = 3  # object: the type numpy.ndarray
TABLE_HEADER = 4  # bytes of an object's header
TABLE_RANK = 5
TABLE_HEAP = 6  # -> this rank's symmetric memory
TABLE_HEAP_BYTES = 7
TABLE_PENDING = 8  # the thread that has begun a call, not ended it, and has the lock; 0 if none has
TABLE_SLOTS = 9  # SLOTS words: 1 + the number of a row, or 0
SLOTS = 2048
TABLE_ROWS = TABLE_SLOTS + SLOTS  # MOST_ROWS of ROW_WORDS
MOST_ROWS = 1024

ROW_COLLECTIVE = 0  # object, as are the other terms
ROW_OP = 1
ROW_ROOT = 2
ROW_ALGORITHM = 3
ROW_ASYNC = 4
ROW_DTYPE = 5  # of x and out: the word DTYPE_KIND
ROW_BYTES = 6  # of x
ROW_OUT_COUNT = 7  # elements
ROW_OUT_BYTES = 8
ROW_AHEAD = 9  # bytes from out's beginning to x's, where they may overlap; NEVER
ROW_FRESH = 10  # whether it is known what a new array for the result is like
ROW_JOBS = 11  # -> two jobs, or 0: for arrays not all in symmetric memory, and for those that are
ROW_JOB = 13  # -> of the call under way
ROW_SOURCE = 14
ROW_TARGET = 15
ROW_STATUS = 16  # what the executor returned
ROW_NDIM = 17
ROW_DIMS = 18
MOST_DIMS = 8
ROW_WORDS = ROW_DIMS + MOST_DIMS
NEVER = 1 << 62

UNKNOWN = -(1 << 62)


@portable
def row_of(table: int, number: int) -> int:
    """Where a row is."""
    return table + 8 * (TABLE_ROWS + ROW_WORDS * number)


@portable
def mix(digest: int, word: int) -> int:
    """A step of a hash."""
    return (digest * 31 + (((word >> 4) ^ word) & 0xFFFFFFFFFFFF)) & 0xFFFFFFFFFFFF


@portable
def is_plain(table: int, x: int, flags: int) -> bool:
    """Whether an object is a NumPy array, and no subclass's, with these flags."""
    header = load_word(table + 8 * TABLE_HEADER)
    if load_word(x + header - 8) != load_word(table + 8 * TABLE_ARRAY):
        return False
    return load_word(x + header + ARRAY_FLAGS) & flags == flags


@portable
def dtype_of(table: int, array: int) -> int:
    """The word that says which dtype an array has. `array`: where its own words are."""
    return load_word(load_word(array + ARRAY_DTYPE) + load_word(table + 8 * TABLE_HEADER) + DTYPE_KIND)


@portable
def first_slot(table: int, array: int, collective: int, op: int, root: int) -> int:
    """The slot from which on a row is looked for."""
    ndim, dims = load_word(array + ARRAY_NDIM) & 0xFFFFFFFF, load_word(array + ARRAY_DIMS)
    digest = mix(mix(mix(mix(ndim, collective), op), root), dtype_of(table, array))
    for i in range(ndim):
        digest = mix(digest, load_word(dims + 8 * i))
    return (digest ^ (digest >> 11) ^ (digest >> 23)) % SLOTS


@portable
def find_row(table: int, array: int, collective: int, op: int, root: int, algorithm: int, async_op: int) -> int:
    """The number of a call's row; else `~slot`, where it may be put in. `array`: where x's own words are."""
    slot = first_slot(table, array, collective, op, root)
    while True:
        number = load_word(table + 8 * (TABLE_SLOTS + slot)) - 1
        if number < 0:
            return ~slot
        if is_row_of(table, row_of(table, number), array, collective, op, root, algorithm, async_op):
            return number
        slot = (slot + 1) % SLOTS


@portable
def is_row_of(
    table: int, row: int, array: int, collective: int, op: int, root: int, algorithm: int, async_op: int
) -> bool:
    """Whether a row is that of a call. `array`: where x's own words are."""
    if (
        load_word(row + 8 * ROW_COLLECTIVE) != collective
        or load_word(row + 8 * ROW_OP) != op
        or load_word(row + 8 * ROW_ROOT) != root
        or load_word(row + 8 * ROW_ALGORITHM) != algorithm
        or load_word(row + 8 * ROW_ASYNC) != async_op
        or load_word(row + 8 * ROW_DTYPE) != dtype_of(table, array)
    ):
        return False
    ndim, dims = load_word(array + ARRAY_NDIM) & 0xFFFFFFFF, load_word(array + ARRAY_DIMS)
    if load_word(row + 8 * ROW_NDIM) != ndim:
        return False
    for i in range(ndim):
        if load_word(row + 8 * (ROW_DIMS + i)) != load_word(dims + 8 * i):
            return False
    return True


@portable
def takes(table: int, row: int, x: int, out: int) -> bool:
    """Whether the result may go into `out`: the right size and dtype, and apart from x or as a call in place has it."""
    if not is_plain(table, out, WRITABLE):
        return False
    header = load_word(table + 8 * TABLE_HEADER)
    source, array = load_word(x + header + ARRAY_DATA), out + header
    dims, count = load_word(array + ARRAY_DIMS), 1
    for i in range(load_word(array + ARRAY_NDIM) & 0xFFFFFFFF):
        count *= load_word(dims + 8 * i)
    if count != load_word(row + 8 * ROW_OUT_COUNT) or dtype_of(table, array) != load_word(row + 8 * ROW_DTYPE):
        return False
    target = load_word(array + ARRAY_DATA)
    apart = source + load_word(row + 8 * ROW_BYTES) <= target or target + load_word(row + 8 * ROW_OUT_BYTES) <= source
    return apart or source - target == load_word(row + 8 * ROW_AHEAD)


@portable
def is_inside(table: int, address: int, nbytes: int) -> bool:
    """Whether these bytes are in symmetric memory."""
    offset = address - load_word(table + 8 * TABLE_HEAP)
    return 0 <= offset and offset <= load_word(table + 8 * TABLE_HEAP_BYTES) - nbytes


@portable
def admit(table: int, x: int, out: int, collective: int, op: int, root: int, algorithm: int, async_op: int) -> int:
    """What to do with a call: its row's number `n` for `go`; UNKNOWN; or `~(2 * n + symmetric)` where the row fits and
    Python has the rest to do: make an array for the result, or a job.
    """
    if not is_plain(table, x, READABLE):
        return UNKNOWN
    array = x + load_word(table + 8 * TABLE_HEADER)
    number = find_row(table, array, collective, op, root, algorithm, async_op)
    if number < 0:
        return UNKNOWN
    row = row_of(table, number)
    if out == load_word(table + 8 * TABLE_NONE):
        if load_word(row + 8 * ROW_FRESH) == 0:
            return UNKNOWN
        return ~(2 * number)
    if not takes(table, row, x, out):
        return UNKNOWN
    source = load_word(array + ARRAY_DATA)
    target = load_word(out + load_word(table + 8 * TABLE_HEADER) + ARRAY_DATA)
    symmetric = 0
    if is_inside(table, source, load_word(row + 8 * ROW_BYTES)):
        if is_inside(table, target, load_word(row + 8 * ROW_OUT_BYTES)):
            symmetric = 1
    job = load_word(row + 8 * (ROW_JOBS + symmetric))
    if job == 0 or load_word(load_word(job + 8 * JOB_LINK) + 8 * LINK_STOPPED) != 0:
        return ~(2 * number + symmetric)
    store_word(row + 8 * ROW_JOB, job)
    store_word(row + 8 * ROW_SOURCE, source)
    store_word(row + 8 * ROW_TARGET, target)
    return number


@portable
def go(table: int, number: int) -> int:
    """Make the call that was admitted. Returns the executor's status, which is in the row, too."""
    row = row_of(table, number)
    source, target = load_word(row + 8 * ROW_SOURCE), load_word(row + 8 * ROW_TARGET)
    status = execute_on(load_word(row + 8 * ROW_JOB), load_word(table + 8 * TABLE_RANK), source, target)
    store_word(row + 8 * ROW_STATUS, status)
    return status


@portable
def short_way(
    table: int, number: int, x: int, out: int, collective: int, op: int, root: int, algorithm: int, async_op: int
) -> int:
    """The two halves of a call, between which the interpreter's lock is let go: `admit`, where the number is UNKNOWN,
    and `go`."""
    if number == UNKNOWN:
        return admit(table, x, out, collective, op, root, algorithm, async_op)
    return go(table, number)
