"""Constants of this machine that `mgpu tune` has measured, kept in the user's cache folder: for a number of ranks, and
of the processors that those may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from collectives.cost import Topology
from collectives.threads import here
from kernels import native


def path(size: int, cores: int | None = None) -> Path:
    """The file of the constants for `size` ranks on this machine: under $MGPU_CACHE, else the user's cache folder.

    cores: the processors that all the ranks may use together; None for as many as this process may.
    """
    root = native.cache_folder().parents[1]
    return root / "tuned" / f"{platform.node() or 'host'}-{cores or here(1)}-cores-{size}-ranks.json"


def keep(topology: Topology) -> Path:
    """Keep the constants for later runs of as many ranks on as many processors; returns the file."""
    file = path(topology.size)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")  # whoever reads meanwhile sees a whole file
    topology.save(unfinished)
    unfinished.replace(file)
    return file


def kept(size: int, cores: int | None = None) -> Topology | None:
    """The constants for so many ranks and processors of this machine; None where nobody has measured them, or the file
    is damaged."""
    try:
        found = Topology.load(path(size, cores))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.hosts == (size,) else None
