"""Steps of the optimisers, in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array


def sgd(
    p: Array, g: Array, momentum_buffer: Array | None = None, *, lr: float, momentum: float, fresh: float,
    weight_decay: float, nesterov: bool,
) -> None:  # fmt: skip
    number = p.dtype.type
    buffer = np.empty(0, p.dtype) if momentum_buffer is None else _flat(momentum_buffer)
    _sgd(_flat(p), _flat(g), buffer, number(lr), number(momentum), number(fresh), number(weight_decay), nesterov)


def adamw(
    p: Array, g: Array, m: Array, v: Array, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int,
) -> None:  # fmt: skip
    number = p.dtype.type
    rate, decay = number(lr / (1 - beta1**step)), number(1 - lr * weight_decay)
    scale = number(1 / np.sqrt(1 - beta2**step))
    _adamw(_flat(p), _flat(g), _flat(m), _flat(v), rate, number(beta1), number(beta2), scale, number(eps), decay)


def _flat(x: Array) -> Array:
    """A contiguous array as a vector over the same memory."""
    if not x.flags.c_contiguous:
        raise ValueError(f"parameters, their gradients and optimiser state must be C-contiguous; strides {x.strides}")
    return x.reshape(-1)


@jit
def _sgd(
    p: Array, g: Array, buffer: Array, lr: Any, momentum: Any, fresh: Any, weight_decay: Any, nesterov: bool
) -> None:
    for i in range(p.size):
        step = g[i] + weight_decay * p[i]
        if buffer.size:
            buffer[i] = momentum * buffer[i] + fresh * step
            step = step + momentum * buffer[i] if nesterov else buffer[i]
        p[i] -= lr * step


@jit
def _adamw(
    p: Array, g: Array, m: Array, v: Array, rate: Any, beta1: Any, beta2: Any, scale: Any, eps: Any, decay: Any
) -> None:
    one = p.dtype.type(1)
    for i in range(p.size):
        m[i] = beta1 * m[i] + (one - beta1) * g[i]
        v[i] = beta2 * v[i] + (one - beta2) * g[i] * g[i]
        p[i] = decay * p[i] - rate * m[i] / (np.sqrt(v[i]) * scale + eps)
