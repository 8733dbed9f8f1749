"""Attention of sequences to themselves, with several heads.

`qkv` (N, T, 3, H, d) holds queries, keys and values. Sample n has lengths[n] keys; where `causal`, a position sees
none after itself. `kept` (N, H, T, T) is the mask of a dropout of the attention weights, which are multiplied by
`scale` where it is true; None keeps all as they are.
"""

from __future__ import annotations

import math

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array


def self_attention(qkv: Array, lengths: Array, causal: bool, kept: Array | None, scale: float) -> tuple[Array, Array]:
    """The means of values by softmax(q k / sqrt(d)), (N, T, H, d), and the logarithms of its denominators (N, H, T).

    A query that sees no key gets zeros.
    """
    xp = array_namespace(qkv)
    _, _, v = _heads(qkv)
    scores = _scores(qkv, lengths, causal)
    largest = xp.max(scores, axis=3, keepdims=True)
    largest = xp.where(xp.isinf(largest), xp.zeros_like(largest), largest)
    sums = xp.sum(xp.exp(scores - largest), axis=3, keepdims=True)
    log_sums = largest + xp.log(xp.where(sums == 0, xp.ones_like(sums), sums))
    weights = _dropped(xp.exp(scores - log_sums), kept, scale)
    return xp.permute_dims(weights @ v, (0, 2, 1, 3)), log_sums[..., 0]


def self_attention_gradient(
    g: Array, qkv: Array, log_sums: Array, lengths: Array, causal: bool, kept: Array | None, scale: float
) -> Array:
    """The gradient of self_attention's qkv; the weights are computed again from its second result, `log_sums`."""
    xp = array_namespace(qkv)
    q, k, v = _heads(qkv)
    g = xp.permute_dims(g, (0, 2, 1, 3))
    weights = xp.exp(_scores(qkv, lengths, causal) - log_sums[..., None])
    dweights = _dropped(g @ xp.matrix_transpose(v), kept, scale)
    dscores = weights * (dweights - xp.sum(weights * dweights, axis=3, keepdims=True)) / math.sqrt(q.shape[3])
    dv = xp.matrix_transpose(_dropped(weights, kept, scale)) @ g
    gradients = xp.stack([dscores @ k, xp.matrix_transpose(dscores) @ q, dv], axis=0)
    return xp.permute_dims(gradients, (1, 3, 0, 2, 4))


def _heads(qkv: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values, (N, H, T, d)."""
    q, k, v = (array_namespace(qkv).permute_dims(qkv[:, :, i, :, :], (0, 2, 1, 3)) for i in range(3))
    return q, k, v


def _scores(qkv: Array, lengths: Array, causal: bool) -> Array:
    """(N, H, T, T): q k / sqrt(d); minus infinity for keys that a query does not see."""
    xp = array_namespace(qkv)
    q, k, _ = _heads(qkv)
    scores = q @ xp.matrix_transpose(k) / math.sqrt(q.shape[3])
    keys = xp.arange(qkv.shape[1])
    visible = keys < lengths[:, None, None, None]
    if causal:
        visible = visible & (keys <= keys[:, None])
    return xp.where(visible, scores, xp.full_like(scores, -math.inf))


def _dropped(weights: Array, kept: Array | None, scale: float) -> Array:
    return weights if kept is None else array_namespace(weights).where(kept, weights * scale, 0 * weights)
