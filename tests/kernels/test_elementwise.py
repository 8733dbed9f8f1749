"""Reductions of every dtype and operation on the CPU, against float64 and exact integers, and against plain Python.

The parameter `kernel` names a compiled function; conftest.py compiles what the chosen tests name.
"""

import ctypes
import itertools
import operator
from collections.abc import Callable, Iterator
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels import elementwise, native
from kernels.dtypes import DTYPES, DType, find
from kernels.portable import bind
from kernels.targets import python

Array = npt.NDArray[Any]

SIZES = (0, 1, 7, 31, 32, 33, 64, 255, 1000, 100_003)
MAIN = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")
CANARY = 0xA5


def every_kernel() -> list[Any]:
    """All dtypes and operations; of the less usual dtypes only one operation is quick."""
    names = []
    for dtype in DTYPES:
        for place, operation in enumerate(dtype.operations()):
            quick = dtype.name in MAIN or place == dtype.code % len(dtype.operations())
            marks = () if quick else (pytest.mark.slow,)
            names.append(pytest.param(f"reduce-{dtype.name}-{operation}", marks=marks))
    return names


every = pytest.mark.parametrize("kernel", every_kernel())


def parts(kernel: str) -> tuple[DType, str]:
    _, dtype, operation = kernel.split("-")
    return find(dtype), operation


class Operand:
    """`count` elements in memory at any byte address, with canaries before and behind."""

    def __init__(self, dtype: DType, count: int, shift: int) -> None:
        self.nbytes = count * dtype.itemsize
        self.memory = np.full(self.nbytes + 192, CANARY, np.uint8)
        self.start = -self.memory.ctypes.data % 64 + 64 + shift
        self.address = self.memory.ctypes.data + self.start
        self.dtype = dtype

    @property
    def bytes(self) -> Array:
        return self.memory[self.start : self.start + self.nbytes]

    def get(self) -> Array:
        return self.bytes.copy().view(self.dtype.numpy)

    def set(self, values: Array) -> None:
        self.bytes[:] = np.ascontiguousarray(values).view(np.uint8)

    def check_canaries(self) -> None:
        assert (self.memory[: self.start] == CANARY).all() and (self.memory[self.start + self.nbytes :] == CANARY).all()


def run(
    function: Callable[..., int],
    dsts: list[Operand],
    srcs: list[Operand],
    count: int,
    raw: int = 0,
    final: int = 0,
    scale: int = 0,
    lanes: int = 1,
) -> None:
    """Call a reduction as the executor does, each lane after the other."""
    addresses = np.array([operand.address for operand in dsts + srcs], np.int64)
    at = addresses.ctypes.data
    for lane in range(lanes):
        function(at, len(dsts), at + 8 * len(dsts), len(srcs), count, raw, final, scale, lane, lanes)


def scale_bits(scale: float, dtype: DType) -> int:
    return int(np.float64(scale).view(np.int64)) if dtype.kind in ("float", "complex") else int(scale)


# Exact: small values, whose sums and products need no rounding before the last one.


