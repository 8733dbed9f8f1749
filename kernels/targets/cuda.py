"""CUDA: bodies for the primitives, and compiling to PTX and to machine code. None of it needs a GPU or a driver.

A block of threads runs one channel, its threads are the lanes (`kernels.executor.run_call`). Lanes move 16 bytes
at a time where all addresses allow it; elements must be aligned to their own size. Additions and multiplications stay
apart (no fused multiply-add), so that the results are the CPU's, bit for bit, but for which NaN a NaN is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda import cgutils
from numba.cuda.compiler import compile_cuda, kernel_fixup
from numba.cuda.cudadrv import nvvm
from numba.cuda.datamodel import models
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.extending import intrinsic, register_model

from kernels import elementwise, executor, lowlatency, native, optimizers, quantize
from kernels.cubin import compilers
from kernels.dtypes import DType, find
from kernels.grid import LONG_NS, MOST_LANES, PATIENCE_NAPS, PATIENCE_STOP, SHORT_NAPS, SHORT_NS
from kernels.portable import bind
from kernels.targets.groups import Vector, group_bodies, optimizer_bodies
from kernels.targets.scalars import scalar_bodies
from kernels.targets.vector import Group

_VECTOR = 16  # bytes that a lane loads or stores at once

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_OPTIONS = {"opt": 3, "fma": False}


def _lower(function: Any, returns: Any, arguments: Any, forceinline: bool = False) -> Any:
    """A Python function as LLVM code, which is the same for every architecture: NVVM then compiles it for one."""
    return compile_cuda(function, returns, arguments, cc=(8, 0), forceinline=forceinline)


class _DeviceFunction(CUDADispatcher):
    """A device function that is lowered without asking which device there is."""

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        if args not in self.overloads:
            result = _lower(self.py_func, return_type, args, forceinline=True)
            result.target_context.insert_user_function(result.entry_point, result.fndesc, [result.library])
            self.overloads[args] = result
        return self.overloads[args]


def _jit(function: Any) -> Any:
    return _DeviceFunction(function, {"device": True})


def _assembly(b: ir.IRBuilder, text: str, constraints: str, returns: ir.Type, *arguments: ir.Value) -> ir.Value:
    """PTX that is kept where it stands: no load or store moves across it."""
    type_ = ir.FunctionType(returns, [argument.type for argument in arguments])
    return b.asm(type_, text, constraints + ",~{memory}", arguments, side_effect=True)


@intrinsic
def load_word(typing, address):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        return b.load(b.inttoptr(args[0], _I64.as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def store_word(typing, address, value):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        b.store(args[1], b.inttoptr(args[0], _I64.as_pointer()))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typing, flag):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        return b.zext(_assembly(b, "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", _I32, args[0]), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def raise_flag(typing, flag, value):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        value = b.trunc(args[1], _I32)
        _assembly(b, "st.release.sys.global.u32 [$0], $1;", "l,r", ir.VoidType(), args[0], value)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def load_pair(typing, address):  # type: ignore[no-untyped-def]
    pair = types.UniTuple(types.int64, 2)

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        both = ir.LiteralStructType([_I64] * 2)
        words = _assembly(b, "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];", "=l,=l,l", both, args[0])
        return context.make_tuple(b, pair, [b.extract_value(words, i) for i in range(2)])

    return pair(types.int64), codegen


@intrinsic
def store_pair(typing, address, first, second):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        _assembly(b, "st.relaxed.sys.global.v2.b64 [$0], {$1, $2};", "l,l,l", ir.VoidType(), *args)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@intrinsic
def nap(typing, nanoseconds):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        _assembly(b, "nanosleep.u32 $0;", "r", ir.VoidType(), b.trunc(args[0], _I32))
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@intrinsic
def clock(typing):  # type: ignore[no-untyped-def]
    """Nanoseconds, by a clock that goes on while the thread sleeps."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        return _assembly(b, "mov.u64 $0, %globaltimer;", "=l", _I64)

    return types.int64(), codegen


