"""The proofs: a program is shown to be right before it runs.

`verify` looks at nothing but the lowered instruction lists, and knows of the collective only its contract. It plays
all ranks' lists against one another, once, with symbols for data, and shows

- *result*: each rank's OUTPUT ends with what the contract wants, every contribution counted exactly once, reduced in
  the same order on every rank (so that all get the same bits), with the flags `raw` and `final` right;
- *progress*: no rank waits for ever;
- *no race*: of any two conflicting accesses, one happens before the other by program order, a signal waited for, or
  Enter (vector clocks; L. Lamport 1978, F. Mattern 1989). With that, what holds in one interleaving holds in all,
  and on weakly ordered machines too;
- *the memory mode*: in staged memory only SCRATCH is touched by others than its owner;
- *the borders of a call*: nobody touches others' arrays before Enter; when a rank has finished, all others have
  finished with its arrays, and with those slots of its scratch that it may write before the next Enter.

Why one run is enough, though programs run in any number of slices, one after another, with chunks of any length:

- Waits look back only to earlier slices (`lag`), so what a rank does in slice s is the same however many follow. The
  run has slots + 2 slices; what must hold at the end of a call is required at the end of each, which covers all
  shorter calls. From slice 1 on each slice repeats the one before, shifted, and uses of one slot are `slots`
  slices apart: what is shown between slices 1 and slots + 1, without Enter's help, holds ever after.
- A call's first writes before Enter go to the slot after the last, which was last used `slots` slices ago. Having
  required that those are over, any program may follow any: all else comes after Enter, and Enter after all
  ranks' last instructions. Counters go on from call to call by what a whole body signals, so none is left over.
- Each Move touches one chunk, the same elements at all its places; where a chunk is empty or has ended, its Moves are
  missing together, with everything that depended on them, and all signals still come.
- INPUT and OUTPUT places of one number are taken for the same memory. A program that passes never reads what that
  overwrote, and is therefore right in place and out of place, even if ranks differ in that. (They are taken for
  different ones where OUTPUT is but a copy of INPUT, which in place is left out.)
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from collectives.builder import lookup
from collectives.errors import ProgramError
from collectives.lowering import build
from collectives.program import Buffer, Enter, Instruction, Move, Program, Ref, Signal, Wait, untouched_inputs

Clock = npt.NDArray[
    np.int64
]  # for each rank, how many of its instructions are known to be done; never changed in place


def verify(program: Program) -> None:
    """Prove `program` right, or raise ProgramError saying at which rank, step and chunk the proof fails."""
    _check_form(program)
    _Run(program).prove()


def verified(collective: str, algorithm: str, size: int, **options: Any) -> Program:
    """`build` a program and `verify` it, or return the one proven earlier in this process for the same arguments."""
    function = lookup(collective, algorithm)  # part of the key: a name may be registered anew
    return _verified(function, collective, algorithm, size, tuple(sorted(options.items())))


@lru_cache(maxsize=1024)
def _verified(
    function: object, collective: str, algorithm: str, size: int, options: tuple[tuple[str, Any], ...]
) -> Program:
    program = build(collective, algorithm, size, **dict(options))
    verify(program)
    return program


def _check_form(program: Program) -> None:
    """Check what can be seen of each instruction by itself."""
    if len(program.bodies) != program.size:
        raise ProgramError(f"there are {len(program.bodies)} instruction lists for {program.size} ranks")
    if program.memory not in ("symmetric", "staged"):
        raise ProgramError(f'memory is "symmetric" or "staged", not {program.memory!r}')
    if program.slots < 2:
        raise ProgramError(f"at least 2 slots must rotate, not {program.slots}")
    for rank, body in enumerate(program.bodies):
        enters = [step for step, instruction in enumerate(body) if isinstance(instruction, Enter)]
        if len(enters) != 1:
            raise ProgramError(f"every rank enters exactly once, not {len(enters)} times", rank=rank)
        for step, instruction in enumerate(body):
            flaw = _flaw(instruction, rank, program, entered=step > enters[0])
            if flaw:
                chunk = instruction.chunk if isinstance(instruction, Move) else None
                raise ProgramError(f"{flaw} ({instruction})", rank=rank, step=step, chunk=chunk)


def _flaw(instruction: Instruction, rank: int, program: Program, entered: bool) -> str | None:
    match instruction:
        case Enter():
            return None
        case Signal(peer) | Wait(peer):
            if not 0 <= peer < program.size or peer == rank:
                return f"{peer} is not another rank"
            if not entered:
                return "ranks neither signal nor wait before all have entered the call"
            if isinstance(instruction, Wait):
                given = int(program.signals_in(rank)[peer])
                if not 1 <= instruction.signal <= given:
                    return f"rank {peer} gives {given} signals, there is no number {instruction.signal}"
                if instruction.lag < 0:
                    return "no rank can wait for a later slice"
            return None
        case Move(chunk, dsts, srcs, raw):
            if not 0 <= chunk < program.chunks:
                return f"there are {program.chunks} chunks"
            if not srcs or not dsts or len(raw) != len(srcs) or len(set(dsts)) != len(dsts):
                return "a move has sources, each with its flag `raw`, and distinct destinations"
            if len(srcs) > 1 and not program.contract.reduces:
                return f"{program.collective} reduces nothing"
            flaws = (_flaw_of_place(ref, chunk, rank, program, entered, ref in dsts) for ref in (*srcs, *dsts))
            return next((flaw for flaw in flaws if flaw), None)


def _flaw_of_place(ref: Ref, chunk: int, rank: int, program: Program, entered: bool, written: bool) -> str | None:
    if not 0 <= ref.rank < program.size:
        return f"{ref} is no rank's"
    own = ref.rank == rank
    if ref.buffer is Buffer.SCRATCH:
        if not 0 <= ref.place < program.cells:
            return f"{ref} does not exist: there are {program.cells} cells"
        return None if entered or (own and written) else f"{ref} is out of bounds before all have entered the call"
    if ref.place != chunk:
        return f"{ref} is not the place of chunk {chunk}"
    if ref.buffer is Buffer.INPUT and written:
        return f"{ref} must not be written"
    if ref.buffer is Buffer.INPUT and chunk not in program.contract.brings(ref.rank):
        return f"{ref} does not exist: that rank brings no chunk {chunk}"
    if ref.buffer is Buffer.OUTPUT and chunk not in program.contract.wants(ref.rank):
        return f"{ref} does not exist: that rank wants no chunk {chunk}"
    if not own and program.memory == "staged":
        return f"{ref} is out of reach in staged memory"
    if not entered and not (own and ref.buffer is Buffer.INPUT):
        return f"{ref} is out of bounds before all have entered the call"
    return None


class _Place:
    """What one place holds, and who has used it since when."""

    __slots__ = ("buffer", "readers", "slice", "value", "writer", "written")

    def __init__(self, value: int, buffer: Buffer, slice_: int, writer: int, written: int) -> None:
        self.value, self.buffer, self.slice = value, buffer, slice_
        self.writer, self.written = writer, written  # the rank, and how many instructions it had then done
        self.readers: dict[int, int] = {}  # rank -> how many instructions it had done, for all that read since


class _Values:
    """Whatever a place can hold: one rank's contribution to a chunk, or a reduction. Equal ones have equal numbers."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, ...], int] = {}
        self.chunk: list[int] = []
        self.contributions: list[int] = []  # the set of ranks, as a bit mask
        self.finished: list[bool] = []  # made by a Move marked `final`

    def contribution(self, rank: int, chunk: int) -> int:
        return self._number((-1, rank, chunk), chunk, 1 << rank, False)

    def reduction(self, sources: list[int], contributions: int, final: bool) -> int:
        if len(sources) == 1 and not final:
            return sources[0]
        return self._number((final, *sources), self.chunk[sources[0]], contributions, final)

    def _number(self, key: tuple[int, ...], chunk: int, contributions: int, finished: bool) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.chunk)
            self.chunk.append(chunk)
            self.contributions.append(contributions)
            self.finished.append(finished)
        return self.numbers[key]


