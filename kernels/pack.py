"""Many tensors to one flat bucket and back, each in one launch, with scale and cast on the way.

The kernels are CUDA C++, in kernels/pack.cu, and take one argument: the address of a `job` in the GPU's memory, so that
a captured graph may be replayed. `compile_kernels` makes machine code of them with NVRTC, without a GPU; `raw_kernel`
gives one to CuPy. `pack` and `unpack` say in NumPy what they do, bit for bit, but for which NaN a NaN is.

A bucket begins at a multiple of 16 bytes; tensors begin anywhere in it (`starts`). Where a tensor begins at a multiple
of 16 bytes both in the bucket and in memory, all of it moves 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.dtypes import DType, find

Array = npt.NDArray[Any]

DIRECTIONS = ("pack", "unpack")
THREADS = 256  # of a block
JOB_WORDS = 7  # segments, starts, counts, addresses, bucket, length, scale: as in pack.cu


def pack(tensors: Sequence[Array], bucket: Array, starts: Sequence[int], scale: float = 1.0) -> None:
    """bucket[start : start + size] = tensor * scale for all tensors, cast to the bucket's dtype; between them zeros.

    Products are float32, or float64 if either dtype is; a float64 becomes a shorter float than float32 by way of it.
    Only floats are scaled or cast. Raises ValueError for starts that do not fit (see `table`), TypeError for dtypes.
    """
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        check(find(dtype), find(bucket.dtype), scale)
    _ordered([tensor.size for tensor in tensors], starts, bucket.size)
    zero, end = np.zeros((), bucket.dtype), 0
    for tensor, start in zip(tensors, starts):
        bucket[end:start] = zero
        end = start + tensor.size
        bucket[start:end] = _converted(tensor.reshape(-1), bucket.dtype, scale)
    bucket[end:] = zero


def unpack(bucket: Array, tensors: Sequence[Array], starts: Sequence[int], scale: float = 1.0) -> None:
    """tensor = bucket[start : start + size] * scale for all tensors, in place, cast to their dtype; see `pack`."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        check(find(dtype), find(bucket.dtype), scale)
    _ordered([tensor.size for tensor in tensors], starts, bucket.size)
    for tensor, start in zip(tensors, starts):
        tensor[...] = _converted(bucket[start : start + tensor.size], tensor.dtype, scale).reshape(tensor.shape)


def _converted(x: Array, dtype: Any, scale: float) -> Array:
    if x.dtype == dtype and scale == 1:
        return x
    wide = np.dtype(np.float64 if np.float64 in (x.dtype, dtype) else np.float32)
    with np.errstate(all="ignore"):
        product: Array = x.astype(wide) * wide.type(scale)
        return product.astype(dtype) if dtype == np.float64 else product.astype(np.float32).astype(dtype)


def check(tensor: DType, bucket: DType, scale: float) -> None:
    """Raises TypeError unless elements of the one become the other."""
    if (tensor.name != bucket.name or scale != 1) and not tensor.kind == bucket.kind == "float":
        raise TypeError(
            f"only floats can be cast or scaled: tensors are {tensor.name}, the bucket is {bucket.name}, scale {scale}"
        )


def _ordered(counts: Sequence[int], starts: Sequence[int], length: int) -> None:
    if len(counts) != len(starts):
        raise ValueError(f"{len(counts)} tensors need as many starts, and there are {len(starts)}")
    end = 0
    for i, (count, start) in enumerate(zip(counts, starts)):
        if not end <= start <= length - count:
            raise ValueError(
                f"tensor {i} takes elements {start} to {start + count} of a bucket of {length}, and those before it "
                f"end at {end}: tensors must follow each other and fit"
            )
        end = start + count


