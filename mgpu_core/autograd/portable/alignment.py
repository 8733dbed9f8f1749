"""Connectionist temporal classification: sums over all alignments of labels with a longer input.

`labels` (N, 2 S + 1) are a target's S labels with blanks between and around them, of which sample n has
2 target_lengths[n] + 1. A path goes through them: at each of lengths[n] times it stays, goes on to the next, or skips a
blank between two different labels. All probabilities are logarithms, in float64 where they add up.
"""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array


def ctc(log_p: Array, labels: Array, lengths: Array, target_lengths: Array) -> tuple[Array, Array]:
    """The losses (N,): minus the log of the sum over all paths; and the sums over their beginnings (N, T + 1, 2 S + 1).

    log_p (N, T, C). Of the beginnings, those at t + 1 have emitted at time t. A target that does not fit into its times
    has an infinite loss.
    """
    xp = array_namespace(log_p)
    emitted, skips = _emitted(log_p, labels), _skips(labels)
    now = xp.where(xp.arange(labels.shape[1]) > 0, -math.inf, xp.zeros(labels.shape, dtype=xp.float64))
    beginnings = [now]
    for t in range(log_p.shape[1]):
        one, two = _shifted(now, 1), _shifted(now, 2)
        reached = _log_sum(xp.stack([now, one, xp.where(skips, two, -math.inf)], axis=2))
        now = xp.where((t < lengths)[:, None], reached + emitted[:, t, :], now)
        beginnings.append(now)
    losses = -_log_sum(xp.where(_ends(labels, target_lengths), now, -math.inf))
    return losses, xp.stack(beginnings, axis=1)


def ctc_gradient(
    log_p: Array, beginnings: Array, losses: Array, labels: Array, lengths: Array, target_lengths: Array, scale: Array
) -> Array:
    """The gradient of the logits that log_p is the log_softmax of, times scale (N,): each class's probability minus the
    share of the paths that emit it (Graves et al. 2006, equation 16).

    0 beyond a sample's length, and where the loss is infinite.
    """
    xp = array_namespace(log_p)
    emitted, skips = _emitted(log_p, labels), _skips(labels)
    one_hot = xp.astype(labels[:, :, None] == xp.arange(log_p.shape[2]), xp.float64)
    possible = xp.isfinite(losses)
    total = xp.where(possible, -losses, xp.zeros_like(losses))[:, None]
    rest = xp.where(_ends(labels, target_lengths), xp.zeros(labels.shape, dtype=xp.float64), -math.inf)
    gradient = xp.zeros_like(log_p)
    for t in reversed(range(log_p.shape[1])):
        alive = ((t < lengths) & possible)[:, None]
        shares = (xp.exp(beginnings[:, t + 1, :] + rest - total)[:, None, :] @ one_hot)[:, 0, :]
        here = xp.where(alive, (xp.exp(log_p[:, t, :]) - shares) * scale[:, None], xp.zeros_like(shares))
        gradient[:, t, :] = xp.astype(here, log_p.dtype)
        left = rest + emitted[:, t, :]
        two = _shifted(xp.where(skips, left, -math.inf), -2)
        rest = xp.where(alive, _log_sum(xp.stack([left, _shifted(left, -1), two], axis=2)), rest)
    return gradient


def _emitted(log_p: Array, labels: Array) -> Array:
    """(N, T, 2 S + 1): the log probability of each label at each time."""
    xp = array_namespace(log_p)
    index = xp.broadcast_to(labels[:, None, :], (*log_p.shape[:2], labels.shape[1]))
    return xp.astype(xp.take_along_axis(log_p, index, axis=2), xp.float64)


def _skips(labels: Array) -> Array:
    """(N, 2 S + 1): whether a path may come to a label from the one before the last."""
    xp = array_namespace(labels)
    count = labels.shape[1]
    differs = labels[:, min(2, count) :] != labels[:, : max(0, count - 2)]
    differs = xp.concat([xp.zeros((labels.shape[0], min(2, count)), dtype=xp.bool), differs], axis=1)
    return differs & (xp.arange(count) % 2 == 1)


def _ends(labels: Array, target_lengths: Array) -> Array:
    """(N, 2 S + 1): where a path may end: at a target's last label, or the blank after it."""
    index, last = array_namespace(labels).arange(labels.shape[1]), 2 * target_lengths[:, None]
    return (index == last) | (index == last - 1)


def _shifted(x: Array, places: int) -> Array:
    """x (N, S) moved to the right, or left; minus infinity comes in."""
    xp = array_namespace(x)
    count = min(abs(places), x.shape[1])
    never = xp.full((x.shape[0], count), -math.inf, dtype=x.dtype)
    kept = x.shape[1] - count
    return xp.concat([never, x[:, :kept]] if places > 0 else [x[:, count:], never], axis=1)


def _log_sum(x: Array) -> Array:
    """The logarithm of the sum of exp(x) over the last axis; minus infinity where all are."""
    xp = array_namespace(x)
    largest = xp.max(x, axis=-1)
    finite = xp.isfinite(largest)
    shift = xp.where(finite, largest, xp.zeros_like(largest))
    total = xp.sum(xp.exp(x - shift[..., None]), axis=-1)
    return xp.where(finite, shift + xp.log(xp.where(finite, total, xp.ones_like(total))), largest)
