"""Compiled functions and the folder they are kept in."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import guarded
import numpy as np
import pytest

import kernels
from kernels import native
from kernels.progress import QUEUE_BYTES, QUEUE_TAKEN

NAME = "complete"  # a small function: quick to compile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("MGPU_CACHE", str(tmp_path / "cache"))
    return native.cache_folder()


def fresh(name: str = NAME) -> native.Native:
    """Load as another process would: from the folder, not from this process's memory."""
    native._loaded.pop(name, None)
    return native.load(name)


def works(function: native.Native) -> bool:
    queue = guarded.zeros(QUEUE_BYTES // 8)
    return function.call(int(queue.ctypes.data)) == 0 and queue[QUEUE_TAKEN // 8] == 1


def python(code: str, folder: Path | None = None, **environment: str) -> str:
    """Run a program in a new process; returns what it prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_function_is_compiled_once_and_then_read_from_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert works(fresh())
    assert {path.name for path in folder.iterdir()} == {NAME, f"{NAME}.lock"}
    monkeypatch.setitem(sys.modules, "kernels.targets.cpu", None)  # to import it now is an error
    assert works(fresh())


@pytest.mark.parametrize("damage", ["cut", "emptied", "one byte changed", "no line"])
def test_a_damaged_file_is_built_anew(folder: Path, damage: str) -> None:
    fresh()
    path = folder / NAME
    good = path.read_bytes()
    bad = {
        "cut": good[:-100],
        "emptied": b"",
        "one byte changed": good[:-1] + bytes([good[-1] ^ 1]),
        "no line": b"?" * 80,
    }
    path.write_bytes(bad[damage])
    assert works(fresh())
    digest, _, code = path.read_bytes().partition(b"\n")
    assert digest == native._sha256(code)


def test_where_no_folder_can_be_made_it_is_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc/nowhere")):
        monkeypatch.setenv("MGPU_CACHE", str(place))
        assert works(fresh())


def test_a_folder_that_fills_up_keeps_no_half_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert works(fresh())
    assert {path.name for path in folder.iterdir()} <= {f"{NAME}.lock"}


def test_without_numba_when_cached(folder: Path) -> None:
    fresh()
    code = f"""
import sys
from kernels import native
import numpy
words = numpy.zeros({QUEUE_BYTES // 8}, numpy.int64)
assert native.load("{NAME}").call(int(words.ctypes.data)) == 0
print(*{{"numba", "numba_cuda", "cupy", "cuda.bindings"}} & set(sys.modules))
"""
    assert python(code) == ""


def test_many_processes_at_once_compile_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "compiled"
    code = f"""
from kernels import native
from kernels.targets import cpu
compile_function = cpu.compile_function
def counted(name):
    with open({str(log)!r}, "a") as file:
        file.write(name + "\\n")
    return compile_function(name)
cpu.compile_function = counted
native.load("{NAME}")
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert log.read_text().split() == [NAME]


def gives_up() -> None:
    raise ConnectionError("nobody needs it any more")


def test_who_waits_for_a_compilation_may_give_up_at_any_time(folder: Path) -> None:
    """And what was begun is there for whoever asks next."""
    ended = threading.Event()

    def make() -> bytes:
        assert ended.wait(60)
        return b"code"

    looks = iter([lambda: None, lambda: None, gives_up])
    with pytest.raises(ConnectionError):
        native.cached("slow", make, lambda: next(looks)())
    assert not (folder / "slow").exists()
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "mgpu compiler":
            thread.join(60)
    assert native.cached("slow", bytes) == b"code"


def test_who_waits_for_another_process_may_give_up_too(folder: Path) -> None:
    with native._only_one(folder / "slow", None), pytest.raises(ConnectionError):
        native.cached("slow", bytes, gives_up)


def test_nobody_waits_for_a_process_that_is_stopped(folder: Path) -> None:
    """Which has gone to sleep in the middle of compiling, for whatever time."""
    folder.mkdir(parents=True)
    stops = (
        "import fcntl, os, signal, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); "
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with subprocess.Popen([sys.executable, "-c", stops, folder / "slow.lock"]) as stopped:
        try:
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
            assert native.cached("slow", lambda: b"code") == b"code"
        finally:
            stopped.kill()


def test_an_error_of_the_compilation_is_raised_where_it_is_waited_for(folder: Path) -> None:
    def make() -> bytes:
        raise ValueError("this is no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        native.cached("bad", make, lambda: None)


def test_a_changed_source_is_another_folder(tmp_path: Path) -> None:
    """Whichever kernel it is in: a function is compiled from several files."""
    copy = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from kernels import native; print(native.cache_folder())"
    before = python(code, tmp_path)
    assert python(code, tmp_path) == before
    with open(copy / "targets" / "vector.py", "a") as file:
        file.write("# changed\n")
    assert python(code, tmp_path) != before


def test_the_user_says_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, wanted in (
        ("HOME", "/home/someone", "/home/someone/.cache/mgpu/kernels"),
        ("XDG_CACHE_HOME", "/caches", "/caches/mgpu/kernels"),
        ("MGPU_CACHE", "/elsewhere", "/elsewhere/kernels"),
    ):
        if name == "HOME":
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
            monkeypatch.delenv("MGPU_CACHE", raising=False)
        monkeypatch.setenv(name, value)
        assert str(native.cache_folder().parent) == wanted


def test_wrong_arguments_are_type_errors_and_run_nothing() -> None:
    call = native.load("settle").call
    for arguments in ((), (1, 2, 3), (1, 2, 3, 4, 5)):
        with pytest.raises(TypeError, match="number of integer arguments expected: 004"):
            call(*arguments)
    with pytest.raises(TypeError):
        call("1", 2, 3, 4)
    with pytest.raises(OverflowError):
        call(2**64, 2, 3, 4)
    with pytest.raises(TypeError):
        call(flag=1)


def test_numpy_integers_and_negative_ones_are_integers() -> None:
    flag = np.array([0, 0], np.uint32)
    call = native.load("settle").call
    assert call(np.int64(flag.ctypes.data), np.int32(-1), 1, 1) == 0


def test_other_threads_run_meanwhile() -> None:
    """The function gives up the GIL: two threads that wait for one another both get what they wait for."""
    flags = np.zeros((2, 16), np.uint32)
    settle = native.load("settle").call
    addresses = [int(flags[i].ctypes.data) for i in range(2)]
    results = [1, 1]

    def meet(mine: int) -> None:
        flags[mine, 0] = 1
        results[mine] = settle(addresses[1 - mine], 1, 2**40, 0)  # so many looks that only a raised flag ends it

    threads = [threading.Thread(target=meet, args=(mine,)) for mine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [0, 0]


def test_a_function_outlives_the_module_that_made_it() -> None:
    """As the interpreter ends modules are emptied first; then the garbage collector looks at the functions that are
    left, and at their descriptions."""
    code = f"""
import ctypes, gc, numpy
from kernels import native
complete, address = native.load("{NAME}").call, native.address_function()
queue = numpy.zeros({QUEUE_BYTES // 8}, numpy.int64)
vars(native).clear()
gc.collect()
taken = [(ctypes.c_uint64 * 4)(*[2**64 - 1] * 4) for _ in range(2000)]  # what lay where a description was freed
gc.collect()
print(complete(address(queue)), queue[{QUEUE_TAKEN // 8}])
"""
    assert python(code) == "0 1"


def test_compiled_code_calls_compiled_code_by_address() -> None:
    assert native.load("settle").address != native.load("complete").address != 0


def test_an_unknown_function_is_an_error(folder: Path) -> None:
    with pytest.raises(AttributeError, match="no_such_function"):
        fresh("no_such_function")
    with pytest.raises(TypeError, match="float128"):
        fresh("reduce-float128-sum")
