"""Recurrent layers over sequences (N, T, D), which may differ in length.

Sequences are batch-first outside and time-first in memory: results are transposed views of (T, N, H) arrays, so that
layers on top of each other copy nothing. The input's part of all gates, at all times, is one matrix product, and so are
the gradients of the weights. What must go step by step is one small product and one loop over the gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mgpu_core.autograd.autocast import widened
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.tape import Array, once
from mgpu_core.nn.functional.lengths import checked_lengths
from mgpu_core.nn.functional.shapes import check_shapes
from mgpu_core.tensor import Tensor, record

_FEW = 32  # rows


def lstm(
    x: Tensor,
    weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor,
    *,
    state: tuple[Tensor, Tensor] | None = None,
    lengths: Any = None,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Long short-term memory (Hochreiter and Schmidhuber 1997; Gers et al. 2000), with PyTorch's order of gates.

    i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of weight x + hidden_weight h + bias;  c = f c + i g;  h = o tanh(c).

    x is (N, T, D), weight (4 H, D), hidden_weight (4 H, H), bias (4 H,); `state` is the (h, c) to start from, each
    (N, H), or zeros. Returns h at all times, (N, T, H), and the last (h, c). With `lengths` (N,), sample n ends after
    lengths[n] times: its outputs are 0 from there on, and its last state is that at its end. `reverse` goes from each
    sample's end to its beginning, from a state of zeros.
    Raises ValueError where shapes or lengths do not fit.
    """
    a = widened(x.data)
    walk = _Walk(a, weight, hidden_weight, 4, state, lengths, reverse)
    check_shapes("lstm", (4 * walk.size,), bias=bias)
    xp, kernels, w, wh, b = walk.xp, kernels_for(a), weight.data, hidden_weight.data, bias.data
    rows = walk.rows(a)
    gates = walk.by_time(rows @ w.T)
    first_hidden, first_cell = state or (None, None)
    hidden, cells = walk.states(first_hidden), walk.states(first_cell)
    for t, source, to in walk.steps():
        kernels.lstm_step(gates, _through(wh, hidden[source, ...]), b, cells, hidden, walk.lengths, t, source, to)
    dlast = _Later()

    @once
    def through_time(g: Array) -> tuple[Array, Array, Array]:
        """The gradients of the gates (in the gates' own memory) and of the state at the start."""
        later = walk.by_time(walk.rows(g))
        dhidden, dcell = dlast.take("h", hidden), dlast.take("c", cells)
        for t, source, to in reversed([*walk.steps()]):
            kernels.lstm_step_gradient(gates, cells, later, dhidden, dcell, walk.lengths, t, source, to)
            dhidden += gates[t, ...] @ wh
        return walk.flat(gates), dhidden, dcell

    output = record(
        walk.outputs(hidden),
        (x, lambda g: walk.by_sample(through_time(g)[0] @ w)),
        (weight, lambda g: through_time(g)[0].T @ rows),
        (hidden_weight, lambda g: through_time(g)[0].T @ walk.sources(hidden)),
        (bias, lambda g: xp.sum(through_time(g)[0], axis=0)),
        (first_hidden, lambda g: through_time(g)[1]),
        (first_cell, lambda g: through_time(g)[2]),
    )
    return output, (dlast.of("h", walk.last(hidden), output), dlast.of("c", walk.last(cells), output))


