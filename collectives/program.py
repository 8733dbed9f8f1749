"""The instruction set: what a collective looks like when it is ready to run.

A `Program` holds one instruction list per rank, its *body*. The executor cuts a long message into slices and
runs the body once per slice; ranks meet only through monotonic counters (`Signal`, `Wait`) and once, in the first
slice, through `Enter`. The instructions are few and plain, so that they can be proven (`collectives.verify`),
costed (`collectives.cost`), executed slowly in Python (`collectives.reference`) and fast in one
compiled kernel (`kernels.executor`), all from the same list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.contract import Contract
from collectives.wording import counted
from kernels.executor import FINAL, RAW_BIT, SOLE_BIT, TAKES


class Buffer(IntEnum):
    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2

    __hash__ = int.__hash__  # places are looked up by the ten thousand, and an Enum's own hash is slow


class Ref(NamedTuple):
    """A place in some rank's memory: a chunk's place (its number) in INPUT or OUTPUT, or a cell of SCRATCH."""

    buffer: Buffer
    rank: int
    place: int

    def __str__(self) -> str:
        return f"{self.buffer.name.lower()}{self.rank}[{self.place}]"


class Move(NamedTuple):
    """Every destination = srcs[0] op srcs[1] op ..., from left to right; with one source, a copy.

    `raw[i]`: source i is one rank's untouched contribution (a scaled sum scales it here).
    `final`: the result is the first to hold all contributions (an average divides here).
    """

    chunk: int
    dsts: tuple[Ref, ...]
    srcs: tuple[Ref, ...]
    raw: tuple[bool, ...]
    final: bool = False

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.dsts))} <- {' + '.join(map(str, self.srcs))}"
        return f"move   {text}{'  final' if self.final else ''}"


def untouched_inputs(moves: Iterable[Move]) -> set[tuple[int, int]]:
    """The (rank, chunk) whose OUTPUT receives nothing but a copy of the same rank's INPUT.

    In an in-place call these copies have nothing to do, and the executor leaves them out: the input stays as it is.
    """
    copied: set[tuple[int, int]] = set()
    changed: set[tuple[int, int]] = set()
    for move in moves:
        for dst in move.dsts:
            if dst.buffer is Buffer.OUTPUT:
                same = move.srcs == (Ref(Buffer.INPUT, dst.rank, dst.place),) and not move.final
                (copied if same else changed).add((dst.rank, dst.place))
    return copied - changed


class Signal(NamedTuple):
    """Tell `peer`, with release semantics, that all before is done. A body's signals to one peer count 1, 2, ..."""

    peer: int

    def __str__(self) -> str:
        return f"signal {self.peer}"


class Wait(NamedTuple):
    """Wait, with acquire semantics, for `peer`'s signal number `signal` of its slice s - lag; nothing if s < lag."""

    peer: int
    signal: int
    lag: int = 0

    def __str__(self) -> str:
        return f"wait   {self.peer} #{self.signal}{f' of {self.lag} slices ago' if self.lag else ''}"


class Enter(NamedTuple):
    """First slice only: publish this call's descriptor and wait for everybody's. A full barrier."""

    def __str__(self) -> str:
        return "enter"


Instruction = Move | Signal | Wait | Enter
Words = npt.NDArray[np.int64]


class Opcode(IntEnum):
    END = 0
    WAIT = 1  # peer, signal, lag
    SIGNAL = 2  # peer
    ENTER = 3
    MOVE = 4  # chunk, flags, number of sources, number of destinations, sources, destinations


BUFFER_SHIFT, RANK_SHIFT = 56, 32  # the fields of a reference's word, beside two bits; the index is in the low bits


def encode_ref(ref: Ref, raw: bool = False, sole: bool = False) -> int:
    return raw << RAW_BIT | sole << SOLE_BIT | ref.buffer << BUFFER_SHIFT | ref.rank << RANK_SHIFT | ref.place