@_jit
def doze(round, flag, seen, spins, yields):  # type: ignore[no-untyped-def]
    # Nobody can wake a thread here. Looks follow each other at once, then after short naps, then after long ones of
    # known length, which count towards the deadline; the host may end the wait before. See PATIENCE_WORDS.
    if round < spins:
        return True
    if round < spins + SHORT_NAPS:
        nap(SHORT_NS)
        return True
    begun = clock()
    while clock() - begun < LONG_NS:
        nap(LONG_NS // 4)
    if load_acquire(yields + 8 * PATIENCE_STOP) != 0:
        return False
    return round - spins - SHORT_NAPS < load_word(yields + 8 * PATIENCE_NAPS)


@_jit
def sync():  # type: ignore[no-untyped-def]
    cuda.syncthreads()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm_type)


@dataclass(frozen=True)
class _Group(Group):
    """A group whose pieces of 16 bytes are read and written by one instruction each: NVVM would split some of them."""

    def read(self, b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        if self.align != _VECTOR:
            return super().read(b, address)
        quad = ir.LiteralStructType([_I32] * 4)
        words = _assembly(b, "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", quad, address)
        return self._from_words(b, [b.extract_value(words, i) for i in range(4)])

    def write(self, b: ir.IRBuilder, address: ir.Value, words: ir.Value) -> None:
        if self.align != _VECTOR:
            return super().write(b, address, words)
        quad = self._to_words(b, words)
        _assembly(b, "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", ir.VoidType(), address, *quad)

    def _from_words(self, b: ir.IRBuilder, words: list[ir.Value]) -> ir.Value:
        vector = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
        for i, word in enumerate(words):
            vector = b.insert_element(vector, word, ir.Constant(_I32, i))
        return b.bitcast(vector, self.stored)

    def _to_words(self, b: ir.IRBuilder, group: ir.Value) -> list[ir.Value]:
        vector = b.bitcast(group, ir.VectorType(_I32, 4))
        return [b.extract_element(vector, ir.Constant(_I32, i)) for i in range(4)]


def _constant(value: int) -> Any:
    @_jit
    def constant():  # type: ignore[no-untyped-def]
        return value

    return constant


def _reduction(dtype: DType, operation: str) -> Any:
    """`elementwise.reduce` for one dtype and operation."""
    few = _VECTOR // dtype.itemsize
    pieces = 2 if few < 16 else 1  # a group takes registers: one for each number, two if it has 64 bits
    widths = {"reduce_many": (few * pieces, pieces), "reduce_few": (few, 1), "reduce_one": (1, 1)}
    bodies: dict[str, Any] = {
        "load_word": load_word,
        "itemsize": _constant(dtype.itemsize),
        "alignment": _constant(_VECTOR),
        "many": _constant(few * pieces),
        "few": _constant(few),
    }
    for name, (width, count) in widths.items():
        align = Group(dtype, operation, 1, 1).bytes if name == "reduce_one" else _VECTOR
        group = group_bodies(_Group(dtype, operation, width, align, count), intrinsic)
        bodies[name] = bind(elementwise.reduce_groups, {**group, "load_word": load_word}, _jit)
    return bind(elementwise.reduce, bodies, _jit)


def _copy_bodies() -> dict[str, Any]:
    """The primitives of `elementwise.copy`."""

    def one(dtype: str, width: int, align: int) -> Any:
        bodies = group_bodies(_Group(find(dtype), "sum", width, align), intrinsic)
        load, store = bodies["load"], bodies["store"]
        return _jit(lambda dst, src: store(dst, load(src, 0), 0))

    four = group_bodies(_Group(find("uint32"), "sum", 16, _VECTOR, pieces=4), intrinsic)
    load, store = four["load"], four["store"]
    return {
        "copy_vectors": _jit(lambda dst, src, stride: store(dst, load(src, stride), stride)),
        "copy_vector": one("uint32", 4, _VECTOR),
        "copy_word": one("uint32", 1, 4),
        "copy_byte": one("uint8", 1, 1),
    }


@intrinsic
def combine(typing, function, dsts, ndst, srcs, nsrc, count, raw, final, scale, lane, lanes):  # type: ignore[no-untyped-def]
    """A call, in Numba's own convention, of a function that is linked in later: the reduction for one dtype."""

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        type_ = ir.FunctionType(_I32, [_I64.as_pointer()] + [_I64] * 10)
        b.call(cgutils.get_or_insert_function(b.module, type_, "combine"), [cgutils.alloca_once(b, _I64), *args[1:]])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 11), codegen


