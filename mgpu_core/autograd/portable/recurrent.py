"""One step of LSTM and GRU cells, and of their gradients.

Arrays over time are time-first: `gates` (T, N, k H) and states (T + 1, N, H), into which the steps write. A step at
time `t` goes from the state at place `source` to that at place `to`. Sample n takes part while t < lengths[n]; at other
times its state is set to zero.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array


def lstm_step(
    gates: Array, recurrent: Array, bias: Array, cells: Array, hidden: Array, lengths: Array,
    t: int, source: int, to: int,
) -> None:  # fmt: skip
    """From `gates` at t, what the input contributes to the gates, and `recurrent` (N, 4 H), what the hidden state does.

    The gates' values (input, forget, candidate, output) take the place of `gates` at t.
    """
    xp = array_namespace(gates)
    i, f, g, o = _parts(gates[t, ...] + recurrent + bias, 4)
    i, f, g, o = _sigmoid(i), _sigmoid(f), xp.tanh(g), _sigmoid(o)
    alive = _alive(lengths, t, cells)
    cell = alive * (f * cells[source, ...] + i * g)
    gates[t, ...] = xp.concat([i, f, g, o], axis=1)
    cells[to, ...] = cell
    hidden[to, ...] = alive * o * xp.tanh(cell)


def lstm_step_gradient(
    gates: Array, cells: Array, g: Array, dhidden: Array, dcell: Array, lengths: Array, t: int, source: int, to: int
) -> None:  # fmt: skip
    """Back from the state at `to` to that at `source`; the gates' gradients take the place of their values.

    g (T, N, H) is the gradient of the outputs, `dhidden` (N, H) what later steps make of the hidden state's. `dcell` is
    the gradient of the cell at `to`, and becomes that of the cell at `source`. Of `dhidden`, what remains is the part
    that does not go through the gates: nothing, or all for a sample that takes no part.
    """
    xp = array_namespace(gates)
    i, f, c, o = _parts(gates[t, ...], 4)
    alive = _alive(lengths, t, cells)
    squashed = xp.tanh(cells[to, ...])
    dh = alive * (g[t, ...] + dhidden)
    dc = alive * dcell + dh * o * (1 - squashed * squashed)
    parts = [
        dc * c * i * (1 - i),
        dc * cells[source, ...] * f * (1 - f),
        dc * i * (1 - c * c),
        dh * squashed * o * (1 - o),
    ]
    dcell[...] = dc * f + (1 - alive) * dcell
    dhidden[...] = (1 - alive) * dhidden
    gates[t, ...] = xp.concat(parts, axis=1)


def gru_step(
    gates: Array, recurrent: Array, bias: Array, hidden_bias: Array, candidates: Array, hidden: Array,
    lengths: Array, t: int, source: int, to: int,
) -> None:  # fmt: skip
    """From `gates` at t, what the input contributes to the gates, and `recurrent` (N, 3 H), what the hidden state does.

    The gates' values (reset, update, new) take the place of `gates` at t; what the hidden state contributes to the new
    one, before the reset gate, goes to `candidates` (T, N, H).
    """
    xp = array_namespace(gates)
    xr, xz, xn = _parts(gates[t, ...] + bias, 3)
    hr, hz, hn = _parts(recurrent, 3)
    hn = hn + hidden_bias
    r, z = _sigmoid(xr + hr), _sigmoid(xz + hz)
    n = xp.tanh(xn + r * hn)
    gates[t, ...] = xp.concat([r, z, n], axis=1)
    candidates[t, ...] = hn
    hidden[to, ...] = _alive(lengths, t, hidden) * (n + z * (hidden[source, ...] - n))


def gru_step_gradient(
    gates: Array, candidates: Array, hidden: Array, g: Array, dhidden: Array, lengths: Array, t: int, source: int
) -> None:
    """Back from the state after step t to that at `source`; gradients take the place of `gates` and `candidates` at t.

    g and `dhidden` as in `lstm_step_gradient`; the part that does not go through the gates goes past the update gate.
    """
    xp = array_namespace(gates)
    r, z, n = _parts(gates[t, ...], 3)
    alive = _alive(lengths, t, hidden)
    dh = alive * (g[t, ...] + dhidden)
    dn = dh * (1 - z) * (1 - n * n)
    dr = dn * candidates[t, ...] * r * (1 - r)
    dz = dh * (hidden[source, ...] - n) * z * (1 - z)
    dhidden[...] = dh * z + (1 - alive) * dhidden
    candidates[t, ...] = dn * r
    gates[t, ...] = xp.concat([dr, dz, dn], axis=1)


def _sigmoid(x: Array) -> Array:
    return 0.5 * array_namespace(x).tanh(0.5 * x) + 0.5


def _parts(x: Array, count: int) -> list[Array]:
    width = x.shape[1] // count
    return [x[:, k * width : (k + 1) * width] for k in range(count)]


def _alive(lengths: Array, t: int, like: Array) -> Any:
    """(N, 1): 1 for samples that take part at time t, else 0."""
    return array_namespace(lengths).astype(lengths > t, like.dtype)[:, None]
