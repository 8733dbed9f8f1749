"""What is compared: our all-reduce in its variants, each peer's, and the memory's own speed.

A `Candidate` says what to call. An engine, which lives in each rank's process, turns it into a function without
arguments that makes one call. Peers' libraries are imported by their own engine only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from bench.inputs import Array

LIMIT = "a += b"  # the candidate that measures the memory


class UnsupportedError(ValueError):
    """This candidate cannot do this dtype or operation."""


@dataclass(frozen=True)
class Candidate:
    """One way to do an all-reduce. `crew` names the processes that do it: "mgpu", "gloo", an MPI, or LIMIT."""

    crew: str
    memory: str = "ordinary"
    algorithm: str | None = None
    plan: bool = False

    @property
    def label(self) -> str:
        """Its name in tables: `mgpu`, `mgpu ordinary ring plan`, `gloo`."""
        words = [self.crew]
        if self.crew == "mgpu" and self.memory == "ordinary":
            words.append("ordinary")
        return " ".join([*words, *([self.algorithm] if self.algorithm else []), *(["plan"] if self.plan else [])])


class Engine(Protocol):
    """One rank of a crew."""

    rank: int
    version: str

    def allocate(self, nbytes: int, memory: str) -> Array:
        """An array of `nbytes` uint8 in symmetric or ordinary memory; all ranks call it in the same order."""

    def prepare(self, candidate: Candidate, x: Array, out: Array, op: str) -> Callable[[], object]:
        """A function that reduces `x` over the ranks into `out`, which may be `x`. Raises UnsupportedError."""

    def close(self) -> None:
        """Leave the group."""


class Collectives:
    """Ours."""

    def __init__(self, comm: Any) -> None:
        import kernels

        self.comm = comm
        self.rank: int = comm.rank
        self.version = f"mgpu {kernels.__version__}, backend {comm.backend}"

    def allocate(self, nbytes: int, memory: str) -> Array:
        """Symmetric memory comes from the communicator."""
        return self.comm.empty(nbytes, np.uint8) if memory == "symmetric" else np.empty(nbytes, np.uint8)

    def prepare(self, candidate: Candidate, x: Array, out: Array, op: str) -> Callable[[], object]:
        """A call as a program would write it, or a plan."""
        options = {"algorithm": candidate.algorithm} if candidate.algorithm else {}
        if candidate.plan:
            return self.comm.plan("all_reduce", x, op, out=out, **options)
        return partial(self.comm.all_reduce, x, op, out=out, **options)

    def close(self) -> None:
        """`spawn` closes the communicator."""


class Gloo:
    """torch.distributed on CPU tensors. It reduces in place only, so out of place it copies first."""

    def __init__(self, rank: int, ranks: int, folder: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=ranks)
        self.rank = rank
        self.version = f"Gloo, torch {torch.__version__}"
        self._ranks = ranks

    def allocate(self, nbytes: int, memory: str) -> Array:
        """Ordinary memory."""
        return np.empty(nbytes, np.uint8)

    def prepare(self, candidate: Candidate, x: Array, out: Array, op: str) -> Callable[[], object]:
        """Gloo has no average: sum, then divide, as DistributedDataParallel does."""
        import torch
        import torch.distributed as dist

        if x.dtype.name not in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"):
            raise UnsupportedError(f"Gloo does not reduce {x.dtype}")
        kind = getattr(torch, x.dtype.name)
        source, target = (torch.from_numpy(array.view(np.uint8)).view(kind) for array in (x, out))
        reduction = {
            "sum": dist.ReduceOp.SUM,
            "avg": dist.ReduceOp.SUM,
            "prod": dist.ReduceOp.PRODUCT,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
        }[op]
        if op != "avg" and out is x:
            return partial(dist.all_reduce, target, reduction)
        if op == "avg" and not kind.is_floating_point:
            raise UnsupportedError(f"Gloo does not average {x.dtype}")

        def call() -> None:
            if out is not x:
                target.copy_(source)
            dist.all_reduce(target, reduction)
            if op == "avg":
                target.div_(self._ranks)

        return call

    def close(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()


class Mpi:
    """Any MPI, through mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.rank: int = MPI.COMM_WORLD.rank
        library = " ".join(MPI.Get_library_version().split(", package")[0].splitlines()[0].strip("\0").split())
        self.version = f"{library}, mpi4py {version('mpi4py')}"

    def allocate(self, nbytes: int, memory: str) -> Array:
        """Ordinary memory."""
        return np.empty(nbytes, np.uint8)

    def prepare(self, candidate: Candidate, x: Array, out: Array, op: str) -> Callable[[], object]:
        """MPI has no average: sum, then divide."""
        from mpi4py import MPI

        kind = {
            "float32": MPI.FLOAT,
            "float64": MPI.DOUBLE,
            "int8": MPI.INT8_T,
            "uint8": MPI.UINT8_T,
            "int32": MPI.INT32_T,
            "uint32": MPI.UINT32_T,
            "int64": MPI.INT64_T,
            "uint64": MPI.UINT64_T,
        }.get(x.dtype.name)
        if kind is None:
            raise UnsupportedError(f"standard MPI has no {x.dtype}")
        reduction = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}[op]
        source = MPI.IN_PLACE if out is x else [x, kind]
        reduce_once = partial(MPI.COMM_WORLD.Allreduce, source, [out, kind], reduction)
        if op != "avg":
            return reduce_once
        if x.dtype.kind != "f":
            raise UnsupportedError(f"MPI does not average {x.dtype}")
        ranks = x.dtype.type(MPI.COMM_WORLD.size)

        def call() -> None:
            reduce_once()
            np.divide(out, ranks, out=out)

        return call

    def close(self) -> None:
        """mpi4py finalises MPI at exit."""


class Addition:
    """No communication: each rank adds one half of its bytes to the other, all ranks at the same time."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.version = f"NumPy {np.__version__}, float32"

    def allocate(self, nbytes: int, memory: str) -> Array:
        """Ordinary memory."""
        return np.empty(nbytes, np.uint8)

    def prepare(self, candidate: Candidate, x: Array, out: Array, op: str) -> Callable[[], object]:
        """The same addition whatever is reduced: it stands for the bytes that pass through memory."""
        data = x.view(np.uint8)[: x.nbytes // 8 * 8].view(np.float32)
        a, b = data[: data.size // 2], data[data.size // 2 :]
        return partial(np.add, a, b, out=a)

    def close(self) -> None:
        """Nothing to leave."""
