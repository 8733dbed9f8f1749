"""`init`: from a process that somebody started to a communicator of all ranks."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from collectives import cgroup, environment, recorder, threads, timeline, wire
from collectives.backends.base import Backend
from collectives.backends.checked import Checked
from collectives.backends.shm import Shm
from collectives.backends.traced import Traced
from collectives.communicator import Communicator
from collectives.errors import CollectiveMismatchError
from collectives.failure import report_failures
from collectives.host import Host
from collectives.place import Place
from collectives.rendezvous import Meeting, machine, meet

if TYPE_CHECKING:
    from collectives.backends.tcp import Tcp
    from kernels.driver import Driver

BACKENDS = ("auto", "shm", "sim", "cuda", "nccl", "cuda+nccl", "mpi", "shm+mpi")
ON_GPU = ("cuda", "nccl", "cuda+nccl")
ACROSS_HOSTS = ("nccl", "cuda+nccl")


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    device: int | None = None,
    mpi: Any = None,
    timeout: float = 300.0,
) -> Communicator:
    """The communicator of all ranks of this job; every rank calls it once.

    Under `mgpu run`, torchrun, mpirun or srun it needs no arguments; without a launcher there is one rank. Or give
    rank, size and address ("unix:NAME" on one host, "HOST:PORT" of rank 0). `timeout`, in seconds, is the deadline of
    this and of every later call. Also gives this process's thread pools (BLAS, OpenMP, Numba) their share of the host's
    cores, unless OMP_NUM_THREADS is set.

    MGPU_TIMELINE=FILE writes a timeline of all calls (see `collectives.timeline`). MGPU_DEBUG_RESULTS=1 looks for NaN
    and for results that differ between ranks after every call (see `collectives.backends.checked`).

    backend, the same on every rank: "shm", processes on one host that share memory. "cuda", a GPU for each of them:
    number `device` of those that the process sees, or else the rank's number on its host, counted round, which becomes
    the calling thread's GPU; arrays of the CPU go as with "shm". "nccl": the same through NVIDIA's NCCL, by nccl4py, on
    any number of hosts; where there are several, arrays of the CPU go by way of rank 0, which is meant for small ones.
    "cuda+nccl": all-reduces are done in parts, by "cuda" inside a host and NCCL between. "sim": the GPU's kernels in
    Numba's simulator, on the host's memory, for tests (`spawn(..., backend="sim")` sets it up); ImportError where Numba
    does not simulate. "shm+mpi": processes on several hosts, which share memory inside each and use MPI between. "mpi":
    MPI alone. Both need mpi4py, and take rank and size from MPI. "auto": where every rank has a GPU and CUDA's Python
    packages, "cuda" on one host and "nccl" on several; else "shm". But where mpirun or srun has started ranks on
    several hosts and mpi4py is there, "shm+mpi".

    mpi: an mpi4py communicator, whose ranks these are, instead of all that MPI has. MGPU_HOST=NAME gives a host an
    identity of its own: ranks with the same one share memory.

    Raises ValueError for a wrong argument or environment, CollectiveMismatchError for backends that differ,
    CollectiveTimeoutError naming who came and who did not, PeerLostError naming a rank that died meanwhile, MemoryError
    where the host has too little. Under `mgpu run` and `spawn` a rank's death is seen at once from its first moment on.
    Other launchers, and whoever gives rank, size and address, cannot be asked about a rank that has not come yet: what
    is seen at once there is the death of rank 0, and of every rank, once it has come; for one that dies before that,
    the deadline is the answer.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; there are {', '.join(BACKENDS)}")
    report_failures()
    given = rank is not None or size is not None or address is not None
    if backend in ("mpi", "shm+mpi") or mpi is not None or (backend == "auto" and not given and _mpi_is_meant()):
        if given:
            raise ValueError(f"backend={backend!r} takes rank, size and address from MPI; leave them out")
        if backend not in ("auto", "mpi", "shm+mpi"):
            raise ValueError(f"backend={backend!r} does not join the ranks of an MPI communicator")
        engine = _over_mpi(backend, mpi, device, timeout)
    else:
        place = environment.place(rank, size, address, timeout=timeout)
        engine = _join(place, backend, _host_engine(backend), partial(_gpu, device))
    recorder.answer_signals()
    if notes := timeline.begin(engine.rank):
        engine = Traced(engine, notes)
    if os.environ.get("MGPU_DEBUG_RESULTS") == "1" and engine.name not in ON_GPU:
        engine = Checked(engine)
    return Communicator(engine)


