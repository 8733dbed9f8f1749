"""Connectionist temporal classification, sample by sample."""

from __future__ import annotations

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.elementary import exp
from mgpu_core.autograd.cpu.layout import Array
from mgpu_core.autograd.cpu.threads import share

_STEP = 32  # a sum of three logarithms takes as long as so many elements of a plain loop


def ctc(log_p: Array, labels: Array, lengths: Array, target_lengths: Array) -> tuple[Array, Array]:
    n, times, _ = log_p.shape
    losses, beginnings = np.empty(n), np.empty((n, times + 1, labels.shape[1]))

    def work(part: slice) -> None:
        _beginnings(
            log_p[part], labels[part], lengths[part], target_lengths[part], losses[part], beginnings[part]
        )  # fmt: skip

    share(work, n, beginnings.size * _STEP)
    return losses, beginnings


def ctc_gradient(
    log_p: Array, beginnings: Array, losses: Array, labels: Array, lengths: Array, target_lengths: Array, scale: Array
) -> Array:
    gradient = np.zeros_like(log_p)

    def work(part: slice) -> None:
        _gradient(
            log_p[part], beginnings[part], losses[part], labels[part], lengths[part], target_lengths[part],
            scale[part], gradient[part],
        )  # fmt: skip

    share(work, len(log_p), beginnings.size * _STEP)
    return gradient


@jit
def _log_sum(a: float, b: float, c: float) -> float:
    largest = max(a, b, c)
    if largest == -np.inf:
        return largest
    return largest + np.log(exp(a - largest) + exp(b - largest) + exp(c - largest))


@jit
def _beginnings(
    log_p: Array, labels: Array, lengths: Array, target_lengths: Array, losses: Array, beginnings: Array
) -> None:
    for n in range(log_p.shape[0]):
        states = 2 * target_lengths[n] + 1
        before, own = beginnings[n, 0], labels[n]
        before[:] = -np.inf
        before[0] = 0
        for t in range(lengths[n]):
            now = beginnings[n, t + 1]
            for s in range(states):
                one = before[s - 1] if s > 0 else -np.inf
                two = before[s - 2] if s > 1 and s % 2 == 1 and own[s] != own[s - 2] else -np.inf
                now[s] = _log_sum(before[s], one, two) + log_p[n, t, own[s]]
            before = now
        losses[n] = -_log_sum(before[states - 1], before[states - 2] if states > 1 else -np.inf, -np.inf)


@jit
def _gradient(
    log_p: Array, beginnings: Array, losses: Array, labels: Array, lengths: Array, target_lengths: Array, scale: Array,
    gradient: Array,
) -> None:  # fmt: skip
    rest = np.empty(labels.shape[1])
    left = np.empty(labels.shape[1])
    for n in range(log_p.shape[0]):
        if not np.isfinite(losses[n]):
            continue
        states = 2 * target_lengths[n] + 1
        own = labels[n]
        rest[:] = -np.inf
        rest[max(states - 2, 0) : states] = 0
        for t in range(lengths[n] - 1, -1, -1):
            row = gradient[n, t]
            for c in range(row.size):
                row[c] = exp(log_p[n, t, c]) * scale[n]
            for s in range(states):
                row[own[s]] -= exp(beginnings[n, t + 1, s] + rest[s] + losses[n]) * scale[n]
                left[s] = rest[s] + log_p[n, t, own[s]]
            for s in range(states):
                one = left[s + 1] if s + 1 < states else -np.inf
                two = left[s + 2] if s + 2 < states and s % 2 == 1 and own[s] != own[s + 2] else -np.inf
                rest[s] = _log_sum(left[s], one, two)
