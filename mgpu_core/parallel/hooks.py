"""Ways to send less for a gradient, for `DataParallel(model, comm, hook=...)` and `collectives.Bucketer`.

    hook                sends, of N float32 gradients       what is lost
    (none)              4 N                                 nothing
    Bfloat16()          2 N                                 16 of 24 bits of each gradient and sum
    BlockInt8()         N + 4 N / 128                       what 127 steps to a block's largest cannot say, for now
    PowerSGD(rank=2)    a few columns for each matrix       what is not of low rank, for now

times 2 (p - 1) / p on p ranks. "For now": what a step leaves out is added to the next step's gradient (error feedback:
Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., ICML 2019), so nothing is lost for good.
It is not part of a checkpoint: a run that is resumed starts with none left out. All ranks end with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from collectives.bucket import AllReduce, Bucket, all_reduce_bytes
from collectives.communicator import Communicator
from kernels import blocks
from mgpu_core import random
from mgpu_core.autograd.tape import Array

Finish = Callable[[], object]


class Bfloat16:
    """Gradients are rounded to bfloat16, summed in float32, and the sum is rounded once more."""

    def __init__(self) -> None:
        self.bytes_sent = 0

    def start(self, comm: Communicator, bucket: Bucket) -> Finish:
        """See `collectives.bucket.Hook`."""
        short = bucket.flat.astype(ml_dtypes.bfloat16)
        self.bytes_sent += all_reduce_bytes(short.nbytes, comm.size)
        work = comm.all_reduce(short, out=short, async_op=True)

        def finish() -> None:
            work.wait()
            bucket.flat[...] = short

        return finish


class BlockInt8:
    """Blocks of gradients travel as 8-bit integers and a float32 scale for each block; see `kernels.quantize`.

    Each rank sums one part of the bucket, of everybody's integers, and sends that sum in the same way. Both roundings
    have error feedback (Tang et al., "DoubleSqueeze", ICML 2019).
    """

    on_host = True  # what it computes, with NumPy

    def __init__(self, block: int = 128) -> None:
        self.block = block
        self.bytes_sent = 0
        self._left_out: dict[int, Array] = {}  # of each gradient, by its number
        self._sums: dict[tuple[int, ...], Array] = {}  # of the part that this rank sums, by the bucket's members

    def start(self, comm: Communicator, bucket: Bucket) -> Finish:
        """See `collectives.bucket.Hook`."""
        size, count = comm.size, bucket.flat.size
        part = -(-count // (size * self.block)) * self.block  # elements for each rank: whole blocks
        values = np.zeros(size * part, np.float32)
        values[:count] = bucket.flat
        for i, view in zip(bucket.members, bucket.views(values)):
            view += self._left_out.get(i, 0)
        packed = blocks.pack(values, self.block)
        values = _finite(np.subtract(values, blocks.unpack(packed, self.block), out=values))
        for i, view in zip(bucket.members, bucket.views(values)):
            self._left_out[i] = view
        self.bytes_sent += 2 * (size - 1) * (packed.nbytes // size)
        theirs = np.empty_like(packed)
        work = comm.all_to_all(packed, out=theirs, async_op=True)

        def finish() -> None:
            work.wait()
            total = blocks.unpack(theirs, self.block).reshape(size, part).sum(axis=0)
            key = tuple(bucket.members)
            total += self._sums.get(key, 0)
            mine = blocks.pack(total, self.block)
            self._sums[key] = _finite(total - blocks.unpack(mine, self.block))
            everything = blocks.unpack(comm.all_gather(mine), self.block)[:count]
            bucket.flat[...] = everything

        return finish


class PowerSGD:
    """Each gradient, as a matrix, is sent as its projection on the `rank` directions that mattered most so far.

    Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019: one step of the
    power method in each step of the training, from where the last one ended (warm start), with error feedback. Axes
    behind the first are the matrix's columns; what would not get smaller is sent as it is.
    """

    on_host = True

    def __init__(self, rank: int = 2, *, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"PowerSGD needs a rank from 1, not {rank}")
        self.rank = rank
        self.seed = seed
        self.bytes_sent = 0
        self._left_out: dict[int, Array] = {}
        self._directions: dict[int, Array] = {}

    def start(self, comm: Communicator, bucket: Bucket) -> Finish:
        """See `collectives.bucket.Hook`."""
        dtype = bucket.flat.dtype
        matrices: dict[int, Array] = {}
        plain: list[Array] = []
        for i, view in zip(bucket.members, bucket.views(bucket.flat)):
            if self._is_worth_it(view.shape):
                view += self._left_out.get(i, 0)
                matrices[i] = view.reshape(len(view), -1)
                if i not in self._directions:
                    shape = (matrices[i].shape[1], self.rank)
                    self._directions[i] = random.generator(self.seed, i).standard_normal(shape).astype(dtype)
            else:
                plain.append(view)
        left = [matrix @ self._directions[i] for i, matrix in matrices.items()]
        sent = _joined([*left, *plain], dtype)
        work = self._all_reduce(comm, sent)

        def finish() -> None:
            work()
            products = _parted(sent, [*left, *plain])
            for view, total in zip(plain, products[len(left) :]):
                view[...] = total
            bases = [_orthonormal(product) for product in products[: len(left)]]
            right = [matrix.T @ basis for matrix, basis in zip(matrices.values(), bases)]
            own = [basis @ part.T for basis, part in zip(bases, right)]
            joined = _joined(right, dtype)
            self._all_reduce(comm, joined)()
            for (i, matrix), basis, mine, total in zip(matrices.items(), bases, own, _parted(joined, right)):
                self._left_out[i] = _finite(matrix - mine).reshape(bucket.shapes[bucket.members.index(i)])
                if np.isfinite(total).all():
                    self._directions[i] = total
                matrix[...] = basis @ total.T

        return finish

    def _is_worth_it(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or not math.prod(shape):
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return self.rank * (rows + columns) < rows * columns

    def _all_reduce(self, comm: Communicator, flat: Array) -> Finish:
        if not flat.size:
            return lambda: None
        self.bytes_sent += all_reduce_bytes(flat.nbytes, comm.size)
        wait: Finish = comm.all_reduce(flat, out=flat, async_op=True).wait
        return wait


HOOKS: dict[str, Callable[[], Any]] = {
    "none": AllReduce,
    "bf16": Bfloat16,
    "int8": BlockInt8,
    "powersgd": PowerSGD,
}


def _finite(left_out: Array) -> Array:
    """Zero in place of what is not finite, which would stay for ever."""
    with np.errstate(all="ignore"):
        suspicious = not np.isfinite(left_out.sum())  # one pass, where what follows takes several
    return np.nan_to_num(left_out, copy=False, nan=0.0, posinf=0.0, neginf=0.0) if suspicious else left_out


def _joined(arrays: list[Array], dtype: Any) -> Array:
    return np.concatenate([np.empty(0, dtype), *(array.reshape(-1) for array in arrays)])


def _parted(flat: Array, like: list[Array]) -> list[Array]:
    ends = np.cumsum([array.size for array in like])
    return [flat[end - array.size : end].reshape(array.shape) for end, array in zip(ends, like)]


def _orthonormal(matrix: Array) -> Array:
    """An orthonormal basis of the columns; those that are zero, or depend on others, give zero, or any direction."""
    basis = np.linalg.qr(matrix.astype(np.float64))[0]
    return basis.astype(matrix.dtype)
