"""What the tests of collectives share: modules beside them that ranks import too, and nothing shared left in memory."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for `import expected`; ranks inherit it


@pytest.fixture
def nothing_shared_left() -> Iterator[None]:
    """A test that leaves a descriptor open, or symmetric memory mapped, in this process fails."""
    gc.collect()
    before = descriptors()
    yield
    gc.collect()
    assert descriptors() <= before
    assert symmetric_maps("self") == 0


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def symmetric_maps(pid: int | str) -> int:
    """How many segments of symmetric memory a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:mgpu")