def gru(
    x: Tensor,
    weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor,
    hidden_bias: Tensor,
    *,
    state: Tensor | None = None,
    lengths: Any = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """A gated recurrent unit (Cho et al. 2014), in PyTorch's form: the reset gate acts after the hidden weight.

    r, z = sigmoid of weight x + hidden_weight h + bias;  n = tanh(weight x + bias + r (hidden_weight h + hidden_bias));
    h = (1 - z) n + z h, where the weights and the bias have one part for each of r, z and n.

    x is (N, T, D), weight (3 H, D), hidden_weight (3 H, H), bias (3 H,), hidden_bias (H,), `state` (N, H). The rest,
    and what is returned, is as in `lstm`, with h alone for the state.
    """
    a = widened(x.data)
    walk = _Walk(a, weight, hidden_weight, 3, None if state is None else (state,), lengths, reverse)
    check_shapes("gru", (3 * walk.size,), bias=bias)
    check_shapes("gru", (walk.size,), hidden_bias=hidden_bias)
    xp, kernels, w, wh = walk.xp, kernels_for(a), weight.data, hidden_weight.data
    b, hb = bias.data, hidden_bias.data
    rows = walk.rows(a)
    gates = walk.by_time(rows @ w.T)
    hidden = walk.states(state)
    candidates = xp.empty(hidden[1:, ...].shape, dtype=hidden.dtype)
    for t, source, to in walk.steps():
        recurrent = _through(wh, hidden[source, ...])
        kernels.gru_step(gates, recurrent, b, hb, candidates, hidden, walk.lengths, t, source, to)
    dlast = _Later()
    both = 2 * candidates.shape[2]

    @once
    def through_time(g: Array) -> tuple[Array, Array, Array]:
        """The gradients of the gates, of the hidden state's part of the candidates, and of the state at the start."""
        later = walk.by_time(walk.rows(g))
        dhidden = dlast.take("h", hidden)
        for t, source, _ in reversed([*walk.steps()]):
            kernels.gru_step_gradient(gates, candidates, hidden, later, dhidden, walk.lengths, t, source)
            dhidden += gates[t, :, :both] @ wh[:both, :] + candidates[t, ...] @ wh[both:, :]
        return walk.flat(gates), walk.flat(candidates), dhidden

    def to_hidden_weight(g: Array) -> Array:
        dgates, dcandidates, _ = through_time(g)
        sources = walk.sources(hidden)
        return xp.concat([dgates[:, :both].T @ sources, dcandidates.T @ sources])

    output = record(
        walk.outputs(hidden),
        (x, lambda g: walk.by_sample(through_time(g)[0] @ w)),
        (weight, lambda g: through_time(g)[0].T @ rows),
        (hidden_weight, to_hidden_weight),
        (bias, lambda g: xp.sum(through_time(g)[0], axis=0)),
        (hidden_bias, lambda g: xp.sum(through_time(g)[1], axis=0)),
        (state, lambda g: through_time(g)[2]),
    )
    return output, dlast.of("h", walk.last(hidden), output)


def _through(weight: Array, rows: Array) -> Array:
    """rows @ weight.T. In NumPy few rows go the other way round: with the copy, half to three quarters of the time."""
    if not isinstance(rows, np.ndarray) or len(rows) > _FEW:
        return rows @ weight.T
    return np.ascontiguousarray((weight @ rows.T).T)


class _Walk:
    """The order of the steps, and how sequences lie in memory.

    States are kept in T + 1 places: going forward, step t leads from place t to t + 1, else from t + 1 to t.
    """

    def __init__(
        self,
        x: Array,
        weight: Tensor,
        hidden_weight: Tensor,
        gates: int,
        state: tuple[Tensor, ...] | None,
        lengths: Any,
        reverse: bool,
    ) -> None:
        self.xp = array_namespace(x, weight.data)
        size = hidden_weight.shape[1]
        wanted = (gates * size, size), (gates * size, x.shape[-1])
        if x.ndim != 3 or (hidden_weight.shape, weight.shape) != wanted:
            raise ValueError(
                f"x {x.shape}, weight {weight.shape} and hidden weight {hidden_weight.shape} do not fit: expected "
                f"(N, T, D), ({gates} H, D) and ({gates} H, H)"
            )
        self.samples, self.times, _ = x.shape
        self.size, self.dtype, self.reverse = size, x.dtype, reverse
        for part in state or ():
            if reverse or part.shape != (self.samples, size):
                raise ValueError(
                    f"a state to start from must be {(self.samples, size)}, not {part.shape}, and is for sequences "
                    "that are read forward"
                )
        self.lengths = checked_lengths(self.xp, lengths, self.samples, self.times)

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """(time, place of the state before it, place of the state after it)."""
        for t in range(self.times):
            yield (self.times - 1 - t, self.times - t, self.times - 1 - t) if self.reverse else (t, t, t + 1)

    def rows(self, sequences: Array) -> Array:
        """(N, T, D) to (T N, D): a view, if it lies time-first in memory."""
        return self.flat(self.xp.permute_dims(sequences, (1, 0, 2)))

    def flat(self, steps: Array) -> Array:
        """(T, N, D) to (T N, D)."""
        return self.xp.reshape(steps, (self.times * self.samples, steps.shape[2]))

    def by_time(self, rows: Array) -> Array:
        """(T N, D) to (T, N, D)."""
        return self.xp.reshape(rows, (self.times, self.samples, rows.shape[1]))

    def by_sample(self, rows: Array) -> Array:
        """(T N, D) to (N, T, D)."""
        return self.xp.permute_dims(self.by_time(rows), (1, 0, 2))

    def states(self, first: Tensor | None) -> Array:
        """Memory for the states, (T + 1, N, H), with the first one in its place."""
        states = self.xp.empty((self.times + 1, self.samples, self.size), dtype=self.dtype)
        states[self.times if self.reverse else 0, ...] = 0 if first is None else first.data
        return states

    def outputs(self, states: Array) -> Array:
        """The states after each step, (N, T, H)."""
        return self.xp.permute_dims(states[: self.times, ...] if self.reverse else states[1:, ...], (1, 0, 2))

    def sources(self, states: Array) -> Array:
        """The states before each step, (T N, H)."""
        return self.flat(states[1:, ...] if self.reverse else states[: self.times, ...])

    def last(self, states: Array) -> Array:
        """(N, H): each sample's state after its last step."""
        if self.reverse:
            return states[0, ...]
        return self.xp.take_along_axis(states, self.lengths[None, :, None], axis=0)[0, ...]


class _Later:
    """The gradients of the last state, which arrive before those of the outputs that it is made of."""

    def __init__(self) -> None:
        self._gradients: dict[str, Array] = {}

    def of(self, name: str, last: Array, output: Tensor) -> Tensor:
        """A tensor for `last`. What backward brings it is left here; the output it hangs on gets zeros."""

        def leave(g: Array) -> Array:
            self._gradients[name] = g
            xp = array_namespace(g)
            return xp.broadcast_to(xp.zeros((), dtype=g.dtype), output.shape)

        return record(last, (output, leave))

    def take(self, name: str, states: Array) -> Array:
        """The gradient of the last state, to be changed in place; zeros if there is none."""
        xp = array_namespace(states)
        g = self._gradients.pop(name, None)
        return xp.zeros(states.shape[1:], dtype=states.dtype) if g is None else xp.asarray(g, copy=True)
