"""Attention in blocks of queries whose scores fit in the second-level cache.

The scores of a whole batch are never in memory. Backward computes them again, from what each row's softmax was divided
by (Dao et al., "FlashAttention", 2022). A causal block leaves out the keys that none of its queries sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.elementary import exp
from mgpu_core.autograd.cpu.layout import Array
from mgpu_core.autograd.cpu.threads import share_products

_SCORES = 1 << 16  # at a time
_QUERIES = 64  # at a time: fewer make slower products, more make scores that a causal mask throws away

Block = tuple[int, slice, slice, slice]


def self_attention(qkv: Array, lengths: Array, causal: bool, kept: Array | None, scale: float) -> tuple[Array, Array]:
    n, t, _, heads, size = qkv.shape
    y, log_sums = np.zeros((n, t, heads, size), qkv.dtype), np.zeros((n, heads, t), qkv.dtype)
    factor = qkv.dtype.type(1 / math.sqrt(size))

    def work(samples: slice) -> None:
        memory = _memory(qkv)
        for block in _blocks(qkv, lengths, causal, samples):
            sample, head, query, _ = block
            q, k, v = _heads(qkv, block)
            weights = _product(q, k.mT, memory)
            _softmax(weights, factor, query.start, causal, log_sums[sample, head, query])
            _drop(weights, kept, block, scale)
            np.matmul(weights, v, out=y[sample, query, head].swapaxes(0, 1))

    share_products(work, n, 2 * qkv.size * t)
    return y, log_sums


def self_attention_gradient(
    g: Array, qkv: Array, log_sums: Array, lengths: Array, causal: bool, kept: Array | None, scale: float
) -> Array:
    n, t, _, _, size = qkv.shape
    dqkv = np.zeros_like(qkv)
    factor = qkv.dtype.type(1 / math.sqrt(size))

    def work(samples: slice) -> None:
        memory, more = _memory(qkv), _memory(qkv)
        for block in _blocks(qkv, lengths, causal, samples):
            sample, head, query, _ = block
            (q, k, v), (dq, dk, dv) = _heads(qkv, block), _heads(dqkv, block)
            dy = g[sample, query, head].swapaxes(0, 1)
            weights, dscores = _product(q, k.mT, memory), _product(dy, v.mT, more)
            _drop(dscores, kept, block, scale)
            _softmax_gradient(weights, dscores, factor, query.start, causal, log_sums[sample, head, query])
            _drop(weights, kept, block, scale)
            dq += dscores @ k
            dk += dscores.mT @ q
            dv += weights.mT @ dy

    share_products(work, n, 5 * qkv.size * t)
    return dqkv


def _blocks(qkv: Array, lengths: Array, causal: bool, samples: slice) -> Iterator[Block]:
    """Samples, heads, queries and the keys that they see, if any."""
    _, t, _, heads, _ = qkv.shape
    queries = max(1, min(t, _QUERIES))
    together = max(1, _SCORES // max(1, queries * t))
    for sample in range(samples.start, samples.stop):
        for head in range(0, heads, together):
            for first in range(0, t, queries):
                last = min(first + queries, t)
                keys = min(int(lengths[sample]), last if causal else t)
                if keys:
                    yield sample, slice(head, head + together), slice(first, last), slice(keys)


def _heads(qkv: Array, block: Block) -> tuple[Array, Array, Array]:
    """A block's queries, keys and values, (H, ..., d)."""
    sample, head, query, key = block
    return (
        qkv[sample, query, 0, head].swapaxes(0, 1),
        qkv[sample, key, 1, head].swapaxes(0, 1),
        qkv[sample, key, 2, head].swapaxes(0, 1),
    )


def _memory(qkv: Array) -> Array:
    """Room for the scores of any block."""
    _, t, _, heads, _ = qkv.shape
    return np.empty(max(min(_SCORES, heads * min(t, _QUERIES) * t), min(t, _QUERIES) * t), qkv.dtype)


def _product(a: Array, b: Array, memory: Array) -> Array:
    shape = (*a.shape[:2], b.shape[2])
    return np.matmul(a, b, out=memory[: math.prod(shape)].reshape(shape))


def _drop(weights: Array, kept: Array | None, block: Block, scale: float) -> None:
    if kept is not None:
        _keep(weights, kept[block], weights.dtype.type(scale))


@jit
def _softmax(scores: Array, factor: float, first: int, causal: bool, log_sums: Array) -> None:
    """In place; query i of the block is at position first + i."""
    heads, queries, keys = scores.shape
    for h in range(heads):
        for i in range(queries):
            row = scores[h, i]
            visible = min(first + i + 1, keys) if causal else keys
            largest = row[0]
            for j in range(visible):
                largest = row[j] if row[j] > largest else largest
            total = row.dtype.type(0)
            for j in range(visible):
                power = exp((row[j] - largest) * factor)
                row[j] = power
                total += power
            inverse = row.dtype.type(1) / total
            for j in range(visible):
                row[j] *= inverse
            row[visible:] = 0
            log_sums[h, i] = largest * factor + np.log(total)


@jit
def _softmax_gradient(scores: Array, dweights: Array, factor: float, first: int, causal: bool, log_sums: Array) -> None:
    """Scores become weights, and the weights' gradients those of the scores before they are multiplied by factor."""
    heads, queries, keys = scores.shape
    for h in range(heads):
        for i in range(queries):
            row, gradient = scores[h, i], dweights[h, i]
            visible = min(first + i + 1, keys) if causal else keys
            along = row.dtype.type(0)
            for j in range(visible):
                row[j] = exp(row[j] * factor - log_sums[h, i])
                along += row[j] * gradient[j]
            for j in range(visible):
                gradient[j] = row[j] * (gradient[j] - along) * factor
            row[visible:] = 0
            gradient[visible:] = 0


@jit
def _keep(weights: Array, kept: Array, scale: float) -> None:
    zero = weights.dtype.type(0)
    for h in range(weights.shape[0]):
        for i in range(weights.shape[1]):
            for j in range(weights.shape[2]):
                weights[h, i, j] = weights[h, i, j] * scale if kept[h, i, j] else zero
