"""What is compared: our collectives in their variants, each peer's, and the memory's own speed.

A `Candidate` says what to call. An engine, which lives in each rank's process, turns it into a function without
arguments that makes one call. Peers' libraries are imported by their own engine only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from bench.case import Case
from bench.inputs import Array

LIMIT = "a += b"  # the candidate that measures the memory
OURS = "mgpu"


class UnsupportedError(ValueError):
    """This candidate cannot do this collective, dtype, operation or placement."""


@dataclass(frozen=True)
class Candidate:
    """One way to make a call. `crew` names the processes that do it: "mgpu", with the name of a backend behind it where
    one was asked for; "gloo", "nccl" or an MPI; or LIMIT."""

    crew: str
    memory: str = "ordinary"
    algorithm: str | None = None
    plan: bool = False

    @property
    def label(self) -> str:
        """Its name in tables: `mgpu`, `mgpu ordinary ring plan`, `gloo`."""
        words = [self.crew]
        if is_ours(self.crew) and self.memory == "ordinary":
            words.append("ordinary")
        return " ".join([*words, *([self.algorithm] if self.algorithm else []), *(["plan"] if self.plan else [])])


def is_ours(name: str) -> bool:
    """Whether a crew's or a candidate's name is one of ours."""
    return name.partition(" ")[0] == OURS


class Engine(Protocol):
    """One rank of a crew."""

    rank: int
    version: str

    def allocate(self, nbytes: int, memory: str) -> Array:
        """An array of `nbytes` uint8 in symmetric or ordinary memory; all ranks call it in the same order."""

    def place(self, block: Array) -> Array:
        """A block of input where it can be copied from."""

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """A function that makes the call from `x` to `out`. Raises UnsupportedError."""

    def close(self) -> None:
        """Leave the group."""


class InHostMemory:
    """What engines for NumPy arrays share."""

    def allocate(self, nbytes: int, memory: str) -> Array:
        """Ordinary memory."""
        return np.empty(nbytes, np.uint8)

    def place(self, block: Array) -> Array:
        """It is there."""
        return block

    def close(self) -> None:
        """Nothing to leave."""


class Collectives(InHostMemory):
    """Ours. `spawn`, or who else made the communicator, closes it."""

    def __init__(self, comm: Any) -> None:
        import kernels

        self.comm = comm
        self.rank: int = comm.rank
        self.version = f"mgpu {kernels.__version__}, backend {comm.backend}"

    def allocate(self, nbytes: int, memory: str) -> Array:
        """Symmetric memory comes from the communicator."""
        return self.comm.empty(nbytes, np.uint8) if memory == "symmetric" else super().allocate(nbytes, memory)

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """A call as a program would write it, or a plan."""
        size = self.comm.size
        if case.collective == "send_recv":
            if candidate.plan or candidate.algorithm:
                raise UnsupportedError("messages between two ranks have no plans and no algorithms")
            return partial(self.comm.sendrecv, x, (self.rank + 1) % size, out, (self.rank - 1) % size)
        comm, op, root = self.comm, sys.intern(case.op), case.root  # interned, as names in a program are
        algorithm = candidate.algorithm and sys.intern(candidate.algorithm)
        if candidate.plan:
            options: dict[str, Any] = {"algorithm": algorithm}
            options |= {"op": op} if op != "none" else {}
            options |= {"root": root} if root >= 0 else {}
            options |= {"out": out} if case.collective not in ("broadcast", "barrier") else {}
            return comm.plan(case.collective, *([] if case.collective == "barrier" else [x]), **options)
        # Written out, since a `partial` with keywords would add 0.4 us of its own.
        call: Callable[[], object] = {
            "all_reduce": lambda: comm.all_reduce(x, op, out=out, algorithm=algorithm),
            "reduce": lambda: comm.reduce(x, op, root=root, out=out, algorithm=algorithm),
            "broadcast": lambda: comm.broadcast(x, root=root, algorithm=algorithm),
            "all_gather": lambda: comm.all_gather(x, out=out, algorithm=algorithm),
            "reduce_scatter": lambda: comm.reduce_scatter(x, op, out=out, algorithm=algorithm),
            "gather": lambda: comm.gather(x, root=root, out=out, algorithm=algorithm),
            "scatter": lambda: comm.scatter(x, root=root, out=out, algorithm=algorithm),
            "all_to_all": lambda: comm.all_to_all(x, out=out, algorithm=algorithm),
            "barrier": lambda: comm.barrier(algorithm=algorithm),
        }[case.collective]
        return call


class OnGpu(Collectives):
    """Ours on arrays in a GPU's memory. A call is over when its stream is."""

    def allocate(self, nbytes: int, memory: str) -> Any:
        """CuPy arrays."""
        import cupy

        return self.comm.empty(nbytes, np.uint8) if memory == "symmetric" else cupy.empty(nbytes, cupy.uint8)

    def place(self, block: Array) -> Any:
        """A copy on the GPU."""
        import cupy

        return cupy.asarray(block)

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """A call, and the wait for its stream."""
        import cupy

        call, wait = super().prepare(candidate, case, x, out), cupy.cuda.get_current_stream().synchronize

        def call_and_wait() -> None:
            call()
            wait()

        return call_and_wait


