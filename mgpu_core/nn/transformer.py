"""Attention and the transformer's block (Vaswani et al., "Attention is all you need", 2017), over sequences (N, T, D).

With `lengths` (N,) the sequences of a batch end at different times; nothing attends to what comes after.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mgpu_core.nn import functional as F
from mgpu_core.nn.layers import Dropout, LayerNorm, Linear
from mgpu_core.nn.module import Module, Parameter
from mgpu_core.tensor import Tensor


class MultiHeadAttention(Module):
    """Self-attention with several heads: (N, T, size) to (N, T, size); see `functional.self_attention`.

    Queries, keys and values come from one projection with weight (3 size, size). As in PyTorch, that is uniform in
    +-sqrt(6 / (4 size)) (Glorot and Bengio 2010), and biases start at 0. Where `causal`, a position sees none after
    itself. `dropout` acts on the attention weights.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        if size % heads:
            raise ValueError(f"a size of {size} cannot be cut into {heads} equal heads")
        self.projection = Linear(size, 3 * size, rng=rng, dtype=dtype)
        self.output = Linear(size, size, rng=rng, dtype=dtype)
        bound = math.sqrt(6 / (4 * size))
        self.projection.weight.data[...] = rng.uniform(-bound, bound, (3 * size, size))
        for linear in (self.projection, self.output):
            assert linear.bias is not None
            linear.bias.data[...] = 0
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.layer = int(rng.integers(2**63))  # names the dropout masks

    def forward(self, x: Tensor, lengths: Any = None) -> Tensor:
        y = F.self_attention(
            self.projection(x),
            self.heads,
            causal=self.causal,
            lengths=lengths,
            dropout=self.dropout if self.training else 0.0,
            layer=self.layer,
        )
        return self.output(y)


class TransformerBlock(Module):
    """Attention, then a network for each position by itself, both added to what they are given: (N, T, size).

    What they are given is normalised first ("pre-norm": Xiong et al. 2020), so that the sum runs through all blocks
    untouched, and wants a LayerNorm after the last. The network has `hidden` GELU units, by default 4 size. `dropout`
    acts on the attention weights and on both summands.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        *,
        hidden: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        hidden = 4 * size if hidden is None else hidden
        self.norm1 = LayerNorm(size, dtype=dtype)
        self.attention = MultiHeadAttention(size, heads, causal=causal, dropout=dropout, rng=rng, dtype=dtype)
        self.dropout1 = Dropout(dropout, rng=rng)
        self.norm2 = LayerNorm(size, dtype=dtype)
        self.widen = Linear(size, hidden, rng=rng, dtype=dtype)
        self.narrow = Linear(hidden, size, rng=rng, dtype=dtype)
        self.dropout2 = Dropout(dropout, rng=rng)

    def forward(self, x: Tensor, lengths: Any = None) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x), lengths))
        return x + self.dropout2(self.narrow(F.gelu(self.widen(self.norm2(x)))))


class PositionalEmbedding(Module):
    """Adds a trained vector to each position of a sequence (N, T, size) with T up to `count`; drawn from N(0, 1).

    That is as large as what `Embedding` starts with, so neither hides the other.
    """

    def __init__(self, count: int, size: int, *, rng: np.random.Generator, dtype: Any = np.float32) -> None:
        self.weight = Parameter(rng.standard_normal((count, size)), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.weight.shape[0]:
            raise ValueError(
                f"a sequence of {x.shape[1]} is longer than the {self.weight.shape[0]} positions there are"
            )
        return x + self.weight[: x.shape[1]]
