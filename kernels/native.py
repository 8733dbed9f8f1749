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
from typing import IO, Any

import llvmlite.binding as llvm

from kernels.again import READABLE


class MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


@dataclass(frozen=True)
class Native:
    """A compiled function: `call(*integers)` from Python, without the GIL; `address` for other compiled code."""

    call: Callable[..., int]
    address: int
    method: MethodDef | None = None


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


def short_way(table: int, name: str = "short_way") -> Callable[..., Any]:
    """A function (x, out, collective, op, root, algorithm, async_op) that makes a call which the table at this address,
    laid out by `kernels/again.py`, knows: with the communicator's lock, without the interpreter's. "message_way": one
    (x, out, dst, src, tag) for a table of `kernels/messages.py`.

    It returns `out`; None where the table does not know the call; or a number. That is `~(2 * row + symmetric)` where
    Python has something to do before (see `again.admit`), or a row's: its call has begun and not ended, and the
    communicator's lock is still held.
    """
    method = load(name).method
    assert method is not None
    function: Callable[..., Any] = _new_function(ctypes.addressof(method), table, None)
    return function


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


@cache
def address_function() -> Callable[[Any], int]:
    """A function from a numpy.ndarray (it must be one) to the address of its data: many times as fast as NumPy's and
    ctypes' ways. It raises ValueError for an array that is not C-contiguous and aligned.
    """
    source = _ADDRESS.replace("HEADER", str(object.__basicsize__)).replace("WANTED", str(READABLE))
    return _function(_method("address", _new_engine(source), _METH_O), ValueError)


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
    lock is stopped or takes too long, all compile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")
    except OSError:
        yield
        return
    with lock:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and not _is_held_by_one_that_is_stopped(lock):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
                if meanwhile is not None:
                    meanwhile()
        yield


_PATIENCE = 120.0  # seconds; compiling one function takes a few


def _is_held_by_one_that_is_stopped(lock: IO[str]) -> bool:
    """Whether the process that has locked this file is known to be stopped, by SIGSTOP or a debugger."""
    inode = f":{os.fstat(lock.fileno()).st_ino}"
    with suppress(OSError, ValueError):  # no such files, or other ones; or it has just ended
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, place, *_ = line.split()
            if kind == "FLOCK" and place.endswith(inode):
                return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _link(name: str, code: bytes) -> Native:
    engine = _new_engine("")
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    method = _method(name, engine, _METH_FASTCALL)
    return Native(_function(method), engine.get_function_address("native"), method)


def _method(name: str, engine: llvm.ExecutionEngine, flags: int) -> MethodDef:
    """The symbol `python` as CPython has functions described. It and its code live as long as the process."""
    method = MethodDef(name.encode(), engine.get_function_address("python"), flags, None)
    # Never freed, not even as the interpreter ends: some functions are freed later than this module's names, and the
    # garbage collector reads their descriptions until then.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((engine, method)))
    return method


def _function(method: MethodDef, error: type[Exception] = TypeError) -> Callable[..., int]:
    """A function of Python's."""
    # Its `self` is the error it may raise: in a process with Numba, the symbol PyExc_TypeError means something else.
    function: Callable[..., int] = _new_function(ctypes.addressof(method), error, None)
    return function


def _new_engine(source: str) -> llvm.ExecutionEngine:
    """An engine that links for this processor, with a module of LLVM text in it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(source), machine)
    engine.finalize_object()
    return engine
