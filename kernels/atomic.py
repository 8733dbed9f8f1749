"""What several ranks may do to one word at the same time: count in it, and hold a lock.

A lock is a flag (see `kernels/primitives.py`) that many sides write: 0 when free, else the number, from 1, of who holds
it. It says who that is, so that those who wait can look whether the holder still lives.
"""

from __future__ import annotations

from kernels.executor import BLOCKED, DONE
from kernels.portable import portable
from kernels.primitives import add_word, compare_exchange, doze, load_acquire, raise_flag


@portable
def fetch_add(address: int, value: int) -> int:
    """Add to the 64-bit word at `address`, which wraps; what it was. Orders all accesses before and after."""
    return add_word(address, value)


@portable
def acquire(lock: int, holder: int, spins: int, yields: int) -> int:
    """Take the lock: DONE, or BLOCKED after about 50 ms in which others had it. What its last holder did is visible."""
    round = 0
    while True:
        if compare_exchange(lock, 0, holder) == 0:
            return DONE
        seen = load_acquire(lock)
        if seen != 0 and not doze(round, lock, seen, spins, yields):
            return BLOCKED
        round += 1


@portable
def release(lock: int) -> int:
    """Let the lock go, and wake those who wait for it."""
    raise_flag(lock, 0)
    return DONE