def small(dtype: DType, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """Numbers so simple that five of them can be combined in any order without rounding in the accumulator."""
    if dtype.kind == "bool":
        return rng.random(shape) < 0.5
    if dtype.kind == "complex":
        return (rng.integers(-3, 4, shape) + 1j * rng.integers(-3, 4, shape)).astype(dtype.numpy)
    low = 0 if dtype.kind == "uint" else -7
    return rng.integers(low, 8, shape).astype(dtype.numpy)


def expected(srcs: Array, dtype: DType, operation: str, raw: int, final: int, scale: float) -> Array:
    """In float64, complex128 or Python's integers; one rounding at the end."""
    if dtype.kind == "bool":
        return {"sum": np.any, "max": np.any, "prod": np.all, "min": np.all}[operation](srcs, axis=0)
    exact = {"float": np.float64, "complex": np.complex128, "int": object, "uint": object}[dtype.kind]
    wide: Any = [source.astype(exact) for source in srcs]
    if operation == "premul_sum":
        factor = int(scale) if exact is object else scale
        wide = [value * factor if raw >> s & 1 else value for s, value in enumerate(wide)]
    combine: dict[str, Callable[[Any, Any], Any]] = {"prod": operator.mul, "min": np.minimum, "max": np.maximum}
    result = reduce(combine.get(operation, operator.add), wide)
    if exact is not object:
        divided = (result.view(np.float64) / final).view(exact) if operation == "avg" and final else result
        # The quotient is rounded to the accumulator, then to the type, as the documentation says.
        return divided.astype(np.float32).astype(dtype.numpy) if dtype.accumulator == "float32" else divided
    bits = 8 * dtype.itemsize
    return np.array([_wrap(value, bits, dtype.kind, final if operation == "avg" else 0) for value in result], object)


def _wrap(value: int, bits: int, kind: str, divisor: int) -> int:
    """As an integer of so many bits, then divided, rounding towards zero."""
    value &= (1 << bits) - 1
    if kind == "int" and value >> (bits - 1):
        value -= 1 << bits
    return (abs(value) // divisor) * (-1 if value < 0 else 1) if divisor else value


def shapes(rng: np.random.Generator) -> Iterator[tuple[int, int, int]]:
    """(count, sources, destinations): every count with every number of sources; the largest once."""
    for count, nsrc in itertools.product(SIZES[:-1], range(1, 6)):
        yield count, nsrc, int(rng.integers(1, 4))
    for ndst in (1, 2, 3):  # of two sources, which have a way of their own
        yield SIZES[-2], 2, ndst
    yield SIZES[-1], 3, 2


@every
def test_reduces_any_number_of_operands_of_any_size_and_alignment(kernel: str) -> None:
    dtype, operation = parts(kernel)
    function = native.load(kernel).call
    rng = np.random.default_rng(dtype.code)
    for trial, (count, nsrc, ndst) in enumerate(shapes(rng)):
        shifts = rng.integers(0, 64, nsrc + ndst) * (trial % 2)  # every other time all are aligned
        values = small(dtype, (nsrc, count), rng)
        srcs = [Operand(dtype, count, int(shift)) for shift in shifts[:nsrc]]
        dsts = [Operand(dtype, count, int(shift)) for shift in shifts[nsrc:]]
        in_place = bool(rng.integers(2))
        if in_place:
            dsts[-1] = srcs[rng.integers(nsrc)]
        for operand, value in zip(srcs, values):
            operand.set(value)
        raw, final = int(rng.integers(1 << nsrc)), int(rng.integers(2)) * nsrc
        scale = float(rng.integers(2, 5)) / (2 if dtype.kind in ("float", "complex") else 1)
        run(function, dsts, srcs, count, raw, final, scale_bits(scale, dtype))
        wanted = expected(values, dtype, operation, raw, final, scale).astype(dtype.numpy)
        for operand in dsts:
            assert_same_bits(operand.get(), wanted, dtype)
        for operand, value in zip(srcs, values):
            assert operand in dsts or (operand.get() == value).all()
        for operand in srcs + dsts:
            operand.check_canaries()


# Any bits: the same as plain Python.


def arbitrary(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    """Random bits, so that every exponent comes, and a good share of what is special."""
    if dtype.kind == "bool":
        return rng.random(count) < 0.5
    values = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype.numpy)
    if dtype.kind in ("float", "complex"):
        real = values.view(values.real.dtype) if dtype.kind == "complex" else values
        chosen = rng.random(real.size) < 0.3
        special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], np.float64).astype(real.dtype)
        real[chosen] = rng.choice(special, int(chosen.sum()))
    return values


def assert_same_bits(left: Array, right: Array, dtype: DType) -> None:
    """Equal bit for bit, but one NaN is as good as another."""
    if dtype.kind == "complex":
        left, right = left.view(left.real.dtype), right.view(right.real.dtype)
    same = left.view(f"u{left.itemsize}") == right.view(f"u{right.itemsize}")
    if dtype.kind in ("float", "complex"):
        same |= np.isnan(left) & np.isnan(right)
    assert same.all(), (left[~same][:5], right[~same][:5])


@every
def test_any_bits_give_what_plain_python_gives(kernel: str) -> None:
    dtype, operation = parts(kernel)
    rng = np.random.default_rng(dtype.code)
    for count, nsrc, lanes, shift in ((1777, 2, 1, 0), (3001, 3, 3, 0), (150, 5, 2, 1)):
        srcs = [Operand(dtype, count, shift) for _ in range(nsrc)]
        for operand in srcs:
            operand.set(arbitrary(dtype, count, rng))
        compiled, plain = Operand(dtype, count, 0), Operand(dtype, count, 0)
        rest = int(rng.integers(1 << nsrc)), nsrc, scale_bits(float(rng.integers(2, 100)) / 7, dtype)
        run(native.load(kernel).call, [compiled], srcs, count, *rest)
        run(python.reduction(dtype, operation), [plain], srcs, count, *rest, lanes)
        assert_same_bits(compiled.get(), plain.get(), dtype)
        plain.check_canaries()


