"""Communication inside a model: functions of tensors whose backward passes communicate too.

Ranks of tensor parallelism hold a tensor in one of three ways: copies (the same on all), parts (cut along an axis) or
summands (their sum is meant). Each function takes one way to another, and its gradient goes the way back:

    function          from        to          backward
    `copy`            copies      copies      sums the gradients of what each rank did with its copy
    `reduce`          summands    copies      hands on the gradient
    `split`           copies      parts       gathers
    `gather`          parts       copies      takes this rank's part
    `reduce_scatter`  summands    parts       gathers

`copy` and `reduce` are f and g of Shoeybi et al., "Megatron-LM", 2019; `split`, `gather` and `reduce_scatter` are from
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023. With `comm` None a
process is alone, and each gives back its argument.

All ranks of `comm` call the same functions in the same order, forward and therefore backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array
from mgpu_core.parallel.placement import even_part
from mgpu_core.tensor import Tensor, record


def copy(x: Tensor, comm: Any) -> Tensor:
    """x, which every rank has and goes on with in its own way."""
    return x if comm is None else record(x.data, (x, lambda g: comm.all_reduce(g)))


def reduce(x: Tensor, comm: Any) -> Tensor:
    """The sum of the ranks' x, on every rank."""
    return x if comm is None else record(comm.all_reduce(x.data), (x, lambda g: g))


def split(x: Tensor, comm: Any, axis: int) -> Tensor:
    """This rank's part of x, which every rank has: as even as can be along `axis`."""
    if comm is None:
        return x
    length = x.shape[axis]
    parts = [even_part(length, rank, comm.size) for rank in range(comm.size)]
    index = (slice(None),) * axis + (slice(*parts[comm.rank]),)
    counts = [stop - start for start, stop in parts]
    own = array_namespace(x.data).asarray(x.data[index], copy=True)  # so that the whole can be freed
    return record(own, (x, lambda g: gathered(g, comm, axis, counts)))


def gather(x: Tensor, comm: Any, axis: int) -> Tensor:
    """The ranks' x, of any lengths, joined along `axis`, on every rank, which all go on with it in the same way."""
    if comm is None:
        return x
    counts = lengths(x.shape[axis], comm)
    start = sum(counts[: comm.rank])
    index = (slice(None),) * axis + (slice(start, start + counts[comm.rank]),)
    return record(gathered(x.data, comm, axis, counts), (x, lambda g: g[index]))


def reduce_scatter(x: Tensor, comm: Any, axis: int) -> Tensor:
    """This rank's part of the sum of the ranks' x, as even as can be along `axis`."""
    if comm is None:
        return x
    parts = (even_part(x.shape[axis], rank, comm.size) for rank in range(comm.size))
    counts = [stop - start for start, stop in parts]
    return record(Scattered(x.data, comm, axis, counts).wait(), (x, lambda g: gathered(g, comm, axis, counts)))


def lengths(own: int, comm: Any) -> list[int]:
    """Every rank's length of an axis."""
    return [own] if comm is None else comm.all_gather(np.array([own])).tolist()


def gathered(x: Array, comm: Any, axis: int, counts: Sequence[int]) -> Array:
    """The ranks' arrays, of which `counts` are the lengths, joined along `axis`."""
    xp = array_namespace(x)
    return xp.moveaxis(comm.all_gather(xp.moveaxis(x, axis, 0), counts=counts), 0, axis)


class Scattered:
    """The sum of the ranks' arrays under way to them in parts of `counts` along `axis`."""

    def __init__(self, x: Array, comm: Any, axis: int, counts: Sequence[int]) -> None:
        self._xp, self._axis = array_namespace(x), axis
        self._work = comm.reduce_scatter(self._xp.moveaxis(x, axis, 0), counts=counts, async_op=True)

    def wait(self) -> Array:
        """This rank's part."""
        return self._xp.moveaxis(self._work.wait(), 0, self._axis)
