"""The processes of a job's ranks on this host: each started in a session of its own, watched, and never left behind.

A session of its own keeps the terminal's Ctrl-C from reaching a rank twice, from the terminal and from us, and makes a
process group of whatever the rank starts.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from collectives import failure, threads
from collectives.channel import wait_for
from collectives.output import WholeLines
from collectives.roll import Roll, describe_end

GRACE = 5.0  # seconds that ranks have to end by themselves after one has failed, and again after SIGTERM
ASKED_GRACE = 30.0  # and when somebody has asked them to: to finish a step or a test, and write a checkpoint
_SWEEP = 1.0  # seconds for what ranks have started to end after them
_PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    """One rank's process. status: its exit code, or minus the signal that killed it; None while it runs."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int | None
    status: int | None = None
    signalled: bool = False  # by us, before its end

    def describe(self) -> str:
        """How it ended."""
        return f"rank {self.number} {'is running' if self.status is None else describe_end(self.status)}"


class Ranks:
    """All ranks of a job that has this one host. `close` ends them, whatever has happened before."""

    def __init__(self, size: int, threads_each: int | None = None, pin: bool = False) -> None:
        """threads_each: for each rank's pools; None for its share. pin: keep each rank on processors of its own."""
        self.size = size
        self.all: list[Rank] = []
        self._pins = threads.pins(size) if pin else None
        self._environ = {name: value for name, value in os.environ.items() if name != failure.VARIABLE}
        if threads_each is not None:
            self._environ.update(dict.fromkeys(threads.VARIABLES, str(threads_each)))
        self._environ.update(threads.variables(threads.here(size), self._environ))
        run = secrets.token_hex(8)
        address = f"unix:mgpu {run}"
        self._roll = Roll(address, size)
        self._environ.update(
            self._roll.variables,
            MGPU_SIZE=str(size),
            MGPU_LOCAL_SIZE=str(size),
            MGPU_ADDRESS=address,
            MGPU_SECRET=secrets.token_hex(32),
            MGPU_RUN=run,
        )

    def start(
        self, command: Sequence[str], environ: dict[str, str], pass_fds: Sequence[int] = (), **options: Any
    ) -> None:
        """Start the next rank; `pass_fds` and `options` are subprocess.Popen's."""
        number = len(self.all)
        before = os.sched_getaffinity(0)
        if self._pins:
            os.sched_setaffinity(
                0, self._pins[number]
            )  # of this thread, and so of the new process from its first moment
        try:
            process = subprocess.Popen(
                command,
                env={**self._environ, "MGPU_RANK": str(number), "MGPU_LOCAL_RANK": str(number), **environ},
                start_new_session=True,
                pass_fds=[*pass_fds, self._roll.reader],
                **options,
            )
        finally:
            if self._pins:
                os.sched_setaffinity(0, before)
        try:
            pidfd = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            pidfd = None
        self.all.append(Rank(number, process, pidfd))

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.all if rank.status is None]

    def wait(self, files: Iterable[Any], deadline: float) -> tuple[list[int], list[Rank]]:
        """Wait for any of these files, any rank's end, or the deadline; which files are ready and which ranks ended."""
        if not all(rank.pidfd is not None for rank in self.running):
            deadline = min(deadline, time.monotonic() + 0.02)  # an older kernel: look again soon
        pidfds = [rank.pidfd for rank in self.running if rank.pidfd is not None]
        ready = wait_for([*files, *pidfds], deadline)
        return ready, [rank for rank in self.running if self._has_ended(rank)]

    def send_signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for rank in self.running:
            rank.signalled = True
            with suppress(ProcessLookupError):  # it has ended, where SIGCHLD is ignored; else its id is still its own
                os.kill(rank.process.pid, number)

    def stop(self, number: int = signal.SIGTERM, grace: float | None = None, output: WholeLines | None = None) -> None:
        """End all ranks: by this signal, with `grace` seconds to heed it (None: GRACE), then by SIGKILL. What they say
        meanwhile is `output`'s to copy: they may wait for that."""
        try:
            self.send_signal(number)
            self.send_signal(signal.SIGCONT)  # one that is stopped hears it only then
            self._wait_for_all(GRACE if grace is None else grace, output)
        finally:  # at Ctrl-C, at once
            self.send_signal(signal.SIGKILL)
            self._wait_for_all(GRACE)

    def close(self) -> None:
        """End all ranks and whatever they have started, and forget them."""
        try:
            self.stop()
        finally:
            self._sweep()
            for rank in self.all:
                rank.process.wait()
                for stream in (rank.process.stdout, rank.process.stderr):
                    if stream:
                        stream.close()
                if rank.pidfd is not None:
                    os.close(rank.pidfd)
            self.all = []
            self._roll.close()

    def _wait_for_all(self, seconds: float, output: WholeLines | None = None) -> None:
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            ready, _ = self.wait(output.pipes if output else [], deadline)
            if output:
                output.pump(ready)

    def _has_ended(self, rank: Rank) -> bool:
        """Notes how. It stays a zombie until `close`, so that its id, which names its group, is not used again."""
        if rank.status is None:
            try:
                result = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # SIGCHLD is ignored here, and the kernel has not kept the status
                rank.status = 0
            else:
                if result:
                    rank.status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            if rank.status is not None:
                self._roll.note(rank.number, rank.status)
        return rank.status is not None

    def _sweep(self) -> None:
        groups = {rank.process.pid for rank in self.all}
        deadline = time.monotonic() + _SWEEP
        while (left := _members(groups)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for group in left:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def die_with(parent: int) -> Callable[[], None]:
    """What a new process calls to be killed when the thread that started it, in the process `parent`, ends."""
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # too late
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


def _members(groups: set[int]) -> set[int]:
    """Those of the process groups that have living members."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, _, group = file.read().rpartition(")")[2].split()[:3]
                if int(group) in groups and state not in "ZX":
                    found.add(int(group))
    return found
