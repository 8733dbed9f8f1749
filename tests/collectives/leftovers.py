"""What a process has of things that outlive calls: to be told before and after."""

import os
from pathlib import Path


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def symmetric_maps(pid: int | str) -> int:
    """How many segments of symmetric memory a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:mgpu")
