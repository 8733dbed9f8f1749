"""Recurrent layers over sequences (N, T, inputs), batch-first; see `functional.lstm` and `functional.gru`.

Called, a layer maps a sequence to a sequence, so it fits into a `Sequential`. `unroll` also takes and returns states,
to read a long sequence piece by piece. With `lengths` (N,) the sequences of a batch end at different times; their
outputs are 0 from there on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mgpu_core.nn import functional as F
from mgpu_core.nn.layers import Dropout, uniform
from mgpu_core.nn.module import Module
from mgpu_core.tensor import Tensor


class _Cell(Module):
    """The weights of one layer in one direction, uniform in +-1 / sqrt(size) as PyTorch's are."""

    gates: int

    def __init__(self, inputs: int, size: int, rng: np.random.Generator, dtype: Any) -> None:
        self.weight = uniform(rng, size, (self.gates * size, inputs), dtype)
        self.hidden_weight = uniform(rng, size, (self.gates * size, size), dtype)
        self.bias = uniform(rng, size, (self.gates * size,), dtype)


class _LSTMCell(_Cell):
    gates = 4

    def forward(self, x: Tensor, state: tuple[Tensor, ...] | None, lengths: Any, reverse: bool) -> Any:
        h_and_c = None if state is None else (state[0], state[1])
        weights = self.weight, self.hidden_weight, self.bias
        return F.lstm(x, *weights, state=h_and_c, lengths=lengths, reverse=reverse)


class _GRUCell(_Cell):
    gates = 3

    def __init__(self, inputs: int, size: int, rng: np.random.Generator, dtype: Any) -> None:
        super().__init__(inputs, size, rng, dtype)
        self.hidden_bias = uniform(rng, size, (size,), dtype)

    def forward(self, x: Tensor, state: tuple[Tensor, ...] | None, lengths: Any, reverse: bool) -> Any:
        weights = self.weight, self.hidden_weight, self.bias, self.hidden_bias
        y, h = F.gru(x, *weights, state=None if state is None else state[0], lengths=lengths, reverse=reverse)
        return y, (h,)


class _Recurrent(Module):
    """What LSTM and GRU share."""

    cell: type[_Cell]

    def __init__(
        self,
        inputs: int,
        size: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        directions = 2 if bidirectional else 1
        widths = [inputs] + [directions * size] * (layers - 1)
        self.forwards = [self.cell(width, size, rng, dtype) for width in widths]
        self.backwards = [self.cell(width, size, rng, dtype) for width in widths] if bidirectional else []
        self.dropouts = [Dropout(dropout, rng=rng) for _ in widths[1:]]

    def forward(self, x: Tensor, lengths: Any = None) -> Tensor:
        return self._run(x, None, lengths)[0]

    def _run(self, x: Tensor, state: tuple[Tensor, ...] | None, lengths: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`state` and the result's state have (layers, N, size) for each kind of state."""
        ends = []
        for layer, cell in enumerate(self.forwards):
            if layer:
                x = self.dropouts[layer - 1](x)
            y, last = cell(x, state and tuple(part[layer] for part in state), lengths, False)
            if self.backwards:
                y = F.concat([y, self.backwards[layer](x, None, lengths, True)[0]], axis=2)
            ends.append(last)
            x = y
        return x, tuple(F.stack(parts) for parts in zip(*ends))

    def _only_forward(self) -> None:
        if self.backwards:
            raise ValueError("a bidirectional layer reads whole sequences; it has no state to go on from")


class LSTM(_Recurrent):
    """Long short-term memory, in layers: (N, T, inputs) to (N, T, size), or 2 size where they are bidirectional.

    `bidirectional` layers (Schuster and Paliwal 1997) read each sequence forward and backward; both outputs are joined.
    `dropout` acts on what each layer passes to the next; see `functional.dropout`. Ranks that share a batch should pad
    to a common length, since its masks depend on the padded length.
    """

    cell = _LSTMCell

    def unroll(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None, lengths: Any = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The outputs, and the last (h, c), each (layers, N, size); `state` is such a pair, to start from."""
        self._only_forward()
        y, (h, c) = self._run(x, state, lengths)
        return y, (h, c)


class GRU(_Recurrent):
    """Gated recurrent units, in layers. Everything is as with `LSTM`, but that h is all of the state."""

    cell = _GRUCell

    def unroll(self, x: Tensor, state: Tensor | None = None, lengths: Any = None) -> tuple[Tensor, Tensor]:
        """The outputs, and the last h (layers, N, size); `state` is such a tensor, to start from."""
        self._only_forward()
        y, (h,) = self._run(x, None if state is None else (state,), lengths)
        return y, h
