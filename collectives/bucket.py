"""Gradient bucketing: many small gradients travel as a few flat arrays, while backward is still running.

Gradients are views of flat *buckets* in symmetric memory, so nothing is packed. They are laid out in the reverse of the
order in which the forward pass uses the parameters, which is about the order in which backward produces gradients;
after the first step, in the order in which rank 0 really produced them. A bucket's all-reduce starts when its last
gradient is ready and every bucket before it has started, so all ranks reduce in the same order whatever theirs is. The
first bucket is small, so that communication starts early. The scheme is that of PyTorch's DistributedDataParallel (Li
et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from collectives.arrays import Array
from collectives.call import PremulSum
from collectives.communicator import Communicator, Op
from kernels.dtypes import DType, find

BUCKET_BYTES = 4 << 20
FIRST_BUCKET_BYTES = 256 << 10
_LINE = 64  # bytes: every gradient starts on a cache line


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together.

    Attributes:
        flat: all of them in one array, (n,), with gaps of zeros.
        members: their numbers, in the order in which they lie there.
        shapes: theirs, beside their numbers.
        starts: where each begins in `flat`.
    """

    flat: Array
    members: list[int]
    shapes: list[tuple[int, ...]]
    starts: list[int]
    missing: set[int] = field(default_factory=set)
    finish: Callable[[], object] | None = None

    def views(self, flat: Array) -> list[Array]:
        """The members' parts of an array that is laid out like `flat`."""
        sized = zip(self.starts, self.shapes, strict=True)
        return [flat[start : start + math.prod(shape)].reshape(shape) for start, shape in sized]


class Hook(Protocol):
    """How a bucket is summed over the ranks: what PyTorch calls a communication hook."""

    bytes_sent: int  # by this rank so far: what its collectives need at least

    def start(self, comm: Communicator, bucket: Bucket) -> Callable[[], object]:
        """Begin to sum `bucket.flat`, in place. The function that comes back ends that: the same bits on every rank.

        Buckets are started, and then ended, in one order on all ranks. Asynchronous calls may be under way in between.
        """
        ...


