"""The executor's arguments: a communicator's *link* and one call's *job*, as the arrays of words that
`kernels/executor.py` lays down. Any backend whose ranks share memory builds them here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from collectives.contract import Geometry
from collectives.program import Program
from kernels import executor as x
from kernels.dtypes import DType

Words = npt.NDArray[np.int64]
LINE = 64


def relocate(words: Words, tables: Mapping[int, Words], base: int) -> Words:
    """A link's or a job's words, and behind them its tables, as one array that is right when it lies at address `base`:
    the word that a table stands under holds the table's address there."""
    pieces = [words.copy()]
    at = len(words)
    for place, table in tables.items():
        pieces[0][place] = base + 8 * at
        pieces.append(table.reshape(-1))
        at += table.size
    return np.concatenate(pieces)


class Link:
    """One rank's view of a communicator: whose memory is where. All addresses are this process's.

    `scratch`, `boards`: every rank's. `flags_in[q]`: this rank's flag that rank q raises; `flags_out[q]`: rank q's flag
    that this rank raises. `finished`: where this rank counts the calls that it has ended. `keep`:
    what must live as long as the link.
    """

    def __init__(
        self,
        rank: int,
        *,
        scratch: Sequence[int],
        boards: Sequence[int],
        flags_in: Sequence[int],
        flags_out: Sequence[int],
        finished: int,
        slots: int,
        slot_bytes: int,
        patience: tuple[int, int],
        channels: int = 1,
        flags_stride: int = 0,
        keep: object = None,
    ) -> None:
        size = len(scratch)
        places = (x.LINK_SCRATCH, x.LINK_BOARDS, x.LINK_FLAGS_IN, x.LINK_FLAGS_OUT)
        given = (scratch, boards, flags_in, flags_out)
        self.tables = {place: np.array(table, np.int64) for place, table in zip(places, given, strict=True)}
        self.counters = np.zeros((channels, x.COUNTERS + 2 * size), np.int64)
        self.words = np.zeros(x.LINK_WORDS, np.int64)
        self.words[x.LINK_RANK] = rank
        self.words[x.LINK_SIZE] = size
        self.words[x.LINK_SLOTS] = slots
        self.words[x.LINK_SLOT_BYTES] = slot_bytes
        self.words[x.LINK_SPINS], self.words[x.LINK_YIELDS] = patience
        self.tables[x.LINK_COUNTERS] = self.counters
        for place, table in self.tables.items():
            self.words[place] = table.ctypes.data
        self.words[x.LINK_FLAGS_STRIDE] = flags_stride
        self.words[x.LINK_FINISHED] = finished
        self.address = int(self.words.ctypes.data)
        self.rank, self.size, self.slots, self.slot_bytes = rank, size, slots, slot_bytes
        self._keep = keep

    def cell_bytes(self, program: Program) -> int:
        """Bytes of one cell of a scratch slot."""
        return self.slot_bytes // max(program.cells, 1) // LINE * LINE

    def fits_one_slice(self, program: Program, geometry: Geometry, dtype: DType) -> bool:
        """Whether every chunk of a call fits in one cell, so that the program need not be pipelined."""
        return program.cells == 0 or int(geometry.lengths.max(initial=0)) * dtype.itemsize <= self.cell_bytes(program)

    @property
    def calls(self) -> int:
        """Collective calls that have ended."""
        return int(self.counters[0, x.COUNT_CALLS])

    def count_call(self) -> None:
        """Count a call that went no further than its entry."""
        self.counters[:, x.COUNT_CALLS] += 1
        ctypes.c_int64.from_address(int(self.words[x.LINK_FINISHED])).value = self.calls


@dataclass(frozen=True)
class Encoded:
    """One rank's part of a program, ready for the executor."""

    program: Program
    code: Words
    signals_in: Words
    number: int  # the program's digest, as far as a word holds it

    @classmethod
    def of(cls, program: Program, rank: int) -> Encoded:
        """Encode the body of `rank`."""
        number = int(program.digest()[:15], 16)
        return cls(program, program.encode(rank), program.signals_in(rank), number)


class Job:
    """One call, ready to run: `execute_on(job.address, rank, source, target)`, with this rank's addresses.

    `inputs` and `outputs` (int64, one address per rank) may be changed between runs, as may `descriptor`. `bases` (one
    address per rank): where each rank's memory begins that holds its arrays; who enters learns from the others'
    descriptors where in it they are.
    """

    def __init__(
        self,
        link: Link,
        encoded: Encoded,
        geometry: Geometry,
        dtype: DType,
        *,
        combine: int = 0,
        scale: int = 0,
        descriptor: Sequence[int] = (),
        channels: int = 1,
        bases: Words | None = None,
    ) -> None:
        program = encoded.program
        longest = int(geometry.lengths.max(initial=0))
        cell_bytes = link.cell_bytes(program)
        step = max(longest, 1) if program.cells == 0 else cell_bytes // dtype.itemsize
        if step == 0:
            raise ValueError(
                f"{program!r} needs {program.cells} cells of scratch, more than a slot of {link.slot_bytes} bytes holds"
            )
        slices = max(1, -(-longest // step))
        if slices > 1 and not program.pipelined:
            raise ValueError(
                f"{program!r} takes at most {step * dtype.itemsize} bytes a chunk, and this call has "
                f"{longest * dtype.itemsize}; choose another algorithm for messages of this size"
            )
        self.inputs, self.outputs = np.zeros(link.size, np.int64), np.zeros(link.size, np.int64)
        operands = np.zeros(channels * (2 * link.size + 2), np.int64)
        self.tables = {
            x.JOB_CODE: encoded.code,
            x.JOB_LENGTHS: geometry.lengths,
            x.JOB_INPUTS: self.inputs,
            x.JOB_OUTPUTS: self.outputs,
            x.JOB_IN_STARTS: geometry.inputs,
            x.JOB_OUT_STARTS: geometry.outputs,
            x.JOB_SIGNALS_IN: encoded.signals_in,
            x.JOB_OPERANDS: operands,
            **({} if bases is None else {x.JOB_BASES: bases}),
        }
        self.words = np.zeros(x.JOB_PLACE + channels * x.PLACE_WORDS, np.int64)
        self.words[x.JOB_LINK] = link.address
        self.words[x.JOB_SLICES] = slices
        self.words[x.JOB_STEP] = step
        self.words[x.JOB_ITEMSIZE] = dtype.itemsize
        self.words[x.JOB_CELL_BYTES] = cell_bytes
        self.words[x.JOB_COMBINE] = combine
        self.words[x.JOB_SCALE] = scale
        self.words[x.JOB_RANKS] = link.size
        self.words[x.JOB_BRIEF] = program.cells == 1 and longest * dtype.itemsize <= LINE
        for place, table in self.tables.items():
            self.words[place] = table.ctypes.data
        self.descriptor = self.words[x.JOB_DESCRIPTOR : x.JOB_DESCRIPTOR + len(descriptor)]
        self.descriptor[:] = descriptor
        self.address = int(self.words.ctypes.data)
        self._bases = bases
        self._keep = link

    def place(self, rank: int, source: int, target: int) -> None:
        """Say where the arrays of `rank`, this one, are."""
        self.inputs[rank], self.outputs[rank] = source, target
        if self._bases is not None:
            self.descriptor[-2:] = source - self._bases[rank], target - self._bases[rank]

    def placed(self, rank: int) -> tuple[int, int]:
        """Where they are."""
        return int(self.inputs[rank]), int(self.outputs[rank])

    def restart(self) -> None:
        """Forget how far an unfinished run has come."""
        self.words[x.JOB_PLACE :] = 0
