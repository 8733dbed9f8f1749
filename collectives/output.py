"""The ranks' output, in whole lines."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from collectives.channel import wait_for

_DRAIN = 1.0  # seconds
_LONGEST = 1 << 20  # bytes of a line that are kept until it ends: what is longer goes on in pieces
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a carriage return may be the first half of a line's end


class WholeLines:
    """Copies pipes line by line, and nothing but what comes through them, unless a line has to be ended for another
    one to begin. What ends in a carriage return, as a progress bar does, is a line too."""

    def __init__(self, prefixed: bool) -> None:
        """prefixed: whether the rank is put before every line, and an end behind every last one."""
        self.pipes: dict[int, tuple[bytes, BinaryIO]] = {}  # descriptor -> prefix, sink
        self._prefixed = prefixed
        self._partial: dict[int, bytes] = {}
        self._unfinished: dict[BinaryIO, int] = {}  # sinks in the middle of a line, and the pipe that this came through

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

    def end_lines(self) -> None:
        """End the lines that have no end, before somebody else writes to where they went."""
        for sink in self._unfinished:
            sink.write(b"\n")
            sink.flush()
        self._unfinished.clear()

    def _copy(self, pipe: int, data: bytes) -> None:
        known = max(0, len(self._partial[pipe]) - 1)  # bytes in which no line ends
        text = self._partial[pipe] + data
        ends = [match.end() for match in _LINE_END.finditer(text, known)]
        lines = [text[start:end] for start, end in zip([0, *ends], ends)]
        rest = text[ends[-1] :] if ends else text
        if long := len(rest) > _LONGEST:
            lines.append(rest)
        self._partial[pipe] = b"" if long else rest
        if lines:
            self._write(pipe, lines, finished=not long)

    def _end(self, pipe: int) -> None:
        rest, (_, sink) = self._partial[pipe], self.pipes[pipe]
        if self._prefixed and (rest or self._unfinished.get(sink) == pipe):
            self._write(pipe, [rest + b"\n"], finished=True)
        elif rest:
            self._write(pipe, [rest], finished=False)
        del self.pipes[pipe]

    def _write(self, pipe: int, lines: Sequence[bytes], finished: bool) -> None:
        """Write lines that came through a pipe. `finished`: whether the last of them ends."""
        prefix, sink = self.pipes[pipe]
        text = b"".join(prefix + line for line in lines)
        before = self._unfinished.pop(sink, None)
        if before == pipe:
            text = text[len(prefix) :]
        elif before is not None:
            text = b"\n" + text
        if not finished:
            self._unfinished[sink] = pipe
        sink.write(text)
        sink.flush()