# The rules that hardware and libraries differ about.


def reduced(kernel: str, *srcs: Array, **flags: int) -> Array:
    dtype, operation = parts(kernel)
    operands = [Operand(dtype, len(source), 0) for source in srcs]
    for operand, source in zip(operands, srcs):
        operand.set(source.astype(dtype.numpy))
    results = []
    for function in (native.load(kernel).call, python.reduction(dtype, operation)):
        result = Operand(dtype, len(srcs[0]), 0)
        run(function, [result], operands, len(srcs[0]), **flags)
        results.append(result.get())
    assert_same_bits(*results, dtype)
    return results[0]


FLOATS = ("float64", "float32", "float16", "bfloat16")


@pytest.mark.parametrize("kernel", [f"reduce-{dtype}-{op}" for dtype in FLOATS for op in ("min", "max")])
def test_nan_wins_and_minus_zero_is_less_than_zero(kernel: str) -> None:
    special = np.array([np.nan, -np.inf, -1, -0.0, 0.0, 1, np.inf])
    left, right = (grid.ravel() for grid in np.meshgrid(special, special))
    result = reduced(kernel, left, right).astype(np.float64)
    keys = np.lexsort((np.signbit(special) < 1, special))  # -0 before +0; NaN comes last
    rank = {place: order for order, place in enumerate(keys)}
    for one, two, value in zip(*(grid.ravel() for grid in np.meshgrid(range(7), range(7))), result):
        if 0 in (one, two):
            assert np.isnan(value)
        else:
            pick = min if kernel.endswith("min") else max
            wanted = special[pick(one, two, key=rank.__getitem__)]
            assert value == wanted and np.signbit(value) == np.signbit(wanted)


@pytest.mark.parametrize("kernel", ["reduce-int32-sum", "reduce-int64-sum", "reduce-uint8-sum"])
def test_sums_of_integers_wrap(kernel: str) -> None:
    dtype, _ = parts(kernel)
    limits = np.iinfo(dtype.numpy)
    assert reduced(kernel, np.array([limits.max]), np.array([1], dtype.numpy)) == [limits.min]


@pytest.mark.parametrize("kernel", ["reduce-int32-prod", "reduce-int64-prod", "reduce-uint8-prod"])
def test_products_of_integers_wrap(kernel: str) -> None:
    dtype, _ = parts(kernel)
    limits = np.iinfo(dtype.numpy)
    product = _wrap(int(limits.max) * 3, 8 * dtype.itemsize, dtype.kind, 0)
    assert reduced(kernel, np.array([limits.max]), np.array([3], dtype.numpy)) == [product]


@pytest.mark.parametrize("kernel", ["reduce-int32-avg", "reduce-int64-avg"])
def test_averages_of_integers_round_towards_zero(kernel: str) -> None:
    left, right = np.array([-7, -1, -6, 7, 1, 6]), np.array([0, 0, 0, 0, 0, 0])
    assert list(reduced(kernel, left, right, final=2)) == [-3, 0, -3, 3, 0, 3]
    assert list(reduced(kernel, left, right, final=0)) == list(left), "not all contributions: nothing is divided"


@pytest.mark.parametrize("kernel", ["reduce-uint8-avg"])
def test_averages_over_more_ranks_than_the_type_can_count(kernel: str) -> None:
    sums = np.array([0, 1, 200, 255], np.uint8)
    for ranks in (200, 255, 256, 257, 1024, 16384):
        assert list(reduced(kernel, sums, np.zeros(4, np.uint8), final=ranks)) == [
            int(value) // ranks for value in sums
        ]


@pytest.mark.parametrize("kernel", [f"reduce-{dtype}-premul_sum" for dtype in MAIN])
def test_only_untouched_contributions_are_scaled(kernel: str) -> None:
    dtype, _ = parts(kernel)
    ones = np.ones(70)
    scale = scale_bits(3, dtype)
    for raw, total in ((0b00, 2), (0b01, 4), (0b10, 4), (0b11, 6)):
        assert (reduced(kernel, ones, ones, raw=raw, scale=scale).astype(float) == total).all()


@pytest.mark.parametrize("kernel", ["reduce-float16-sum", "reduce-bfloat16-sum"])
def test_a_sum_of_many_small_floats_is_rounded_once(kernel: str) -> None:
    """Rounding after every addition would leave 1; one rounding at the end sees what the small ones add up to."""
    dtype, _ = parts(kernel)
    step = 2.0**-11 if dtype.name == "float16" else 2.0**-8  # half a unit in the last place of 1
    srcs = [np.ones(40)] + [np.full(40, step)] * 4
    assert (reduced(kernel, *srcs).astype(float) == 1 + 4 * step).all()


