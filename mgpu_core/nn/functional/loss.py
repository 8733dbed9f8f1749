"""Losses."""

from __future__ import annotations

import math
from typing import Any, Literal

from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.autocast import widened
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.tape import Array
from mgpu_core.nn.functional.lengths import checked_lengths
from mgpu_core.nn.functional.linear import in_range, nan_unless
from mgpu_core.tensor import Tensor, record


def cross_entropy(
    logits: Tensor, targets: Any, *, weights: Any = None, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """Softmax cross-entropy of logits (..., classes) with integer targets (...), one number.

    `weights` (...) multiply the samples' losses; "mean" divides their sum by the sum of the weights. For a batch that
    is split unevenly over ranks, take "sum" on each and divide by the whole batch's weight: the parts then add up to
    the mean. A mean over no weight at all is 0: an empty shard adds nothing.
    Raises IndexError for a target that is no class; on a GPU the loss is NaN instead.
    """
    classes = logits.shape[-1]
    labels = device.beside(Tensor(targets).data, logits.data)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"cross_entropy: logits {logits.shape} need targets of shape {logits.shape[:-1]}")
    valid = in_range(labels, classes, "a class")
    xp = array_namespace(logits.data)
    shape, count = logits.shape, math.prod(labels.shape)
    rows, labels = xp.reshape(widened(logits.data), (count, classes)), xp.reshape(labels, (count,))
    kernels = kernels_for(rows)
    losses, log_sums = kernels.cross_entropy(rows, labels)
    if valid is not None:
        losses = nan_unless(xp.reshape(valid, (count,)), losses)
    if weights is None:
        scale = xp.ones_like(losses)
        total = float(count)
    else:
        scale = xp.reshape(xp.astype(device.beside(Tensor(weights).data, losses), losses.dtype), (count,))
        total = float(xp.sum(scale))
    if reduction == "mean":
        scale = scale / total if total else 0 * scale
    return record(
        xp.sum(losses * scale),
        (logits, lambda g: xp.reshape(kernels.cross_entropy_gradient(rows, labels, log_sums, g * scale), shape)),
    )


def ctc_loss(
    logits: Tensor,
    targets: Any,
    *,
    lengths: Any = None,
    target_lengths: Any = None,
    blank: int = 0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Connectionist temporal classification (Graves et al. 2006) of logits (N, T, classes) with targets (N, S).

    Minus the log probability that the classes drawn at a sample's times, repetitions merged and blanks left out, are
    its target: summed over all alignments, so none need be known. Sample n has lengths[n] times and target_lengths[n]
    labels, by default T and S; what comes after them may be anything. "mean" divides the sum of the samples' losses by
    their number, and not by the targets' lengths as PyTorch does. A target that does not fit into its sample's times
    has an infinite loss, and gradient 0.
    Raises IndexError for a target that is no class, ValueError for one that is the blank or where shapes do not fit. On
    a GPU the loss of a sample with such a target is NaN instead.
    """
    labels = device.beside(Tensor(targets).data, logits.data)
    if logits.ndim != 3 or labels.ndim != 2 or labels.shape[0] != logits.shape[0]:
        raise ValueError(
            f"ctc_loss: expected logits (N, T, classes) and targets (N, S), not {logits.shape} and {labels.shape}"
        )
    n, times, classes = logits.shape
    if not 0 <= blank < classes:
        raise ValueError(f"ctc_loss: the blank must be one of {classes} classes, not {blank}")
    xp = array_namespace(logits.data)
    labels = xp.asarray(labels)
    lengths = checked_lengths(xp, lengths, n, times)
    target_lengths = checked_lengths(xp, target_lengths, n, labels.shape[1])
    used = xp.arange(labels.shape[1]) < target_lengths[:, None]
    blanks = used & (labels == blank)
    labels = xp.where(used, labels, blank)
    valid = in_range(labels, classes, "a class")
    if valid is None and xp.any(blanks):
        raise ValueError(f"ctc_loss: a target must not contain the blank, {blank}")
    states = xp.full((n, 2 * labels.shape[1] + 1), blank, dtype=xp.int64)
    states[:, 1::2] = xp.astype(labels, xp.int64)

    a = widened(logits.data)
    kernels = kernels_for(a)
    log_p = kernels.log_softmax(a, -1)
    losses, beginnings = kernels.ctc(log_p, states, lengths, target_lengths)
    if valid is not None:
        losses = nan_unless(xp.all(valid & ~blanks, axis=1), losses)

    def vjp(g: Array) -> Array:
        return kernels.ctc_gradient(log_p, beginnings, losses, states, lengths, target_lengths, g)

    total = record(xp.astype(losses, a.dtype), (logits, vjp)).sum()
    return total / max(n, 1) if reduction == "mean" else total
