"""A slow executor in plain Python: what any program does, under any interleaving of its ranks.

It runs the same encoded words as the fast executor, over the same geometry and with the same monotonic counters, for
all ranks in one thread, and lets chance decide at every single access who goes next. Memory that nobody has written
yet is known to be so, and reading it is an error. Tests use it as the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.contract import Counts, Geometry, geometry
from collectives.errors import ProgramError
from collectives.program import BUFFER_SHIFT, RANK_SHIFT, Buffer, Opcode, Program
from kernels.executor import FINAL, RAW_BIT

Array = npt.NDArray[Any]
Ready = Callable[[], bool]


def _now() -> bool:
    return True


@dataclass
class Call:
    """One collective call of all ranks: rank r brings the elements `inputs[r]`, laid out as `counts` says.

    `step` is the length of a slice of a chunk, in elements (0: everything in one slice). A sum may be scaled: each
    contribution is multiplied by `scale`, and the result divided by the number of ranks if `average`.
    """

    program: Program
    inputs: Sequence[Array]
    counts: Counts
    step: int = 0
    in_place: bool = False
    op: Callable[[Array, Array], Array] = np.add
    scale: float | None = None
    average: bool = False

    layout: Geometry = field(init=False)
    slices: int = field(init=False)

    def __post_init__(self) -> None:
        self.layout = geometry(self.program.contract, self.counts, self.inputs[0].itemsize)
        longest = int(self.layout.lengths.max(initial=0))
        self.step = self.step or max(1, longest)
        self.slices = max(1, -(-longest // self.step))


def run(program: Program, inputs: Sequence[Array], counts: Counts, *, seed: int = 0, **details: Any) -> list[Array]:
    """Run one call and return each rank's output; `details` are the other fields of `Call`."""
    return execute([Call(program, inputs, counts, **details)], seed)[0]


def execute(calls: Sequence[Call], seed: int = 0) -> list[list[Array]]:
    """Run calls one after another on every rank, each at its own pace; returns outputs[call][rank].

    Raises ProgramError when a rank reads what was never written, or when all ranks wait for ever.
    """
    world = _World(calls)
    chance = random.Random(seed)
    stay = chance.choice([0.0, 0.5, 0.9, 0.99])  # how likely a rank goes on alone: near 1 finds what rank races ahead
    ranks = {rank: _Rank(world, rank).live() for rank in range(world.size)}
    pending: dict[int, Ready] = dict.fromkeys(ranks, _now)
    current = 0
    while pending:
        ready = [rank for rank in pending if pending[rank]()]
        if not ready:
            raise ProgramError(f"ranks {sorted(pending)} wait for ever")
        if current not in ready or chance.random() >= stay:
            current = chance.choice(ready)
        try:
            pending[current] = next(ranks[current])
        except StopIteration:
            del pending[current]
    return world.outputs()


class _Memory:
    """An array that knows which of its elements have been written."""

    def __init__(self, data: Array, written: npt.NDArray[np.bool_]) -> None:
        self.data, self.written = data, written

    @classmethod
    def poisoned(cls, length: int, dtype: np.dtype[Any]) -> _Memory:
        return cls(np.full(length, 77, dtype), np.zeros(length, dtype=bool))

    def view(self, start: int) -> _Memory:
        return _Memory(self.data[start:], self.written[start:])

    def read(self, start: int, length: int, who: str) -> Array:
        if not self.written[start : start + length].all():
            raise ProgramError(f"{who} reads what was never written")
        return self.data[start : start + length].copy()

    def write(self, start: int, values: Array) -> None:
        assert start + len(values) <= len(self.data), "a write beyond the end"
        self.data[start : start + len(values)] = values
        self.written[start : start + len(values)] = True


