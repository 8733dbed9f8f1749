"""The few things that hardware does differently: atomics, waiting, wide loads. Here are their names, what they
mean, and their Python bodies; `kernels/targets/` has the CPU's and CUDA's.

Every address and value is a 64-bit integer. A *flag* is a 32-bit counter alone on a 64-byte line, written by
one side only; the next 32 bits count the waiters asleep on it (CPU). Flags wrap around: they are compared
by signed difference.
"""

from __future__ import annotations

import ctypes
import time

from kernels.portable import portable, primitive


@primitive
def load_word(address: int) -> int:
    """The 64-bit word at `address`."""
    return ctypes.c_int64.from_address(address).value


@primitive
def store_word(address: int, value: int) -> None:
    """Write a 64-bit word."""
    ctypes.c_int64.from_address(address).value = value


@primitive
def load_acquire(flag: int) -> int:
    """The flag's value, 0 to 2**32 - 1. What its writer did before `raise_flag` is visible afterwards."""
    return ctypes.c_uint32.from_address(flag).value


@primitive
def raise_flag(flag: int, value: int) -> None:
    """Give the flag a new value (modulo 2**32) after everything this rank has done so far, and wake its waiters."""
    ctypes.c_uint32.from_address(flag).value = value & 0xFFFFFFFF


@primitive
def fetch_ahead(address: int) -> None:
    """A hint that the memory at `address` will be read soon (CPU)."""


@primitive
def add_word(address: int, value: int) -> int:
    """Add to the 64-bit word at `address` in one step, as no load and store can; what it was. A full fence.

    (This body is one step only among threads that share an interpreter lock.)
    """
    word = ctypes.c_int64.from_address(address)
    before = word.value
    word.value = before + value
    return before


@primitive
def compare_exchange(flag: int, expected: int, value: int) -> int:
    """Give the flag the value if it is as expected, in one step; what it was, 0 to 2**32 - 1. A full fence.

    (This body is one step only among threads that share an interpreter lock.)
    """
    word = ctypes.c_uint32.from_address(flag)
    before = word.value
    if before == expected:
        word.value = value
    return before


@primitive
def integer_of(object: int) -> int:
    """The value of one of Python's integers, given the address of the object; -2**62 for one of more than 64 bits."""
    value: int = ctypes.cast(object, ctypes.py_object).value
    return value if -(2**63) <= value < 2**63 else -(2**62)


@primitive
def now() -> int:
    """Nanoseconds of a clock that all processes of this host share and that never goes back."""
    return time.monotonic_ns()


@primitive
def doze(round: int, flag: int, seen: int, spins: int, yields: int) -> bool:
    """Pass the time between two looks at `flag`, whose value was `seen`: spin first, then yield, then sleep.

    `round` counts the looks. False says that about 50 ms have gone by in sleep: time to report back. With negative
    `yields` it says so as soon as the spins are over.
    """
    if round < spins + yields:
        time.sleep(0)
        return True
    if yields < 0:
        return False
    time.sleep(0.0002)
    return (round - spins - yields + 1) % 250 != 0


@primitive
def sync() -> None:
    """Wait for the other lanes of this channel. One lane needs none."""


@primitive
def copy_bytes(dst: int, src: int, nbytes: int, lane: int, lanes: int) -> None:
    """Copy `nbytes` between places that are the same or do not overlap; the lanes share the work."""
    if lane == 0:
        ctypes.memmove(dst, src, nbytes)


@primitive
def take_over(address: int, nbytes: int) -> None:
    """Have the lines of what another rank has written, and this one alone reads, in this core's own possession: a word
    of each is rewritten as it is (CPU).

    On AMD's processors it takes a writer up to four times as long to write over a line that another core has only read
    as over one that the other core has written. `address` is a multiple of 8.
    """


@primitive
def block_bytes() -> int:
    """What is read at a time before it is taken over: so much that the nearest cache holds it. 0: nothing is (CUDA)."""
    return 1 << 30


@primitive
def copy_past_caches(dst: int, src: int, nbytes: int) -> None:
    """Copy what is larger than the caches: without reading what is written over, and leaving in them what is there.

    The data are visible to who sees the next `raise_flag`.
    """
    ctypes.memmove(dst, src, nbytes)


@primitive
def combine(
    function: int, dsts: int, ndst: int, srcs: int, nsrc: int,
    count: int, raw: int, final: int, scale: int, lane: int, lanes: int,
) -> None:  # fmt: skip
    """Reduce `nsrc` sources of `count` elements into `ndst` destinations: `kernels.elementwise.reduce` for one dtype
    and operation, which the target looks up in `function` or was compiled for."""
    raise LookupError("combine has no meaning of its own: bind it to a reduction")


@portable
def reached(value: int, target: int) -> bool:
    """Whether a counter that wraps at 2**32 has come to `target`."""
    return ((value - target) & 0xFFFFFFFF) < 0x80000000


@portable
def await_flag(flag: int, target: int, spins: int, yields: int, data: int = 0) -> bool:
    """Wait until the flag reaches `target`. False: it has not, in about 50 ms. `data`, if given: where what it tells of
    begins, which is then on its way to this core at the same time as the flag."""
    round = 0
    while True:
        if data != 0:
            fetch_ahead(data)
        seen = load_acquire(flag)
        if reached(seen, target):
            return True
        if not doze(round, flag, seen, spins, yields):
            return False
        round += 1