@pytest.mark.parametrize("lanes", [1, 2, 5, 32])
def test_lanes_copy_every_byte_and_no_other(lanes: int) -> None:
    rng = np.random.default_rng(lanes)
    for nbytes in (0, 1, 3, 4, 15, 16, 17, 63, 64, 65, 1000, 64 * lanes, 64 * lanes + 1, 200 * lanes + 7):
        for shifts in ((0, 0), (16, 48), (4, 0), (8, 12), (1, 0), (2, 3)):
            source, target = (Operand(find("uint8"), nbytes, shift) for shift in shifts)
            source.set(rng.integers(0, 256, nbytes, np.uint8))
            for lane in range(lanes):
                python.PRIMITIVES["copy_bytes"](target.address, source.address, nbytes, lane, lanes)
            assert (target.get() == source.get()).all()
            target.check_canaries()


def test_the_processor_copies_every_byte_and_no_other() -> None:
    """Below, within and beyond the lengths that our own loop copies."""
    from numba import njit

    from kernels.targets import cpu

    @njit
    def copy(dst, src, nbytes):  # type: ignore[no-untyped-def]
        cpu.copy_bytes(dst, src, nbytes, 0, 1)

    rng = np.random.default_rng(7)
    for nbytes in (0, 1, 8191, 8192, 8193, 8447, 8448, 20_001, 1 << 20, (1 << 20) + 1):
        for shifts in ((0, 0), (16, 0), (0, 16), (63, 1), (4, 60)):
            source, target = (Operand(find("uint8"), nbytes, shift) for shift in shifts)
            source.set(rng.integers(0, 256, nbytes, np.uint8))
            copy(target.address, source.address, nbytes)
            assert (target.get() == source.get()).all()
            target.check_canaries()


def test_taking_lines_over_changes_no_byte() -> None:
    from numba import njit

    from kernels.targets import cpu

    @njit
    def take(address, nbytes):  # type: ignore[no-untyped-def]
        cpu.take_over(address, nbytes)

    rng = np.random.default_rng(3)
    for nbytes in (0, 1, 7, 8, 63, 64, 65, 1000):
        cell = Operand(find("uint8"), nbytes, 0)
        values = rng.integers(0, 256, nbytes, np.uint8)
        cell.set(values)
        take(cell.address, nbytes)
        assert (cell.get() == values).all()
        cell.check_canaries()


# Rounding: a kernel of the tests' own, which casts float32 to a small float and back.


@cache
def cast(source: str, target: str, width: int, half: bool) -> Callable[..., None]:
    """Copy groups from one dtype to another, by their `load` and `store`, through float32."""
    from numba import njit
    from numba.extending import intrinsic

    from kernels.targets import cpu
    from kernels.targets.groups import group_bodies
    from kernels.targets.vector import Group

    read = group_bodies(Group(find(source), "sum", width, align=1, half=half), intrinsic)
    write = group_bodies(Group(find(target), "sum", width, align=1, half=half), intrinsic)
    copy_groups = bind(elementwise.reduce_groups, {**read, "store": write["store"], "load_word": cpu.load_word}, njit)
    sizes = width * find(source).itemsize, width * find(target).itemsize

    @njit
    def copy(dst, src, addresses, groups):  # type: ignore[no-untyped-def]
        for g in range(groups):
            cpu.store_word(addresses, dst + g * sizes[1])
            cpu.store_word(addresses + 8, src + g * sizes[0])
            copy_groups(addresses, 1, addresses + 8, 1, 0, 0, 1, 0, 0, 0, 0)

    return copy


def converted(values: Array, target: str, width: int = 64, half: bool = True) -> Array:
    source = find(values.dtype).name
    assert values.size % width == 0
    result = np.empty(values.size, find(target).numpy)
    room = (ctypes.c_int64 * 2)()
    cast(source, target, width, half)(
        result.ctypes.data, values.ctypes.data, ctypes.addressof(room), values.size // width
    )
    return result


SMALL_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# `half`: whether float16 is left to the processor; the oldest ones of x86-64 cannot convert it.
small_floats = pytest.mark.parametrize(
    ("name", "half"), [(name, True) for name in SMALL_FLOATS] + [("float16", False), ("float8_e5m2", False)]
)


