"""Cutting a model into stages that take equally long, by the measured cost of its layers.

    costs = measure(model, Tensor(images[:32]))
    stages = [model[part] for part in cut(costs, 4)]

A pipeline is as fast as its slowest stage. So the cut is the contiguous partition whose largest part is smallest (the
linear partition problem), and of those the one whose parts are most alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median

from mgpu_core import device, random
from mgpu_core.nn import Sequential
from mgpu_core.parallel.boundary import Value, leaves, tensors
from mgpu_core.tensor import Tensor, backward


def cut(costs: Sequence[float], stages: int) -> list[slice]:
    """Which of the layers with these costs make up each of the stages; every stage has at least one.

    The largest sum of a stage's costs is as small as it can be, and given that, so is the sum of the sums' squares.

    Raises:
        ValueError: for fewer layers than stages, or a cost that is negative or not finite.

    >>> cut([1, 1, 1, 5, 2, 2], 3)
    [slice(0, 3, None), slice(3, 4, None), slice(4, 6, None)]
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages of at least one layer each")
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError(f"costs must be finite and not negative; these are {list(costs)}")
    largest, _ = _partition(costs, stages, lambda total: total, max)
    _, ends = _partition(costs, stages, lambda t: t * t if t <= largest else math.inf, lambda a, b: a + b)
    return [slice(start, end) for start, end in zip([0, *ends], ends)]


def _partition(
    costs: Sequence[float],
    parts: int,
    price: Callable[[float], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least joined price of the parts' totals, and where the parts end. Dynamic programming, O(parts * n^2)."""
    before = list(accumulate(costs, initial=0.0))
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(math.inf, [])] * len(costs)]  # for the first j costs
    for _ in range(parts):
        longer: list[tuple[float, list[int]]] = [(math.inf, [])]
        for j in range(1, len(before)):
            value, i = min((join(best[i][0], price(before[j] - before[i])), i) for i in range(j))
            longer.append((value, [*best[i][1], j]))
        best = longer
    return best[-1]


def measure(model: Sequential, sample: Tensor, *, repeats: int = 5) -> list[float]:
    """Seconds that each layer of `model` takes forward and backward for this input: medians of `repeats`.

    `sample` should be as large as the micro-batches will be. Buffers and gradients are left as they were. To be called
    before the model goes into a `DataParallel`, whose communication it would start.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.data.copy()) for buffer in model.buffers()]
    for parameter in parameters:
        parameter.grad = None
    try:
        with random.batch(seed=0, step=0, samples=range(len(sample))):
            taken = [_seconds(model, sample) for _ in range(repeats + 1)]
    finally:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        for buffer, array in buffers:
            buffer.data[...] = array
    return [median(times) for times in zip(*taken[1:])]  # the first time compiles kernels


def _seconds(model: Sequential, sample: Tensor) -> list[float]:
    taken = []
    value: Value = sample
    for layer in model:
        begin = time.perf_counter()
        result = layer(value)
        outputs = [output for output in tensors(result) if output.requires_grad]
        backward(outputs, [None] * len(outputs))
        for output in tensors(result):
            device.synchronize(output.data)
        taken.append(time.perf_counter() - begin)
        value = leaves(result)
    return taken
