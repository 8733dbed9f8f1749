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
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm


@dataclass(frozen=True)
class Native:
    """A compiled function: `call(*integers)` from Python, without the GIL; `address` for other compiled code."""

    call: Callable[..., int]
    address: int
    keep: tuple[Any, ...]  # what must live as long as the code


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


_METH_FASTCALL = 0x0080
_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.restype = ctypes.py_object
_new_function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]


def cache_folder() -> Path:
    """Where compiled kernels are kept: $MGPU_CACHE, else the user's cache folder."""
    root = os.environ.get("MGPU_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "mgpu"
    )
    return Path(root) / "kernels" / _fingerprint()


@cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    processor = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    digest.update(repr((version("numba"), version("llvmlite"), processor)).encode())
    return digest.hexdigest()[:16]


@cache
def load(name: str) -> Native:
    """The compiled function `name` (see `kernels.targets.cpu.compile_function`), compiling it if need be."""
    path = cache_folder() / name
    code = _read(path)
    if code is None:
        with _only_one(path):
            code = _read(path) or _compile(name, path)
    return _link(name, code)


def _read(path: Path) -> bytes | None:
    """A cached function's object code; None if it is missing or damaged."""
    try:
        digest, code = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return code if digest == _sha256(code) else None


def _sha256(code: bytes) -> bytes:
    return hashlib.sha256(code).hexdigest().encode()


def _compile(name: str, path: Path) -> bytes:
    from kernels.targets.cpu import compile_function

    code = compile_function(name)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_sha256(code) + b"\n" + code)
        os.replace(file.name, path)
    except OSError:
        pass  # nowhere to keep it: this process has it all the same
    return code


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Let one process compile while others wait for its result. Without a folder to lock, all compile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _link(name: str, code: bytes) -> Native:
    engine = _new_engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    method = _MethodDef(name.encode(), engine.get_function_address("python"), _METH_FASTCALL, None)
    call = _new_function(ctypes.addressof(method), None, None)
    return Native(call, engine.get_function_address("native"), keep=(engine, method))


def _new_engine() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
