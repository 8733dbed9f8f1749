"""The CPU: bodies for the primitives, and compiling to object code through Numba.

Imported only when something has to be compiled; a process that finds its functions in the cache
(`kernels/native.py`) never loads Numba.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.core.extending import intrinsic, register_model
from numba.core.registry import cpu_target

from kernels import again, atomic, elementwise, executor, lowlatency, messages, optimizers, pace, progress, quantize
from kernels.dtypes import DType, find
from kernels.portable import bind
from kernels.targets.groups import Vector, group_bodies, optimizer_bodies
from kernels.targets.scalars import scalar_bodies
from kernels.targets.vector import Group

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_CLOCK_MONOTONIC = 1
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not the PRIVATE ones: the words are shared between processes
_SLEEP_NS = 50_000_000


def _emit(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's code generator out of a function (builder, *values) that returns a value, or None for none."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        result = generate(builder, *args)
        return context.get_dummy_value() if result is None else result

    return codegen


def _function(
    builder: ir.IRBuilder, name: str, returns: ir.Type, *arguments: ir.Type, var_arg: bool = False
) -> ir.Function:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returns, arguments, var_arg=var_arg), name)


def _pointer(builder: ir.IRBuilder, address: ir.Value, type_: ir.Type) -> ir.Value:
    return builder.inttoptr(address, type_.as_pointer())


@intrinsic
def load_word(typing, address):  # type: ignore[no-untyped-def]
    return types.int64(types.int64), _emit(lambda b, address: b.load(_pointer(b, address, _I64)))


@intrinsic
def store_word(typing, address, value):  # type: ignore[no-untyped-def]
    def generate(b, address, value):  # type: ignore[no-untyped-def]
        b.store(value, _pointer(b, address, _I64))

    return types.none(types.int64, types.int64), _emit(generate)


@intrinsic
def load_pair(typing, address):  # type: ignore[no-untyped-def]
    pair = types.UniTuple(types.int64, 2)

    def codegen(context, b, signature, args):  # type: ignore[no-untyped-def]
        places = (args[0], b.add(args[0], ir.Constant(_I64, 8)))
        words = [b.load_atomic(_pointer(b, place, _I64), ordering="monotonic", align=8) for place in places]
        return context.make_tuple(b, pair, words)

    return pair(types.int64), codegen


@intrinsic
def store_pair(typing, address, first, second):  # type: ignore[no-untyped-def]
    def generate(b, address, *words):  # type: ignore[no-untyped-def]
        for i, word in enumerate(words):
            place = _pointer(b, b.add(address, ir.Constant(_I64, 8 * i)), _I64)
            b.store_atomic(word, place, ordering="monotonic", align=8)

    return types.none(types.int64, types.int64, types.int64), _emit(generate)


@intrinsic
def load_acquire(typing, flag):  # type: ignore[no-untyped-def]
    def generate(b, flag):  # type: ignore[no-untyped-def]
        return b.zext(b.load_atomic(_pointer(b, flag, _I32), ordering="acquire", align=4), _I64)

    return types.int64(types.int64), _emit(generate)


def _read_modify_write(operation: str, type_: ir.IntType = _I32) -> Any:
    def generate(b, address, value):  # type: ignore[no-untyped-def]
        value = value if type_ is _I64 else b.trunc(value, type_)
        old = b.atomic_rmw(operation, _pointer(b, address, type_), value, "seq_cst")
        return old if type_ is _I64 else b.zext(old, _I64)

    return types.int64(types.int64, types.int64), _emit(generate)


@intrinsic
def exchange(typing, address, value):  # type: ignore[no-untyped-def]
    return _read_modify_write("xchg")


@intrinsic
def add(typing, address, value):  # type: ignore[no-untyped-def]
    return _read_modify_write("add")


@intrinsic
def add_word(typing, address, value):  # type: ignore[no-untyped-def]
    return _read_modify_write("add", _I64)


@intrinsic
def compare_exchange(typing, flag, expected, value):  # type: ignore[no-untyped-def]
    def generate(b, flag, expected, value):  # type: ignore[no-untyped-def]
        expected, value = b.trunc(expected, _I32), b.trunc(value, _I32)
        both = b.cmpxchg(_pointer(b, flag, _I32), expected, value, "seq_cst", "seq_cst")
        return b.zext(b.extract_value(both, 0), _I64)

    return types.int64(types.int64, types.int64, types.int64), _emit(generate)


@intrinsic
def now(typing):  # type: ignore[no-untyped-def]
    def generate(b):  # type: ignore[no-untyped-def]
        time = cgutils.alloca_once(b, ir.ArrayType(_I64, 2))
        clock = _function(b, "clock_gettime", _I32, _I32, _I64)
        b.call(clock, [ir.Constant(_I32, _CLOCK_MONOTONIC), b.ptrtoint(time, _I64)])
        seconds, rest = (b.load(b.gep(time, [ir.Constant(_I32, 0), ir.Constant(_I32, k)])) for k in (0, 1))
        return b.add(b.mul(seconds, ir.Constant(_I64, 10**9)), rest)

    return types.int64(), _emit(generate)


@intrinsic
def fetch_ahead(typing, address):  # type: ignore[no-untyped-def]
    def generate(b, address):  # type: ignore[no-untyped-def]
        place = _pointer(b, address, _I8)
        prefetch = _function(b, "llvm.prefetch.p0", ir.VoidType(), place.type, _I32, _I32, _I32)
        b.call(prefetch, [place, *(ir.Constant(_I32, word) for word in (0, 3, 1))])  # to read, into all caches, data

    return types.none(types.int64), _emit(generate)


@intrinsic
def pause(typing):  # type: ignore[no-untyped-def]
    def generate(b):  # type: ignore[no-untyped-def]
        if platform.machine() == "x86_64":
            b.call(_function(b, "llvm.x86.sse2.pause", ir.VoidType()), [])
        else:
            b.call(_function(b, "llvm.aarch64.hint", ir.VoidType(), _I32), [ir.Constant(_I32, 1)])

    return types.none(), _emit(generate)


@intrinsic
def yield_core(typing):  # type: ignore[no-untyped-def]
    return types.none(), _emit(lambda b: b.call(_function(b, "sched_yield", _I32), []) and None)


def _futex(b: ir.IRBuilder, flag: ir.Value, operation: int, value: ir.Value, timeout: ir.Value) -> ir.Value:
    zero = ir.Constant(_I64, 0)
    syscall = _function(b, "syscall", _I64, _I64, var_arg=True)
    return b.call(syscall, [ir.Constant(_I64, _FUTEX), flag, ir.Constant(_I64, operation), value, timeout, zero, zero])


@intrinsic
def futex_wait(typing, flag, seen):  # type: ignore[no-untyped-def]
    def generate(b, flag, seen):  # type: ignore[no-untyped-def]
        timeout = cgutils.alloca_once(b, ir.ArrayType(_I64, 2))
        b.store(ir.Constant(ir.ArrayType(_I64, 2), [0, _SLEEP_NS]), timeout)
        return _futex(b, flag, _FUTEX_WAIT, seen, b.ptrtoint(timeout, _I64))

    return types.int64(types.int64, types.int64), _emit(generate)


@intrinsic
def futex_wake(typing, flag):  # type: ignore[no-untyped-def]
    def generate(b, flag):  # type: ignore[no-untyped-def]
        return _futex(b, flag, _FUTEX_WAKE, ir.Constant(_I64, 2**31 - 1), ir.Constant(_I64, 0))

    return types.int64(types.int64), _emit(generate)


@intrinsic
def integer_of(typing, object):  # type: ignore[no-untyped-def]
    def generate(b, object):  # type: ignore[no-untyped-def]
        overflow = cgutils.alloca_once(b, _I32)
        read = _function(b, "PyLong_AsLongLongAndOverflow", _I64, _I64, overflow.type)
        value = b.call(read, [object, overflow])
        fits = b.icmp_signed("==", b.load(overflow), ir.Constant(_I32, 0))
        return b.select(fits, value, ir.Constant(_I64, -(2**62)))

    return types.int64(types.int64), _emit(generate)


@intrinsic
def move_memory(typing, dst, src, nbytes):  # type: ignore[no-untyped-def]
    def generate(b, dst, src, nbytes):  # type: ignore[no-untyped-def]
        dst, src = _pointer(b, dst, _I8), _pointer(b, src, _I8)
        memcpy = b.module.declare_intrinsic("llvm.memcpy", [dst.type, src.type, _I64])
        b.call(memcpy, [dst, src, nbytes, ir.Constant(ir.IntType(1), 0)])

    return types.none(types.int64, types.int64, types.int64), _emit(generate)


@intrinsic
def rewrite(typing, address):  # type: ignore[no-untyped-def]
    def generate(b, address):  # type: ignore[no-untyped-def]
        word = _pointer(b, address, _I64)  # atomic, or the compiler sees that nothing changes and leaves it out
        b.store_atomic(b.load_atomic(word, "monotonic", align=8), word, "monotonic", align=8)

    return types.none(types.int64), _emit(generate)


@intrinsic
def move_lines(typing, dst, src):  # type: ignore[no-untyped-def]
    def generate(b, dst, src):  # type: ignore[no-untyped-def]
        lines = ir.VectorType(_I64, _LINES // 8)
        b.store(b.load(_pointer(b, src, lines), align=1), _pointer(b, dst, lines), align=64)

    return types.none(types.int64, types.int64), _emit(generate)


@intrinsic
def move_line_past_caches(typing, dst, src):  # type: ignore[no-untyped-def]
    def generate(b, dst, src):  # type: ignore[no-untyped-def]
        line = ir.VectorType(_I64, 8)
        store = b.store(b.load(_pointer(b, src, line), align=1), _pointer(b, dst, line), align=64)
        store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(_I32, 1)]))

    return types.none(types.int64, types.int64), _emit(generate)


@intrinsic
def call_reduction(typing, function, dsts, ndst, srcs, nsrc, count, raw, final, scale, lane, lanes):  # type: ignore[no-untyped-def]
    def generate(b, function, *arguments):  # type: ignore[no-untyped-def]
        # Numba's own calling convention: status f(result*, exception**, arguments...).
        result, error = cgutils.alloca_once(b, _I64), cgutils.alloca_once(b, _I8.as_pointer())
        places = [_I64.as_pointer(), _I8.as_pointer().as_pointer()]
        type_ = ir.FunctionType(_I32, places + [_I64] * len(arguments))
        b.call(_pointer(b, function, type_), [result, error, *arguments])

    return types.none(*[types.int64] * 11), _emit(generate)


_jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_jit
def sync():  # type: ignore[no-untyped-def]
    return None


# Bytes from which, and up to which, the C library copies with `rep movsb` on AMD's processors: between places that are
# not alike in their last bits it takes up to 1.4 times as long as a loop.
_LEAST_LOOP, _MOST_LOOP = 8 << 10, 1 << 20
_LINES = 256


@_jit
def copy_bytes(dst, src, nbytes, lane, lanes):  # type: ignore[no-untyped-def]
    done = 0
    if _LEAST_LOOP <= nbytes <= _MOST_LOOP:
        done = -dst & 63
        move_memory(dst, src, done)
        while done + _LINES <= nbytes:
            move_lines(dst + done, src + done)
            done += _LINES
    move_memory(dst + done, src + done, nbytes - done)


@_jit
def take_over(address, nbytes):  # type: ignore[no-untyped-def]
    for at in range(address, address + nbytes - 7, 64):  # whole words only: what lies behind is not ours
        rewrite(at)


@_jit
def copy_past_caches(dst, src, nbytes):  # type: ignore[no-untyped-def]
    before = min(-dst & 63, nbytes)
    lines = (nbytes - before) // 64
    move_memory(dst, src, before)
    for i in range(lines):
        move_line_past_caches(dst + before + 64 * i, src + before + 64 * i)
    done = before + 64 * lines
    move_memory(dst + done, src + done, nbytes - done)


@_jit
def raise_flag(flag, value):  # type: ignore[no-untyped-def]
    # The exchange is a full fence between the new value and the look at the waiters, whose own fence is `add`; stores
    # past the caches are done before it, too.
    exchange(flag, value)
    if load_acquire(flag + 4) != 0:
        futex_wake(flag)


@_jit
def doze(round, flag, seen, spins, yields):  # type: ignore[no-untyped-def]
    if round < spins:
        pause()
        return True
    if round < spins + yields:
        yield_core()
        return True
    if yields < 0:
        return False
    add(flag + 4, 1)
    awake = True
    if load_acquire(flag) == seen:
        awake = futex_wait(flag, seen) == 0 or load_acquire(flag) != seen
    add(flag + 4, -1)
    return awake


def _constant(value: int) -> Any:
    @_jit
    def constant():  # type: ignore[no-untyped-def]
        return value

    return constant


PRIMITIVES = {
    "load_word": load_word,
    "store_word": store_word,
    "load_acquire": load_acquire,
    "raise_flag": raise_flag,
    "add_word": add_word,
    "now": now,
    "integer_of": integer_of,
    "compare_exchange": compare_exchange,
    "doze": doze,
    "fetch_ahead": fetch_ahead,
    "sync": sync,
    "copy_bytes": copy_bytes,
    "take_over": take_over,
    "block_bytes": _constant(16 << 10),
    "copy_past_caches": copy_past_caches,
    "combine": call_reduction,
    "load_pair": load_pair,
    "store_pair": store_pair,
    **scalar_bodies(intrinsic),
}


@register_model(Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm_type)


def _converts_float16() -> bool:
    """Whether this processor does; LLVM would call a library for it that is not there."""
    return platform.machine() != "x86_64" or "+f16c" in cpu_target.target_context.codegen()._tm_features


def _reduction(dtype: DType, operation: str) -> dict[str, Any]:
    """The primitives of `elementwise.reduce` for one dtype and operation."""
    accumulator = 4 if dtype.accumulator == "float32" else dtype.itemsize
    widths = {"reduce_many": max(8, 256 // accumulator), "reduce_few": max(2, 32 // accumulator), "reduce_one": 1}
    bodies: dict[str, Any] = {
        "load_word": load_word,
        "itemsize": _constant(dtype.itemsize),
        "alignment": _constant(1),
        "many": _constant(widths["reduce_many"]),
        "few": _constant(widths["reduce_few"]),
    }
    for name, width in widths.items():
        group = group_bodies(Group(dtype, operation, width, align=1, half=_converts_float16()), intrinsic)
        bodies[name] = bind(elementwise.reduce_groups, {**group, "load_word": load_word}, _jit)
    return bodies


def _small(name: str, operation: str) -> dict[str, Any]:
    """The primitives of `lowlatency.all_reduce` for one dtype and operation."""
    dtype = find(name)
    group = Group(dtype, operation, lowlatency.elements(dtype), align=1, half=_converts_float16())
    return {**PRIMITIVES, **group_bodies(group, intrinsic)}


def _optimizer(rule: str, dtype: str) -> dict[str, Any]:
    """The primitives of `optimizers.update` for a rule and the gradients' dtype."""
    gradient = find(dtype)
    state = find(gradient.accumulator)
    pairs = [
        [Group(each, "sum", width, align=1, half=_converts_float16()) for each in (gradient, state)]
        for width in (64 // state.itemsize, 1)
    ]
    return optimizer_bodies(rule, pairs, 1, load_word, _jit, intrinsic)


def compile_function(name: str) -> bytes:
    """Object code for this processor of `execute`, of a function of `kernels/progress.py`, `again.py`, `messages.py`,
    `atomic.py`, `quantize.py` or `pace.py`, of `reduce-<dtype>-<operation>`, `small-<dtype>-<operation>`
    (`kernels/lowlatency.py`), or of `sgd-<dtype>` and `adamw-<dtype>` (`kernels/optimizers.py`).

    It holds two symbols to use: `native`, in Numba's calling convention, and `python`, a METH_FASTCALL function of
    integers; those of `short_way` and `message_way` take objects: see `native.short_way`.
    """
    kind, *names = name.split("-")
    source: Callable[..., Any]
    if kind == "reduce":
        source = elementwise.reduce
        inner = bind(source, _reduction(find(names[0]), names[1]), _jit)
    elif kind == "small":
        source = lowlatency.all_reduce
        inner = bind(source, _small(*names), _jit)
    elif kind in optimizers.RULES:
        source = optimizers.update
        inner = bind(source, _optimizer(kind, *names), _jit)
    else:
        homes = progress, again, messages, atomic, quantize, pace
        home = next((module for module in homes if hasattr(module, name)), executor)
        source = getattr(home, name)
        inner = bind(source, PRIMITIVES, _jit, _bound)
    arguments = source.__code__.co_argcount
    signature = types.int64(*[types.int64] * arguments)
    inner.compile(signature)
    result = inner.overloads[signature.args]
    native = result.fndesc.llvm_func_name
    short = source in (again.short_way, messages.message_way)
    wrapper = _short_way(native, arguments - 2) if short else _python_wrapper(native, arguments)
    text = result.library.get_llvm_str() + wrapper
    module = llvm.parse_assembly(text)
    module.verify()
    foreign = {f.name for f in module.functions if f.is_declaration} - _KNOWN
    foreign = {f for f in foreign if not f.startswith("llvm.")}
    if foreign:
        raise RuntimeError(f"kernel {name} calls {', '.join(sorted(foreign))}, which only Numba provides")
    module.get_function(native).name = "native"
    return result.library.codegen._tm.emit_object(module)


_bound: dict[FunctionType, Any] = {}  # what functions share is compiled once
_COMPLAINT = "number of integer arguments expected: "
# What compiled kernels may call: libc and CPython's stable interface, nothing that only Numba provides.
_KNOWN = {
    "memcpy", "syscall", "sched_yield", "clock_gettime",
    "PyLong_AsLongLong", "PyLong_FromLongLong", "PyErr_Occurred",
}  # fmt: skip
_KNOWN |= {"PyErr_SetString", "PyEval_SaveThread", "PyEval_RestoreThread"}
_KNOWN |= {"PyObject_CallNoArgs", "PyThread_get_thread_ident", "Py_IncRef", "Py_DecRef", "PyLong_AsLongLongAndOverflow"}


def _python_wrapper(native: str, count: int) -> str:
    """LLVM text of `python`: integers from Python, the GIL released, `native` called, an integer back.

    `self` is the exception type for a wrong number of arguments.
    """
    loads = "".join(
        f"""
  %p{i} = getelementptr ptr, ptr %args, i64 {i}
  %o{i} = load ptr, ptr %p{i}
  %a{i} = call i64 @PyLong_AsLongLong(ptr %o{i})"""
        for i in range(count)
    )
    arguments = "".join(f", i64 %a{i}" for i in range(count))
    return f"""
@complaint = private constant [{len(_COMPLAINT) + 4} x i8] c"{_COMPLAINT}{count:03d}\\00"
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyErr_Occurred()
declare void @PyErr_SetString(ptr, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
define ptr @python(ptr %self, ptr %args, i64 %count) {{
  %enough = icmp eq i64 %count, {count}
  br i1 %enough, label %parse, label %refuse
refuse:
  call void @PyErr_SetString(ptr %self, ptr @complaint)
  ret ptr null
parse:{loads}
  %error = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %run, label %fail
fail:
  ret ptr null
run:
  %result = alloca i64
  %exception = alloca ptr
  %thread = call ptr @PyEval_SaveThread()
  %status = call i32 @{native}(ptr %result, ptr %exception{arguments})
  call void @PyEval_RestoreThread(ptr %thread)
  %value = load i64, ptr %result
  %object = call ptr @PyLong_FromLongLong(i64 %value)
  ret ptr %object
}}
"""


def _short_way(native: str, count: int) -> str:
    """LLVM text of `python` for `again.short_way` and its like. `self` is the table's address; the arguments are
    `count` objects, the second of which is what a call that was made returns."""
    loads = "".join(
        f"""
  %p{i} = getelementptr ptr, ptr %args, i64 {i}
  %o{i} = load ptr, ptr %p{i}
  %a{i} = ptrtoint ptr %o{i} to i64"""
        for i in range(count)
    )
    objects = "".join(f", i64 %a{i}" for i in range(count))
    return f"""
declare ptr @PyObject_CallNoArgs(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare i64 @PyThread_get_thread_ident()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
define ptr @python(ptr %self, ptr %args, i64 %count) {{
  %result = alloca i64
  %exception = alloca ptr
  %address = call i64 @PyLong_AsLongLong(ptr %self)
  %table = inttoptr i64 %address to ptr
  %none_at = getelementptr i64, ptr %table, i64 {again.TABLE_NONE}
  %none = load ptr, ptr %none_at
  %enough = icmp eq i64 %count, {count}
  br i1 %enough, label %lock, label %unknown
lock:
  %acquire_at = getelementptr i64, ptr %table, i64 {again.TABLE_ACQUIRE}
  %acquire = load ptr, ptr %acquire_at
  %locked = call ptr @PyObject_CallNoArgs(ptr %acquire)
  %failed = icmp eq ptr %locked, null
  br i1 %failed, label %fail, label %look
fail:
  ret ptr null
look:
  call void @Py_DecRef(ptr %locked){loads}
  %looked = call i32 @{native}(ptr %result, ptr %exception, i64 %address, i64 {again.UNKNOWN}{objects})
  %number = load i64, ptr %result
  %admitted = icmp sge i64 %number, 0
  br i1 %admitted, label %go, label %leave
go:
  %thread = call ptr @PyEval_SaveThread()
  %gone = call i32 @{native}(ptr %result, ptr %exception, i64 %address, i64 %number{objects})
  call void @PyEval_RestoreThread(ptr %thread)
  %status = load i64, ptr %result
  %done = icmp eq i64 %status, 0
  br i1 %done, label %leave, label %keep
keep:
  %me = call i64 @PyThread_get_thread_ident()
  %pending = getelementptr i64, ptr %table, i64 {again.TABLE_PENDING}
  store i64 %me, ptr %pending
  br label %tell
leave:
  %release_at = getelementptr i64, ptr %table, i64 {again.TABLE_RELEASE}
  %release = load ptr, ptr %release_at
  %released = call ptr @PyObject_CallNoArgs(ptr %release)
  %lost = icmp eq ptr %released, null
  br i1 %lost, label %fail, label %answer
answer:
  call void @Py_DecRef(ptr %released)
  br i1 %admitted, label %made, label %refused
made:
  call void @Py_IncRef(ptr %o1)
  ret ptr %o1
refused:
  %strange = icmp eq i64 %number, {again.UNKNOWN}
  br i1 %strange, label %unknown, label %tell
unknown:
  call void @Py_IncRef(ptr %none)
  ret ptr %none
tell:
  %told = call ptr @PyLong_FromLongLong(i64 %number)
  ret ptr %told
}}
"""