def init_all(devices: Sequence[int], *, timeout: float = 300.0) -> list[Communicator]:
    """One process with several GPUs: a communicator for each of `devices`, rank by rank. A device may be named several
    times; its ranks' calls are then one cooperative launch, made by the last of them to call.

    Collectives of GPU arrays may be called from one thread, for one rank after the other, since they do not wait. What
    waits on the host (empty, barrier, split, signal, messages, arrays of the CPU) needs a thread for each rank.

    Raises ValueError for a device that does not exist, and what `init` raises.
    """
    from kernels.driver import Driver

    drivers = {device: Driver(device) for device in dict.fromkeys(devices)}
    return join_all([drivers[device] for device in devices], timeout)


def join_all(drivers: Sequence[Driver], timeout: float) -> list[Communicator]:
    """A rank for each driver, all in this process."""
    from collectives.backends.cuda import Cuda, Process

    process, size, address = Process(drivers), len(drivers), f"unix:{secrets.token_hex(16)}"

    def join(rank: int) -> Communicator:
        place = environment.place(rank, size, address, timeout=timeout)
        return Communicator(
            _join(place, "cuda", Shm, lambda _, control: Cuda(cast(Shm, control), drivers[rank], process))
        )

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


def _join(place: Place, backend: str, engine_class: type[Shm], on_gpu: Callable[[str, Shm | Tcp], Backend]) -> Backend:
    """This rank's engine, when all ranks have met. `on_gpu(backend, control)` makes one of GPUs."""
    meeting = meet(place)
    with ExitStack() as undo:
        undo.callback(meeting.close)
        _share_processors(meeting)
        backend = _agree(backend, meeting)
        control: Shm | Tcp
        if backend in ACROSS_HOSTS and not all(peer.local for peer in meeting.peers):
            control = _over_tcp(meeting, place.timeout)
            undo.callback(control.close)
        else:
            host = Host(meeting)
            undo.callback(host.close)
            control = engine_class(host, range(meeting.size), 0, place.timeout)
            meeting.exchange(b"")  # nobody touches a peer's memory before everybody's is ready
        try:
            engine = on_gpu(backend, control) if backend in ON_GPU else control
        except BaseException as error:
            control.fail(error)  # for those who wait for this rank in there
            raise
        undo.pop_all()
    return engine


def _over_tcp(meeting: Meeting, timeout: float) -> Tcp:
    from collectives.backends.tcp import Tcp
    from collectives.post import Post

    return Tcp(Post(meeting), range(meeting.size), timeout)


def _agree(backend: str, meeting: Meeting) -> str:
    """The backend that all ranks ask for, chosen where it is "auto"."""
    answers = [json.loads(answer) for answer in meeting.exchange(json.dumps([backend, _has_gpu()]).encode())]
    if len({name for name, _ in answers}) > 1:
        asked = ", ".join(f"rank {rank} {name}" for rank, (name, _) in enumerate(answers))
        raise CollectiveMismatchError(f"the ranks ask for different backends: {asked}")
    without = [peer for peer, (_, gpu) in zip(meeting.peers, answers) if not gpu]
    several = not all(peer.local for peer in meeting.peers)
    if several and len(without) < meeting.size and backend in ("auto", *ACROSS_HOSTS):
        if without:
            told = ", ".join(f"rank {peer.rank} (on {peer.hostname})" for peer in without)
            raise RuntimeError(
                f"some hosts have GPUs, and others none: {told}. There is no /dev/nvidiactl there, or CUDA's Python "
                f"packages are missing; `mgpu doctor` on that host says more. To leave GPUs alone, start the ranks by "
                f"mpirun or srun, with backend='shm+mpi'"
            )
        return "nccl" if backend == "auto" else backend
    if backend != "auto":
        return backend
    return "shm" if without or several else "cuda"


