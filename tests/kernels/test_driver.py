"""What `kernels/driver.py` asks of CUDA's driver, against the bindings that are installed: a slip in a name or in the
number of arguments must not wait for a GPU to be found."""

from __future__ import annotations

import ast
import ctypes
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from cuda.bindings import driver as cu

from kernels import driver

TREE = ast.parse(Path(driver.__file__).read_text())


def names(node: ast.AST) -> str:
    """Such as cu.CUevent_flags.CU_EVENT_DISABLE_TIMING."""
    return f"{names(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def calls() -> list[tuple[str, int]]:
    """Every call(cu.function, arguments...), and how many arguments it has; *grid is two."""
    found = []
    for node in ast.walk(TREE):
        if isinstance(node, ast.Call) and names(node.func) == "call" and names(node.args[0]).startswith("cu."):
            arguments = node.args[1:]
            found.append((names(node.args[0])[3:], len(arguments) + sum(isinstance(a, ast.Starred) for a in arguments)))
    return found


def test_every_function_exists_and_takes_what_it_is_given() -> None:
    assert len(calls()) > 30
    for name, count in calls():
        assert len(inspect.signature(getattr(cu, name)).parameters) == count, name


def test_every_constant_exists() -> None:
    used = {names(node) for node in ast.walk(TREE) if isinstance(node, ast.Attribute)}
    aliases = {"attributes.": "cu.CUdevice_attribute."}
    for name in used:
        for short, long in aliases.items():
            name = name.replace(short, long) if name.startswith(short) else name
        if name.startswith("cu.") and not name.endswith(".name"):
            value = cu
            for part in name.split(".")[1:]:
                assert hasattr(value, part), name
                value = getattr(value, part)


def test_a_handle_of_memory_is_as_long_as_the_drivers() -> None:
    first, second = cu.CUipcMemHandle(), cu.CUipcMemHandle()
    data = bytes(range(driver.HANDLE_BYTES))
    ctypes.memmove(first.getPtr(), data, len(data))
    ctypes.memmove(second.getPtr(), first.getPtr(), driver.HANDLE_BYTES)
    assert ctypes.string_at(second.getPtr(), driver.HANDLE_BYTES) == data


def test_a_handle_is_read_before_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 13's bindings give its memory to whatever is made next."""
    data = bytes(range(driver.HANDLE_BYTES))
    memory = ctypes.create_string_buffer(data, driver.HANDLE_BYTES)

    class Handle:
        def getPtr(self) -> int:
            return ctypes.addressof(memory)

        def __del__(self) -> None:
            ctypes.memset(memory, 0xA5, driver.HANDLE_BYTES)

    monkeypatch.setattr(cu, "cuIpcGetMemHandle", lambda start: (cu.CUresult.CUDA_SUCCESS, Handle()), raising=True)
    assert object.__new__(driver.Driver).export(4096) == data
    assert memory.raw != data


def test_what_a_capture_forbids_is_asked_for_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls that are made while some stream may be captured, those that CUDA calls potentially unsafe."""
    modes = cu.CUstreamCaptureMode
    relaxed, strict = modes.CU_STREAM_CAPTURE_MODE_RELAXED, modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    mode, asked = [strict], []

    def unsafe(name: str, *results: Any) -> Callable[..., Any]:
        def function(*_: Any) -> Any:
            asked.append(name)
            assert mode == [relaxed], f"{name} while a stream is captured"
            return (cu.CUresult.CUDA_SUCCESS, *results)

        function.__name__ = name
        return function

    def exchange(new: Any) -> Any:
        before, mode[0] = mode[0], new
        return cu.CUresult.CUDA_SUCCESS, before

    monkeypatch.setattr(cu, "cuThreadExchangeStreamCaptureMode", exchange)
    unsafe_calls: dict[str, tuple[Any, ...]] = {
        "cuMemAlloc": (4096,), "cuMemFree": (), "cuMemsetD8Async": (), "cuMemcpyAsync": (), "cuStreamSynchronize": (),
        "cuEventQuery": (), "cuModuleLoadData": ("module",), "cuModuleGetFunction": ("function",),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": (2,),
    }  # fmt: skip
    for name, results in unsafe_calls.items():
        monkeypatch.setattr(cu, name, unsafe(name, *results))
    gpu = object.__new__(driver.Driver)
    gpu._stream, gpu._modules, gpu.processors = 1, [], 132
    address = gpu.allocate(8)
    gpu.write(address, b"12345678")
    gpu.write(address, b"")
    assert len(gpu.read(address, 8)) == 8
    gpu.free(address)
    assert gpu.load(b"cubin", "execute", 512) == driver.Kernel("function", 264)
    assert gpu.done(7)
    assert set(asked) == set(unsafe_calls) and mode == [strict]


@pytest.mark.parametrize(
    ("status", "owner"),
    [("CUDA_SUCCESS", 3), ("CUDA_ERROR_INVALID_VALUE", None)],
)
def test_memory_has_an_owner(status: str, owner: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cu, "cuPointerGetAttribute", lambda attribute, address: (getattr(cu.CUresult, status), owner))
    assert object.__new__(driver.Driver).owner(4096) == owner


def test_streams_events_and_addresses_are_integers_both_ways() -> None:
    for kind in (cu.CUstream, cu.CUevent, cu.CUdeviceptr):
        assert int(kind(12345)) == 12345


def test_an_error_is_named() -> None:
    def refused(number: int) -> tuple[object]:
        return (cu.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,)

    with pytest.raises(driver.DriverError, match="refused: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED") as caught:
        driver.call(refused, 1)
    assert caught.value.name == "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
    success = cu.CUresult.CUDA_SUCCESS
    assert driver.call(lambda: (success, 5)) == 5 and driver.call(lambda: (success, 5, 6)) == (5, 6)
    assert driver.call(lambda: (success,)) == ()
