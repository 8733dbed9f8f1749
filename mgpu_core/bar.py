"""A progress bar that a kill leaves nothing of."""

from __future__ import annotations

import threading

from tqdm import tqdm


class Bar(tqdm):
    """tqdm's, with a lock among threads alone. Its own makes a semaphore in /dev/shm, which stays there if this process
    is killed before that is unlinked."""

    _lock = threading.RLock()