class _Run:
    """All ranks' lists, played against one another for slots + 2 slices (or the one that the program is for)."""

    def __init__(self, program: Program) -> None:
        size = program.size
        self.program = program
        self.slices = program.slots + 2 if program.pipelined else 1
        self.values = _Values()
        self.places: dict[tuple[int, int, int], _Place] = {}
        self.entered: set[int] = set()
        self.done = [0] * size  # instructions, of all slices so far
        self.clocks: list[Clock] = [np.zeros(size, dtype=np.int64)] * size
        self.signals: dict[tuple[int, int], list[tuple[int, Clock]]] = defaultdict(list)  # by (from, to): sender's time
        self.untouched = untouched_inputs(move for body in program.bodies for move in body if type(move) is Move)
        self.signals_in = [program.signals_in(rank).tolist() for rank in range(size)]
        # by [owner, slice, visitor]: the visitor's time at its last access to the owner's arrays, and to its scratch
        self.array_visits = np.zeros((size, self.slices, size), dtype=np.int64)
        self.scratch_visits = np.zeros((size, self.slices, size), dtype=np.int64)
        self.clocks_at_end = np.zeros((size, self.slices, size), dtype=np.int64)

    def prove(self) -> None:
        self._play()
        self._check_results()
        self._check_ends()

    def _fail(self, message: str, rank: int, chunk: int | None = None) -> NoReturn:
        raise ProgramError(message, rank=rank, step=self._step(rank, self.done[rank]), chunk=chunk)

    def _step(self, rank: int, done: int) -> int:
        return done % len(self.program.bodies[rank])

    def _play(self) -> None:
        """Let each rank go on as far as it can, until all are through or none can go on."""
        size = self.program.size
        ready = deque(range(size))
        blocked: dict[int, tuple[int, int]] = {}  # rank -> (peer, how many signals of that peer it waits for)
        while ready:
            rank = ready.popleft()
            body = self.program.bodies[rank]
            while self.done[rank] < len(body) * self.slices:
                slice_, step = divmod(self.done[rank], len(body))
                instruction = body[step]
                if type(instruction) is Move:
                    self._move(instruction, rank, slice_)
                elif type(instruction) is Signal:
                    peer = instruction.peer
                    self.signals[rank, peer].append((self.done[rank] + 1, self.clocks[rank]))
                    if blocked.get(peer) == (rank, len(self.signals[rank, peer])):
                        del blocked[peer]
                        ready.append(peer)
                elif type(instruction) is Wait and slice_ >= instruction.lag:
                    peer = instruction.peer
                    count = (slice_ - instruction.lag) * self.signals_in[rank][peer] + instruction.signal
                    if len(self.signals[peer, rank]) < count:
                        blocked[rank] = peer, count
                        break
                    time, clock = self.signals[peer, rank][count - 1]
                    self.clocks[rank] = np.maximum(self.clocks[rank], clock)
                    self.clocks[rank][peer] = max(self.clocks[rank][peer], time)
                elif type(instruction) is Enter and slice_ == 0 and rank not in self.entered:
                    self.entered.add(rank)
                    if len(self.entered) < size:
                        break
                    self.clocks = [np.array(self.done, dtype=np.int64)] * size
                    ready.extend(other for other in range(size) if other != rank)
                self.done[rank] += 1
                if step + 1 == len(body):
                    self.clocks_at_end[rank, slice_] = self.clocks[rank]
        for rank, (peer, _) in blocked.items():
            stuck = "; ".join(
                f"rank {r} at step {self._step(r, self.done[r])}, for {q}" for r, (q, _) in blocked.items()
            )
            self._fail(f"waits for ever for rank {peer} (stuck: {stuck})", rank)

    def _move(self, move: Move, rank: int, slice_: int) -> None:
        sources = [self._read(ref, move.chunk, rank, slice_) for ref in move.srcs]
        contributions = 0
        finished = False
        for ref, value, raw in zip(move.srcs, sources, move.raw, strict=True):
            twice = contributions & self.values.contributions[value]
            if twice:
                self._fail(f"{ref} counts the contribution of rank {_ranks(twice)} twice", rank, move.chunk)
            contributions |= self.values.contributions[value]
            finished |= self.values.finished[value]
            if raw != (self.values.contributions[value].bit_count() == 1 and not self.values.finished[value]):
                self._fail(f"{ref} is marked {'' if raw else 'not '}raw, wrongly", rank, move.chunk)
        completes = self.program.contract.reduces and contributions == self.program.contract.everyone and not finished
        if move.final != completes:
            self._fail(f"marked {'' if move.final else 'not '}final, wrongly", rank, move.chunk)
        value = self.values.reduction(sources, contributions, move.final)
        for ref in move.dsts:
            self._write(ref, value, move.chunk, rank, slice_)

    def _key(self, ref: Ref, rank: int, slice_: int) -> tuple[int, int, int]:
        """The place that `ref` means in this slice; notes the visit if it is another rank's."""
        if ref.buffer is Buffer.SCRATCH:
            if ref.rank != rank:
                self.scratch_visits[ref.rank, slice_, rank] = self.done[rank] + 1
            return ref.rank, -1 - ref.place, slice_ % self.program.slots
        if ref.rank != rank:
            self.array_visits[ref.rank, slice_, rank] = self.done[rank] + 1
        apart = ref.buffer is Buffer.INPUT and (ref.rank, ref.place) in self.untouched
        return ref.rank, ref.place, -1 - slice_ if apart else slice_

    def _read(self, ref: Ref, chunk: int, rank: int, slice_: int) -> int:
        key = self._key(ref, rank, slice_)
        place = self.places.get(key)
        if place is None:
            if ref.buffer is not Buffer.INPUT:
                self._fail(f"{ref} is read before anything was written there", rank, chunk)
            place = _Place(self.values.contribution(ref.rank, chunk), ref.buffer, slice_, ref.rank, 0)
            self.places[key] = place
        if place.writer != rank and self.clocks[rank][place.writer] < place.written:
            self._fail(
                f"{ref} is read while {self._access(place.writer, place.written)} may be writing it", rank, chunk
            )
        if place.buffer is not ref.buffer:
            problem = (
                "was overwritten, if the call is in place" if ref.buffer is Buffer.INPUT else "was not written yet"
            )
            self._fail(f"{ref} is read, but {problem}", rank, chunk)
        if place.slice != slice_ or self.values.chunk[place.value] != chunk:
            self._fail(f"{ref} holds chunk {self.values.chunk[place.value]} of slice {place.slice}", rank, chunk)
        place.readers[rank] = self.done[rank] + 1
        return place.value

    def _write(self, ref: Ref, value: int, chunk: int, rank: int, slice_: int) -> None:
        key = self._key(ref, rank, slice_)
        before = self.places.get(key)
        if before is not None:
            clock = self.clocks[rank]
            for peer, time in ((before.writer, before.written), *before.readers.items()):
                if peer != rank and clock[peer] < time:
                    self._fail(f"{ref} is written while {self._access(peer, time)} may be using it", rank, chunk)
        self.places[key] = _Place(value, ref.buffer, slice_, rank, self.done[rank] + 1)

    def _access(self, rank: int, time: int) -> str:
        return f"rank {rank} at its step {self._step(rank, time - 1)}"

    def _check_results(self) -> None:
        contract = self.program.contract
        for slice_ in range(self.slices):
            agreed: dict[int, tuple[int, int]] = {}  # chunk -> (a rank, the value it ends with)
            for rank in range(contract.size):
                for chunk, wanted in contract.wants(rank).items():
                    place = self.places.get((rank, chunk, slice_))
                    if place is None or place.buffer is not Buffer.OUTPUT:
                        raise ProgramError("the output is never written", rank=rank, chunk=chunk)
                    found = self.values.contributions[place.value]
                    if found != wanted or self.values.chunk[place.value] != chunk:
                        message = f"the output holds what rank {_ranks(found)} contributed, not rank {_ranks(wanted)}"
                        raise ProgramError(message, rank=rank, chunk=chunk)
                    other, value = agreed.setdefault(chunk, (rank, place.value))
                    if contract.reduces and value != place.value:
                        raise ProgramError(f"not reduced in the same order as on rank {other}", rank=rank, chunk=chunk)

    def _check_ends(self) -> None:
        """When a rank is through, its peers must be done with its arrays, and with the scratch it may soon write."""
        slots, slices = self.program.slots, self.slices
        for visits, ago, what in ((self.array_visits, 0, "arrays"), (self.scratch_visits, slots - 1, "scratch")):
            late = np.argwhere(visits[:, : max(slices - ago, 0)] > self.clocks_at_end[:, ago:])
            for rank, slice_, peer in late.tolist():
                access = self._access(peer, int(visits[rank, slice_, peer]))
                raise ProgramError(f"ends while {access} may still be using its {what}", rank=rank)


def _ranks(contributions: int) -> str:
    return "+".join(str(rank) for rank in range(contributions.bit_length()) if contributions >> rank & 1)
