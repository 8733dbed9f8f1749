"""Arrays with a guard behind them."""

import signal
import subprocess
import sys
from pathlib import Path

import guarded
import numpy as np
import pytest


def test_all_of_an_array_can_be_used() -> None:
    for count, dtype in ((0, np.int64), (1, np.uint8), (3, np.int64), (512, np.int64), (4097, np.uint8)):
        array = guarded.zeros(count, dtype)
        assert array.shape == (count,) and array.dtype == dtype and not array.any()
        array[:] = 7
        assert (array == 7).all()
    assert guarded.zeros(8 * 5).ctypes.data % 64 == 0


@pytest.mark.parametrize("ahead", [8, 8392])
def test_who_writes_past_its_end_is_killed(ahead: int) -> None:
    code = f"""
import ctypes, guarded, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ctypes.memset(guarded.zeros(3).ctypes.data + 16 + {ahead}, 1, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(guarded.__file__).parent, capture_output=True)
    assert done.returncode == -signal.SIGSEGV
