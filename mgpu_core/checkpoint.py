"""Checkpoints: named tensors and a little JSON in one safetensors file, written whole or not at all.

    checkpoint.save("run/checkpoint.safetensors", {"model.conv.weight": weight, ...}, {"epoch": 3, "step": 120})
    tensors, meta = checkpoint.load("run/checkpoint.safetensors")

Safetensors is plain data behind a JSON header: loading one runs no code, and other tools can read it.
The JSON is kept under the metadata key "mgpu".

Ranks that hold parts of a model, by whatever strategy, write the same file that one process would:

    with checkpoint.Writer("run/checkpoint.safetensors", comm) as writer:
        writer.save(checkpoint.parts(model, optimizer), {"epoch": 3, "step": 120})     # returns before it is written
    meta = checkpoint.restore("run/checkpoint.safetensors", checkpoint.parts(model, optimizer))

A file holds whole tensors by their global index, so any number of ranks and any mesh loads what any other saved. Rank
0 gathers them and writes one file, rather than each rank its own: ranks share a host's memory and disk here, one file
is replaced in one instant, and no tool needs to know how many ranks there were. The price is that rank 0 holds a copy
of the model and the optimiser's state until the file is written.
"""

from __future__ import annotations

import glob
import json
import math
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from mgpu_core import device

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


class Part(NamedTuple):
    """What a rank holds of a tensor: its array, C-contiguous, and where that lies in the whole (None: it is the whole).

    `placement` has `shape`, the whole's, and `runs()`: see `mgpu_core.parallel.placement`.
    """

    array: Any
    placement: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return self.array.shape if self.placement is None else self.placement.shape

    def runs(self) -> NDArray[np.int64]:
        """(n, 3): elements of the flattened part from [0] on are those of the flattened whole from [1] on, [2] many."""
        runs = [(0, 0, self.array.size)] if self.placement is None else list(self.placement.runs())
        return np.array(runs, np.int64).reshape(-1, 3)


def parts(model: Any, optimizer: Any = None) -> dict[str, Part]:
    """What this rank holds of "model.NAME" and "optimizer.KIND.NAME": the arrays themselves, and where they lie.

    `model` is a module, or a strategy's wrapper of one, whose own `named_parameters` and `named_buffers` come first.
    """
    model = model if hasattr(model, "named_parameters") else model.model
    placements = {name: getattr(p, "placement", None) for name, p in model.named_parameters()}
    found = {f"model.{name}": Part(p.data, placements[name]) for name, p in model.named_parameters()}
    found |= {f"model.{name}": Part(buffer.data) for name, buffer in model.named_buffers()}
    if optimizer is not None:
        for name, array in optimizer.state_dict().items():
            found[f"optimizer.{name}"] = Part(array, placements.get(name.partition(".")[2]))
    return found


class Writer:
    """Writes the checkpoints of a run, one in place of the other, while the run goes on.

    All ranks of `comm` (None: one process) make it and call it together. An error of a write that goes on in the
    background is raised, on every rank, by the next `save` or `wait`; the file is then the one before. Use it in
    `with`, or end with `wait`.
    """

    def __init__(self, path: str | Path, comm: Any = None) -> None:
        self.path = Path(path)
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(self, parts: Mapping[str, Part], meta: Mapping[str, Any]) -> None:
        """Save what all ranks hold together; rank 0's `meta`. Returns when the arrays may be changed again.

        Raises:
            CheckpointError: on every rank, if parts do not make whole tensors, for what `save` refuses, and for an
                earlier write that failed.
        """
        self.wait()
        whole = _gather(parts, self._comm)
        if whole is not None:
            self._thread = threading.Thread(target=self._write, args=(whole, dict(meta)), name=f"writer of {self.path}")
            self._thread.start()

    def wait(self) -> None:
        """Wait until the latest checkpoint is on the disk. Raises CheckpointError, on every rank, if it is not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        said = None if error is None else str(error)
        if self._comm is not None:
            said = self._comm.broadcast_object(said)
        if said is not None:
            raise CheckpointError(said) from error

    def _write(self, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        try:
            save(self.path, tensors, meta)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # a thread's errors would be lost
            self._error = CheckpointError(f"{self.path} was not written: {error!r}")

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()


def restore(path: str | Path, parts: Mapping[str, Part], comm: Any = None) -> dict[str, Any]:
    """Read this rank's parts, in place and in their dtypes, from a checkpoint that any number of ranks saved; its meta.

    All ranks of `comm` (None: one process) call it together, with the parts of a model, or of a model and its
    optimiser. Only the parts are read. Afterwards call `refresh()` of a model that is `Sharded`.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if it is damaged, or of another model or optimiser; nothing is changed then.
    """
    wholes, meta = _mapped(Path(path))
    wanted = set(parts)
    if comm is not None:
        wanted.update(*(comm.broadcast_object(sorted(parts), root=rank) for rank in range(comm.size)))
    kinds = {name.partition(".")[0] for name in wanted}
    if missing := sorted(wanted - wholes.keys()):
        raise CheckpointError(f"{path} does not fit: it has no {', '.join(missing[:5])}")
    if unknown := sorted(name for name in wholes.keys() - wanted if name.partition(".")[0] in kinds):
        raise CheckpointError(f"{path} does not fit: there is no use here for {', '.join(unknown[:5])}")
    for name, part in parts.items():
        if wholes[name].shape != part.shape:
            raise CheckpointError(
                f"{path} does not fit: {name} has shape {wholes[name].shape} there, and {part.shape} here"
            )
    for name, part in parts.items():
        own, whole = part.array.reshape(-1), wholes[name].reshape(-1)
        for here, there, count in part.runs().tolist():
            own[here : here + count] = device.beside(whole[there : there + count], own)
    return meta


def read_meta(path: str | Path) -> dict[str, Any]:
    """A checkpoint's meta alone. Raises as `restore`."""
    return _mapped(Path(path))[1]


