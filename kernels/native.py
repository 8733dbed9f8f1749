"""Compiled functions for the CPU, kept as object files.

Importing Numba and compiling take seconds; loading an object file takes milliseconds. So what Numba has compiled once
is kept in a cache folder, named by a hash of all the kernels' sources, the compilers' versions and the processor, and
later processes link it with LLVM alone. With nowhere to keep files, each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

from kernels.again import TABLE_ACQUIRE, TABLE_NONE, TABLE_PENDING, TABLE_RELEASE, UNKNOWN


@dataclass(frozen=True)
class Native:
    """A compiled function: `call(*integers)` from Python, without the GIL; `address` for other compiled code."""

    call: Callable[..., int]
    address: int


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_METH_O, _METH_FASTCALL = 0x0008, 0x0080
_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.restype = ctypes.py_object
_new_function.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]


def cache_folder() -> Path:
    """Where compiled kernels are kept: $MGPU_CACHE, else the user's cache folder."""
    root = os.environ.get("MGPU_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "mgpu"
    )
    return Path(root) / "kernels" / _fingerprint()


@cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in sorted([*folder.rglob("*.py"), *folder.rglob("*.cu")]):
        digest.update(source.read_bytes())
    processor = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    digest.update(repr((version("numba"), version("llvmlite"), processor)).encode())
    return digest.hexdigest()[:16]


def load(name: str, meanwhile: Callable[[], None] | None = None) -> Native:
    """The compiled function `name` (see `kernels.targets.cpu.compile_function`), compiling it if need be; `meanwhile`
    as for `cached`."""
    if name not in _loaded:
        _loaded[name] = _link(name, cached(name, partial(_compile, name), meanwhile))
    return _loaded[name]


_loaded: dict[str, Native] = {}


def cached(name: str, make: Callable[[], bytes], meanwhile: Callable[[], None] | None = None) -> bytes:
    """What `make` makes, from the cache folder if it is there; one process of several makes it.

    That takes seconds, here or in the process that does it, and `meanwhile`, if given, is called every 50 ms or so:
    what it raises is raised at once, and leaves the making to end in a thread of its own, for whoever asks next.
    """
    path = cache_folder() / name
    code = _read(path)
    if code is None:
        with _only_one(path, meanwhile):
            code = _read(path) or _attended(lambda: _keep(path, make()), meanwhile)
    return code


def _attended(work: Callable[[], bytes], meanwhile: Callable[[], None] | None) -> bytes:
    """What `work` returns, done in another thread if there is something to do meanwhile."""
    if meanwhile is None:
        return work()
    done: Future[bytes] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="mgpu compiler").start()  # no daemon: compilers do not survive exit() under them
    while not wait([done], _LOOK).done:
        meanwhile()
    return done.result()


_LOOK = 0.05  # seconds between two calls of `meanwhile`


# METH_O: the address of a NumPy array's data, which NumPy's C interface has right after the object's header, the
# flags 48 bytes later. `self` is the error for flags that are not WANTED.
_ADDRESS = """
@complaint = private constant [28 x i8] c"the array cannot be used so\\00"
declare void @PyErr_SetString(ptr, ptr)
declare ptr @PyLong_FromLongLong(i64)
define ptr @python(ptr %self, ptr %array) {
  %place = getelementptr i8, ptr %array, i64 HEADER
  %second = getelementptr i8, ptr %place, i64 48
  %flags = load i32, ptr %second
  %have = and i32 %flags, WANTED
  %good = icmp eq i32 %have, WANTED
  br i1 %good, label %read, label %fail
fail:
  call void @PyErr_SetString(ptr %self, ptr @complaint)
  ret ptr null
read:
  %data = load i64, ptr %place
  %object = call ptr @PyLong_FromLongLong(i64 %data)
  ret ptr %object
}
"""
_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x001, 0x100, 0x400


# METH_FASTCALL, see `short_way`: `self` is a NumPy array, the table of `kernels/again.py`; the arguments are those of
# its `admit`, as objects. Words of the table that stand for objects are used as they are.
_SHORT_WAY = """
declare ptr @PyObject_CallNoArgs(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare i64 @PyThread_get_thread_ident()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
define ptr @python(ptr %self, ptr %args, i64 %count) {
  %place = getelementptr i8, ptr %self, i64 HEADER
  %table = load ptr, ptr %place
  %word = ptrtoint ptr %table to i64
  %none_at = getelementptr i64, ptr %table, i64 NONE
  %none = load ptr, ptr %none_at
  %acquire_at = getelementptr i64, ptr %table, i64 ACQUIRE
  %acquire = load ptr, ptr %acquire_at
  %release_at = getelementptr i64, ptr %table, i64 RELEASE
  %release = load ptr, ptr %release_at
  %result = alloca i64
  %exception = alloca ptr
  %enough = icmp eq i64 %count, 7
  br i1 %enough, label %lock, label %unknown
lock:
  %locked = call ptr @PyObject_CallNoArgs(ptr %acquire)
  %failed = icmp eq ptr %locked, null
  br i1 %failed, label %fail, label %look
fail:
  ret ptr null
look:
  call void @Py_DecRef(ptr %locked)LOADS
  %looked = call i32 inttoptr (i64 ADMIT to ptr)(ptr %result, ptr %exception, i64 %wordARGUMENTS)
  %number = load i64, ptr %result
  %known = icmp sge i64 %number, 0
  br i1 %known, label %run, label %leave
run:
  %thread = call ptr @PyEval_SaveThread()
  %ran = call i32 inttoptr (i64 GO to ptr)(ptr %result, ptr %exception, i64 %word, i64 %number)
  call void @PyEval_RestoreThread(ptr %thread)
  %status = load i64, ptr %result
  %done = icmp eq i64 %status, 0
  br i1 %done, label %leave, label %keep
keep:
  %me = call i64 @PyThread_get_thread_ident()
  %pending = getelementptr i64, ptr %table, i64 PENDING
  store i64 %me, ptr %pending
  br label %tell
leave:
  %unlocked = call ptr @PyObject_CallNoArgs(ptr %release)
  %lost = icmp eq ptr %unlocked, null
  br i1 %lost, label %fail, label %answer
answer:
  call void @Py_DecRef(ptr %unlocked)
  br i1 %known, label %made, label %refused
made:
  call void @Py_IncRef(ptr %o1)
  ret ptr %o1
refused:
  %strange = icmp eq i64 %number, UNKNOWN
  br i1 %strange, label %unknown, label %tell
unknown:
  call void @Py_IncRef(ptr %none)
  ret ptr %none
tell:
  %told = call ptr @PyLong_FromLongLong(i64 %number)
  ret ptr %told
}
"""


