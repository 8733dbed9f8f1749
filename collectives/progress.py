"""Calls that go on while the caller computes: a queue of jobs and the thread that runs them.

The thread stays in compiled code, without the interpreter lock, as long as nothing is wrong, so a caller busy in Python
does not hold a collective up. It sleeps while there is nothing to do.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from collectives.backends.base import Pending
from collectives.call import Call
from collectives.job import LINE, Job
from kernels.progress import IDLE, QUEUE_BYTES, QUEUE_CAPACITY, QUEUE_COMPLETED, QUEUE_SUBMITTED, QUEUE_TIMES

if TYPE_CHECKING:
    from collectives.backends.shm import Shm


class Queued(NamedTuple):
    """A call, its job, the objects that must live until it has ended, and what is to be called then."""

    call: Call
    job: Job
    keep: object
    ended: Callable[[], None]


class Progress:
    """A communicator's queue and thread."""

    def __init__(self, shm: Shm) -> None:
        self._shm = shm
        self._memory = np.zeros(QUEUE_BYTES + LINE, np.uint8)
        self._queue = -(-self._memory.ctypes.data // LINE) * LINE
        self._submit, self._serve, self._complete, self.settle = (
            shm.kernel(name).call for name in ("submit", "serve", "complete", "settle")
        )
        self._running: dict[int, Queued] = {}  # by number, from the one that was submitted first
        self._unswept = 1  # every call before this one has been swept
        self._closing = False
        self._lock = threading.Lock()  # of those who submit
        self.failure: tuple[int, BaseException] | None = None  # the number of the call that failed, and why
        self._thread = threading.Thread(target=self._work, name="mgpu progress", daemon=True)
        self._thread.start()
        _alive.add(self)

    @property
    def completed(self) -> int:
        """The number of the last call that has ended, counted modulo 2**32."""
        return ctypes.c_uint32.from_address(self._queue + QUEUE_COMPLETED).value

    @property
    def busy(self) -> bool:
        """Whether calls are under way."""
        return self.completed != self._submitted

    @property
    def _submitted(self) -> int:
        """The number of the last call that was put in, counted modulo 2**32. There is no other count of them, since
        Ctrl-C may come between any two lines."""
        return ctypes.c_uint32.from_address(self._queue + QUEUE_SUBMITTED).value

    @property
    def flag(self) -> int:
        """Address of the flag that counts ended calls."""
        return self._queue + QUEUE_COMPLETED

    def submit(self, queued: Queued) -> Ticket:
        """Put a call at the end of the queue, waiting for room if need be."""
        with self._lock:
            self.sweep()
            while len(self._running) >= QUEUE_CAPACITY - 1:
                self.settle(self.flag, self._unswept, 0, 0)
                self.sweep()
            first = self._unswept
            number = first + (self._submitted + 1 - first & 0xFFFFFFFF)
            self._running[number] = queued
            self._submit(self._queue, queued.job.address, number)
            return Ticket(self, number)

    def sweep(self) -> None:
        """Let go of the calls that have ended. Threads may do so at once, and none waits: each call is one's."""
        while self.ended(number := self._unswept):
            queued = self._running.pop(number, None)
            self._unswept = number + 1
            if queued is not None:
                queued.ended()

    def ended(self, number: int) -> bool:
        """Whether a call has ended."""
        return (self.completed - number) & 0xFFFFFFFF < 0x80000000

    def times(self, number: int) -> tuple[int, int]:
        """When a call that has ended was begun and ended, on the clock of time.monotonic_ns; good for as long as no
        QUEUE_CAPACITY calls have followed."""
        begun = self._queue + QUEUE_TIMES + 16 * ((number - 1) % QUEUE_CAPACITY)
        return ctypes.c_int64.from_address(begun).value, ctypes.c_int64.from_address(begun + 8).value

    def _work(self) -> None:
        while (self.busy or not self._closing) and self.failure is None:
            status = self._serve(self._queue)
            if status != IDLE:
                self._attend(status)

    def _attend(self, status: int) -> None:
        """See to the call after the last one that has ended: it waits, or differs between ranks."""
        following = self.completed + 1 & 0xFFFFFFFF
        number = next(number for number in list(self._running) if number & 0xFFFFFFFF == following)
        call, job = self._running[number][:2]  # and not what is to be let go of as soon as the call has ended
        try:
            self._shm.complete(job, call, status, None)
        except BaseException as error:  # raised again by every wait
            self._shm.fail(error)
            self.failure = number, error
            while self.busy:
                self._complete(self._queue)
        else:
            self._complete(self._queue)

    def disown(self, error: BaseException) -> None:
        """Let whoever waits for the calls under way, in a forked process that has no thread, hear so."""
        self.sweep()
        self.failure = self.failure or (self._unswept, error)

    def close(self) -> None:
        """Let the calls under way end, and the thread with them. Where the garbage collector calls this in that very
        thread, they end afterwards."""
        here = self._thread is threading.current_thread()
        while self.busy and self._thread.is_alive() and not here:
            self.settle(self.flag, self._submitted, 0, 0)
        self._closing = True
        if not here:
            self._thread.join()


_alive: weakref.WeakSet[Progress] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for progress in list(_alive):
        progress.close()


class Ticket(Pending):
    """One call in the queue."""

    def __init__(self, progress: Progress, number: int) -> None:
        self._progress, self._number = progress, number

    def wait(self) -> None:
        progress = self._progress
        while not progress.ended(self._number) and progress.failure is None:
            progress.settle(progress.flag, self._number, 200, 20)
        progress.sweep()
        if progress.failure is not None and self._number >= progress.failure[0]:
            raise copy(progress.failure[1]) from progress.failure[1]

    def done(self) -> bool:
        progress = self._progress
        done = progress.ended(self._number) or progress.failure is not None
        progress.sweep()
        return done

    def times(self) -> tuple[int, int]:
        return self._progress.times(self._number)
