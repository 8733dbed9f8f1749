"""One GPU, through the CUDA driver: every call of the driver that this package makes, and nothing else.

What is decided (which memory to share, which stream waits for which, what a failure means) is decided by its callers,
so that tests can run them on a stand-in for this class. Addresses, streams and events are plain integers. Imported only
by ranks that use a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cu

HANDLE_BYTES = 64  # of cudaIpcMemHandle


class DriverError(RuntimeError):
    """A call of the driver that failed: `name` is CUDA's name for the error."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{what}: {name}")
        self.name = name


class Kernel(NamedTuple):
    """A kernel that is loaded, and how many of its blocks of the most lanes run at once."""

    function: Any
    most_blocks: int


def call(function: Any, *arguments: Any) -> Any:
    """What the driver's function returns, its error as an exception."""
    status, *results = function(*arguments)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise DriverError(getattr(status, "name", str(status)), function.__name__)
    return results[0] if len(results) == 1 else tuple(results)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Inside, what this thread asks for spoils no capture of a stream that is going on elsewhere."""
    before = call(cu.cuThreadExchangeStreamCaptureMode, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(cu.cuThreadExchangeStreamCaptureMode, before)


def devices() -> int:
    """How many GPUs this process sees. Raises DriverError or RuntimeError where there is no driver."""
    call(cu.cuInit, 0)
    return int(call(cu.cuDeviceGetCount))


class Driver:
    """A GPU and its primary context, which is current inside `with driver:` alone."""

    def __init__(self, device: int) -> None:
        """Raises ValueError for a number that is no GPU's."""
        count = devices()
        if not 0 <= device < count:
            raise ValueError(f"device {device} does not exist; this process sees {count}")
        self.device = device
        self._handle = call(cu.cuDeviceGet, device)
        self._context = call(cu.cuDevicePrimaryCtxRetain, self._handle)
        self._modules: list[Any] = []
        attributes = cu.CUdevice_attribute
        major = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        self.capability = major, self._attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.processors = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.name = call(cu.cuDeviceGetName, 128, self._handle).split(b"\0")[0].decode()
        # Of a part of a GPU (MIG) its own; CUDA 13's bindings have that under the old name.
        uuid = getattr(cu, "cuDeviceGetUuid_v2", cu.cuDeviceGetUuid)
        self.uuid = bytes(call(uuid, self._handle).bytes).hex()
        with self:
            self._stream = self.new_stream()

    def _attribute(self, attribute: Any) -> int:
        return int(call(cu.cuDeviceGetAttribute, attribute, self._handle))

    def __enter__(self) -> Driver:
        call(cu.cuCtxPushCurrent, self._context)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        call(cu.cuCtxPopCurrent)

    def use(self) -> None:
        """Make this GPU the calling thread's: where CUDA's runtime, and so CuPy and PyTorch, make arrays."""
        call(cu.cuCtxSetCurrent, self._context)

    # Memory

    def allocate(self, nbytes: int) -> int:
        """Memory of this GPU, zeroed."""
        with _beside_captures():
            address = int(call(cu.cuMemAlloc, nbytes))
        self.clear(address, nbytes)
        return address

    def clear(self, address: int, nbytes: int) -> None:
        """Make memory zero, and return when it is."""
        with _beside_captures():
            call(cu.cuMemsetD8Async, address, 0, nbytes, self._stream)
            self.synchronize(self._stream)

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        with _beside_captures():
            call(cu.cuMemFree, address)

    def owner(self, address: int) -> int | None:
        """The number of the GPU that memory belongs to; None for what CUDA does not know."""
        try:
            return int(
                call(cu.cuPointerGetAttribute, cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
            )
        except DriverError as error:
            if error.name != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None

    def extent(self, address: int) -> tuple[int, int]:
        """The (start, bytes) of the allocation that an address lies in."""
        start, nbytes = call(cu.cuMemGetAddressRange, address)
        return int(start), int(nbytes)

    def export(self, start: int) -> bytes:
        """A handle of the allocation that begins at `start`, for other processes to `attach`."""
        handle = call(cu.cuIpcGetMemHandle, start)  # which keeps its bytes
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def attach(self, handle: bytes) -> int:
        """Where another process's allocation begins in this one."""
        wrapped = cu.CUipcMemHandle()
        ctypes.memmove(wrapped.getPtr(), handle, HANDLE_BYTES)
        flag = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(call(cu.cuIpcOpenMemHandle, wrapped, int(flag)))

    def detach(self, start: int) -> None:
        """Undo `attach`."""
        call(cu.cuIpcCloseMemHandle, start)

    def register(self, address: int, nbytes: int) -> int:
        """Make pages of host memory the GPU's too, and say at which address it sees them."""
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
        call(cu.cuMemHostRegister, address, nbytes, flags)
        return int(call(cu.cuMemHostGetDevicePointer, address, 0))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        call(cu.cuMemHostUnregister, address)

    def enable_access(self, other: Driver) -> None:
        """Let this GPU read and write the other's memory, in one process. Raises DriverError where it cannot."""
        if other.device != self.device:
            try:
                call(cu.cuCtxEnablePeerAccess, other._context, 0)
            except DriverError as error:
                if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                    raise

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to the GPU, and return when they are there."""
        self._copy_now(address, np.frombuffer(data, np.uint8).ctypes.data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of the GPU's memory, or a peer's, as they are now: kernels may be running."""
        data = np.empty(nbytes, np.uint8)
        self._copy_now(data.ctypes.data, address, nbytes)
        return data.tobytes()

    def _copy_now(self, dst: int, src: int, nbytes: int) -> None:
        # On a stream of its own: the caller's may be captured, and then nothing waits.
        with _beside_captures():
            call(cu.cuMemcpyAsync, dst, src, nbytes, self._stream)
            self.synchronize(self._stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses, host or GPU, in stream order."""
        call(cu.cuMemcpyAsync, dst, src, nbytes, stream)

    # Work

    def load(self, cubin: bytes, name: str, lanes: int) -> Kernel:
        """The kernel `name` of a compiled module, to be launched with blocks of `lanes`."""
        with _beside_captures():
            module = call(cu.cuModuleLoadData, cubin)
            self._modules.append(module)
            function = call(cu.cuModuleGetFunction, module, name.encode())
            blocks = int(call(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor, function, lanes, 0))
        return Kernel(function, blocks * self.processors)

    def launch(self, kernel: Kernel, grid: tuple[int, int], lanes: int, argument: int, stream: int) -> None:
        """Launch blocks that all run at once, with one 64-bit argument."""
        value = np.array([argument], np.uint64)
        values = np.array([value.ctypes.data], np.uint64)
        call(
            cu.cuLaunchCooperativeKernel, kernel.function, *grid, 1, lanes, 1, 1, 0, stream, values.ctypes.data
        )  # fmt: skip

    def new_stream(self) -> int:
        """A stream that waits for no other, the default one included."""
        return int(call(cu.cuStreamCreate, int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def drop_stream(self, stream: int) -> None:
        """Give a stream of `new_stream` back, when what it has been given has ended."""
        call(cu.cuStreamDestroy, stream)

    def synchronize(self, stream: int) -> None:
        """Wait, on the host, for what has been put into a stream."""
        call(cu.cuStreamSynchronize, stream)

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        status = call(cu.cuStreamIsCapturing, stream)
        return bool(status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def new_event(self) -> int:
        """An event, which takes no time."""
        return int(call(cu.cuEventCreate, int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def record(self, event: int, stream: int) -> None:
        """Let the event stand for all that the stream has been given so far."""
        call(cu.cuEventRecord, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Let what the stream is given from now on wait for the event."""
        call(cu.cuStreamWaitEvent, stream, event, 0)

    def done(self, event: int) -> bool:
        """Whether what the event stands for has ended."""
        try:
            with _beside_captures():
                call(cu.cuEventQuery, event)
        except DriverError as error:
            if error.name != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def drop_event(self, event: int) -> None:
        """Give an event back."""
        call(cu.cuEventDestroy, event)

    def close(self) -> None:
        """Give the kernels, the private stream and the context back."""
        with self:
            for module in self._modules:
                call(cu.cuModuleUnload, module)
            self.drop_stream(self._stream)
        call(cu.cuDevicePrimaryCtxRelease, self._handle)