class AllReduce:
    """The hook that sends gradients as they are; `op` as for all_reduce."""

    def __init__(self, op: Op = "sum") -> None:
        self.op = op
        self.bytes_sent = 0

    def start(self, comm: Communicator, bucket: Bucket) -> Callable[[], object]:
        """See `Hook`."""
        self.bytes_sent += all_reduce_bytes(bucket.flat.nbytes, comm.size)
        finish: Callable[[], object] = comm.all_reduce(bucket.flat, self.op, out=bucket.flat, async_op=True).wait
        return finish


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """What each of `size` ranks has to send at least for an all-reduce of `nbytes`: 2 (size - 1) / size of them."""
    return -(-2 * (size - 1) * nbytes // size)


class Bucketer:
    """Sums gradients over the ranks of `comm` in buckets.

    `gradients`: (shape, dtype) of each, in the order in which the forward pass uses the parameters; equal on all ranks,
    which make a Bucketer together. In every step, after the values of `views[i]` are final, call `ready(i)`, in any
    order; when backward is over, `finish()`. A bucket is all-reduced, `op` as for all_reduce, or summed by a `hook`,
    which may send less (`mgpu_core.parallel.hooks` has some).

    Buckets lie where `comm.zeros` puts them, on a GPU with backends of GPUs; or where `zeros` does, a function like it.

    After the first `finish` the views are others, with the same contents: take `views` again when `rebuilt` is True.
    """

    def __init__(
        self,
        comm: Communicator,
        gradients: Sequence[tuple[Sequence[int], npt.DTypeLike]],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        op: Op = "sum",
        hook: Hook | None = None,
        zeros: Callable[[int, npt.DTypeLike], Array] | None = None,
    ) -> None:
        if hook is not None and op != "sum":
            raise ValueError(f"hooks sum; op {op!r} goes without one")
        if min(bucket_bytes, first_bucket_bytes) <= 0:
            raise ValueError(f"buckets of {bucket_bytes} and {first_bucket_bytes} bytes: both must be positive")
        self._comm = comm
        self._zeros = comm.zeros if zeros is None else zeros
        self.hook: Hook = AllReduce(op) if hook is None else hook
        self._shapes = [tuple(shape) for shape, _ in gradients]
        self._dtypes: list[DType] = [find(np.dtype(dtype)) for _, dtype in gradients]
        self._bytes = bucket_bytes, first_bucket_bytes
        self._alone = comm.size == 1 and not isinstance(op, PremulSum)  # then every gradient is its own sum
        self._arrivals: list[int] = []
        self.rebuilt = False
        self.unused: list[int] = []
        self._lay_out(list(reversed(range(len(gradients)))))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket, in the order in which they are reduced."""
        return [bucket.flat.nbytes for bucket in self._buckets]

    @property
    def order(self) -> list[int]:
        """The gradients' numbers in the order in which they lie in the buckets."""
        return [i for bucket in self._buckets for i in bucket.members]

    def ready(self, i: int) -> None:
        """Gradient i is final. Starts the reduction of every bucket that is complete and whose turn it is.

        Raises ValueError for a gradient that was ready before in this step.
        """
        bucket = self._home[i]
        if i not in bucket.missing:
            raise ValueError(f"gradient {i} was ready before in this step; call finish() at the end of every step")
        bucket.missing.remove(i)
        self._arrivals.append(i)
        self._start_complete()

    def finish(self) -> float:
        """End the step: all gradients are reduced when this returns. Returns the seconds spent waiting.

        Gradients that never were ready count as zero on this rank; `unused` lists them.
        """
        self.unused = sorted(i for bucket in self._buckets for i in bucket.missing)
        for i in self.unused:
            self.views[i][...] = 0
            self._home[i].missing.remove(i)
        self._start_complete()
        began = time.perf_counter()
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.finish()
                bucket.finish = None
        waited = time.perf_counter() - began
        if not self.rebuilt:
            self._rebuild()
        self._begin_step()
        return waited

    def _start_complete(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            if bucket.flat.size and not self._alone:
                bucket.finish = self.hook.start(self._comm, bucket)
            self._next += 1

    def _begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.missing = set(bucket.members)
        self._arrivals = []
        self._next = 0

    def _rebuild(self) -> None:
        """Lay the buckets out anew, in the order of rank 0's arrivals."""
        self.rebuilt = True
        order: list[int] = self._comm.broadcast_object(self._arrivals + self.unused)
        if order == self.order:
            return
        before = self.views
        self._lay_out(order)
        for new, old in zip(self.views, before, strict=True):
            new[...] = old

    def _lay_out(self, order: Sequence[int]) -> None:
        views: dict[int, Array] = {}
        self._buckets: list[Bucket] = []
        self._home: dict[int, Bucket] = {}
        for members in self._cut(order):
            dtype = self._dtypes[members[0]]
            unit = max(1, _LINE // dtype.itemsize)
            shapes = [self._shapes[i] for i in members]
            *starts, end = np.cumsum([0, *(-(-math.prod(shape) // unit) * unit for shape in shapes)]).tolist()
            bucket = Bucket(self._zeros(end, dtype.numpy), members, shapes, starts)
            self._buckets.append(bucket)
            views |= zip(members, bucket.views(bucket.flat), strict=True)
            self._home |= dict.fromkeys(members, bucket)
        self.views: list[Array] = [views[i] for i in range(len(views))]
        self._begin_step()

    def _cut(self, order: Sequence[int]) -> list[list[int]]:
        """Consecutive gradients of one dtype share a bucket until it is full."""
        cuts: list[list[int]] = []
        room, dtype = 0, None
        for i in order:
            nbytes = math.prod(self._shapes[i]) * self._dtypes[i].itemsize
            if self._dtypes[i] != dtype or nbytes > room:
                cuts.append([])
                room, dtype = self._bytes[0 if len(cuts) > 1 else 1], self._dtypes[i]
            cuts[-1].append(i)
            room -= nbytes
        return cuts
