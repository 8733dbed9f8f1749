"""Sums over samples and affine maps per channel, of arrays (N, C, ...): what batch norm is made of."""

from __future__ import annotations

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array


def channel_sums(g: Array) -> Array:
    """The sum of g (N, C, ...) over all axes but the second: (C,), added up in float64."""
    return _over_samples(g)


def channel_moments(x: Array, center: Array) -> tuple[Array, Array]:
    """Sums of x - center, and of its square, over all axes but the second: float64 (C,), like `center`."""
    offset = _offset(x, center)
    return _over_samples(offset), _over_samples(offset * offset)


def channel_products(g: Array, x: Array, center: Array) -> tuple[Array, Array]:
    """Sums of g, and of g * (x - center), over all axes but the second: float64 (C,), like `center`."""
    return channel_sums(g), _over_samples(g * _offset(x, center))


def normalize_channels(x: Array, center: Array, scale: Array, shift: Array) -> Array:
    """(x - center) * scale + shift, where these are (C,); in the dtype of x (N, C, ...)."""
    return (x - _per_channel(center, x)) * _per_channel(scale, x) + _per_channel(shift, x)


def combine_channels(g: Array, x: Array, center: Array, a: Array, b: Array, c: Array) -> Array:
    """a * g + b * (x - center) + c, where these are (C,); in the dtype of g and x (N, C, ...)."""
    return _per_channel(a, x) * g + _per_channel(b, x) * (x - _per_channel(center, x)) + _per_channel(c, x)


def _over_samples(x: Array) -> Array:
    """Added up in float64, and never held in it: a float64 copy of the activations would be twice their size."""
    xp = array_namespace(x)
    return xp.sum(x, axis=tuple(i for i in range(x.ndim) if i != 1), dtype=xp.float64)


def _per_channel(values: Array, x: Array) -> Array:
    """Values (C,) in the dtype of x (N, C, ...), so that they broadcast against it."""
    xp = array_namespace(x)
    return xp.reshape(xp.astype(values, x.dtype), (-1,) + (1,) * (x.ndim - 2))


def _offset(x: Array, center: Array) -> Array:
    """x - center per channel."""
    return x - _per_channel(center, x)
