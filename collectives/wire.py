"""MPI for those who must not hang: calls that return at once, and requests that are tested until they have ended or
somebody gives up. (A blocking MPI call cannot be left, and cannot raise.)
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from collectives.call import name_ranks
from collectives.channel import wait_for
from collectives.errors import CollectiveTimeoutError, PeerLostError

LOCK = threading.RLock()  # around every call of MPI, so that an MPI which threads may only use in turn will do
_GREETING = 27_751  # an unlikely tag, in a communicator that is the user's
_ROOM = 4096  # bytes of a greeting
_NAP = 0.001
_LAST_WORDS = 1.0  # seconds that others have to say what they know before this process's end ends them
_ABORTING = 1.0  # seconds that MPI_Abort may then take
_abandoned: list[Any] = []
_leaving: list[Any] = []


# With unequal parts these calls of Intel MPI 2021 hang, unless all ranks are told which algorithm to take: left to
# itself each seems to choose by the size of its own part.
_INTEL = {"I_MPI_ADJUST_IALLGATHERV": "2", "I_MPI_ADJUST_IALLTOALLV": "1"}


class Identity(NamedTuple):
    """What a rank tells the others of itself.

    host: ranks with equal ones share memory. machine: those with equal ones see each other's processes.
    processors: that it may run on. token: a secret, by which the ranks of its host may meet.
    """

    host: str
    pid: int
    machine: str
    processors: list[int]
    token: str

    @classmethod
    def of(cls, host: str) -> Identity:
        """This process's, on a host with this identity."""
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
        return cls(host, os.getpid(), machine, sorted(os.sched_getaffinity(0)), secrets.token_hex(32))

    @property
    def name(self) -> str:
        """The host's, for messages."""
        return self.host.partition(" ")[0]


class Word(NamedTuple):
    """What a rank says as it leaves a communicator. kind: "closed", or the name of the error it gives up with."""

    kind: str
    call: int  # how many collective calls it has begun
    text: str


def choose_algorithms() -> None:
    """To be called before MPI is loaded, which reads this when it starts."""
    for name, number in _INTEL.items():
        os.environ.setdefault(name, number)


def join(comm: Any, own: Identity, timeout: float) -> tuple[Any, Any, list[Identity]]:
    """Two private duplicates of an mpi4py communicator, one for calls and one for words, and every rank's identity.

    Raises CollectiveTimeoutError naming the ranks that have not come.
    """
    from mpi4py import MPI

    deadline = time.monotonic() + timeout
    size, others = comm.Get_size(), [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    greeting = np.frombuffer(json.dumps(own).encode().ljust(_ROOM), np.uint8)
    greetings = np.empty((size, _ROOM), np.uint8)
    greetings[comm.Get_rank()] = greeting
    with LOCK:
        came = {rank: comm.Irecv([greetings[rank], MPI.BYTE], rank, _GREETING) for rank in others}
        sent = [comm.Isend([greeting, MPI.BYTE], rank, _GREETING) for rank in others]
    while not ended([*came.values(), *sent]):
        if time.monotonic() > deadline:
            absent = [rank for rank, request in came.items() if not ended([request])]
            abandon([*came.values(), *sent], greeting)
            raise CollectiveTimeoutError(
                f"init among {size} ranks of MPI did not finish in {timeout:g} s: "
                + (f"{name_ranks(absent)} did not come" if absent else "a greeting was not received")
            )
        time.sleep(_NAP)
    copies = []
    for _ in range(2):
        with LOCK:
            copy, request = comm.Idup()
        while not ended([request]):
            if time.monotonic() > deadline:
                abandon([request])
                raise CollectiveTimeoutError(f"init among {size} ranks of MPI did not finish in {timeout:g} s")
            time.sleep(_NAP)
        copy.Set_errhandler(MPI.ERRORS_RETURN)  # which mpi4py raises
        copies.append(copy)
    return copies[0], copies[1], [Identity(*json.loads(bytes(each))) for each in greetings]


def ended(requests: Sequence[Any]) -> bool:
    """Whether all of these requests have ended. Those that have may be given again."""
    from mpi4py import MPI

    with LOCK:
        return bool(MPI.Request.Testall(requests))


def abandon(requests: Sequence[Any], *buffers: Any) -> None:
    """Requests that may never end: their memory is kept, and this process ends without MPI_Finalize, which would wait
    for them."""
    from mpi4py import MPI

    with suppress(MPI.Exception):
        if ended(requests):
            return
    if not _abandoned:
        MPI._set_abort_status(1)  # mpi4py then ends by MPI_Abort
    _abandoned.append((requests, buffers))


@atexit.register  # now, so that what others register is done before
def _leave() -> None:
    """After a request was abandoned: give others time to speak. MPI_Abort, which comes next, asks the launcher to end
    all ranks and waits for it, for ever if the network to it is gone: the alarm's signal ends this process then."""
    if _abandoned:
        time.sleep(_LAST_WORDS)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _ABORTING)


class Peers:
    """The ranks of a communicator, as far as one of them can know: what they have said, and who has died here."""

    def __init__(self, comm: Any, identities: Sequence[Identity]) -> None:
        self.comm, self.identities = comm, identities
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.said: dict[int, Word] = {}
        self._sent: list[tuple[Any, bytes]] = []
        self._pidfds: dict[int, int] = {}
        for rank in self.others:
            if identities[rank].machine == identities[self.rank].machine:
                try:
                    self._pidfds[os.pidfd_open(identities[rank].pid)] = rank
                except ProcessLookupError:
                    raise PeerLostError(f"{self.name([rank])} was lost: its process has ended") from None
                except (OSError, AttributeError):  # an older kernel, or a sandbox
                    pass

    def name(self, ranks: Sequence[int]) -> str:
        """Such as: ranks 0, 1, 5 (on nodeA)."""
        hosts = sorted({self.identities[rank].name for rank in ranks})
        return f"{name_ranks(ranks)} (on {', '.join(hosts)})" if hosts else name_ranks(ranks)

    def tell(self, word: Word) -> None:
        """Say something to all others, who hear it when they next wait."""
        from mpi4py import MPI

        text = json.dumps(word).encode()
        with LOCK:
            for rank in self.others:
                with suppress(MPI.Exception):
                    self._sent.append((self.comm.Isend([text, MPI.BYTE], rank), text))
        self.told()

    def told(self) -> bool:
        """Whether all that was said has left."""
        from mpi4py import MPI

        with LOCK, suppress(MPI.Exception):
            self._sent = [(request, text) for request, text in self._sent if not request.Test()]
        return not self._sent

    def listen(self) -> None:
        """Take in what others have said."""
        from mpi4py import MPI

        status = MPI.Status()
        with LOCK, suppress(MPI.Exception):
            while message := self.comm.Improbe(status=status):
                text = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([text, MPI.BYTE])
                self.said.setdefault(status.Get_source(), Word(*json.loads(text)))

    def dead(self) -> list[int]:
        """The ranks of this machine whose process has ended."""
        return [self._pidfds[pidfd] for pidfd in wait_for(self._pidfds, 0.0)]

    def close(self) -> None:
        """Forget the processes. What was said and has not left yet does so in MPI_Finalize."""
        _leaving.extend(self._sent)
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = {}
