"""Rules for every test: few threads, no leftovers, no luck with timing."""

import compileall
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

sys.path.append(str(Path(__file__).parent))  # for `import crew`, `import fakecupy`; ranks inherit it

# Ranks outnumber cores in tests, so each takes one thread; set before NumPy and Numba are imported.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A shell that starts this in the background has it ignore SIGINT, and the programs that tests interrupt would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("mgpu", deadline=None, print_blob=True, max_examples=40)
hypothesis.settings.load_profile("mgpu")

from crew import Crews, crews  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Hundreds of ranks import the packages: compiled once, also where PYTHONDONTWRITEBYTECODE has each do it anew."""
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        for package in ("kernels", "collectives", "mgpu_core", "bench"):
            compileall.compile_dir(config.rootpath / package, quiet=2)


@pytest.fixture(scope="session", autouse=True)
def crew() -> Iterator[Crews]:
    """Called like `collectives.spawn`, but the ranks stay up for the next test that asks for as many."""
    yield crews
    crews.close()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaves a process behind fails, and is told which. Crews stay to the end."""
    before = children()
    yield
    before |= crews.pids
    deadline = time.monotonic() + 5
    while left := children() - before:
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(f"{pid} {command_line(pid)}" for pid in sorted(left)))
        time.sleep(0.02)


def children() -> set[int]:
    """This process's living children, but for multiprocessing's own servants, which last as long as it does."""
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            pids.update(map(int, path.read_text().split()))
    return {pid for pid in pids if (line := command_line(pid)) and "multiprocessing.resource_tracker" not in line}


def command_line(pid: int) -> str:
    """Empty for a process that has ended, whether or not it has been waited for."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
