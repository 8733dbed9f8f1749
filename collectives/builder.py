"""The language in which an algorithm is written: chunks of data that travel between ranks.

    @algorithm("all_reduce")
    def ring(chunks: Chunks, size: int) -> None:
        for c in range(size):  # chunk c starts its journey at rank c
            share = chunks(rank=c, index=c)
            for hop in range(1, size):
                share = share.reduce_into(rank=(c + hop) % size)
            for hop in range(size - 1):
                share = share.copy_to(rank=(c + size + hop) % size)

Nothing moves while such a function runs: what it says is recorded, as a graph of values, and `collectives.lowering`
makes instructions of it. What a rank ends up with and the collective wants there lands in its OUTPUT; what it
brings and wants itself is copied by itself.
"""

from __future__ import annotations

import errno
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from collectives.contract import COLLECTIVES, Contract
from collectives.errors import ProgramError


class Value(NamedTuple):
    """A node of the recorded graph: some ranks' contributions to one chunk, reduced, at one rank."""

    rank: int
    block: int
    part: int
    sources: tuple[int, ...]  # numbers of the values it is made from, in order; none for a rank's own contribution
    contributions: int  # the set of ranks it holds contributions of, as a bit mask


class Share:
    """A value while an algorithm is being written: who has it now, and where it may go next."""

    def __init__(self, chunks: Chunks, number: int) -> None:
        self._chunks = chunks
        self._number = number

    @property
    def rank(self) -> int:
        """The rank that has it."""
        return self._chunks.values[self._number].rank

    def reduce_into(self, rank: int) -> Share:
        """Send it to `rank`, which adds its own contribution."""
        value = self._chunks.values[self._number]
        return self._chunks.reduce([self, self._chunks._contribution(rank, value.block, value.part)], rank)

    @overload
    def copy_to(self, rank: int) -> Share: ...
    @overload
    def copy_to(self, rank: Iterable[int]) -> list[Share]: ...
    def copy_to(self, rank: int | Iterable[int]) -> Share | list[Share]:
        """Copy it to `rank`, or to each of several. A rank that has it already just keeps it."""
        if isinstance(rank, int):
            return self if rank == self.rank else self._chunks.reduce([self], rank)
        return [self.copy_to(one) for one in rank]


class Chunks:
    """The data before anything has moved: `chunks(rank=r, index=i)` is what rank r brings of chunk i.

    `index` counts
    - the pieces into which the algorithm cuts the array, for all_reduce, reduce, broadcast and send_recv: there
      are as many as it names;
    - the ranks, for the others: whose block it is for all_gather and gather (so it can be left out), whom it is
      for in reduce_scatter, scatter and all_to_all. Such a block may be cut further into parts, 0, 1, ...
    """

    def __init__(self, collective: str, size: int, root: int) -> None:
        self._whole = Contract(collective, size, root)
        self._contributions: dict[tuple[int, int, int], Share] = {}
        self.values: list[Value] = []

    def __call__(self, rank: int, index: int | None = None, part: int = 0) -> Share:
        axes, size = self._whole.terms.axes, self._whole.size
        if axes == 0:
            return self._contribution(rank, 0, index or 0)
        if index is None:
            index = rank
        if not 0 <= index < size:
            raise ProgramError(f"index {index} is not a rank: expected 0 to {size - 1}")
        return self._contribution(rank, rank * size + index if axes == 2 else index, part)

    def _contribution(self, rank: int, block: int, part: int) -> Share:
        self._check_rank(rank)
        if block not in self._whole.brings(rank):
            raise ProgramError(f"in {self._whole.collective}, rank {rank} brings nothing of block {block}")
        place = (rank, block, part)
        if place not in self._contributions:
            self._contributions[place] = self._record(Value(*place, (), 1 << rank))
        return self._contributions[place]

    def reduce(self, shares: Sequence[Share], rank: int) -> Share:
        """Reduce several shares of one chunk at `rank`, in the order given, in one step."""
        self._check_rank(rank)
        values = [self.values[share._number] for share in shares]
        if len({(value.block, value.part) for value in values}) != 1:
            raise ProgramError(f"only shares of one chunk can be reduced together, got {values}", rank=rank)
        contributions = 0
        for value in values:
            contributions |= value.contributions
        numbers = tuple(share._number for share in shares)
        return self._record(Value(rank, values[0].block, values[0].part, numbers, contributions))

    @property
    def contract(self) -> Contract:
        """The collective's promise, its blocks cut into as many parts as have been named."""
        none = -1 if self._whole.collective == "barrier" else 0  # only a barrier may move nothing at all
        parts = 1 + max((value.part for value in self.values), default=none)
        return Contract(self._whole.collective, self._whole.size, self._whole.root, parts)

    def _record(self, value: Value) -> Share:
        self.values.append(value)
        return Share(self, len(self.values) - 1)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._whole.size:
            raise ProgramError(f"rank {rank} does not exist: expected 0 to {self._whole.size - 1}")


Algorithm = Callable[..., None]
AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm)
ROOTED = ("reduce", "broadcast", "gather", "scatter", "send_recv")  # their algorithms are also given the root

_registered: dict[str, dict[str, Algorithm]] = {collective: {} for collective in COLLECTIVES}


def algorithm(collective: str, name: str | None = None) -> Callable[[AlgorithmT], AlgorithmT]:
    """Register a function as an algorithm for `collective`, under its own name or the one given.

    It is called as f(chunks, size, **options), with root=... for a rooted collective, and is proven, like those that
    come with the package, before it runs. A later function of the same name takes the earlier one's place.
    """
    if collective not in _registered:
        raise ValueError(f"no collective is called {collective!r}; there are {', '.join(_registered)}")

    def register(function: AlgorithmT) -> AlgorithmT:
        _registered[collective][name or function.__name__] = function
        return function

    return register


def register_from(place: str) -> None:
    """Import a file (NAME.py) or a module, for the algorithms that it registers.

    FileNotFoundError, ModuleNotFoundError, and whatever it raises itself.
    """
    file = Path(place).resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # of a module, this folder; a file may import its neighbours
    if file.suffix != ".py":
        importlib.import_module(place)
        return
    if not file.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)


def algorithms(collective: str) -> dict[str, Algorithm]:
    """The algorithms known for `collective`, by name."""
    import collectives.algorithms  # noqa: F401  (registers those that come with the package, which import this module)

    if collective not in _registered:
        raise ValueError(f"no collective is called {collective!r}; there are {', '.join(_registered)}")
    return dict(_registered[collective])


def lookup(collective: str, name: str) -> Algorithm:
    """The algorithm called `name`; ValueError lists those that exist."""
    known = algorithms(collective)
    if name not in known:
        raise ValueError(f"no {collective} algorithm is called {name!r}; there are {', '.join(sorted(known))}")
    return known[name]


def trace(function: Algorithm, collective: str, size: int, root: int, options: dict[str, Any]) -> Chunks:
    """Run an algorithm's function and return what it recorded."""
    chunks = Chunks(collective, size, root)
    arguments = {"root": root, **options} if collective in ROOTED else options
    try:
        inspect.signature(function).bind(chunks, size, **arguments)
    except TypeError as error:
        raise TypeError(f"{collective} by {function.__name__}: {error}") from None
    function(chunks, size, **arguments)
    return chunks
