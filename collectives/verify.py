"""The proofs: a program is shown to be right before it runs.

`verify` looks at nothing but the lowered instruction lists, and knows of the collective only its contract. It
plays all ranks' lists against one another, with symbols for data, and shows

- *result*: each rank's OUTPUT ends with what the contract wants, every contribution counted exactly once, reduced
  in the same order on every rank (so that all get the same bits), with the flags `raw` and `final` right;
- *progress*: no rank waits for ever;
- *no race*: of any two conflicting accesses, one happens before the other by program order, by a signal waited for,
  or by Enter (see `collectives.clocks`). With that, what holds in one interleaving holds in all, and on weakly
  ordered machines too;
- *the memory mode*: in staged memory nobody touches what is not his own, except SCRATCH;
- *the borders of a call*: nobody touches others' arrays before Enter; when a rank has finished, all others have
  finished with its arrays, and with those slots of its scratch that it may write before the next Enter.

Why this is enough, though programs run in any number of slices, one after another, with chunks of any length:

- Waits look back only to earlier slices (`lag`), so what a rank does in slice s is the same however many follow.
  Clocks are kept for slots + 2 slices; what must hold at the end of a call is required at the end of each, which
  covers all shorter calls. From slice 1 on each slice repeats the one before, shifted, and uses of one slot are
  `slots` slices apart: what is shown from slice 1 to slice slots + 1, without Enter's help, holds ever after.
- More slots only ask for less: who knows that another is past slice s knows it of all before. So there is nothing to
  gain from more slots than the longest lag needs, and the proof is made for these.
- Every slice's Moves do the same to other elements and another slot. They are followed once, in one possible order,
  and all conflicting accesses are required to keep that order in all slices; so each finds there what was found here.
- A call's first writes before Enter go to the slot after the last, which was last used `slots` slices ago. As these
  uses are required to be over, any program may follow any: all else comes after Enter, and Enter after all ranks'
  last instructions. Counters go on from call to call by what a whole body signals, so none is left over.
- Each Move touches one chunk, the same elements at all its places; where a chunk is empty or has ended, its Moves are
  missing together with everything that depended on them, and all signals still come.
- INPUT and OUTPUT places of one number are taken for the same memory. A program that passes never reads what that
  overwrote, and is therefore right in place and out of place, even if ranks differ in that. (They are taken for
  different ones where OUTPUT is but a copy of INPUT, which in place is left out.)
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from collectives.builder import lookup
from collectives.clocks import Clocks
from collectives.errors import ProgramError
from collectives.lowering import build
from collectives.program import Buffer, Enter, Instruction, Move, Program, Ref, Signal, Wait, untouched_inputs

Point = tuple[int, int]  # a rank, and a step in its list


def verify(program: Program) -> None:
    """Prove `program` right, or raise ProgramError saying at which rank, step and chunk the proof fails."""
    _check_form(program)
    lag = max((i.lag for body in program.bodies for i in body if type(i) is Wait), default=0)
    slots = min(program.slots, max(lag + 1, 2))
    clocks = Clocks(program, slices=slots + 2 if program.pipelined else 1)
    data = _Dataflow(program, clocks.order)
    _check_results(data)
    _check_races(data, clocks, slots)
    _check_ends(data, clocks, slots)


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
    signals = Counter((rank, i.peer) for rank, body in enumerate(program.bodies) for i in body if type(i) is Signal)
    form = _Form(program, signals)
    for rank, body in enumerate(program.bodies):
        enters = [step for step, instruction in enumerate(body) if type(instruction) is Enter]
        if len(enters) != 1:
            raise ProgramError(f"every rank enters exactly once, not {len(enters)} times", rank=rank)
        for step, instruction in enumerate(body):
            if flaw := form.flaw(instruction, rank, step > enters[0]):
                chunk = instruction.chunk if isinstance(instruction, Move) else None
                raise ProgramError(f"{flaw} ({instruction})", rank=rank, step=step, chunk=chunk)


class _Form:
    """What an instruction may look like in a program."""

    def __init__(self, program: Program, signals: Counter[Point]) -> None:
        contract = program.contract
        self.size, self.chunks, self.cells = program.size, program.chunks, program.cells
        self.staged, self.reduces, self.collective = program.memory == "staged", contract.reduces, program.collective
        self.brings = [frozenset(contract.brings(rank)) for rank in range(program.size)]
        self.wants = [contract.wants(rank).keys() for rank in range(program.size)]
        self.signals = signals  # by (from, to)

    def flaw(self, instruction: Instruction, rank: int, entered: bool) -> str | None:
        if type(instruction) is Move:
            return self._flaw_of_move(instruction, rank, entered)
        if type(instruction) is Enter:
            return None
        assert not isinstance(instruction, (Move, Enter))
        peer = instruction.peer
        if not 0 <= peer < self.size or peer == rank:
            return f"{peer} is not another rank"
        if not entered:
            return "ranks neither signal nor wait before all have entered the call"
        if type(instruction) is Wait:
            if not 1 <= instruction.signal <= self.signals[peer, rank]:
                return f"rank {peer} gives {self.signals[peer, rank]} signals, there is no number {instruction.signal}"
            if instruction.lag < 0:
                return "no rank can wait for a later slice"
        return None

    def _flaw_of_move(self, move: Move, rank: int, entered: bool) -> str | None:
        chunk, dsts, srcs, raw, _ = move
        if not 0 <= chunk < self.chunks:
            return f"there are {self.chunks} chunks"
        if not srcs or not dsts or len(raw) != len(srcs) or len(dsts) > 1 and len(set(dsts)) < len(dsts):
            return "a move has sources, each with its flag `raw`, and distinct destinations"
        if len(srcs) + len(dsts) > 2 * self.size + 2:
            return f"a move has at most {2 * self.size + 2} places, for which the executor has room"
        if len(set(raw[63:])) > 1:
            return "of a move's sources from the 64th on either all are raw or none is"
        if len(srcs) > 1 and not self.reduces:
            return f"{self.collective} reduces nothing"
        for ref in srcs:
            if flaw := self._flaw_of_place(ref, chunk, rank, entered, written=False):
                return flaw
        for ref in dsts:
            if flaw := self._flaw_of_place(ref, chunk, rank, entered, written=True):
                return flaw
        return None

    def _flaw_of_place(self, ref: Ref, chunk: int, rank: int, entered: bool, written: bool) -> str | None:
        buffer, owner, place = ref
        if not 0 <= owner < self.size:
            return f"{ref} is no rank's"
        own = owner == rank
        if buffer is Buffer.SCRATCH:
            if not 0 <= place < self.cells:
                return f"{ref} does not exist: there are {self.cells} cells"
            return None if entered or (own and written) else f"{ref} is out of bounds before all have entered the call"
        if place != chunk:
            return f"{ref} is not the place of chunk {chunk}"
        if buffer is Buffer.INPUT:
            if written:
                return f"{ref} must not be written"
            if chunk not in self.brings[owner]:
                return f"{ref} does not exist: that rank brings no chunk {chunk}"
        elif chunk not in self.wants[owner]:
            return f"{ref} does not exist: that rank wants no chunk {chunk}"
        if not own and self.staged:
            return f"{ref} is out of reach in staged memory"
        if not entered and not (own and buffer is Buffer.INPUT):
            return f"{ref} is out of bounds before all have entered the call"
        return None


class _Values:
    """Whatever a place can hold: one rank's contribution to a chunk, or a reduction. Equal ones have equal numbers."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, ...], int] = {}
        self.chunk: list[int] = []
        self.contributions: list[int] = []  # the set of ranks, as a bit mask
        self.finished: list[bool] = []  # made by a Move marked `final`
        self.raw: list[bool] = []  # one rank's, untouched

    def contribution(self, rank: int, chunk: int) -> int:
        return self._number((-1, rank, chunk), chunk, 1 << rank, False)

    def reduction(self, sources: list[int], contributions: int, final: bool) -> int:
        if len(sources) == 1 and not final:
            return sources[0]
        return self._number((final, *sources), self.chunk[sources[0]], contributions, final)

    def _number(self, key: tuple[int, ...], chunk: int, contributions: int, finished: bool) -> int:
        number = self.numbers.setdefault(key, len(self.chunk))
        if number == len(self.chunk):
            self.chunk.append(chunk)
            self.contributions.append(contributions)
            self.finished.append(finished)
            self.raw.append(contributions.bit_count() == 1 and not finished)
        return number


