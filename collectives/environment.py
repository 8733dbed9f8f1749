"""Where a process stands in its job, as its launcher tells it through the environment.

| launcher            | rank, size                         | how the ranks meet                                        |
|---------------------|------------------------------------|-----------------------------------------------------------|
| mgpu run, spawn     | MGPU_RANK, MGPU_SIZE               | MGPU_ADDRESS                                              |
| torchrun            | RANK, WORLD_SIZE                   | one host: a Unix socket; else MASTER_ADDR:MASTER_PORT + 1 |
| mpirun of Open MPI  | OMPI_COMM_WORLD_RANK, _SIZE        | one host: a Unix socket; else MGPU_ADDRESS must be set    |
| MPICH, Intel MPI    | PMI_RANK, PMI_SIZE                 | as Open MPI                                               |
| srun                | SLURM_PROCID, SLURM_STEP_NUM_TASKS | one host: a Unix socket; else the step's first host       |

torchrun itself listens on MASTER_PORT. Others set its variables too, PyTorch's Kubernetes operators for instance, and
may leave out LOCAL_WORLD_SIZE: nothing says then that there is one host, and ranks meet at MASTER_ADDR, by a Unix
socket if that is loopback. MGPU_ADDRESS ("HOST:PORT" of rank 0, or "unix:NAME"), MGPU_SECRET and MGPU_HOST
(an identity to use in place of the machine's) count with every launcher. Without any launcher there is one rank.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from collectives.place import Place
from collectives.wording import counted

RESTART = "MGPU_RESTART"


@dataclass(frozen=True)
class Standing:
    """What the launcher says. address: "" where it must be given and is not; remedy: what to do then."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    remedy: str = ""


def place(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    timeout: float = 300.0,
    environ: Mapping[str, str] = os.environ,
) -> Place:
    """This process's place: what is given here, and the rest from the launcher.

    Raises ValueError where something is missing, is no number, or is out of range; it names the setting.
    """
    if (rank is None) != (size is None):
        raise ValueError(f"rank={rank} and size={size}: give both, or neither to take the launcher's")
    if rank is None or size is None:
        found = standing(environ)
        rank, size, address, remedy = found.rank, found.size, address or found.address, found.remedy
    else:
        address, remedy = address or environ.get("MGPU_ADDRESS", ""), "pass address=, or set MGPU_ADDRESS"
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {counted(size, 'rank')}; expected a rank from 0 to size - 1")
    if size > 1 and not address:
        raise ValueError(
            f"{counted(size, 'rank')} have no address at which to meet; {remedy}: HOST:PORT of rank 0, or unix:NAME"
        )
    return Place(rank, size, address, _secret(environ), environ.get("MGPU_HOST") or None, timeout)


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often `mgpu run` has started this job's ranks again: above 0, go on from the last checkpoint."""
    return _integer(environ, RESTART, 0, 0)


