"""Reduce and copy: the arithmetic of collectives, for one dtype and operation at a time.

`reduce` reads every source once, keeps the running value in registers and writes it to every destination, so
a destination may be one of the sources. It works on groups of elements: *many* at a time, then *few*, then single
ones. A group of many is several groups of few, with those of the other lanes in between, so that neighbouring lanes
touch neighbouring memory and each has several loads on their way. Low-precision floats are widened as they are loaded
and rounded as they are stored, so a sum of p of them is rounded once.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.portable import portable, primitive
from kernels.primitives import load_word


@primitive
def load(address: int, stride: int) -> Any:
    """A group of elements, its pieces `stride` bytes apart, widened to the accumulator type."""
    raise LookupError("load is bound to a dtype and a width")


@primitive
def store(address: int, group: Any, stride: int) -> None:
    """Round a group to the element type, to nearest even, and write it, its pieces `stride` bytes apart."""
    raise LookupError("store is bound to a dtype and a width")


@primitive
def apply(left: Any, right: Any) -> Any:
    """left op right. Minimum and maximum: NaN wins, and -0 is less than +0. Integers wrap. Of booleans the sum is `or`
    and the product `and`."""
    raise LookupError("apply is bound to an operation")


@primitive
def premultiply(group: Any, scale: int) -> Any:
    """premul_sum: an untouched contribution times the scale (an integer, or the bits of a float64); else as it is."""
    raise LookupError("premultiply is bound to an operation")


@primitive
def finish(group: Any, ranks: int) -> Any:
    """avg: the sum over `ranks`, integers rounding towards zero; else as it is."""
    raise LookupError("finish is bound to an operation")


@portable
def reduce_groups(
    dsts: int, ndst: int, srcs: int, nsrc: int, at: int, last: int, step: int, stride: int, raw: int, final: int,
    scale: int,
) -> int:  # fmt: skip
    """Reduce groups of elements, `step` bytes apart: the first lies `at` bytes into every operand, and none beyond
    `last`. Returns where the next would lie."""
    if nsrc == 2 and ndst <= 2 and raw == 0 and final == 0:
        # What two ranks do, or a ring: with the addresses in registers it takes half the time.
        left, right = load_word(srcs), load_word(srcs + 8)
        first, second = load_word(dsts), load_word(dsts + 8 * (ndst - 1))
        while at <= last:
            group = apply(load(left + at, stride), load(right + at, stride))
            store(first + at, group, stride)
            if second != first:
                store(second + at, group, stride)
            at += step
        return at
    while at <= last:
        group = load(load_word(srcs) + at, stride)
        if raw & 1:
            group = premultiply(group, scale)
        for s in range(1, nsrc):
            other = load(load_word(srcs + 8 * s) + at, stride)
            if (raw >> min(s, 63)) & 1:
                other = premultiply(other, scale)
            group = apply(group, other)
        if final != 0:
            group = finish(group, final)
        for d in range(ndst):
            store(load_word(dsts + 8 * d) + at, group, stride)
        at += step
    return at


@primitive
def reduce_many(
    dsts: int, ndst: int, srcs: int, nsrc: int, at: int, last: int, step: int, stride: int, raw: int, final: int,
    scale: int,
) -> int:  # fmt: skip
    """`reduce_groups`, `many()` elements wide."""
    return reduce_groups(dsts, ndst, srcs, nsrc, at, last, step, stride, raw, final, scale)


@primitive
def reduce_few(
    dsts: int, ndst: int, srcs: int, nsrc: int, at: int, last: int, step: int, stride: int, raw: int, final: int,
    scale: int,
) -> int:  # fmt: skip
    """`reduce_groups`, `few()` elements wide."""
    return reduce_groups(dsts, ndst, srcs, nsrc, at, last, step, stride, raw, final, scale)


@primitive
def reduce_one(
    dsts: int, ndst: int, srcs: int, nsrc: int, at: int, last: int, step: int, stride: int, raw: int, final: int,
    scale: int,
) -> int:  # fmt: skip
    """`reduce_groups`, one element wide."""
    return reduce_groups(dsts, ndst, srcs, nsrc, at, last, step, stride, raw, final, scale)


@primitive
def itemsize() -> int:
    """Bytes per element."""
    raise LookupError("itemsize is bound to a dtype")


@primitive
def many() -> int:
    """Elements in the widest group: a multiple of `few`."""
    raise LookupError("many is bound to a target")


@primitive
def few() -> int:
    """Elements in the middle group."""
    raise LookupError("few is bound to a target")


@primitive
def alignment() -> int:
    """The power of two that every address must be a multiple of for groups wider than one element."""
    raise LookupError("alignment is bound to a target")


@portable
def aligned(operands: int, count: int) -> bool:
    """Whether all of the `count` addresses at `operands` allow wide groups."""
    bits = 0
    for i in range(count):
        bits |= load_word(operands + 8 * i)
    return bits & (alignment() - 1) == 0


@portable
def reduce(
    dsts: int, ndst: int, srcs: int, nsrc: int, count: int, raw: int, final: int, scale: int, lane: int, lanes: int
) -> int:
    """dst[i] = src0[i] op src1[i] op ... for every dst and i < count, in that order.

    `dsts` and `srcs` point at arrays of addresses. Bit s of `raw`: source s is one rank's untouched contribution
    (premul_sum scales it); the last bit, 63, stands for all from there on. `final`: the number of ranks, if the result
    holds all contributions (avg divides), else 0.
    The `lanes` that run this together share the work.
    """
    nbytes = count * itemsize()
    done = 0
    if aligned(dsts, ndst) and aligned(srcs, nsrc):
        piece = few() * itemsize()
        tile = many() * itemsize() * lanes
        at = lane * piece
        at = reduce_many(dsts, ndst, srcs, nsrc, at, nbytes - tile + at, tile, lanes * piece, raw, final, scale)
        reduce_few(dsts, ndst, srcs, nsrc, at, nbytes - piece, lanes * piece, 0, raw, final, scale)
        done = nbytes // piece * piece
    at = done + lane * itemsize()
    reduce_one(dsts, ndst, srcs, nsrc, at, nbytes - itemsize(), lanes * itemsize(), 0, raw, final, scale)
    return 0


@primitive
def copy_vectors(dst: int, src: int, stride: int) -> None:
    """Copy four times 16 bytes that lie `stride` bytes apart: four loads, then four stores."""
    for i in range(4):
        ctypes.memmove(dst + i * stride, src + i * stride, 16)


@primitive
def copy_vector(dst: int, src: int) -> None:
    """Copy 16 bytes."""
    ctypes.memmove(dst, src, 16)


@primitive
def copy_word(dst: int, src: int) -> None:
    """Copy 4 bytes."""
    ctypes.memmove(dst, src, 4)


@primitive
def copy_byte(dst: int, src: int) -> None:
    """Copy a byte."""
    ctypes.memmove(dst, src, 1)


@portable
def copy(dst: int, src: int, nbytes: int, lane: int, lanes: int) -> None:
    """The primitive `copy_bytes` where many lanes share the work: in units of 16 bytes, of 4 or of 1."""
    done = 0
    if (dst | src) & 15 == 0:
        tile = 64 * lanes
        while done + tile <= nbytes:
            copy_vectors(dst + done + 16 * lane, src + done + 16 * lane, 16 * lanes)
            done += tile
        at = done + 16 * lane
        while at + 16 <= nbytes:
            copy_vector(dst + at, src + at)
            at += 16 * lanes
        done = nbytes // 16 * 16
    elif (dst | src) & 3 == 0:
        at = 4 * lane
        while at + 4 <= nbytes:
            copy_word(dst + at, src + at)
            at += 4 * lanes
        done = nbytes // 4 * 4
    at = done + lane
    while at < nbytes:
        copy_byte(dst + at, src + at)
        at += lanes
