"""Ways to run jobs: one at once, and a queue of them that one thread runs while another computes.

The queue is an array of 64-bit words at an address: three lines of 64 bytes, a ring of job addresses, and a ring of the
times at which each job was begun and ended, in nanoseconds. Submitted and completed are flags (see
`kernels/primitives.py`), counted up by the submitting and the running thread.
"""

from __future__ import annotations

from kernels.executor import DESCRIPTOR_WORDS, DONE, JOB_BASES, JOB_DESCRIPTOR, JOB_INPUTS, JOB_OUTPUTS, execute
from kernels.portable import portable
from kernels.primitives import await_flag, load_word, now, raise_flag, store_word

IDLE = 3  # what serve returns, beside execute's DONE, BLOCKED and DIFFERENT, when about 50 ms brought no job

QUEUE_SUBMITTED = 0  # byte offsets
QUEUE_COMPLETED = 64
QUEUE_TAKEN = 128
QUEUE_RING = 192
QUEUE_CAPACITY = 1024
QUEUE_TIMES = QUEUE_RING + 8 * QUEUE_CAPACITY
QUEUE_BYTES = QUEUE_TIMES + 16 * QUEUE_CAPACITY


@portable
def execute_on(job: int, rank: int, source: int, target: int) -> int:
    """`execute` the job with these addresses as the INPUT and OUTPUT of `rank`."""
    store_word(load_word(job + 8 * JOB_INPUTS) + 8 * rank, source)
    store_word(load_word(job + 8 * JOB_OUTPUTS) + 8 * rank, target)
    bases = load_word(job + 8 * JOB_BASES)
    if bases != 0:
        places = job + 8 * (JOB_DESCRIPTOR + DESCRIPTOR_WORDS - 2)
        store_word(places, source - load_word(bases + 8 * rank))
        store_word(places + 8, target - load_word(bases + 8 * rank))
    return execute(job, 0, 1, 0, 1)


@portable
def submit(queue: int, job: int, ticket: int) -> int:
    """Put a job at the end of the queue; `ticket` is its number, counted from 1. There must be room."""
    store_word(queue + QUEUE_RING + 8 * ((ticket - 1) % QUEUE_CAPACITY), job)
    store_word(queue + QUEUE_TIMES + 16 * ((ticket - 1) % QUEUE_CAPACITY), 0)
    raise_flag(queue + QUEUE_SUBMITTED, ticket)
    return DONE


@portable
def complete(queue: int) -> int:
    """Count the job that was taken last as completed, and wake who waits for it."""
    ticket = load_word(queue + QUEUE_TAKEN) + 1
    store_word(queue + QUEUE_TIMES + 16 * ((ticket - 1) % QUEUE_CAPACITY) + 8, now())
    store_word(queue + QUEUE_TAKEN, ticket)
    raise_flag(queue + QUEUE_COMPLETED, ticket)
    return DONE


@portable
def serve(queue: int) -> int:
    """Run jobs in order until one is BLOCKED or DIFFERENT (calling again goes on with it) or none has come (IDLE)."""
    while True:
        taken = load_word(queue + QUEUE_TAKEN)
        if not await_flag(queue + QUEUE_SUBMITTED, taken + 1, 0, 0):
            return IDLE
        begun = queue + QUEUE_TIMES + 16 * (taken % QUEUE_CAPACITY)
        if load_word(begun) == 0:
            store_word(begun, now())
        status = execute(load_word(queue + QUEUE_RING + 8 * (taken % QUEUE_CAPACITY)), 0, 1, 0, 1)
        if status != DONE:
            return status
        complete(queue)


@portable
def settle(flag: int, target: int, spins: int, yields: int) -> int:
    """Wait about 50 ms for a flag: 0 if it has reached `target`, else 1."""
    if await_flag(flag, target, spins, yields):
        return 0
    return 1