class _Place:
    """What one place holds in a slice, and who has used it."""

    __slots__ = ("buffer", "first", "readers", "value", "writer")

    def __init__(self, value: int, buffer: Buffer, writer: Point | None, first: Point | None) -> None:
        self.value = value
        self.buffer = buffer  # the name by which it was written
        self.writer = writer  # None if it is what a rank brings
        self.readers: list[Point] = []  # since it was written
        self.first = first  # the first to write in this slice


class _Dataflow:
    """What the Moves of one slice do, in one order that the ranks can take, and where that order matters."""

    def __init__(self, program: Program, order: list[tuple[int, int, int]]) -> None:
        self.program = program
        self.values = _Values()
        self.complete = program.contract.everyone if program.contract.reduces else None  # what makes a result final
        self.places: dict[Ref, _Place] = {}
        self.conflicts: list[tuple[Point, Point, Ref]] = []  # (later, earlier), by different ranks
        self.last_visit: dict[tuple[int, int, bool], int] = {}  # (owner, visitor, to its scratch): the visitor's step
        self.untouched = untouched_inputs(move for body in program.bodies for move in body if type(move) is Move)
        for rank, start, stop in order:
            body = program.bodies[rank]
            for step in range(start, stop):
                if type(move := body[step]) is Move:
                    self._move(move, (rank, step))

    def chunk(self, at: Point) -> int:
        move = self.program.bodies[at[0]][at[1]]
        assert isinstance(move, Move)
        return move.chunk

    def _fail(self, message: str, at: Point, move: Move) -> NoReturn:
        raise ProgramError(message, rank=at[0], step=at[1], chunk=move.chunk)

    def _move(self, move: Move, at: Point) -> None:
        values = self.values
        sources, contributions, finished = [], 0, False
        for ref, raw in zip(move.srcs, move.raw, strict=True):
            value = self._read(ref, move, at)
            sources.append(value)
            brought = values.contributions[value]
            if twice := contributions & brought:
                self._fail(f"{ref} counts the contribution of rank {_ranks(twice)} twice", at, move)
            contributions |= brought
            if raw != values.raw[value]:
                self._fail(f"{ref} is marked {'' if raw else 'not '}raw, wrongly", at, move)
            finished = finished or values.finished[value]
        if move.final != (contributions == self.complete and not finished):
            self._fail(f"marked {'' if move.final else 'not '}final, wrongly", at, move)
        result = values.reduction(sources, contributions, move.final)
        for ref in move.dsts:
            self._write(ref, result, at)

    def memory(self, ref: Ref) -> Ref:
        """One name for each place: INPUT and OUTPUT of one number are the same memory if a call is in place."""
        buffer, rank, place = ref
        if buffer is Buffer.INPUT and (rank, place) not in self.untouched:
            return Ref(Buffer.OUTPUT, rank, place)
        return ref

    def _read(self, ref: Ref, move: Move, at: Point) -> int:
        buffer, owner, _ = ref
        if owner != at[0]:
            self.last_visit[owner, at[0], buffer is Buffer.SCRATCH] = at[1]
        memory = self.memory(ref)
        place = self.places.get(memory)
        if place is None:
            if buffer is not Buffer.INPUT:
                self._fail(f"{ref} is read before anything was written there", at, move)
            place = _Place(self.values.contribution(owner, move.chunk), Buffer.INPUT, None, None)
            self.places[memory] = place
        if place.buffer is not buffer:
            problem = "was overwritten, if the call is in place" if buffer is Buffer.INPUT else "was not written yet"
            self._fail(f"{ref} is read, but {problem}", at, move)
        if self.values.chunk[place.value] != move.chunk:
            self._fail(f"{ref} holds chunk {self.values.chunk[place.value]}", at, move)
        writer = place.writer
        if writer is not None and writer[0] != at[0]:
            self.conflicts.append((at, writer, ref))
        place.readers.append(at)
        return place.value

    def _write(self, ref: Ref, value: int, at: Point) -> None:
        buffer, owner, _ = ref
        if owner != at[0]:
            self.last_visit[owner, at[0], buffer is Buffer.SCRATCH] = at[1]
        memory = self.memory(ref)
        before, first = self.places.get(memory), at
        if before is not None:
            for user in before.readers if before.writer is None else (before.writer, *before.readers):
                if user[0] != at[0]:
                    self.conflicts.append((at, user, ref))
            first = before.first or at
        self.places[memory] = _Place(value, buffer, at, first)


