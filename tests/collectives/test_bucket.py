"""Gradient buckets: what they sum, how they are cut and ordered, and what happens to gradients that never come."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from crew import Crews
from expected import same_bits

from collectives import Bucketer, Communicator, premul_sum

SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((7,), "float32"), ((3, 4), "float32"), ((), "float32"), ((100, 30), "float32"), ((5,), "float64"),
    ((0, 3), "float32"), ((2000,), "float32"), ((1,), "float32"), ((40, 50), "float32"),
]  # fmt: skip


def gradient(step: int, rank: int, i: int) -> Any:
    shape, dtype = SHAPES[i]
    return np.random.default_rng([step, rank, i]).integers(-8, 8, shape).astype(dtype)


def steps(comm: Communicator, bucket_bytes: int, first_bucket_bytes: int, op: str) -> list[str]:
    """In every step gradients become ready in each rank's own order; their sums are exact, and equal on every rank."""
    wrong = []
    bucketer = Bucketer(comm, SHAPES, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, op=op)
    for step in range(5):
        order = list(range(len(SHAPES)))
        random.Random(step * 10 + comm.rank).shuffle(order)
        for i in order:
            bucketer.views[i][...] = gradient(step, comm.rank, i)
            bucketer.ready(i)
        waited = bucketer.finish()
        if waited < 0 or bucketer.unused:
            wrong.append(f"step {step}: waited {waited}, unused {bucketer.unused}")
        for i, view in enumerate(bucketer.views):
            total = sum(gradient(step, rank, i) for rank in range(comm.size))
            wanted = total / comm.size if op == "avg" else total
            if view.shape != SHAPES[i][0] or not same_bits(view, np.asarray(wanted, view.dtype)):
                wrong.append(f"step {step}, gradient {i}")
            if view.size and view.ctypes.data % 64:
                wrong.append(f"gradient {i} does not begin on a cache line")
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums(crew: Crews, size: int) -> None:
    for bucket_bytes, first in ((4 << 20, 256 << 10), (1000, 100), (1, 1)):
        assert crew(steps, size, (bucket_bytes, first, "sum")) == [[]] * size


def test_averages(crew: Crews) -> None:
    assert crew(steps, 2, (4096, 512, "avg")) == [[], []]


def scaled(comm: Communicator) -> list[float]:
    bucketer = Bucketer(comm, [((3,), "float32")], op=premul_sum(0.5))
    bucketer.views[0][...] = 4
    bucketer.ready(0)
    bucketer.finish()
    return bucketer.views[0].tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_scaled_sums_of_one_rank_are_scaled_too(crew: Crews, size: int) -> None:
    assert crew(scaled, size) == [[2.0 * size] * 3] * size


def order_of_arrival(comm: Communicator) -> list[Any]:
    """At first the reverse of the order of use; after a step the order in which rank 0's gradients came."""
    bucketer = Bucketer(comm, [((10,), "float32")] * 6, bucket_bytes=120, first_bucket_bytes=40)
    found: list[Any] = [bucketer.order, bucketer.sizes, bucketer.rebuilt]
    arrivals = [3, 5, 4, 0, 1, 2] if comm.rank == 0 else [0, 1, 2, 3, 4, 5]
    for step in range(3):
        for i in arrivals:
            bucketer.views[i][...] = i + step
            bucketer.ready(i)
        bucketer.finish()
        found.append((bucketer.order, bucketer.rebuilt, [float(view[9]) for view in bucketer.views]))
    return found


def test_order_of_arrival(crew: Crews) -> None:
    for order, sizes, rebuilt, *each in crew(order_of_arrival, 2):
        assert order == [5, 4, 3, 2, 1, 0] and not rebuilt
        assert sizes == [64, 192, 128]  # whole cache lines: a small first bucket, then three each
        for step, (later, rebuilt, values) in enumerate(each):
            assert later == [3, 5, 4, 0, 1, 2] and rebuilt
            assert values == [2.0 * (i + step) for i in range(6)]


def missing(comm: Communicator) -> list[Any]:
    """A gradient that a rank never makes counts as zero there, and is named."""
    bucketer = Bucketer(comm, [((4,), "float32")] * 3, bucket_bytes=1, first_bucket_bytes=1)
    found: list[Any] = []
    for _ in range(3):
        for i in (2, 1, 0):
            bucketer.views[i][...] = 1
            if not (i == 1 and comm.rank == 0):
                bucketer.ready(i)
        bucketer.finish()
        found.append((bucketer.unused, [view.tolist() for view in bucketer.views]))
    return found


def test_gradients_that_never_come(crew: Crews) -> None:
    first, second = crew(missing, 2)
    for unused, values in first:
        assert unused == [1] and values == [[2.0] * 4, [1.0] * 4, [2.0] * 4]
    assert all(unused == [] for unused, _ in second)


def overlaps(comm: Communicator) -> bool:
    """A bucket is reduced while later gradients are still being made."""
    bucketer = Bucketer(comm, [((1000,), "float32")] * 2, bucket_bytes=4000, first_bucket_bytes=4000)
    bucketer.views[1][...] = 1
    bucketer.ready(1)
    finish = bucketer._buckets[0].finish
    assert finish is not None
    finish()
    early = bool((bucketer.views[1] == comm.size).all())
    bucketer.views[0][...] = 1
    bucketer.ready(0)
    bucketer.finish()
    return early


def test_reduction_starts_early(crew: Crews) -> None:
    assert crew(overlaps, 2) == [True, True]


def twice(comm: Communicator) -> list[str]:
    bucketer = Bucketer(comm, [((4,), "float32")] * 2)
    bucketer.ready(0)
    told = []
    for call in (lambda: bucketer.ready(0), lambda: Bucketer(comm, [((4,), "float32")], bucket_bytes=0)):
        try:
            call()
            told.append("no error")
        except ValueError as error:
            told.append(str(error))
    bucketer.ready(1)
    bucketer.finish()
    return told


def test_misuse(crew: Crews) -> None:
    for told in crew(twice, 2):
        assert "gradient 0 was ready before in this step; call finish()" in told[0]
        assert "both must be positive" in told[1]


def none(comm: Communicator) -> tuple[float, list[int]]:
    bucketer = Bucketer(comm, [])
    return bucketer.finish(), bucketer.sizes


def test_no_gradients(crew: Crews) -> None:
    assert all(waited >= 0 and sizes == [] for waited, sizes in crew(none, 2))
