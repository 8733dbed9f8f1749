"""What collectives must give, by NumPy alone; data whose results are exact; and arrays that show where one writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives import Communicator, premul_sum
from kernels.dtypes import find

Array = npt.NDArray[Any]
POISON = 0xA5
GUARD = 64  # poisoned bytes on either side of an array
SCALE = 2
PERIOD = 49_999  # a prime
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
UNEVEN = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")


def exact_data(key: Sequence[int], rank: int, shape: Sequence[int], dtype: str, op: str = "sum") -> Array:
    """One rank's contribution: small integers, so that every order of reduction of up to 6 ranks gives one exact result
    in every dtype, 8-bit floats too. For avg all ranks have the same, so that integers divide."""
    random = np.random.default_rng([*key] if op == "avg" else [*key, rank])
    kind = find(dtype).kind
    if np.prod(shape) > 2 * PERIOD:  # what is long repeats itself, out of step with every slice and chunk
        return np.resize(exact_data(key, rank, (PERIOD,), dtype, op), shape)
    if op == "prod":
        # A complex product has no part that is zero, beside an imaginary one of only ones: its sign is the order's.
        signed = [1, 1, 2 + 1j, -2 - 1j] if kind == "complex" else [1, -1, 1, 2]
        values = random.choice([1, 1, 2] if kind in ("uint", "bool") else signed, shape)
    else:
        values = random.integers(0 if kind in ("uint", "bool") else -1, 3, shape)
    array = values.astype(find(dtype).numpy)
    if kind == "complex" and op != "prod":
        array = array + 1j * random.integers(-1, 3, shape).astype(array.dtype)
    return array.astype(find(dtype).numpy)


def reduction(op: str) -> Any:
    """What to pass for op."""
    return premul_sum(SCALE) if op == "premul_sum" else op


def reduced(contributions: Sequence[Array], op: str) -> Array:
    """The exact reduction of exact contributions."""
    dtype = contributions[0].dtype
    if dtype.kind == "b":
        stacked = np.stack(contributions)
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    wide = np.stack([np.asarray(x, np.complex128 if dtype.kind == "c" else np.float64) for x in contributions])
    if op == "premul_sum":
        wide, op = wide * SCALE, "sum"
    if op == "avg":
        return (wide.sum(0) / len(contributions)).astype(dtype)
    return {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[op](wide, axis=0).astype(dtype)


@dataclass(frozen=True)
class Case:
    """One collective call.

    `rows`: of the array, or of each block where there are equal ones; `counts`: of each rank's block, for all_to_all
    counts[source][target]. `form`: fresh (no out=), out or in_place. `memory`: ordinary; symmetric; shifted (symmetric,
    each rank's at another offset); mixed (some ranks one, some the other). `way`: call, async or plan.
    """

    collective: str
    dtype: str = "float32"
    op: str = "sum"
    rows: int = 5
    width: int = 1
    root: int = 0
    counts: Any = None
    algorithm: str | None = None
    form: str = "fresh"
    memory: str = "ordinary"
    way: str = "call"


@dataclass
class Runner:
    """Runs cases on one rank and gathers what went wrong, in words."""

    comm: Communicator
    pool_bytes: int = 1 << 20
    wrong: list[str] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self._pools = [self.comm.empty(self.pool_bytes, np.uint8) for _ in range(2)] if self.pool_bytes else []

    def array(self, values_or_shape: Any, dtype: str, memory: str, pool: int) -> Array:
        """An array with these values, or a poisoned one of this shape, between two guards."""
        given = values_or_shape if isinstance(values_or_shape, np.ndarray) else None
        shape = given.shape if given is not None else values_or_shape
        kind = find(dtype).numpy
        nbytes = int(np.prod(shape)) * kind.itemsize
        rank = self.comm.rank
        if memory == "symmetric" or memory == "shifted" or (memory == "mixed" and (rank + self.number) % 2):
            start = 0 if memory == "symmetric" else 16 * rank + 1024 * (self.number % 3)
            buffer = self._pools[pool][start : start + nbytes + 2 * GUARD]
            assert buffer.nbytes == nbytes + 2 * GUARD, "the pool is too small"
        else:
            buffer = np.empty(nbytes + 2 * GUARD, np.uint8)
        buffer[:] = POISON
        array = buffer[GUARD : GUARD + nbytes].view(kind).reshape(shape)
        if given is not None:
            array[...] = given
        self._guards.append((buffer, nbytes))
        return array

    def run(self, case: Case) -> None:
        """Make the call, and compare everything it may and may not have written."""
        self.number += 1
        self._guards: list[tuple[Array, int]] = []
        comm, rank, p = self.comm, self.comm.rank, case
        every = self._contributions(case)
        x: Array | None = every[rank]
        want = self._wanted(case, every)
        options: dict[str, Any] = {"algorithm": p.algorithm} if p.algorithm else {}
        if p.collective in ROOTED:
            options["root"] = p.root
        if p.counts is not None:
            options["counts"] = p.counts[rank] if p.collective == "all_to_all" else p.counts
        before = None if x is None else x.copy()
        out = None
        if p.form == "in_place":
            x, out, before = self._in_place(case, x, want)
        else:
            if p.collective == "broadcast" and rank != p.root:
                x = self.array(x.shape, p.dtype, p.memory, 0)
            elif p.collective == "scatter" and rank != p.root:
                x = None
            else:
                x = self.array(x, p.dtype, p.memory, 0)
            if (p.form == "out" or x is None) and want is not None and p.collective != "broadcast":
                out = self.array(want.shape, p.dtype, p.memory, 1)
        if out is not None:
            options["out"] = out
        arguments = [x, reduction(p.op)] if p.collective in REDUCING else [x]
        if p.way == "plan":
            planned: Any = comm.plan(p.collective, *arguments, **options)
            planned()
            got = planned.out
        elif p.way == "async":
            got = getattr(comm, p.collective)(*arguments, **options, async_op=True).wait()
        else:
            got = getattr(comm, p.collective)(*arguments, **options)

        if (got is None) != (want is None):
            self._complain(case, f"returned {type(got).__name__}")
        elif out is not None and got is not out:
            self._complain(case, "did not return out")
        elif want is not None and (got.dtype != want.dtype or got.size != want.size or not same_bits(got, want)):
            self._complain(case, f"gave {_short(got)}, expected {_short(want)}")
        elif out is None and want is not None and got.shape != want.shape:
            self._complain(case, f"gave shape {got.shape}, expected {want.shape}")
        if before is not None and x is not None and not (p.collective == "broadcast" and rank != p.root):
            if not same_bits(x, before):
                self._complain(case, f"left {_short(x)} in x, expected {_short(before)}")
        for buffer, nbytes in self._guards:
            if (buffer[:GUARD] != POISON).any() or (buffer[GUARD + nbytes :] != POISON).any():
                self._complain(case, "wrote beside an array")

    def _contributions(self, case: Case) -> list[Array]:
        """Every rank's x, as if all had one."""
        key, size, counts = [self.number], self.comm.size, case.counts
        tail = (case.width,) if case.width > 1 else ()

        def rows(rank: int) -> int:
            if case.collective in ("all_gather", "gather"):
                return case.rows if counts is None else counts[rank]
            if case.collective in ("reduce_scatter", "scatter"):
                return case.rows * size if counts is None else sum(counts)
            if case.collective == "all_to_all":
                return case.rows * size if counts is None else sum(counts[rank])
            return case.rows

        return [exact_data(key, rank, (rows(rank), *tail), case.dtype, case.op) for rank in range(size)]

    def _wanted(self, case: Case, every: list[Array]) -> Array | None:
        """This rank's result; None where it has none."""
        rank, size, counts = self.comm.rank, self.comm.size, case.counts
        if case.collective in ("reduce", "gather") and rank != case.root:
            return None
        blocks = [case.rows] * size if counts is None or case.collective == "all_to_all" else list(counts)
        bounds = np.cumsum([0, *blocks])
        if case.collective in ("all_reduce", "reduce"):
            return reduced(every, case.op)
        if case.collective == "broadcast":
            return every[case.root]
        if case.collective in ("all_gather", "gather"):
            return np.concatenate(every)
        if case.collective == "reduce_scatter":
            return reduced(every, case.op)[bounds[rank] : bounds[rank + 1]]
        if case.collective == "scatter":
            return every[case.root][bounds[rank] : bounds[rank + 1]]
        table = np.full((size, size), case.rows) if counts is None else np.asarray(counts)
        starts = np.cumsum(table, 1) - table
        return np.concatenate([every[q][starts[q, rank] : starts[q, rank] + table[q, rank]] for q in range(size)])

    def _in_place(self, case: Case, x: Array, want: Array | None) -> tuple[Array | None, Array | None, Array | None]:
        """x, out (one inside of the other), and what must stay in x (None if the result replaces it)."""
        rank, size = self.comm.rank, self.comm.size
        blocks = [case.rows] * size if case.counts is None else list(case.counts)
        mine = slice(sum(blocks[:rank]), sum(blocks[: rank + 1]))
        if case.collective in ("all_gather", "gather") and want is not None:
            out = self.array(want.shape, case.dtype, case.memory, 1)
            out[mine] = x
            return out[mine], out, x.copy()
        if case.collective == "scatter" and rank != case.root:
            return None, self.array(want.shape, case.dtype, case.memory, 1), None
        whole = self.array(x, case.dtype, case.memory, 0)
        if case.collective in ("reduce_scatter", "scatter"):
            after = x.copy()
            after[mine] = want
            return whole, whole[mine], after
        if case.collective == "broadcast":
            whole[...] = x if rank == case.root else whole
            return whole, None, None
        return whole, whole if want is not None else None, None if want is not None else x.copy()

    def _complain(self, case: Case, what: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(f"rank {self.comm.rank} of {self.comm.size}, {case}: {what}")


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays of one dtype hold the same bytes, in C order."""
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _short(array: Array) -> str:
    text = np.array2string(np.asarray(array).reshape(-1)[:12], threshold=12)
    return f"{text} of shape {np.shape(array)}"
