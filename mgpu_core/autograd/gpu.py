"""An optimiser's step on CuPy arrays: all parameters in one launch of the kernels of `kernels.optimizers`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels import cubin, optimizers
from mgpu_core import device
from mgpu_core.autograd.tape import Array

_LANES = 256  # threads of a block
_WAVES = 4  # blocks of each multiprocessor
_VECTOR = 16  # bytes that a lane moves at once
_DTYPES = ("float32", "float64")


class Update(NamedTuple):
    """What a step of SGD or AdamW is made of for one parameter.

    `arrays`: the parameter, its gradient and its state, which is the momentum, if it is kept, or both means.
    `settings`: the keyword arguments of the kernel, `sgd` or `adamw`.
    """

    arrays: tuple[Array, ...]
    settings: dict[str, Any]


def takes(update: Update) -> bool:
    """Whether the kernels can do it: CuPy arrays of float32 or float64, without gaps."""
    first, *_ = update.arrays
    return device.of(first) == "cuda" and all(
        array.dtype == first.dtype and array.dtype.name in _DTYPES and array.flags.c_contiguous
        for array in update.arrays
    )


def step(rule: str, updates: Sequence[Update]) -> None:
    """The step, in place, on the current stream; the host does not wait."""
    cupy = device.cuda()
    for dtype in _DTYPES:
        jobs = [_job(rule, update) for update in updates if update.arrays[0].dtype.name == dtype]
        if jobs:
            largest = max(int(job[optimizers.JOB_COUNT]) for job in jobs)
            function, most = _kernel(rule, dtype, cupy.cuda.Device().id)
            groups = -(-largest * np.dtype(dtype).itemsize // _VECTOR)
            blocks = max(1, min(most, -(-groups // _LANES)))
            table = cupy.array(np.stack(jobs))
            function((blocks, len(jobs)), (_LANES,), (table.data.ptr,))


def _job(rule: str, update: Update) -> np.ndarray:
    p, g, *state = update.arrays
    addresses = [array.data.ptr for array in (p, g, *state)] + [0] * (3 - len(state))
    if rule == "sgd":
        settings = optimizers.sgd_settings(**update.settings)
    else:
        others = dict(update.settings)
        betas = others.pop("beta1"), others.pop("beta2")
        settings = optimizers.adamw_settings(betas=betas, **others)
    return optimizers.job(addresses, p.size, settings)


@cache
def _kernel(rule: str, dtype: str, number: int) -> tuple[Any, int]:
    """The kernel on GPU `number`, which is the current one, and how many blocks of it are launched at most."""
    cupy = device.cuda()
    gpu = cupy.cuda.Device(number)
    capability = int(gpu.compute_capability[:-1]), int(gpu.compute_capability[-1])
    module = cupy.cuda.Module()
    module.load(cubin.load_optimizer(rule, dtype, capability))
    return module.get_function(rule), _WAVES * gpu.attributes["MultiProcessorCount"]