class _World:
    """What all ranks share: counters and scratch, which live as long as the communicator, and each call's arrays."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.size = calls[0].program.size
        self.slots = calls[0].program.slots
        self.counters = np.zeros((self.size, self.size), dtype=np.int64)  # [from, to]
        self.entered = [0] * self.size  # calls
        self.slot_length = max(call.program.cells * call.step for call in calls)
        dtype = calls[0].inputs[0].dtype
        self.scratch = [_Memory.poisoned(self.slots * self.slot_length, dtype) for _ in range(self.size)]
        self.arrays = [[self._arrays(call, rank) for rank in range(self.size)] for call in calls]

    def _arrays(self, call: Call, rank: int) -> dict[int, _Memory]:
        """A rank's INPUT and OUTPUT in one call: views of one array if it is in place."""
        contract, layout = call.program.contract, call.layout
        brings, wants = list(contract.brings(rank)), list(contract.wants(rank))
        length_in = max((int(layout.inputs[c] + layout.lengths[c]) for c in brings), default=0)
        length_out = max((int(layout.outputs[c] + layout.lengths[c]) for c in wants), default=0)
        assert len(call.inputs[rank]) == length_in, "inputs do not fit counts"
        dtype = call.inputs[rank].dtype
        both = sorted({*brings} & {*wants})
        if call.in_place and both:
            shift = int(layout.outputs[both[0]] - layout.inputs[both[0]])
            whole = _Memory.poisoned(max(length_in, length_out), dtype)
            source, target = whole.view(max(shift, 0)), whole.view(max(-shift, 0))
        else:
            source, target = _Memory.poisoned(length_in, dtype), _Memory.poisoned(length_out, dtype)
        source.write(0, call.inputs[rank])
        target.data = target.data[:length_out]
        return {Buffer.INPUT: source, Buffer.OUTPUT: target}

    def place(self, number: int, word: int, s: int, first: int) -> tuple[_Memory, int]:
        """The memory that a reference means in slice s of a call, and where in it."""
        buffer, owner, index = word >> BUFFER_SHIFT & 3, word >> RANK_SHIFT & 0xFFFFFF, word & 0xFFFFFFFF
        call = self.calls[number]
        if buffer == Buffer.SCRATCH:
            return self.scratch[owner], (first + s) % self.slots * self.slot_length + index * call.step
        starts = call.layout.inputs if buffer == Buffer.INPUT else call.layout.outputs
        return self.arrays[number][owner][buffer], int(starts[index]) + s * call.step

    def has_signalled(self, peer: int, rank: int, count: int) -> bool:
        return bool(self.counters[peer, rank] >= count)

    def have_entered(self, calls: int) -> bool:
        return min(self.entered) >= calls

    def outputs(self) -> list[list[Array]]:
        return [[arrays[Buffer.OUTPUT].data for arrays in by_rank] for by_rank in self.arrays]


class _Rank:
    """One rank's life. Its generators yield, before every step that others can notice, when it can go on."""

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.base_in = np.zeros(world.size, dtype=np.int64)  # what each peer had signalled when the call began
        self.first = 0  # the slot of the call's first slice

    def live(self) -> Iterator[Ready]:
        for number, call in enumerate(self.world.calls):
            words = call.program.encode(self.rank).tolist()
            for s in range(call.slices):
                yield from self._slice(number, words, s)
            self.base_in += call.slices * call.program.signals_in(self.rank)
            self.first += call.slices

    def _slice(self, number: int, words: list[int], s: int) -> Iterator[Ready]:
        world, rank = self.world, self.rank
        signals_in = world.calls[number].program.signals_in(rank)
        at = 0
        while words[at] != Opcode.END:
            if words[at] == Opcode.WAIT:
                peer, signal, lag = words[at + 1 : at + 4]
                at += 4
                if s >= lag:
                    yield partial(
                        world.has_signalled, peer, rank, self.base_in[peer] + (s - lag) * signals_in[peer] + signal
                    )
            elif words[at] == Opcode.SIGNAL:
                yield _now
                world.counters[rank, words[at + 1]] += 1
                at += 2
            elif words[at] == Opcode.ENTER:
                at += 1
                if s == 0:
                    yield _now
                    world.entered[rank] = number + 1
                    yield partial(world.have_entered, number + 1)
            else:
                chunk, flags, n_sources, n_destinations = words[at + 1 : at + 5]
                at += 5 + n_sources + n_destinations
                refs = words[at - n_sources - n_destinations : at]
                yield from self._move(number, s, chunk, bool(flags & FINAL), refs[:n_sources], refs[n_sources:])

    def _move(
        self, number: int, s: int, chunk: int, final: bool, sources: list[int], targets: list[int]
    ) -> Iterator[Ready]:
        call = self.world.calls[number]
        length = min(call.step, int(call.layout.lengths[chunk]) - s * call.step)
        if length <= 0:
            return
        values = []
        for word in sources:
            yield _now
            memory, start = self.world.place(number, word, s, self.first)
            value = memory.read(start, length, f"rank {self.rank}, in call {number}, slice {s}, chunk {chunk},")
            raw = word >> RAW_BIT & 1
            if call.scale is not None and raw and (len(sources) > 1 or final):
                value = value * value.dtype.type(call.scale)
            values.append(value)
        result = reduce(call.op, values)
        if call.average and final:
            result = result / self.world.size
        for word in targets:
            yield _now
            memory, start = self.world.place(number, word, s, self.first)
            memory.write(start, result)
