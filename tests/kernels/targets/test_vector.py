"""Groups of elements as LLVM code: what CUDA makes of them, run on the CPU, lane by lane.

`test_elementwise.py` tests their arithmetic; here is what only CUDA uses: pieces that lie `lanes` apart.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.extending import intrinsic

from kernels import elementwise
from kernels.dtypes import find
from kernels.portable import bind
from kernels.targets import cpu, python
from kernels.targets.groups import group_bodies
from kernels.targets.vector import Group


def as_on_cuda(dtype: str, operation: str) -> Callable[..., int]:
    """A reduction of groups of two pieces of 16 bytes, for aligned addresses."""
    few = 16 // find(dtype).itemsize
    constants = {"itemsize": find(dtype).itemsize, "alignment": 16, "many": 2 * few, "few": few}
    bodies: dict[str, Any] = {name: cpu._constant(value) for name, value in constants.items()}
    bodies["load_word"] = cpu.load_word
    for name, width, pieces in (("reduce_many", 2 * few, 2), ("reduce_few", few, 1), ("reduce_one", 1, 1)):
        group = Group(find(dtype), operation, width, 1 if name == "reduce_one" else 16, pieces)
        primitives = {**group_bodies(group, intrinsic), "load_word": cpu.load_word}
        bodies[name] = bind(elementwise.reduce_groups, primitives, njit)
    return bind(elementwise.reduce, bodies, njit)


@pytest.mark.parametrize(
    ("dtype", "operation"),
    [("bfloat16", "avg"), ("complex64", "prod"), pytest.param("uint8", "sum", marks=pytest.mark.slow)],
)
def test_lanes_share_the_work_and_leave_nothing_out(dtype: str, operation: str) -> None:
    numpy = find(dtype).numpy
    compiled, plain = as_on_cuda(dtype, operation), python.reduction(find(dtype), operation)
    rng = np.random.default_rng(0)
    room = 4000
    for count, lanes, shift in [(0, 1, 0), (5, 4, 0), (64, 2, 0), (999, 3, 0), (999, 3, 1), (3000, 32, 0)]:
        memory = rng.integers(0, 4, (4, room * numpy.itemsize)).astype(np.uint8)
        at = [int(row.ctypes.data) + -int(row.ctypes.data) % 16 + shift * numpy.itemsize for row in memory]
        results = []
        for reduce in (compiled, plain):
            destinations = memory[2:].copy()
            addresses = (ctypes.c_int64 * 4)(*(at[2:] + at[:2]))
            for lane in range(lanes):
                place = ctypes.addressof(addresses)
                reduce(place, 2, place + 16, 2, count, 0, 2, 0, lane, lanes)
            results.append(memory[2:].copy())
            memory[2:] = destinations
        assert (results[0] == results[1]).all()
        assert count == 0 or (results[0] != destinations).any()
