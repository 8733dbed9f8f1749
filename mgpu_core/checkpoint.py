"""Checkpoints: named tensors and a little JSON in one safetensors file, written whole or not at all.

    checkpoint.save("run/checkpoint.safetensors", {"model.conv.weight": weight, ...}, {"epoch": 3, "step": 120})
    tensors, meta = checkpoint.load("run/checkpoint.safetensors")

Safetensors is plain data behind a JSON header: loading one runs no code, and other tools can read it.
The JSON is kept under the metadata key "mgpu".
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

FORMAT = 1

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "C64": np.complex64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file or the tensor."""


def save(path: str | Path, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of the one at `path`, if any.

    The new file is complete and on the disk before it takes the old one's name, so a process or a machine
    that dies in here leaves the old one whole.

    Args:
        tensors: arrays by name, of any shape and layout; floating, integer and boolean dtypes, bfloat16 and float8.
        meta: values that JSON can hold: the position in the data, states of random generators (`random_state`), ...

    Raises:
        CheckpointError: for a tensor of another dtype, values in `meta` that are not JSON's, or a failed write.
    """
    path = Path(path)
    try:
        header = {"mgpu": json.dumps({"format": FORMAT, **meta})}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the metadata for {path} is not JSON: {error}") from error
    arrays = {name: _storable(name, tensor) for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):  # by a process killed in here
        abandoned.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(safetensors.numpy.save(arrays, metadata=header))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_names(path.parent)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} was not written ({error}); what it held before is unchanged") from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read (tensors, meta) as `save` was given them; the arrays are writable and C-contiguous.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is not a checkpoint of mgpu, or damaged.
    """
    content = Path(path).read_bytes()
    try:
        tensors = {name: _array(**entry) for name, entry in safetensors.deserialize(content)}
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        meta = json.loads(header["__metadata__"]["mgpu"])
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged, or is not a checkpoint of mgpu ({error!r})") from error
    if meta.pop("format") != FORMAT:
        raise CheckpointError(f"{path} was written by another version of mgpu, in another format")
    return tensors, meta


def _storable(name: str, tensor: Any) -> NDArray[Any]:
    array = np.asarray(
        tensor, order="C"
    )  # save_file takes the bytes as they lie, so a transposed array must be laid out
    if array.dtype.newbyteorder("=") not in map(np.dtype, _DTYPES.values()):
        raise CheckpointError(f"{name}: safetensors has no dtype {array.dtype}")
    return array


def _array(dtype: str, shape: list[int], data: bytes) -> NDArray[Any]:
    return np.frombuffer(bytearray(data), _DTYPES[dtype]).reshape(shape)


def _sync_names(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
