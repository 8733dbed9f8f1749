"""Losses."""

from __future__ import annotations

from typing import Any, Literal

from array_api_compat import array_namespace

from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.nn.functional.activation import log_softmax_of
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
    labels = xp.reshape(labels, (-1, 1))
    count = labels.shape[0]
    log_p = log_softmax_of(xp.reshape(logits.data, (count, classes)), -1)
    losses = -xp.take_along_axis(log_p, labels, axis=1)
    if weights is None:
        scale = xp.ones_like(losses)
        total = float(count)
    else:
        scale = xp.reshape(xp.astype(Tensor(weights).data, losses.dtype), (count, 1))
        total = float(xp.sum(scale))
    if reduction == "mean":
        scale = scale / total if total else 0 * scale

    kernels, shape = kernels_for(log_p), logits.shape
    return record(
        xp.sum(losses * scale),
        (logits, lambda g: xp.reshape(kernels.softmax_minus_one_hot(log_p, labels, g * scale), shape)),
    )
