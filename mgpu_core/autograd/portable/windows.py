"""A window that moves over images (N, C, H, W)."""

from __future__ import annotations

from collections.abc import Iterator

from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array

Pair = tuple[int, int]


def output_size(size: tuple[int, ...], window: tuple[int, ...], stride: Pair, padding: Pair) -> Pair:
    """How many places the window has, in rows and columns."""
    rows, columns = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, window, stride, padding))
    return rows, columns


def padded_shape(shape: tuple[int, ...], padding: Pair) -> tuple[int, ...]:
    return (*shape[:2], shape[2] + 2 * padding[0], shape[3] + 2 * padding[1])


def crop(padded: Array, shape: tuple[int, ...], padding: Pair) -> Array:
    return padded[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]


def places(size: tuple[int, ...], window: tuple[int, ...], stride: Pair) -> Iterator[tuple[slice, ...]]:
    """For each element of the window, where it lies on the padded image in all of its places."""
    for a in range(window[0]):
        for b in range(window[1]):
            rows = slice(a, a + stride[0] * (size[0] - 1) + 1, stride[0])
            columns = slice(b, b + stride[1] * (size[1] - 1) + 1, stride[1])
            yield slice(None), slice(None), rows, columns


def taps(x: Array, window: tuple[int, ...], stride: Pair, padding: Pair, fill: float) -> Array:
    """(N, C, kh * kw, Ho, Wo): what each element of the window sees in each of its places."""
    xp = array_namespace(x)
    padded = xp.full(padded_shape(x.shape, padding), fill, dtype=x.dtype)
    padded[:, :, padding[0] : padding[0] + x.shape[2], padding[1] : padding[1] + x.shape[3]] = x
    size = output_size(x.shape[2:], window, stride, padding)
    return xp.stack([padded[place] for place in places(size, window, stride)], axis=2)
