"""Attention over sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mgpu_core import random
from mgpu_core.autograd.autocast import narrowed
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.tape import Array
from mgpu_core.nn.functional.lengths import checked_lengths
from mgpu_core.tensor import Tensor, record


def self_attention(
    qkv: Tensor,
    heads: int,
    *,
    causal: bool = False,
    lengths: Any = None,
    dropout: float = 0.0,
    layer: int = 0,
    first_head: int = 0,
) -> Tensor:
    """Scaled dot-product attention of sequences to themselves (Vaswani et al. 2017): (N, T, 3 D) to (N, T, D).

    The last axis holds queries, keys and values, each with its `heads` one after another. Where `causal`, a position
    sees none after itself. With `lengths` (N,), nothing sees a sample's positions from lengths[n] on. `dropout` zeroes
    attention weights with that probability and divides the others by 1 - dropout, each sample and head with masks of
    its own stream (see `functional.dropout`): `layer` as there, and where ranks hold different heads, `first_head`
    is the number of this rank's first among all.
    Raises ValueError where shapes or lengths do not fit, RuntimeError for dropout outside of `random.batch`.
    """
    if qkv.ndim != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ValueError(f"attention with {heads} heads takes (N, T, 3 D) with D a multiple of them, not {qkv.shape}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout's p must be at least 0 and less than 1, not {dropout}")
    (a,) = narrowed(qkv.data)
    xp, kernels = array_namespace(a), kernels_for(a)
    n, t, width = a.shape
    shape = (n, t, 3, heads, width // (3 * heads))
    kept = xp.asarray(_kept(n, heads, t, dropout, layer, first_head)) if dropout else None
    options = checked_lengths(xp, lengths, n, t), causal, kept, 1 / (1 - dropout)
    parts = xp.reshape(a, shape)
    y, log_sums = kernels.self_attention(parts, *options)

    def vjp(g: Array) -> Array:
        g = xp.reshape(g, (n, t, *shape[3:]))
        return xp.reshape(kernels.self_attention_gradient(g, parts, log_sums, *options), (n, t, width))

    return record(xp.reshape(y, (n, t, width // 3)), (qkv, vjp))


def _kept(samples: int, heads: int, times: int, dropout: float, layer: int, first_head: int) -> np.ndarray:
    """(N, H, T, T): where the mask keeps an attention weight."""
    kept = np.empty((samples, heads, times, times), bool)
    for head in range(heads):
        words = random.sample_words((layer, first_head + head), samples, times * times)
        np.greater_equal(words.reshape(samples, times, times), dropout * 2**32, out=kept[:, head])
    return kept