PRIMITIVES = {
    "load_word": load_word,
    "store_word": store_word,
    "load_acquire": load_acquire,
    "raise_flag": raise_flag,
    "doze": doze,
    "fetch_ahead": _jit(lambda address: None),
    "take_over": _jit(lambda address, nbytes: None),
    "block_bytes": _jit(lambda: 0),
    "sync": sync,
    "copy_bytes": bind(elementwise.copy, _copy_bodies(), _jit),
    "combine": combine,
    "load_pair": load_pair,
    "store_pair": store_pair,
    **scalar_bodies(intrinsic),
}


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its PTX, and the compute capability it is for."""

    ptx: str
    architecture: tuple[int, int]
    name: str = "execute"

    @cached_property
    def cubin(self) -> bytes:
        """Machine code, ready to load."""
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(arch="sm_{}{}".format(*self.architecture))
        return bytes(Program(self.ptx, "ptx", options).compile("cubin").code)


@cache
def compile_kernel(dtype: str, operation: str, architecture: tuple[int, int]) -> Kernel:
    """The kernel that runs jobs whose reductions are of one dtype and operation, for one compute capability.

    Its argument is the address of a table of jobs, one for each rank that takes part in the launch; its grid: channels
    by ranks; its block: up to `MOST_LANES` lanes. See `kernels.executor.run_call`.
    """
    return _kernel(_executor() + _combine(dtype, operation), "execute", architecture)


@cache
def _executor() -> list[str]:
    """LLVM modules of the kernel, but for the reduction. They take longest, and are the same for all: they are kept."""
    modules: list[str] = json.loads(
        native.cached(f"execute-{compilers()}.ll", lambda: json.dumps(_lower_executor()).encode())
    )
    return modules


def _lower_executor() -> list[str]:
    run = bind(executor.run_call, PRIMITIVES, _jit)
    integer = types.int64

    def block(jobs):  # type: ignore[no-untyped-def]
        channel, channels = integer(cuda.blockIdx.x), integer(cuda.gridDim.x)
        job = load_word(jobs + 8 * integer(cuda.blockIdx.y))
        run(job, channel, channels, integer(cuda.threadIdx.x), integer(cuda.blockDim.x))

    return _entry(block, 1, "execute")


@cache
def compile_small(dtype: str, operation: str, architecture: tuple[int, int]) -> Kernel:
    """The kernel `small`: `lowlatency.run_call` for one dtype and operation.

    Its argument and launch are those of `compile_kernel`, with jobs of `kernels.lowlatency`.
    """
    return _kernel(_small(dtype, operation), "small", architecture)


@cache
def _small(dtype: str, operation: str) -> list[str]:
    element = find(dtype)
    group = group_bodies(_Group(element, operation, lowlatency.elements(element), 8), intrinsic)
    run = bind(lowlatency.run_call, {**PRIMITIVES, **group}, _jit)
    integer = types.int64

    def block(jobs):  # type: ignore[no-untyped-def]
        job = load_word(jobs + 8 * integer(cuda.blockIdx.y))
        run(job, integer(cuda.blockIdx.x), integer(cuda.gridDim.x), integer(cuda.threadIdx.x), integer(cuda.blockDim.x))

    return _entry(block, 1, "small")


@cache
def compile_optimizer(rule: str, dtype: str, architecture: tuple[int, int]) -> Kernel:
    """The kernel of a rule, `sgd` or `adamw`, for gradients of one dtype. It takes jobs of `kernels.optimizers`, one
    after another in memory, and any grid that has as many blocks as jobs along y."""
    gradient = find(dtype)
    state = find(gradient.accumulator)
    width = _VECTOR // gradient.itemsize
    pieces = width * state.itemsize // _VECTOR
    pairs = (
        (_Group(gradient, "sum", width, _VECTOR), _Group(state, "sum", width, _VECTOR, pieces)),
        (_Group(gradient, "sum", 1, gradient.itemsize), _Group(state, "sum", 1, state.itemsize)),
    )
    job_bytes = 8 * optimizers.JOB_WORDS
    update = bind(optimizers.update, optimizer_bodies(rule, pairs, _VECTOR, load_word, _jit, intrinsic), _jit)

    def grid(jobs):  # type: ignore[no-untyped-def]
        lane, lanes = _lane_of_grid()
        update(jobs + job_bytes * _integer(cuda.blockIdx.y), lane, lanes)

    return _kernel(_entry(grid, 1, rule), rule, architecture)


@cache
def compile_quantize(name: str, architecture: tuple[int, int]) -> Kernel:
    """A kernel of `kernels.quantize`, with its arguments but for the lanes, which are those of any grid."""
    run = bind(getattr(quantize, name), scalar_bodies(intrinsic), _jit)

    def grid(dst, src, blocks, block, code):  # type: ignore[no-untyped-def]
        lane, lanes = _lane_of_grid()
        run(dst, src, blocks, block, code, lane, lanes)

    def grid_of_many(dst, src, senders, blocks, block, code):  # type: ignore[no-untyped-def]
        lane, lanes = _lane_of_grid()
        run(dst, src, senders, blocks, block, code, lane, lanes)

    modules = _entry(grid_of_many, 6, name) if name == "reduce_blocks" else _entry(grid, 5, name)
    return _kernel(modules, name, architecture)


_integer = types.int64


@_jit
def _lane_of_grid():  # type: ignore[no-untyped-def]
    """This thread's number in the whole grid, and how many there are."""
    lanes = _integer(cuda.blockDim.x)
    return _integer(cuda.blockIdx.x) * lanes + _integer(cuda.threadIdx.x), lanes * _integer(cuda.gridDim.x)