SHORT_WAY: tuple[str, ...] = ("admit", "go")  # the functions of `kernels/again.py` that it is made of


def short_way(table: npt.NDArray[np.int64]) -> Callable[..., Any]:
    """A function (x, out, collective, op, root, algorithm, async_op) that makes a call which `table`, laid out by
    `kernels/again.py`, knows, without the interpreter lock but with the communicator's: the cheapest way from Python.

    It returns `out`; None where the table does not know the call; or a number. That is `~(2 * row + symmetric)` where
    Python has something to do before (see `again.admit`), or a row's: its call has begun and not ended, and the
    communicator's lock is still held.
    """
    return _new_function(ctypes.addressof(_short_way_method()), table, None)


@cache
def _short_way_method() -> _MethodDef:
    loads = "".join(
        f"""
  %p{i} = getelementptr ptr, ptr %args, i64 {i}
  %o{i} = load ptr, ptr %p{i}
  %a{i} = ptrtoint ptr %o{i} to i64"""
        for i in range(7)
    )
    source = _SHORT_WAY.replace("LOADS", loads).replace("ARGUMENTS", "".join(f", i64 %a{i}" for i in range(7)))
    words = {"NONE": TABLE_NONE, "ACQUIRE": TABLE_ACQUIRE, "RELEASE": TABLE_RELEASE, "PENDING": TABLE_PENDING}
    words |= {"HEADER": object.__basicsize__, "UNKNOWN": UNKNOWN}
    words |= {name.upper(): load(name).address for name in SHORT_WAY}
    for name, word in words.items():
        source = source.replace(name, str(word))
    return _method("short_way", _new_engine(source), _METH_FASTCALL)


@cache
def address_function(writable: bool) -> Callable[[Any], int]:
    """A function from a numpy.ndarray (it must be one) to the address of its data: many times as fast as NumPy's and
    ctypes' ways. It raises ValueError for an array that is not C-contiguous and aligned and, if asked for, writable.
    """
    wanted = _C_CONTIGUOUS | _ALIGNED | _WRITEABLE * writable
    source = _ADDRESS.replace("HEADER", str(object.__basicsize__)).replace("WANTED", str(wanted))
    return _function("address", _new_engine(source), _METH_O, ValueError)


def _read(path: Path) -> bytes | None:
    """A cached function's object code; None if it is missing or damaged."""
    try:
        digest, code = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return code if digest == _sha256(code) else None


def _sha256(code: bytes) -> bytes:
    return hashlib.sha256(code).hexdigest().encode()


def _compile(name: str) -> bytes:
    from kernels.targets.cpu import compile_function

    return compile_function(name)


def _keep(path: Path, code: bytes) -> bytes:
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_bytes(_sha256(code) + b"\n" + code)
        os.replace(part, path)
    except OSError:  # nowhere to keep it, or no room: this process has it all the same
        with suppress(OSError):
            part.unlink()
    return code


@contextmanager
def _only_one(path: Path, meanwhile: Callable[[], None] | None) -> Iterator[None]:
    """Let one process compile while others wait for its result. Without a folder to lock, or when the one that has the
    lock takes too long (it may have been stopped), all compile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")
    except OSError:
        yield
        return
    with lock:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
                if meanwhile is not None:
                    meanwhile()
        yield


_PATIENCE = 120.0  # seconds; compiling one function takes a few


def _link(name: str, code: bytes) -> Native:
    engine = _new_engine("")
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Native(_function(name, engine, _METH_FASTCALL), engine.get_function_address("native"))


def _function(
    name: str, engine: llvm.ExecutionEngine, flags: int, error: type[Exception] = TypeError
) -> Callable[..., int]:
    """The symbol `python` as a function of Python's. It lives as long as the process."""
    method = _method(name, engine, flags)
    # Its `self` is the error it may raise: in a process with Numba, the symbol PyExc_TypeError means something else.
    function: Callable[..., int] = _new_function(ctypes.addressof(method), error, None)
    return function


def _method(name: str, engine: llvm.ExecutionEngine, flags: int) -> _MethodDef:
    """The symbol `python` as CPython's description of a method. It and its code live as long as the process."""
    method = _MethodDef(name.encode(), engine.get_function_address("python"), flags, None)
    _linked.append((engine, method))
    return method


_linked: list[tuple[llvm.ExecutionEngine, _MethodDef]] = []


def _new_engine(source: str) -> llvm.ExecutionEngine:
    """An engine that links for this processor, with a module of LLVM text in it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(source), machine)
    engine.finalize_object()
    return engine
