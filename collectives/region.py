"""What a communicator keeps at the start of its arena, in each member's segment, for the others to see.

Offsets in bytes: the rank's state (whether it has given up or closed) and who it is, the count of calls it has ended,
what it waits for, its bell, its board of descriptors, and the flags that its peers raise.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import NamedTuple

import numpy as np

from collectives.memory import PAGE, Segment
from kernels.executor import DESCRIPTOR_WORDS, PAGE_BYTES, PAGES

_STATE = 0  # a flag: OPEN, FAILED or CLOSED
_MEMBER = 8  # a mark that says that it is written, and a Member's words
_MARK = 0x75_70_67_6D
_REASON = 64  # its length and the reason, JSON
_REASON_BYTES = 1984
_FINISHED = _REASON + _REASON_BYTES
_WAITING = _FINISHED + 64
_BELL = _WAITING + 64  # a flag
_BOARD = _BELL + 64
_FLAGS = _BOARD + PAGES * PAGE_BYTES
_FLAG_BYTES = 64
_KINDS = 4  # flags from each peer: of collectives, of messages that arrived, of messages that it has taken, of signals

OPEN, FAILED, CLOSED = range(3)


def region_bytes(size: int) -> int:
    """Bytes of the region in a communicator of `size` ranks: whole pages."""
    return -(-(_FLAGS + _KINDS * size * _FLAG_BYTES) // PAGE) * PAGE


class Member(NamedTuple):
    """Whose region it is: rank `rank` of `size`, in a communicator of the run whose first rank is process `run`."""

    rank: int
    size: int
    process: int
    run: int


class Region:
    """One member's region, as this process maps it."""

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.address = segment.address + offset
        self.size = size
        self._bytes = segment.view(offset, region_bytes(size))
        self._words = self._bytes[: _FLAGS // 8 * 8].view(np.int64)

    @property
    def board(self) -> int:
        """Address of the board."""
        return self.address + _BOARD

    @property
    def finished(self) -> int:
        """Address of the count of ended calls."""
        return self.address + _FINISHED

    @property
    def bell(self) -> int:
        """Address of the bell that wakes this member where it waits for messages: see `kernels/messages.py`."""
        return self.address + _BELL

    def flag(self, kind: int, peer: int) -> int:
        """Address of this member's flag that `peer` raises, of kind 0 (of collectives), 1 (messages), 2 (taken
        messages) or 3 (signals)."""
        return self.address + _FLAGS + (kind * self.size + peer) * _FLAG_BYTES

    @property
    def calls_ended(self) -> int:
        """Collective calls that this member has ended."""
        return int(self._words[_FINISHED // 8])

    def page(self, call: int) -> tuple[int, ...] | None:
        """This member's descriptor of a call (numbered from 1), or None if it has not made it or it is long ago."""
        start = (_BOARD + call % PAGES * PAGE_BYTES) // 8
        words = self._words[start : start + 1 + DESCRIPTOR_WORDS].tolist()
        return tuple(words[1:]) if words[0] & 0xFFFFFFFF == call & 0xFFFFFFFF else None

    @property
    def calls_begun(self) -> int:
        """The number of the last call that this member has begun."""
        ended = self.calls_ended
        return ended if self.page(ended + 1) is None else ended + 1

    @property
    def waiting(self) -> int:
        """What this member waits for, as `collectives.deadlock` words it; 0 for nothing."""
        return int(self._words[_WAITING // 8])

    @waiting.setter
    def waiting(self, word: int) -> None:
        self._words[_WAITING // 8] = word

    @property
    def state(self) -> int:
        """OPEN, FAILED or CLOSED."""
        return ctypes.c_uint32.from_address(self.address + _STATE).value

    @property
    def member(self) -> Member | None:
        """Whose region this is; None where nobody has moved in."""
        mark, *words = self._words[_MEMBER // 8 : _MEMBER // 8 + 1 + len(Member._fields)].tolist()
        return Member(*words) if mark == _MARK else None

    @member.setter
    def member(self, member: Member) -> None:
        first = _MEMBER // 8
        self._words[first + 1 : first + 1 + len(member)] = member
        self._words[first] = _MARK

    @staticmethod
    def member_in(descriptor: int, offset: int) -> Member | None:
        """Whose region begins at an offset of a segment that is not mapped: where nobody has moved in, a look at a
        mapped page would take memory."""
        nbytes = 8 * (1 + len(Member._fields))
        found = os.pread(descriptor, nbytes, offset + _MEMBER).ljust(nbytes, b"\0")
        mark, *words = np.frombuffer(found, np.int64).tolist()
        return Member(*words) if mark == _MARK else None

    def leave(self, state: int, reason: dict[str, object]) -> None:
        """Say that this member has failed or closed, and why, as far as there is room for the `text` of it."""
        while len(text := json.dumps(reason).encode()) > _REASON_BYTES - 8:
            words = str(reason["text"])
            reason = {**reason, "text": words[: len(words) * 3 // 4]}
        self._bytes[_REASON + 8 : _REASON + 8 + len(text)] = np.frombuffer(text, np.uint8)
        self._words[_REASON // 8] = len(text)
        ctypes.c_uint32.from_address(self.address + _STATE).value = state

    def reason(self) -> dict[str, object]:
        """What the member said when it left."""
        length = int(self._words[_REASON // 8])
        try:
            found = json.loads(self._bytes[_REASON + 8 : _REASON + 8 + length].tobytes())
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}