@small_floats
def test_every_small_float_widens_to_its_value(name: str, half: bool) -> None:
    dtype = find(name)
    bits = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}")
    wide = converted(bits.view(dtype.numpy), "float32", half=half)
    assert_same_bits(wide, bits.view(dtype.numpy).astype(np.float32), find("float32"))
    assert (np.signbit(wide) == (bits >> (8 * dtype.itemsize - 1)).astype(bool)).all()


def float32_patterns(rng: np.random.Generator) -> Array:
    """Every sign, exponent and leading fraction bit with what matters to rounding behind; and millions at random."""
    upper = np.arange(1 << 14, dtype=np.uint32)[:, None] << 18
    below = [0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000]
    below += [0x10000, 0x1FFFF, 0x20000, 0x20001, 0x30000, 0x3FFFF]
    chosen = upper | np.array(below, np.uint32)
    every = np.concatenate([chosen.ravel(), rng.integers(0, 1 << 32, 1 << 21, np.uint32)])
    return every[: every.size // 64 * 64].view(np.float32)


@small_floats
def test_float32_is_rounded_to_nearest_even_as_ml_dtypes_does(name: str, half: bool) -> None:
    dtype = find(name)
    values = float32_patterns(np.random.default_rng(1))
    with np.errstate(all="ignore"):
        wanted = values.astype(dtype.numpy)
    assert_same_bits(converted(values, name, half=half), wanted, dtype)
    assert_same_bits(converted(values[::997].copy(), name, width=1, half=half), wanted[::997], dtype)


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_ties_between_neighbours_go_to_the_even_one(name: str) -> None:
    dtype = find(name)
    bits = np.arange((1 << (8 * dtype.itemsize - 1)) - 1).astype(f"u{dtype.itemsize}")
    lower = bits.view(dtype.numpy).astype(np.float32)
    upper = (bits + 1).astype(bits.dtype).view(dtype.numpy).astype(np.float32)
    between = np.isfinite(lower) & np.isfinite(upper)
    middle = ((lower[between].astype(np.float64) + upper[between]) / 2).astype(np.float32)
    padded = np.concatenate([middle, np.zeros(-middle.size % 64, np.float32)])
    for sign in (1, -1):
        result = converted(sign * padded, name)[: middle.size].view(bits.dtype)
        even = np.where(bits % 2, bits + 1, bits)[between]
        assert (result == even | (0 if sign > 0 else 1 << (8 * dtype.itemsize - 1))).all()


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_nan_stays_nan_and_too_much_becomes_what_the_type_has_for_it(name: str) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0, 1e-45] * 8, np.float32)
    result = converted(values, name).astype(np.float32)[:8]
    top = np.nan if name == "float8_e4m3fn" else np.inf
    if name == "bfloat16":
        np.testing.assert_array_equal(result[1:3], [np.inf, -np.inf])
    else:
        np.testing.assert_array_equal(result[1:5], [top, -top, top, -top])
    assert np.isnan(result[0])
    assert list(result[5:]) == [0, 0, 0] and list(np.signbit(result[5:])) == [False, True, False]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_all_float32_there_are(name: str) -> None:
    dtype = find(name)
    for upper in range(1 << 8):
        values = ((np.uint32(upper) << np.uint32(24)) + np.arange(1 << 24, dtype=np.uint32)).view(np.float32)
        given = values
        if (
            name == "float16"
        ):  # for each that is far out of range NumPy sets a flag, which takes longer than all the rest
            given = np.where(np.abs(values) > 1e5, np.copysign(np.inf, values), values)
            given = np.where(np.abs(values) < 1e-8, np.copysign(0, values), given).astype(np.float32)
        with np.errstate(all="ignore"):
            wanted = given.astype(dtype.numpy)
        assert_same_bits(converted(values, name), wanted, dtype)


@pytest.mark.parametrize("target", ["compiled", "python"])
def test_more_sources_than_a_word_has_bits(target: str) -> None:
    """The last bit is all further sources'."""
    dtype = find("float32")
    compiled = native.load("reduce-float32-premul_sum").call
    function = compiled if target == "compiled" else python.reduction(dtype, "premul_sum")
    srcs, (dst,) = [Operand(dtype, 33, 0) for _ in range(70)], [Operand(dtype, 33, 0)]
    for operand in srcs:
        operand.set(np.ones(33, np.float32))
    for raw, total in ((-1, 140), (0, 70), (2**63 - 1, 133), (-(2**63), 77), (1, 71)):
        run(function, [dst], srcs, 33, raw, 0, scale_bits(2.0, dtype))
        assert (dst.get() == total).all(), (raw, total)
