"""One step of LSTM and GRU cells, and of their gradients: all that is elementwise in one loop."""

from __future__ import annotations

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.elementary import sigmoid, tanh
from mgpu_core.autograd.cpu.layout import Array
from mgpu_core.autograd.cpu.threads import share


def lstm_step(
    gates: Array, recurrent: Array, bias: Array, cells: Array, hidden: Array, lengths: Array,
    t: int, source: int, to: int,
) -> None:  # fmt: skip
    now, before, cell, out = gates[t], cells[source], cells[to], hidden[to]

    def work(part: slice) -> None:
        _lstm(now[part], recurrent[part], bias, before[part], cell[part], out[part], lengths[part], t)

    share(work, len(now), now.size)


def lstm_step_gradient(
    gates: Array, cells: Array, g: Array, dhidden: Array, dcell: Array, lengths: Array, t: int, source: int, to: int
) -> None:  # fmt: skip
    now, before, after, later = gates[t], cells[source], cells[to], g[t]

    def work(part: slice) -> None:
        _lstm_gradient(
            now[part], before[part], after[part], later[part], dhidden[part], dcell[part], lengths[part], t
        )  # fmt: skip

    share(work, len(now), now.size)


def gru_step(
    gates: Array, recurrent: Array, bias: Array, hidden_bias: Array, candidates: Array, hidden: Array,
    lengths: Array, t: int, source: int, to: int,
) -> None:  # fmt: skip
    now, candidate, before, out = gates[t], candidates[t], hidden[source], hidden[to]

    def work(part: slice) -> None:
        _gru(
            now[part], recurrent[part], bias, hidden_bias, candidate[part], before[part], out[part], lengths[part], t
        )  # fmt: skip

    share(work, len(now), now.size)


def gru_step_gradient(
    gates: Array, candidates: Array, hidden: Array, g: Array, dhidden: Array, lengths: Array, t: int, source: int
) -> None:
    now, candidate, before, later = gates[t], candidates[t], hidden[source], g[t]

    def work(part: slice) -> None:
        _gru_gradient(now[part], candidate[part], before[part], later[part], dhidden[part], lengths[part], t)

    share(work, len(now), now.size)


# One loop a result: those that write to more arrays than a few become no vector instructions, for they might overlap.


@jit
def _sigmoids(x: Array) -> None:
    for k in range(x.size):
        x[k] = sigmoid(x[k])


@jit
def _lstm(
    gates: Array, recurrent: Array, bias: Array, before: Array, cell: Array, out: Array, lengths: Array, t: int
) -> None:
    size = cell.shape[1]
    for n in range(cell.shape[0]):
        if t >= lengths[n]:
            cell[n, :] = 0
            out[n, :] = 0
            continue
        i, f, g, o = gates[n, :size], gates[n, size : 2 * size], gates[n, 2 * size : 3 * size], gates[n, 3 * size :]
        for k in range(4 * size):
            gates[n, k] += recurrent[n, k] + bias[k]
        _sigmoids(gates[n, : 2 * size])
        _sigmoids(o)
        for k in range(size):
            g[k] = tanh(g[k])
        for k in range(size):
            cell[n, k] = f[k] * before[n, k] + i[k] * g[k]
        for k in range(size):
            out[n, k] = o[k] * tanh(cell[n, k])


@jit
def _lstm_gradient(
    gates: Array, before: Array, after: Array, later: Array, dhidden: Array, dcell: Array, lengths: Array, t: int
) -> None:
    size = before.shape[1]
    one, zero = gates.dtype.type(1), gates.dtype.type(0)
    for n in range(before.shape[0]):
        if t >= lengths[n]:
            gates[n, :] = 0
            continue
        i, f, g, o = gates[n, :size], gates[n, size : 2 * size], gates[n, 2 * size : 3 * size], gates[n, 3 * size :]
        for k in range(size):
            squashed = tanh(after[n, k])
            dh = later[n, k] + dhidden[n, k]
            dc = dcell[n, k] + dh * o[k] * (one - squashed * squashed)
            dcell[n, k] = dc * f[k]
            dhidden[n, k] = zero
            di, df, dg = dc * g[k] * i[k] * (one - i[k]), dc * before[n, k] * f[k] * (one - f[k]), dc * i[k]
            i[k], f[k], g[k], o[k] = di, df, dg * (one - g[k] * g[k]), dh * squashed * o[k] * (one - o[k])


@jit
def _gru(
    gates: Array, recurrent: Array, bias: Array, hidden_bias: Array, candidate: Array, before: Array, out: Array,
    lengths: Array, t: int,
) -> None:  # fmt: skip
    size = before.shape[1]
    for n in range(before.shape[0]):
        if t >= lengths[n]:
            out[n, :] = 0
            continue
        r, z, new = gates[n, :size], gates[n, size : 2 * size], gates[n, 2 * size :]
        hr, hz, hn = recurrent[n, :size], recurrent[n, size : 2 * size], recurrent[n, 2 * size :]
        for k in range(3 * size):
            gates[n, k] += bias[k]
        for k in range(size):
            candidate[n, k] = hn[k] + hidden_bias[k]
            r[k], z[k] = sigmoid(r[k] + hr[k]), sigmoid(z[k] + hz[k])
            new[k] = tanh(new[k] + r[k] * candidate[n, k])
            out[n, k] = new[k] + z[k] * (before[n, k] - new[k])


@jit
def _gru_gradient(
    gates: Array, candidate: Array, before: Array, later: Array, dhidden: Array, lengths: Array, t: int
) -> None:
    size = before.shape[1]
    one = gates.dtype.type(1)
    for n in range(before.shape[0]):
        if t >= lengths[n]:
            gates[n, :] = 0
            candidate[n, :] = 0
            continue
        r, z, new = gates[n, :size], gates[n, size : 2 * size], gates[n, 2 * size :]
        for k in range(size):
            dh = later[n, k] + dhidden[n, k]
            dn = dh * (one - z[k]) * (one - new[k] * new[k])
            dr = dn * candidate[n, k] * r[k] * (one - r[k])
            dz = dh * (before[n, k] - new[k]) * z[k] * (one - z[k])
            dhidden[n, k] = dh * z[k]
            candidate[n, k] = dn * r[k]
            r[k], z[k], new[k] = dr, dz, dn
