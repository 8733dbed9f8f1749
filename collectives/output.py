"""The ranks' output, in whole lines."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import BinaryIO

from collectives.channel import wait_for

_DRAIN = 1.0  # seconds


class WholeLines:
    """Copies pipes line by line. What ends in a carriage return, as a progress bar does, is a line too."""

    def __init__(self, prefixed: bool) -> None:
        """prefixed: whether the rank is put before every line."""
        self.pipes: dict[int, tuple[bytes, BinaryIO]] = {}  # descriptor -> prefix, sink
        self._prefixed = prefixed
        self._partial: dict[int, bytes] = {}

    def add(self, pipe: int, rank: int, sink: BinaryIO) -> None:
        """Copy this pipe, which remains the caller's to close."""
        self.pipes[pipe] = b"[%d] " % rank if self._prefixed else b"", sink
        self._partial[pipe] = b""

    def pump(self, ready: Iterable[int]) -> None:
        """Copy what has come through those pipes that are ready."""
        for pipe in self.pipes.keys() & ready:
            data = os.read(pipe, 1 << 16)
            self._copy(pipe, data)
            if not data:
                self._end(pipe)

    def drain(self) -> None:
        """Copy what ended ranks have left, for a second at most: what they have started may go on writing for ever."""
        deadline = time.monotonic() + _DRAIN
        while time.monotonic() < deadline and (ready := wait_for(self.pipes, 0.0)):
            self.pump(ready)
        for pipe in list(self.pipes):
            self._end(pipe)

    def _copy(self, pipe: int, data: bytes) -> None:
        prefix, sink = self.pipes[pipe]
        text = self._partial[pipe] + data
        lines = re.findall(rb"[^\r\n]*(?:\r\n|\r(?!$)|\n)", text)
        self._partial[pipe] = text[sum(map(len, lines)) :]
        sink.write(b"".join(prefix + line for line in lines))
        sink.flush()

    def _end(self, pipe: int) -> None:
        if self._partial[pipe]:
            self._copy(pipe, b"\n")
        del self.pipes[pipe]