def _gather(parts: Mapping[str, Part], comm: Any) -> dict[str, NDArray[Any]] | None:
    """The whole tensors, copies, on rank 0; None on the others."""
    mine = {name: (_native(_storable(name, part.array)), part) for name, part in parts.items()}
    codes = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
    described: list[Any] = []
    for name, (array, part) in mine.items():
        runs = part.runs()
        described.append([name, codes[array.dtype], part.shape, int(runs[:, 2].sum()), zlib.crc32(runs.tobytes())])
    ranks = [described] if comm is None else [comm.broadcast_object(described, root=r) for r in range(comm.size)]
    wanted = _choose(ranks)
    rank = 0 if comm is None else comm.rank
    if rank != 0:
        for name in wanted[rank]:
            array, part = mine[name]
            runs = part.runs()
            comm.send(np.array([len(runs)]), 0)
            comm.send(runs, 0)
            comm.send(array.reshape(-1).view(np.uint8), 0)
        return None
    whole: dict[str, NDArray[Any]] = {}
    for source, list_ in enumerate(wanted):
        known: dict[str, Any] = {name: (code, shape, count) for name, code, shape, count, _ in ranks[source]}
        for name in list_:
            code, shape, count = known[name]
            flat = whole.setdefault(name, np.empty(tuple(shape), _DTYPES[code])).reshape(-1)
            if source == 0:
                runs, values = mine[name][1].runs(), mine[name][0].reshape(-1)
            else:
                runs = comm.recv(np.empty((int(comm.recv(np.zeros(1, np.int64), source)[0]), 3), np.int64), source)
                values = comm.recv(np.empty(count * flat.itemsize, np.uint8), source).view(flat.dtype)
            for here, there, length in runs.tolist():
                flat[there : there + length] = values[here : here + length]
    return whole


def _choose(ranks: list[Any]) -> list[list[str]]:
    """For each rank the names of the parts that it brings: of equal ones the first rank's. The same on every rank.

    Raises CheckpointError where parts do not make a whole.
    """
    chosen: list[list[str]] = []
    kinds: dict[str, Any] = {}
    found: dict[str, int] = {}
    seen: set[Any] = set()
    for rank, described in enumerate(ranks):
        chosen.append([])
        for name, code, shape, count, runs in described:
            kind = (code, tuple(shape))
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"{name} is {kinds[name][0]} of shape {kinds[name][1]} on one rank, but {code} of shape {kind[1]} "
                    f"on rank {rank}"
                )
            if (name, runs, count) not in seen and (count or not math.prod(shape)):
                seen.add((name, runs, count))
                chosen[rank].append(name)
                found[name] = found.get(name, 0) + count
    for name, (_, shape) in kinds.items():
        if found.get(name) != math.prod(shape):
            raise CheckpointError(f"the ranks hold {found.get(name, 0)} elements of {name}, of shape {shape}, together")
    return chosen


def _mapped(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The whole tensors of a file, read-only, of which only what is used is read; and its meta."""
    with open(path, "rb") as file:
        try:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length) if length < path.stat().st_size else b"")
            meta = json.loads(header.pop("__metadata__")["mgpu"])
            wholes = dict(_views(path, header, 8 + length))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged, or is not a checkpoint of mgpu ({error!r})") from error
    if meta.pop("format") != FORMAT:
        raise CheckpointError(f"{path} was written by another version of mgpu, in another format")
    return wholes, meta


def _views(path: Path, header: dict[str, Any], start: int) -> Iterator[tuple[str, NDArray[Any]]]:
    size = path.stat().st_size
    data = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if start + last > size:
            raise ValueError(f"{name} ends {start + last - size} bytes behind the file")
        yield name, np.asarray(data[start + first : start + last]).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _storable(name: str, tensor: Any) -> NDArray[Any]:
    # save_file takes the bytes as they lie, so a transposed array must be laid out.
    array = np.asarray(device.move(tensor, "cpu"), order="C")
    if array.dtype.newbyteorder("=") not in map(np.dtype, _DTYPES.values()):
        raise CheckpointError(f"{name}: safetensors has no dtype {array.dtype}")
    return array


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """In this machine's order of bytes."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _array(dtype: str, shape: list[int], data: bytes) -> NDArray[Any]:
    return np.frombuffer(bytearray(data), _DTYPES[dtype]).reshape(shape)


def _sync_names(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
