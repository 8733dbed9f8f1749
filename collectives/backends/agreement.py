"""What the ranks of an engine agree on beside their calls: each brings something, and all see everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from collectives.backends.base import Backend, CanFail
from collectives.call import INTERNAL, make_call, padded
from collectives.errors import CollectiveMismatchError
from kernels.dtypes import find

_Made = TypeVar("_Made")
_BYTE = find("uint8")


class Agrees(CanFail, Protocol):
    """An engine that gathers bytes: every rank's payload, by rank."""

    def gather_bytes(self, payload: bytes) -> list[bytes]: ...


def gather_bytes(engine: Backend, payload: bytes) -> list[bytes]:
    """Every rank's payload, by rank, in two calls: lengths, then what is padded to the longest of them."""
    lengths = np.zeros(engine.size, np.int64)
    engine.run(make_call("all_gather", find("int64"), 1, scale=INTERNAL), np.array([len(payload)]), lengths)
    room = padded(int(lengths.max()))
    given = np.frombuffer(payload.ljust(room, b"\0"), np.uint8)
    gathered = np.empty((engine.size, room), np.uint8)
    engine.run(make_call("all_gather", _BYTE, room, scale=INTERNAL), given, gathered)
    return [row[:length].tobytes() for row, length in zip(gathered, lengths.tolist(), strict=True)]


def agree(engine: Agrees, what: str, payload: object) -> list[Any]:
    """Every rank's payload, by rank, through JSON. Raises CollectiveMismatchError if not all are in call `what`."""
    answers = [json.loads(answer) for answer in engine.gather_bytes(json.dumps([what, payload]).encode())]
    if len({theirs for theirs, _ in answers}) > 1:
        calls = ", ".join(f"rank {rank} called {theirs}" for rank, (theirs, _) in enumerate(answers))
        _refuse(engine, f"the ranks disagree: {calls}")
    return [theirs for _, theirs in answers]


def check_sizes(engine: CanFail, sizes: Sequence[int]) -> None:
    """Raise CollectiveMismatchError unless all ranks allocate the same number of bytes."""
    if len(set(sizes)) > 1:
        told = ", ".join(f"rank {rank} {size:,}" for rank, size in enumerate(sizes))
        _refuse(engine, f"the ranks allocate different numbers of bytes: {told}")


def together(
    engine: Agrees,
    make: Callable[[], _Made],
    undo: Callable[[_Made], object] = lambda made: None,
    name: Callable[[int], str] = "rank {}".format,
) -> _Made:
    """What `make` makes, on every rank. MemoryError on every rank if it raises that on one; the others `undo` it."""
    made, problem = None, ""
    try:
        made = make()
    except MemoryError as error:
        problem = str(error) or "there is too little memory"
    problems = [answer.decode() for answer in engine.gather_bytes(problem.encode())]
    if any(problems) and not problem:
        undo(cast(_Made, made))
    raise_problems(MemoryError, problems, name)
    return cast(_Made, made)


def raise_problems(
    kind: type[Exception], problems: Sequence[str], name: Callable[[int], str] = "rank {}".format
) -> None:
    """Raise, if a rank has a problem. `problems`: the ranks', by rank; empty for none."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(problems):
        if text:
            ranks.setdefault(text, []).append(name(rank))
    if ranks:
        raise kind("; ".join(f"{', '.join(names)}: {text}" for text, names in ranks.items()))


def _refuse(engine: CanFail, text: str) -> None:
    error = CollectiveMismatchError(text)
    engine.fail(error)
    raise error
