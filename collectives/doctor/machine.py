"""The machine: processors, memory, the kernel, and the limits that a container or a shell sets."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path

from collectives import cgroup, memory, threads
from collectives.doctor.finding import Finding, size
from collectives.wording import counted

_ROOM = 1 << 30  # bytes below which training is likely to run out of memory
_DESCRIPTORS_A_PEER = 3  # its memory, its process and its socket


def examine() -> list[Finding]:
    """All findings about the machine."""
    return [system(), cores(), room(), shared_memory_file_system(), huge_pages(), descriptors(), *shell_limits()]


def system() -> Finding:
    """The operating system, and what of it we need."""
    facts = {"system": sys.platform, "machine": platform.machine(), "kernel": platform.release()}
    what = f"Linux {platform.release()} on {platform.machine()}"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return Finding(
            "system", f"{sys.platform} on {platform.machine()}", "mgpu runs on Linux, x86-64 or aarch64", True, facts
        )
    try:
        os.close(os.memfd_create("mgpu-doctor"))
    except OSError as error:
        return Finding(
            "system", f"{what}; memfd_create is refused ({error.strerror})",
            "allow the system call memfd_create in the container's seccomp profile", True, facts,
        )  # fmt: skip
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "system", f"{what}; pidfd_open is refused ({error.strerror})",
            "a dead rank is noticed later; allow it in the container's seccomp profile, or use Linux 5.3 or newer",
            facts=facts,
        )  # fmt: skip
    return Finding("system", what, facts=facts)


def cores(allowed: int | None = None, quota: float | None = None) -> Finding:
    """Processors that ranks may use. Arguments stand in for this process's own mask and quota, for tests."""
    allowed = allowed or len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota() if quota is None else quota
    there = os.cpu_count() or allowed
    usable = min(allowed, quota or allowed)
    facts = {"there": there, "allowed": allowed, "quota": quota, "threads_of_2_ranks": threads.here(2)}
    what = f"{allowed} of {counted(there, 'processor')} may be used" if allowed < there else counted(there, "processor")
    if quota is not None:
        what += f", of whose time a control group grants {quota:g}"
    if usable < 2:
        advice = (
            "two ranks take turns on one processor: all works, but a collective costs scheduler switches instead of "
            "microseconds; give the container or the job 2 processors or more (docker --cpus, cpuset, srun -c, taskset)"
        )
        return Finding("processors", what, advice, True, facts)
    if quota is not None and quota < allowed:
        advice = f"start no more than {counted(int(usable), 'rank')}: waiting ranks use up the quota, and all wait then"
        return Finding("processors", what, advice, facts=facts)
    return Finding("processors", f"{what}; {counted(int(usable), 'rank')} or fewer have one each", facts=facts)


def room(left: int | None = None) -> Finding:
    """Memory that may still be taken; `left` stands in for it in tests."""
    limit = cgroup.memory_left()
    left = memory.available() if left is None else left
    try:
        scratch = memory.scratch_setting()
    except ValueError:  # which `software.settings` tells of
        scratch = 0
    scratch = scratch or memory.scratch_bytes(len(os.sched_getaffinity(0)))
    facts = {"available": left, "group_limit_left": limit, "scratch_a_rank": scratch}
    what = f"{size(left)} may still be taken{'' if limit is None else ' (a control group sets a limit)'}"
    if left < _ROOM:
        advice = (
            f"each rank takes {size(scratch)} for each communicator, and what your arrays need; raise the container's "
            f"memory (docker --memory), start fewer ranks, or set a smaller MGPU_SCRATCH"
        )
        return Finding("memory", what, advice, left < (64 << 20) + 4 * scratch, facts)  # 64 MB are left
    return Finding("memory", what, facts=facts)


def shared_memory_file_system(path: str = "/dev/shm") -> Finding:
    """The size of /dev/shm, which is of no importance to us, and to others is."""
    try:
        state = os.statvfs(path)
    except OSError:
        return Finding("/dev/shm", "is not there; mgpu does not use it", facts={"bytes": None})
    total = state.f_blocks * state.f_frsize
    what = f"{size(total)}; mgpu does not use it (its memory has no name, and no size limit but the machine's)"
    if total < 1 << 30:
        advice = "MPI libraries and PyTorch's data loaders do: start the container with --shm-size=1g for them"
        return Finding("/dev/shm", what, advice, facts={"bytes": total})
    return Finding("/dev/shm", what, facts={"bytes": total})


def huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")) -> Finding:
    """Whether shared memory may lie in huge pages."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        found = None
    mode = found[1] if found else "unknown"
    return Finding("huge pages", f"of shared memory: {mode}", facts={"shmem": mode})


def descriptors(limit: int | None = None) -> Finding:
    """How many ranks the limit on open descriptors allows; `limit` stands in for it in tests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = soft if limit is None else limit
    ranks = max(0, (soft - 64) // _DESCRIPTORS_A_PEER)
    what = f"{soft:,} allowed, enough for {counted(min(ranks, 9999), 'rank')} on this host"
    facts = {"soft": soft, "hard": hard, "ranks": ranks}
    if ranks < 16:
        return Finding("descriptors", what, "raise it: ulimit -n 4096 (docker --ulimit nofile=4096)", ranks < 2, facts)
    return Finding("descriptors", what, facts=facts)


def shell_limits() -> list[Finding]:
    """Limits that are seldom set, and then in the way."""
    found = []
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        advice = "symmetric memory reserves much of it; raise the limit (ulimit -v unlimited), or set MGPU_HEAP=1G"
        found.append(Finding("address space", f"limited to {size(space)}", advice, facts={"bytes": space}))
    file = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if file != resource.RLIM_INFINITY:
        advice = "symmetric memory is a file to the kernel, and no larger than this; raise it: ulimit -f unlimited"
        found.append(Finding("file size", f"limited to {size(file)}", advice, facts={"bytes": file}))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and Path("/dev/infiniband").exists():
        advice = "NCCL and MPI register memory with the network card, which counts as locked: ulimit -l unlimited"
        found.append(Finding("locked memory", f"limited to {size(locked)}", advice, facts={"bytes": locked}))
    return found
