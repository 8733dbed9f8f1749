"""Signals between two ranks, for one-sided communication: every ordered pair counts its own. What a rank has done
before it signals, in its own memory or a peer's, is visible to the one that has waited for the signal.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from collectives.contract import Contract, geometry
from collectives.deadlock import Doing, Waiting
from collectives.job import Encoded, Job, Link
from collectives.program import Program, Signal, Wait
from collectives.watch import Watch
from kernels.dtypes import find
from kernels.executor import DONE

if TYPE_CHECKING:
    from collectives.backends.shm import Shm


def signal_program() -> Program:
    """Rank 0 signals, rank 1 waits. It has no Enter: it goes on from signal to signal."""
    contract = Contract("send_recv", 2)
    bodies = ((Signal(1),), (Wait(0, signal=1),))
    return Program(contract, "signal", "symmetric", 2, pipelined=False, cells=0, bodies=bodies)


class Signals:
    """One rank's signals to and from each rank of its communicator, itself included."""

    def __init__(self, shm: Shm) -> None:
        self._shm = shm
        self._jobs: dict[tuple[int, bool], Job] = {}
        self._execute_on = shm.kernel("execute_on").call

    def send(self, peer: int) -> None:
        """One signal more for `peer`."""
        self._execute_on(self._job(peer, True).address, 0, 0, 0)

    def wait(self, peer: int) -> None:
        """Wait for the next signal of `peer`."""
        shm, job = self._shm, self._job(peer, False)
        if self._execute_on(job.address, 1, 0, 0) == DONE:
            return
        with Watch(shm, lambda: f"wait_signal({peer})") as watch:
            while True:
                waiting = None if shm.busy else Waiting(Doing.WAIT_SIGNAL, peer)
                watch.look([peer], partial(shm.history, [peer]), waiting)
                if self._execute_on(job.address, 1, 0, 0) == DONE:
                    return

    def _job(self, peer: int, sending: bool) -> Job:
        if (peer, sending) not in self._jobs:
            self._jobs[peer, sending] = self._make_job(peer, sending)
        return self._jobs[peer, sending]

    def _make_job(self, peer: int, sending: bool) -> Job:
        sender, receiver = (self._shm.rank, peer) if sending else (peer, self._shm.rank)
        flag = self._shm.regions[receiver].flag(3, sender)
        finished = np.zeros(1, np.int64)
        link = Link(
            0 if sending else 1,
            scratch=(0, 0),
            boards=(0, 0),
            flags_in=(0, 0) if sending else (flag, 0),
            flags_out=(0, flag) if sending else (0, 0),
            finished=finished.ctypes.data,
            slots=2,
            slot_bytes=0,
            patience=self._shm.patience,
            keep=finished,
        )
        byte = find("uint8")
        encoded = Encoded.of(signal_program(), link.rank)
        return Job(link, encoded, geometry(encoded.program.contract, 0), byte)
