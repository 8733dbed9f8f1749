"""Memory for compiled functions, which know nothing but addresses: who goes past its end is killed there and then."""

import ctypes
import mmap
from typing import Any

import numpy as np

_GUARD = 1 << 20  # bytes behind an array that cannot be read or written: nobody is wrong by more
_C = ctypes.CDLL(None, use_errno=True)


def zeros(count: int, dtype: Any = np.int64) -> Any:
    """`count` zeros that end where the guard begins; at a multiple of 64 bytes if they are so many bytes."""
    nbytes = count * np.dtype(dtype).itemsize
    room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, room + _GUARD), np.uint8)
    if _C.mprotect(ctypes.c_void_p(memory.ctypes.data + room), ctypes.c_size_t(_GUARD), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return memory[room - nbytes : room].view(dtype)
