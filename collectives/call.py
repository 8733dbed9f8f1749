"""What ranks must agree on: one collective call, as each rank's descriptor publishes it.

A descriptor is seven 64-bit words. The first four are the *signature*: if they differ between ranks, somebody has made
a mistake, and all raise. The last three say how a rank means to run the call: its program's digest and where its arrays
lie; these may differ, and then all ranks find the common way from everybody's words.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import SupportsFloat

from collectives.contract import COLLECTIVES
from kernels.dtypes import DTYPES, OPERATIONS, DType
from kernels.executor import SIGNATURE_WORDS

INTERNAL = 1  # the scale of a call that the package makes for itself, within another
ORDINARY = -1  # the location of an array outside symmetric memory

_CALLS = tuple(COLLECTIVES)
_UNEVEN = ("all_gather", "gather", "scatter")  # which ranks with different numbers of rows may have meant to call


@dataclass(frozen=True)
class PremulSum:
    """The sum of every rank's contribution times its `scale`: see `premul_sum`."""

    scale: float


def premul_sum(scale: SupportsFloat) -> PremulSum:
    """A reduction that multiplies each contribution by `scale` (the same on every rank) before summing, as NCCL's.

    scale: a number, or an array of one, which is read now.
    """
    try:
        return PremulSum(index(scale))  # type: ignore[arg-type]  # an integer, however large, as it is
    except TypeError:
        return PremulSum(float(scale))


@dataclass(frozen=True, eq=False)
class Call:
    """One collective call.

    `count`: elements of the array, of one block where there are equal blocks, or of all blocks together with `counts`.
    `scale`: the bits of what premul_sum multiplies by. `algorithm`: what the caller insists on.
    Make one with `make_call`: equal calls are one object, so that they are quickly found in tables.
    """

    collective: str
    dtype: DType
    count: int
    op: str = "sum"
    root: int = 0
    scale: int = 0
    counts: tuple[int, ...] | None = None
    algorithm: str | None = None

    @property
    def reduces(self) -> bool:
        """Whether the call adds anything up."""
        return COLLECTIVES[self.collective].source is None and self.collective != "barrier"

    def signature(self) -> tuple[int, int, int, int]:
        """The words that must be equal on every rank."""
        algorithm = zlib.crc32(self.algorithm.encode()) & 0x7FFF | 1 if self.algorithm else 0
        what = _CALLS.index(self.collective) | self.dtype.code << 8 | OPERATIONS.index(self.op) << 16
        counts = 0 if self.counts is None else zlib.crc32(struct.pack(f"{len(self.counts)}q", *self.counts)) + 1
        return what | self.root << 24 | algorithm << 40, self.count, self.scale, counts


def padded(nbytes: int) -> int:
    """Bytes in which to send a text of `nbytes`: one of few lengths, since each is a kind of call of its own."""
    return 1 << max(6, (nbytes - 1).bit_length())


@lru_cache(maxsize=8192)
def make_call(
    collective: str,
    dtype: DType,
    count: int,
    op: str = "sum",
    root: int = 0,
    scale: int = 0,
    counts: tuple[int, ...] | None = None,
    algorithm: str | None = None,
) -> Call:
    """The `Call` with these terms."""
    return Call(collective, dtype, count, op, root, scale, counts, algorithm)


def describe(words: tuple[int, ...]) -> str:
    """A descriptor's signature in words, for people: "all_reduce(float32, count 10, sum)"."""
    what, count, scale, counts = words[:SIGNATURE_WORDS]
    collective = _CALLS[what & 0xFF]
    parts = [DTYPES[what >> 8 & 0xFF].name, f"count {count}"] if collective != "barrier" else []
    terms = COLLECTIVES[collective]
    if terms.source is None and collective != "barrier":
        op = OPERATIONS[what >> 16 & 0xFF]
        parts.append(f"premul_sum({scale_value(what, scale)})" if op == "premul_sum" else op)
    if collective in ("reduce", "broadcast", "gather", "scatter"):
        parts.append(f"root {what >> 24 & 0xFFFF}")
    elif scale == INTERNAL:
        parts.append("as a part of empty or split")
    if counts:
        parts.append(f"counts with hash {counts:x}")
    if what >> 40 & 0x7FFF:
        parts.append(f"algorithm with hash {what >> 40 & 0x7FFF:x}")
    return f"{collective}({', '.join(parts)})"


def disagreement(number: int, words: Sequence[tuple[int, ...]]) -> str:
    """Which ranks called what, from every rank's descriptor of one call."""
    groups: dict[str, list[int]] = {}
    for rank, page in enumerate(words):
        groups.setdefault(describe(page), []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)} called {what}" for what, ranks in groups.items())
    uneven = len({(what, scale) for what, _, scale, *_ in words}) == 1 and _CALLS[words[0][0] & 0xFF] in _UNEVEN
    hint = "; where ranks have different numbers of rows, each passes the same counts=" if uneven else ""
    return f"the ranks disagree in call {number}: {told}{hint}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as: ranks 0, 1, 5."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else "nobody"


def scale_bits(scale: float, dtype: DType) -> int:
    """What the kernels take as a scale: a float64's bits, or an integer for integer types."""
    if dtype.kind in ("int", "uint"):
        if not -(2**63) <= scale < 2**63 or scale != int(scale):  # NaN is in no range
            raise ValueError(
                f"premul_sum({scale}) of {dtype.name}: the scale of an integer type must be an integer of 64 bits"
            )
        return int(scale)
    bits: int = struct.unpack("<q", struct.pack("<d", scale))[0]
    return bits


def scale_value(what: int, bits: int) -> float:
    """The scale again, from a descriptor's words."""
    if DTYPES[what >> 8 & 0xFF].kind in ("int", "uint"):
        return bits
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