def over_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an MPI launcher, or srun, has started ranks on several hosts, or hosts have been given names."""
    found = standing(environ)
    started = found.launcher in ("mpirun", "mpiexec", "srun")
    return started and (found.local_size < found.size or bool(environ.get("MGPU_HOST")))


def standing(environ: Mapping[str, str] = os.environ) -> Standing:
    """What the launcher says, whichever it is; a single rank where there is none."""
    for launcher, is_there in _LAUNCHERS:
        if is_there(environ):
            found = launcher(environ)
            return replace(found, address=environ.get("MGPU_ADDRESS") or found.address)
    return Standing("none", 0, 1, 0, 1, "")


def _mgpu(environ: Mapping[str, str]) -> Standing:
    rank, size = _integer(environ, "MGPU_RANK"), _integer(environ, "MGPU_SIZE", 1)
    local_rank, local_size = (
        _integer(environ, "MGPU_LOCAL_RANK", 0, rank),
        _integer(environ, "MGPU_LOCAL_SIZE", 1, size),
    )
    return Standing("mgpu run", rank, size, local_rank, local_size, "", "set MGPU_ADDRESS")


def _torchrun(environ: Mapping[str, str]) -> Standing:
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE", 1)
    local_rank, local_size = _integer(environ, "LOCAL_RANK", 0, rank), _integer(environ, "LOCAL_WORLD_SIZE", 1, size)
    host, port = environ.get("MASTER_ADDR", ""), _integer(environ, "MASTER_PORT", 1)
    if local_size == size and "LOCAL_WORLD_SIZE" in environ:
        names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
        address = " ".join(["unix:torchrun", host, str(port), *(environ.get(name, "") for name in names)])
    else:
        address = f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"
    return Standing("torchrun", rank, size, local_rank, local_size, address)


def _open_mpi(environ: Mapping[str, str]) -> Standing:
    prefix = "OMPI_COMM_WORLD_"
    rank, size = _integer(environ, prefix + "RANK"), _integer(environ, prefix + "SIZE", 1)
    local_rank = _integer(environ, prefix + "LOCAL_RANK", 0, rank)
    local_size = _integer(environ, prefix + "LOCAL_SIZE", 1, size)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or _ancestor("prte", "orte", "mpi")
    address = f"unix:mpirun {job}" if local_size == size else ""
    return Standing(
        "mpirun", rank, size, local_rank, local_size, address, "start them by `mpirun -x MGPU_ADDRESS -x MGPU_SECRET`"
    )


def _pmi(environ: Mapping[str, str]) -> Standing:
    rank, size = _integer(environ, "PMI_RANK"), _integer(environ, "PMI_SIZE", 1)
    local_rank, local_size = (
        _integer(environ, "MPI_LOCALRANKID", 0, rank),
        _integer(environ, "MPI_LOCALNRANKS", 1, size),
    )
    job = f"{environ.get('I_MPI_HYDRA_UUID', '')} {_ancestor('hydra', 'mpi')}"
    address = f"unix:mpiexec {job}" if local_size == size else ""
    return Standing(
        "mpiexec", rank, size, local_rank, local_size, address, "start them by `mpiexec -genv MGPU_ADDRESS ...`"
    )


def _slurm(environ: Mapping[str, str]) -> Standing:
    rank, size = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_STEP_NUM_TASKS", 1)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    local_size = _tasks_here(environ, size)
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    if local_size == size:
        address = f"unix:srun {job}"
    else:
        port = 10_000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "little") % 20_000
        host = first_host(nodes)
        address = f"{host}:{port}" if host else ""
    return Standing(
        "srun",
        rank,
        size,
        _integer(environ, "SLURM_LOCALID", 0, 0),
        local_size,
        address,
        "export MGPU_ADDRESS before srun",
    )


# In this order: a launcher may start another, whose variables then stand beside its own. What an mpirun starts inside a
# Slurm step sees that step's variables too; a batch script, which is no rank, sees all but SLURM_STEP_NUM_TASKS.
_LAUNCHERS: list[tuple[Callable[[Mapping[str, str]], Standing], Callable[[Mapping[str, str]], bool]]] = [
    (_mgpu, lambda environ: "MGPU_RANK" in environ or "MGPU_SIZE" in environ),  # one alone is an error, not one rank
    (_torchrun, lambda environ: all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))),
    (_open_mpi, lambda environ: "OMPI_COMM_WORLD_RANK" in environ),
    (_pmi, lambda environ: "PMI_RANK" in environ and "MPI_LOCALNRANKS" in environ),
    (_slurm, lambda environ: "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ),
    (_pmi, lambda environ: "PMI_RANK" in environ),
]


def first_host(nodes: str) -> str:
    """The first of Slurm's host list, such as "node[07-09,11]-ib,login1": "node07-ib"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0]) if first else ""


def _tasks_here(environ: Mapping[str, str], size: int) -> int:
    """Ranks on this host, from Slurm's list of tasks per node, such as "4(x2),3"."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(size)
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = _integer(environ, "SLURM_NODEID", 0, 0)
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node}, but the list of tasks per node is {text!r}")
    return counts[node]


def _secret(environ: Mapping[str, str]) -> bytes:
    text = environ.get("MGPU_SECRET", "")
    if text and len(text) < 16:
        raise ValueError(
            f"MGPU_SECRET has {counted(len(text), 'character')} and could be guessed; "
            f"make one by python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text.encode()


def _integer(environ: Mapping[str, str], name: str, least: int = 0, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ValueError(f"{name}={text!r}; expected a whole number, {least} or more")
    return int(text)


def _ancestor(*names: str) -> str:
    """Process id of the nearest ancestor whose name begins with one of these, or of the parent: one for all ranks that
    the same launcher has started on this host."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            break
        if name.startswith(names):
            return str(pid)
        pid = int(rest.split()[1])
    return str(os.getppid())