def _has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl") and find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def _gpu(device: int | None, backend: str, control: Shm | Tcp) -> Backend:
    from kernels.driver import Driver, devices

    local_rank = sum(peer.local and peer.rank < control.rank for peer in control.host.meeting.peers)
    driver = Driver(local_rank % max(devices(), 1) if device is None else device)
    driver.use()  # the caller's arrays are made there from now on
    if backend == "cuda":
        from collectives.backends.cuda import Cuda

        return Cuda(cast(Shm, control), driver)
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise ImportError(f"backend={backend!r} needs nccl4py: pip install 'mgpu-core[cuda12]' ({error})") from error
    return over_nccl(backend, control, driver, nccl)


def over_nccl(backend: str, control: Shm | Tcp, driver: Driver, library: Any) -> Backend:
    """The engine of ranks whose GPUs NCCL joins: all of them, or with "cuda+nccl" hosts."""
    from collectives.backends.nccl import Nccl

    if backend == "nccl":
        return Nccl(control, driver, library)
    from collectives.backends.cuda import Cuda
    from collectives.backends.device import beside
    from collectives.backends.gpu_hosts import GpuHosts

    if isinstance(control, Shm):  # one host, where there is nothing between
        return Cuda(control, driver)
    local = on_this_host(control)
    with beside(local):
        return GpuHosts(control, driver, library, Cuda(local, driver))


def on_this_host(control: Tcp) -> Shm:
    """Beside a communicator of several hosts, one of this host's ranks, in their order."""
    peers = [control.host.meeting.peers[member] for member in control.members]
    names = [answer.decode() for answer in control.gather_bytes(secrets.token_hex(16).encode())]
    here = [rank for rank, peer in enumerate(peers) if peer.local]
    index = here.index(control.rank)
    place = Place(index, len(here), f"unix:{names[here[0]]}", timeout=control.timeout)
    return cast(Shm, _join(place, "shm", Shm, partial(_gpu, None)))


def _host_engine(backend: str) -> type[Shm]:
    if backend == "sim":
        from collectives.backends.sim import Sim

        return Sim
    return Shm


def _share_processors(meeting: Meeting) -> None:
    answers = [json.loads(mask) for mask in meeting.exchange(json.dumps(sorted(os.sched_getaffinity(0))).encode())]
    masks: dict[object, list[int]] = {os.getpid(): answers[meeting.rank]}  # of processes: pools are theirs, not ranks'
    for peer in meeting.peers:
        if peer.local and peer.rank != meeting.rank:  # one without a pidfd may be numbered in another namespace
            masks[peer.pid if peer.pidfd is not None else f"rank {peer.rank}"] = answers[peer.rank]
    threads.limit(threads.share(list(masks.values()), 0, cgroup.cpu_quota()))


def _mpi_is_meant() -> bool:
    return environment.over_mpi() and find_spec("mpi4py") is not None


def _over_mpi(backend: str, comm: Any, device: int | None, timeout: float) -> Backend:
    """The ranks of an mpi4py communicator, or all that MPI has: over MPI alone, or with shared memory inside hosts."""
    wire.choose_algorithms()
    from mpi4py import MPI

    from collectives.backends.hosts import Hosts
    from collectives.backends.mpi import Mpi

    started = environment.standing()
    if comm is None and started.launcher != "none" and MPI.COMM_WORLD.Get_size() != started.size:
        raise RuntimeError(
            f"{started.launcher} has started {started.size} ranks, and MPI knows of {MPI.COMM_WORLD.Get_size()}: "
            f"mpi4py has loaded an MPI that this launcher does not belong to, "
            f"{MPI.Get_library_version().splitlines()[0]}"
        )
    name = os.environ.get("MGPU_HOST") or None
    own = wire.Identity.of(machine(name))
    calls, words, identities = wire.join(MPI.COMM_WORLD if comm is None else comm, own, timeout)
    here = [rank for rank, identity in enumerate(identities) if identity.host == own.host]
    index = here.index(calls.Get_rank())
    if backend == "mpi":
        masks = [identities[rank].processors for rank in here]
        threads.limit(threads.share(masks, index, cgroup.cpu_quota()))
        return Mpi(calls, words, identities, timeout)
    token = identities[here[0]].token
    place = Place(index, len(here), f"unix:{token}", token.encode(), name, timeout)
    if backend == "auto" and len(here) == len(identities):
        return _join(place, "auto", Shm, partial(_gpu, device))
    local = cast(Shm, _join(place, "shm", Shm, partial(_gpu, device)))
    return Hosts(calls, words, identities, timeout, local)