def _kernel(modules: list[str], name: str, architecture: tuple[int, int]) -> Kernel:
    ptx = nvvm.compile_ir(modules, arch="compute_{}{}".format(*architecture), **_OPTIONS)
    return Kernel(ptx.decode().strip("\0\n"), architecture, name)


def _entry(function: Any, arguments: int, name: str) -> list[str]:
    """LLVM modules of a kernel of so many integers."""
    result = _lower(function, types.void, (types.int64,) * arguments)
    entry = result.library.get_function(result.fndesc.llvm_func_name)
    kernel_fixup(entry, debug=False)
    nvvm.set_launch_bounds(entry, (MOST_LANES, 1))
    return [module.replace(entry.name, name) for module in result.library.llvm_strs]


@cache
def _combine(dtype: str, operation: str) -> list[str]:
    """LLVM modules of the reduction for one dtype and operation."""
    reduce = _reduction(find(dtype), operation)
    result = reduce.compile_device((types.int64,) * reduce.py_func.__code__.co_argcount)
    modules = [module.replace(result.fndesc.llvm_func_name, "combine") for module in result.library.llvm_strs]
    # Once inlined it is not needed by itself.
    return [module.replace('define i32 @"combine"', 'define linkonce_odr i32 @"combine"') for module in modules]
