"""Batch and layer normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable

from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.autocast import widened
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.replay import is_replay, remember
from mgpu_core.autograd.tape import Array, once
from mgpu_core.nn.functional.shapes import check_shapes
from mgpu_core.tensor import Tensor, record

Reduce = Callable[[Array], Array]


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    reduce: Reduce | None = None,
) -> Tensor:
    """Normalises each channel of x (N, C, ...) to mean 0 and variance 1, times weight (C,), plus bias (C,).

    Training uses, and differentiates through, the batch's own mean and variance (Ioffe and Szegedy 2015), and moves
    the running ones towards them: running += momentum * (batch - running), the variance being the unbiased one.
    Otherwise the running ones are used. A batch without elements, as of a rank that has no sample, moves nothing.

    `reduce` makes the batch that of all ranks: it is given a float64 vector of sums and returns the vector summed over
    the ranks. Each of them calls it once in the forward pass and once in the backward pass, a rank with no
    samples too. Sums are taken about the running mean, which all ranks share, so that little cancels.
    Raises ValueError where shapes do not fit, and in training when the batch of all ranks that `reduce` sums over has
    no element per channel; on a GPU, where to look would be to wait for it, the result is NaN instead.
    """
    channels = x.shape[1]
    check_shapes(
        "batch_norm", (channels,), weight=weight, bias=bias, running_mean=running_mean, running_var=running_var
    )
    a, w = x.data, weight.data
    training = training and (a.size > 0 or reduce is not None)
    xp = array_namespace(a, w)
    kernels = kernels_for(a)
    center = xp.astype(running_mean.data, xp.float64, copy=True)
    if training:

        def statistics() -> tuple[Array, Array]:
            size = xp.full((1,), a.size / channels, dtype=xp.float64)
            sums = xp.concat([*kernels.channel_moments(a, center), size])
            return center, sums if reduce is None else reduce(sums)

        before, sums = remember(statistics)
        count = sums[-1]  # on a GPU it stays there
        if device.of(count) == "cpu" and not count:
            raise ValueError(f"batch norm in training needs at least one element per channel; x is {a.shape}")
        offset = sums[:channels] / count
        variance = sums[channels:-1] / count - offset * offset
        center = before + offset
        if not is_replay():
            unbiased = variance * (count / xp.where(count > 2, count - 1, 1.0))
            running_mean.data += xp.astype(momentum * offset, running_mean.dtype)
            running_var.data += xp.astype(momentum * (unbiased - running_var.data), running_var.dtype)
    else:
        variance = xp.astype(running_var.data, xp.float64)
        count = math.inf  # so that no gradient goes through the statistics
    inverse = 1 / xp.sqrt(variance + eps)

    @once
    def local_sums(g: Array) -> tuple[Array, Array]:
        """Sums of g and of g times the normalised x over this rank's samples."""
        total, product = kernels.channel_products(g, a, center)
        return total, inverse * product

    def to_x(g: Array) -> Array:
        sums = xp.concat(local_sums(g))
        if reduce is not None and training:
            sums = reduce(sums)
        total, product = sums[:channels] / count, sums[channels:] / count
        scale = w * inverse
        return kernels.combine_channels(g, a, center, scale, -scale * inverse * product, -scale * total)

    return record(
        kernels.normalize_channels(a, center, w * inverse, bias.data),
        (x, to_x),
        (weight, lambda g: local_sums(g)[1]),
        (bias, lambda g: local_sums(g)[0]),
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Normalises x (..., D) to mean 0 and variance 1 along its last axis, times weight (D,), plus bias (D,).

    Ba, Kiros and Hinton 2016. Raises ValueError where the shapes do not fit.
    """
    check_shapes("layer_norm", x.shape[-1:], weight=weight, bias=bias)
    xp = array_namespace(x.data, weight.data)
    shape, w = x.shape, weight.data
    matrix = (math.prod(shape[:-1]), shape[-1])
    rows = xp.reshape(widened(x.data), matrix)
    kernels = kernels_for(rows)
    y, center, inverse = kernels.layer_norm(rows, w, bias.data, eps)

    @once
    def gradients(g: Array) -> tuple[Array, Array, Array]:
        return kernels.layer_norm_gradient(xp.reshape(g, matrix), rows, w, center, inverse)

    return record(
        xp.reshape(y, shape),
        (x, lambda g: xp.reshape(gradients(g)[0], shape)),
        (weight, lambda g: gradients(g)[1]),
        (bias, lambda g: gradients(g)[2]),
    )
