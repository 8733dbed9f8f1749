"""Files that a launcher leaves to the ranks it starts: open descriptors, and the variables that name them.

A process between may have closed such a descriptor and used its number for something else, so the variable says which
file is meant, too; and a rank's own children inherit nothing.
"""

from __future__ import annotations

import os


def bequest(variable: str, descriptor: int) -> dict[str, str]:
    """For the environment of a process that is started with this descriptor open."""
    return {variable: ":".join(map(str, (descriptor, *_file(descriptor))))}


def inherited(variable: str) -> int | None:
    """The descriptor that this process was left, if it is still that file; taken once, and to be closed by nobody."""
    try:
        descriptor, *file = map(int, os.environ.pop(variable, "").split(":"))
        if _file(descriptor) != tuple(file):
            return None
        os.set_inheritable(descriptor, False)
    except (ValueError, OSError):
        return None
    return descriptor


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