class Gloo(InHostMemory):
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

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """Gloo has no average: sum, then divide, as DistributedDataParallel does. What is copied goes as bytes."""
        import torch
        import torch.distributed as dist

        if case.op == "none":
            kind = torch.uint8
        elif x.dtype.name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"):
            kind = getattr(torch, x.dtype.name)
        else:
            raise UnsupportedError(f"Gloo does not reduce {x.dtype}")
        if case.op == "avg" and not kind.is_floating_point:
            raise UnsupportedError(f"Gloo does not average {x.dtype}")
        source, target = (torch.from_numpy(array.view(np.uint8)).view(kind) for array in (x, out))
        operation = {"prod": "PRODUCT", "min": "MIN", "max": "MAX"}.get(case.op, "SUM")
        reduction, root, at_root = getattr(dist.ReduceOp, operation), case.root, case.root == self.rank
        right, left = (self.rank + 1) % self._ranks, (self.rank - 1) % self._ranks
        result = source if case.collective == "reduce" and not at_root else target
        copied = case.collective in ("all_reduce", "reduce") and result is target and not case.in_place

        def exchange() -> None:
            sent = dist.isend(source, right)
            dist.recv(target, left)
            sent.wait()

        transfer: Callable[[], object] = {
            "all_reduce": lambda: dist.all_reduce(target, reduction),
            "reduce": lambda: dist.reduce(result, root, reduction),
            "broadcast": lambda: dist.broadcast(target, root),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source, reduction),
            "gather": lambda: dist.gather(source, list(target.chunk(self._ranks)) if at_root else None, root),
            "scatter": lambda: dist.scatter(target, list(source.chunk(self._ranks)) if at_root else None, root),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "barrier": dist.barrier,
            "send_recv": exchange,
        }[case.collective]
        if not copied and case.op != "avg":
            return transfer

        def call() -> None:
            if copied:
                target.copy_(source)
            transfer()
            if case.op == "avg" and result is target:
                target.div_(self._ranks)

        return call

    def close(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()


class Mpi(InHostMemory):
    """Any MPI, through mpi4py, which finalises it at exit."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.rank: int = MPI.COMM_WORLD.rank
        library = " ".join(MPI.Get_library_version().split(", package")[0].splitlines()[0].strip("\0").split())
        self.version = f"{library}, mpi4py {version('mpi4py')}"

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """MPI has no average: sum, then divide. What is copied goes as bytes."""
        from mpi4py import MPI

        comm, root = MPI.COMM_WORLD, case.root
        if case.op == "none":
            kind, x, out = MPI.BYTE, x.view(np.uint8), out.view(np.uint8)
        else:
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
        if case.op == "avg" and x.dtype.kind != "f":
            raise UnsupportedError(f"MPI does not average {x.dtype}")
        if case.collective == "reduce_scatter" and case.in_place:
            raise UnsupportedError("in place, MPI's reduce-scatter leaves every block at the beginning of the array")
        reduction = {"prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}.get(case.op, MPI.SUM)
        has_result = case.collective not in ("reduce", "gather") or self.rank == root
        has_input = case.collective != "scatter" or self.rank == root
        given, taken = [x, kind] if has_input else None, [out, kind] if has_result else None
        if case.in_place and case.collective == "scatter" and self.rank == root:
            taken = MPI.IN_PLACE
        elif case.in_place and case.collective != "scatter" and has_result:
            given = MPI.IN_PLACE
        right, left = (self.rank + 1) % comm.size, (self.rank - 1) % comm.size
        call: Callable[[], object] = {
            "all_reduce": partial(comm.Allreduce, given, taken, reduction),
            "reduce": partial(comm.Reduce, given, taken, reduction, root),
            "broadcast": partial(comm.Bcast, [x, kind], root),
            "all_gather": partial(comm.Allgather, given, taken),
            "reduce_scatter": partial(comm.Reduce_scatter_block, given, taken, reduction),
            "gather": partial(comm.Gather, given, taken, root),
            "scatter": partial(comm.Scatter, given, taken, root),
            "all_to_all": partial(comm.Alltoall, given, taken),
            "barrier": comm.Barrier,
            "send_recv": partial(comm.Sendrecv, given, right, 0, taken, left, 0),
        }[case.collective]
        if case.op != "avg" or not has_result:
            return call
        ranks = x.dtype.type(comm.size)

        def average() -> None:
            call()
            np.divide(out, ranks, out=out)

        return average


class Addition(InHostMemory):
    """No communication: each rank adds one half of its bytes to the other, all ranks at the same time."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.version = f"NumPy {np.__version__}, float32"

    def prepare(self, candidate: Candidate, case: Case, x: Array, out: Array) -> Callable[[], object]:
        """The same addition whatever is called: it stands for the bytes that pass through memory."""
        data = x.view(np.uint8)[: x.nbytes // 8 * 8].view(np.float32)
        a, b = data[: data.size // 2], data[data.size // 2 :]
        return partial(np.add, a, b, out=a)