def _check_results(data: _Dataflow) -> None:
    contract, values = data.program.contract, data.values
    agreed: dict[int, tuple[int, int]] = {}  # chunk -> (a rank, the value it ends with)
    for rank in range(contract.size):
        for chunk, wanted in contract.wants(rank).items():
            place = data.places.get(Ref(Buffer.OUTPUT, rank, chunk))
            if place is None or place.buffer is not Buffer.OUTPUT:
                raise ProgramError("the output is never written", rank=rank, chunk=chunk)
            found = values.contributions[place.value]
            if found != wanted:
                message = f"the output holds what rank {_ranks(found)} contributed, not rank {_ranks(wanted)}"
                raise ProgramError(message, rank=rank, chunk=chunk)
            other, value = agreed.setdefault(chunk, (rank, place.value))
            if contract.reduces and value != place.value:
                raise ProgramError(f"not reduced in the same order as on rank {other}", rank=rank, chunk=chunk)


def _check_races(data: _Dataflow, clocks: Clocks, slots: int) -> None:
    """Conflicting accesses come in the order in which they were played, in each slice and from one slice to another."""
    _require(data.conflicts, data, clocks, apart=0)
    reuses = []
    for memory, place in data.places.items():
        if memory.buffer is Buffer.SCRATCH and place.first is not None and place.writer is not None:
            users = (user for user in (place.writer, *place.readers) if user[0] != place.first[0])
            reuses += [(place.first, user, memory) for user in users]
    _require(reuses, data, clocks, apart=slots)