def table(addresses: Sequence[int], counts: Sequence[int], starts: Sequence[int], length: int) -> Array:
    """What a job says of its tensors: int64 (3, segments), the starts, counts and addresses of those not empty.

    `addresses` are multiples of the element's size, `starts` the first elements in a bucket of `length` elements.
    Raises ValueError where tensors are out of order, overlap or do not fit.
    """
    _ordered(counts, starts, length)
    rows = np.array([starts, counts, addresses], np.int64).reshape(3, -1)
    rows = rows[:, rows[1] > 0]
    return np.ascontiguousarray(rows) if rows.size else np.zeros((3, 1), np.int64)


def job(segments: int, rows: int, bucket: int, length: int, scale: float = 1.0) -> Array:
    """The kernels' argument, to be copied to the GPU: int64 (7,). `rows` is the address there of a `table` of so many
    segments, `bucket` that of `length` elements, a multiple of 16. Raises ValueError if it is not."""
    if bucket % 16:
        raise ValueError(f"a bucket must begin at a multiple of 16 bytes, not at address {bucket:#x}")
    row = 8 * segments
    scale_bits = int(np.float64(scale).view(np.int64))
    return np.array([segments, rows, rows + row, rows + 2 * row, bucket, length, scale_bits], np.int64)


def blocks(length: int, tensor: DType, bucket: DType, most: int) -> int:
    """Blocks of THREADS to launch for a bucket of `length` elements, where `most` run at once."""
    tile = THREADS * 16 // min(tensor.itemsize, bucket.itemsize)
    return max(1, min(most, -(-length // tile)))


def source() -> str:
    """The CUDA C++ of the kernels."""
    return Path(__file__).with_name("pack.cu").read_text()


def defines(tensor: DType, bucket: DType, scaled: bool) -> dict[str, str]:
    """The macros that choose what the kernels are for. What casts scales too: by 1, it may be."""
    check(tensor, bucket, 2.0 if scaled else 1.0)
    if tensor.name == bucket.name and not scaled:
        return {"TENSOR": f"bytes{tensor.itemsize}", "BUCKET": f"bytes{bucket.itemsize}", "SCALED": "0"}
    return {"TENSOR": tensor.name, "BUCKET": bucket.name, "SCALED": "1"}


class Compiled(NamedTuple):
    """Both kernels, `pack` and `unpack`, for one compute capability."""

    ptx: str
    cubin: bytes


@cache
def compile_kernels(tensor: str, bucket: str, architecture: tuple[int, int], scaled: bool = True) -> Compiled:
    """Both kernels for these dtypes, by NVRTC; to be launched with THREADS threads a block. Raises RuntimeError with
    the compiler's words."""
    from cuda.bindings import nvrtc

    arch = "--gpu-architecture=sm_{}{}".format(*architecture)
    options = [option.encode() for option in (arch, *_options(tensor, bucket, scaled))]
    _, program = nvrtc.nvrtcCreateProgram(source().encode(), b"pack.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)

    def read(size_of: Any, write: Any) -> bytes:
        text = bytearray(size_of(program)[1])
        write(program, text)
        return bytes(text)

    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        raise RuntimeError(f"pack.cu for {tensor} and {bucket}: {log.decode().strip()}")
    ptx = read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    cubin = read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    nvrtc.nvrtcDestroyProgram(program)
    return Compiled(ptx.decode().rstrip("\0"), cubin)


def _options(tensor: str, bucket: str, scaled: bool) -> tuple[str, ...]:
    """What NVRTC is told. No fused multiply-add, so that rounding is the host's."""
    macros = defines(find(tensor), find(bucket), scaled)
    return "--std=c++17", "--fmad=false", *(f"-D{name}={value}" for name, value in macros.items())


def raw_kernel(direction: str, tensor: str, bucket: str, scaled: bool = True) -> Any:
    """The kernel "pack" or "unpack" as a `cupy.RawKernel`: call it with (blocks,), (THREADS,), (the job's address,)."""
    import cupy

    return cupy.RawKernel(source(), direction, options=_options(tensor, bucket, scaled))
