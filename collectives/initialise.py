"""`init`: from a process that somebody started to a communicator of all ranks."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack

from collectives import cgroup, environment, recorder, threads, timeline
from collectives.backends.base import Backend
from collectives.backends.checked import Checked
from collectives.backends.shm import Shm
from collectives.backends.traced import Traced
from collectives.communicator import Communicator
from collectives.failure import report_failures
from collectives.host import Host
from collectives.rendezvous import Meeting, meet

BACKENDS = ("auto", "shm", "sim")


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    timeout: float = 300.0,
) -> Communicator:
    """The communicator of all ranks of this job; every rank calls it once.

    Under `mgpu run`, torchrun, mpirun or srun it needs no arguments; without a launcher there is one rank. Or give
    rank, size and address ("unix:NAME" on one host, "HOST:PORT" of rank 0). `timeout`, in seconds, is the deadline of
    this and of every later call. Also gives this process's thread pools (BLAS, OpenMP, Numba) their share of the host's
    cores, unless OMP_NUM_THREADS is set.

    MGPU_TIMELINE=FILE writes a timeline of all calls (see `collectives.timeline`). MGPU_DEBUG_RESULTS=1 looks for NaN
    and for results that differ between ranks after every call (see `collectives.backends.checked`).

    backend: "shm", processes on one host that share memory; "auto" chooses it. "sim": the GPU's kernels, in Numba's
    simulator, on the same memory, for tests (`spawn(..., backend="sim")` sets it up); ImportError where Numba does not
    simulate.

    Raises ValueError for a wrong argument or environment, CollectiveTimeoutError naming who came and who did not,
    PeerLostError naming a rank that died meanwhile, MemoryError where the host has too little. Under `mgpu run` and
    `spawn` a rank's death is seen at once from its first moment on. Other launchers, and whoever gives rank, size and
    address, cannot be asked about a rank that has not come yet: what is seen at once there is the death of rank 0, and
    of every rank, once it has come; for one that dies before that, the deadline is the answer.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; there are {', '.join(BACKENDS)}")
    report_failures()
    engine_class = _engine_class(backend)
    meeting = meet(environment.place(rank, size, address, timeout=timeout))
    with ExitStack() as undo:
        undo.callback(meeting.close)
        _share_processors(meeting)
        host = Host(meeting)
        undo.callback(host.close)
        engine = engine_class(host, range(meeting.size), 0, timeout)
        meeting.exchange(b"")  # nobody touches a peer's memory before everybody's is ready
        undo.pop_all()
    recorder.answer_signals()
    backend_: Backend = engine
    if notes := timeline.begin(engine.rank):
        backend_ = Traced(backend_, notes)
    if os.environ.get("MGPU_DEBUG_RESULTS") == "1":
        backend_ = Checked(backend_)
    return Communicator(backend_)


def _engine_class(backend: str) -> type[Shm]:
    if backend == "sim":
        from collectives.backends.sim import Sim

        return Sim
    return Shm


def _share_processors(meeting: Meeting) -> None:
    answers = [json.loads(mask) for mask in meeting.exchange(json.dumps(sorted(os.sched_getaffinity(0))).encode())]
    here = [peer.rank for peer in meeting.peers if peer.local or peer.rank == meeting.rank]
    masks = [answers[rank] for rank in here]
    threads.limit(threads.share(masks, here.index(meeting.rank), cgroup.cpu_quota()))