def _require(orders: list[tuple[Point, Point, Ref]], data: _Dataflow, clocks: Clocks, apart: int) -> None:
    """In each slice, the later access must know of the earlier, which came `apart` slices before."""
    if (flaw := _first_unknown([later + earlier for later, earlier, _ in orders], clocks, apart)) is not None:
        at, other, ref = orders[flaw]
        when = f", {apart} slices ago" if apart else ""
        message = f"uses {ref} while rank {other[0]} may still be at its step {other[1]}{when}, which uses it too"
        raise ProgramError(message, rank=at[0], step=at[1], chunk=data.chunk(at))


def _check_ends(data: _Dataflow, clocks: Clocks, slots: int) -> None:
    """When a rank is through, its peers must be done with its arrays, and with the scratch that it may write next."""
    for scratch in (False, True):
        apart = slots - 1 if scratch else 0
        visits = [
            (owner, len(data.program.bodies[owner]), visitor, step)
            for (owner, visitor, to_scratch), step in data.last_visit.items()
            if to_scratch == scratch
        ]
        if (flaw := _first_unknown(visits, clocks, apart)) is not None:
            owner, _, visitor, step = visits[flaw]
            what = f"its scratch of {apart} slices ago" if scratch else "its arrays"
            raise ProgramError(
                f"ends while rank {visitor} may still be at its step {step}, which uses {what}", rank=owner
            )


def _first_unknown(orders: list[tuple[int, int, int, int]], clocks: Clocks, apart: int) -> int | None:
    """The first of these (rank, step, peer, its step) where, in some slice, the rank comes to its step and does not
    know that the peer is through its own of `apart` slices before."""
    rank, step, peer, its_step = np.fromiter(chain.from_iterable(orders), np.int64, 4 * len(orders)).reshape(-1, 4).T
    for slice_ in range(apart, clocks.slices):
        known = clocks.know(rank, slice_, step, peer, slice_ - apart, its_step)
        if not known.all():
            return int(np.argmin(known))
    return None


def _ranks(contributions: int) -> str:
    return "+".join(str(rank) for rank in range(contributions.bit_length()) if contributions >> rank & 1)
