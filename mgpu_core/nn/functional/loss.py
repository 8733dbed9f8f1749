"""Losses."""

from __future__ import annotations

import math
from typing import Any, Literal

from array_api_compat import array_namespace

from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.nn.functional.linear import check_range
from mgpu_core.tensor import Tensor, record


def cross_entropy(
    logits: Tensor, targets: Any, *, weights: Any = None, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """Softmax cross-entropy of logits (..., classes) with integer targets (...), one number.

    `weights` (...) multiply the samples' losses; "mean" divides their sum by the sum of the weights. For a batch that
    is split unevenly over ranks, take "sum" on each and divide by the whole batch's weight: the parts then add up to
    the mean. A mean over no weight at all is 0: an empty shard adds nothing.
    Raises IndexError for a target that is no class.
    """
    classes = logits.shape[-1]
    labels = Tensor(targets).data
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"cross_entropy: logits {logits.shape} need targets of shape {logits.shape[:-1]}")
    check_range(labels, classes, "a class")
    xp = array_namespace(logits.data)
    shape, count = logits.shape, math.prod(labels.shape)
    rows, labels = xp.reshape(logits.data, (count, classes)), xp.reshape(labels, (count,))
    kernels = kernels_for(rows)
    losses, log_sums = kernels.cross_entropy(rows, labels)
    if weights is None:
        scale = xp.ones_like(losses)
        total = float(count)
    else:
        scale = xp.reshape(xp.astype(Tensor(weights).data, losses.dtype), (count,))
        total = float(xp.sum(scale))
    if reduction == "mean":
        scale = scale / total if total else 0 * scale
    return record(
        xp.sum(losses * scale),
        (logits, lambda g: xp.reshape(kernels.cross_entropy_gradient(rows, labels, log_sums, g * scale), shape)),
    )
