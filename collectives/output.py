"""The ranks' output with the rank before every line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import BinaryIO

from collectives.channel import wait_for


class PrefixedOutput:
    """Copies pipes line by line. What ends in a carriage return, as a progress bar does, is a line too."""

    def __init__(self) -> None:
        self.pipes: dict[int, tuple[bytes, BinaryIO]] = {}  # descriptor -> prefix, sink
        self._partial: dict[int, bytes] = {}

    def add(self, pipe: int, rank: int, sink: BinaryIO) -> None:
        """Copy this pipe, which remains the caller's to close."""
        self.pipes[pipe] = b"[%d] " % rank, sink
        self._partial[pipe] = b""

    def pump(self, ready: Iterable[int]) -> None:
        """Copy what has come through those pipes that are ready."""
        for pipe in self.pipes.keys() & ready:
            prefix, sink = self.pipes[pipe]
            data = os.read(pipe, 1 << 16)
            text = self._partial[pipe] + data
            if not data:
                del self.pipes[pipe]
                text += b"\n" if text else b""
            lines = re.findall(rb"[^\r\n]*(?:\r\n|\r(?!$)|\n)", text)
            self._partial[pipe] = text[sum(map(len, lines)) :]
            sink.write(b"".join(prefix + line for line in lines))
            sink.flush()

    def drain(self) -> None:
        """Copy what is left."""
        while ready := wait_for(self.pipes, 0.0):
            self.pump(ready)
