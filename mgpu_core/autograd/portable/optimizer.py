"""Steps of the optimisers, in place."""

from __future__ import annotations

import math

from mgpu_core.autograd.tape import Array


def sgd(
    p: Array, g: Array, momentum_buffer: Array | None = None, *, lr: float, momentum: float, fresh: float,
    weight_decay: float, nesterov: bool,
) -> None:  # fmt: skip
    """One step of SGD on parameter p and its momentum, in which the gradient counts `fresh`; see `optim.SGD`."""
    if weight_decay:
        g = g + weight_decay * p
    if momentum_buffer is not None:
        momentum_buffer *= momentum
        momentum_buffer += fresh * g
        g = g + momentum * momentum_buffer if nesterov else momentum_buffer
    p -= lr * g


def adamw(
    p: Array, g: Array, m: Array, v: Array, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int,
) -> None:  # fmt: skip
    """Step number `step` (from 1) of AdamW on parameter p and its moments, in place; see `optim.AdamW`."""
    p *= 1 - lr * weight_decay
    m *= beta1
    m += (1 - beta1) * g
    v *= beta2
    v += (1 - beta2) * g * g
    p -= lr / (1 - beta1**step) * m / (v**0.5 / math.sqrt(1 - beta2**step) + eps)