@dataclass(frozen=True, repr=False)
class Program:
    """One collective by one algorithm, exactly for one number of ranks, lowered to instructions.

    `slots`: how many slices' worth of scratch rotate (at least 2). `pipelined`: may run in more than one slice;
    a program that is not is shorter, and must be given its whole message as one slice. `cells`: how many pieces
    one slot of scratch is cut into.
    """

    contract: Contract
    algorithm: str
    memory: str
    slots: int
    pipelined: bool
    cells: int
    bodies: tuple[tuple[Instruction, ...], ...]

    @property
    def collective(self) -> str:
        return self.contract.collective

    @property
    def size(self) -> int:
        return self.contract.size

    @property
    def root(self) -> int:
        return self.contract.root

    @property
    def chunks(self) -> int:
        """The number of entries in the tables of lengths and positions (`contract.geometry` computes them)."""
        return self.contract.chunks

    @cached_property
    def fan_in(self) -> int:
        """The most sources that a Move has."""
        return max((len(step.srcs) for body in self.bodies for step in body if isinstance(step, Move)), default=0)

    def encode(self, rank: int) -> Words:
        """The body of `rank` as the executor reads it: flat int64 words, closed by END."""
        words: list[int] = []
        for instruction in self.bodies[rank]:
            match instruction:
                case Move(chunk, dsts, srcs, raw, final):
                    sole = [self._visitors.get(ref) == {rank} and ref not in dsts for ref in srcs]
                    words += Opcode.MOVE, chunk, FINAL * final | TAKES * any(sole), len(srcs), len(dsts)
                    words += map(encode_ref, srcs, raw, sole)
                    words += map(encode_ref, dsts)
                case Wait(peer, signal, lag):
                    words += Opcode.WAIT, peer, signal, lag
                case Signal(peer):
                    words += Opcode.SIGNAL, peer
                case Enter():
                    words.append(Opcode.ENTER)
        words.append(Opcode.END)
        return np.array(words, dtype=np.int64)

    @cached_property
    def _visitors(self) -> dict[Ref, set[int]]:
        """By cell of scratch: the ranks, beside its owner, that read or write it."""
        visitors: dict[Ref, set[int]] = {}
        for rank, body in enumerate(self.bodies):
            for step in body:
                for ref in (*step.srcs, *step.dsts) if isinstance(step, Move) else ():
                    if ref.buffer is Buffer.SCRATCH and ref.rank != rank:
                        visitors.setdefault(ref, set()).add(rank)
        return visitors

    @cached_property
    def _signals(self) -> Words:
        """signals[a, b]: how many signals a gives b in one slice."""
        signals = np.zeros((self.size, self.size), dtype=np.int64)
        for rank, body in enumerate(self.bodies):
            for instruction in body:
                if isinstance(instruction, Signal):
                    signals[rank, instruction.peer] += 1
        return signals

    def signals_in(self, rank: int) -> Words:
        """How many signals each peer gives `rank` in one slice: int64 of shape (size,)."""
        return self._signals[:, rank].copy()

    def signals_out(self, rank: int) -> Words:
        """How many signals `rank` gives each peer in one slice: int64 of shape (size,)."""
        return self._signals[rank].copy()

    def digest(self) -> str:
        """A hash of all that the executor reads, on every rank: equal digests, equal programs."""
        state = hashlib.sha256(f"{self.contract} {self.memory} {self.slots} {self.pipelined} {self.cells}".encode())
        for rank in range(self.size):
            state.update(self.encode(rank).astype("<i8").tobytes())
        return state.hexdigest()

    def draw(self) -> str:
        """A picture in text: what each rank does at each step."""
        from collectives.inspect import draw

        return draw(self)

    def __repr__(self) -> str:
        moves = sum(isinstance(instruction, Move) for body in self.bodies for instruction in body)
        return f"<Program {self.collective} {self.algorithm} size={self.size} {self.memory}: {counted(moves, 'move')}>"

    def __str__(self) -> str:
        lines = [
            f"{self.collective} by {self.algorithm}: {counted(self.size, 'rank')}, {self.memory} memory, "
            f"{counted(self.chunks, 'chunk')}, {counted(self.cells, 'cell')} x {self.slots} slots"
            f"{'' if self.pipelined else ', one slice'}"
        ]
        for rank, body in enumerate(self.bodies):
            lines.append(f"rank {rank}")
            lines += (f"  {step:3d}  {instruction}" for step, instruction in enumerate(body))
        return "\n".join(lines)
