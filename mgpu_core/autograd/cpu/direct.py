"""Convolution without a column matrix, in float32, where outputs are a multiple of 16.

    y[i, j, o] = sum over taps (a, b) of the window and channels c of x[i s + a, j s + b, c] w[a, b, c, o]

A tile of several places in a row times 16 or 32 outputs is summed in registers: for each tap and channel, one load of
weights and a product with each place's number. Images are first copied, some lines at a time, into a buffer that the
second-level cache holds, with padding around them and channels in blocks of 16, so that neighbouring places are always
64 bytes apart. With a stride, columns are sorted by their remainder, which makes them neighbours again; a tap is then
no more than an offset in the buffer. (Georganas et al. 2018, "Anatomy of high-performance deep learning convolutions on
SIMD architectures".)

The input's gradient is the same sum over g and the transposed weights. With stride s it falls into s x s of them, one
for each remainder of a pixel's place, which have a share of the taps each. The weight's gradient sums a tile of input
channels times outputs over all places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from mgpu_core.autograd.cpu.compile import jit
from mgpu_core.autograd.cpu.layout import Array, channels_first, channels_last
from mgpu_core.autograd.cpu.threads import share
from mgpu_core.autograd.cpu.tile import LANES, SUMS, WIDE, add_products, load, load_some, store
from mgpu_core.autograd.portable.windows import Pair, output_size

Shape = tuple[int, ...]

_BUFFER = 1 << 16  # floats: 256 KB
_CELL = 4 * LANES  # bytes from a place in the buffer to the next


def conv2d(x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
    """As `portable.conv2d`; O is a multiple of 16."""
    o, c, kh, kw = weight.shape
    y = np.empty((len(x), *output_size(x.shape[2:], (kh, kw), stride, padding), o), dtype=x.dtype)
    start = np.zeros(o, dtype=x.dtype) if bias is None else np.ascontiguousarray(bias)
    matrices = weight.transpose(2, 3, 1, 0).reshape(kh * kw, c, o)
    _correlate(channels_last(x), (-padding[0], -padding[1]), stride, [_taps((kh, kw))], matrices, start, y, (1, 1))
    return channels_first(y)


def conv2d_input_gradient(g: Array, weight: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    """As `portable.conv2d_input_gradient`; C is a multiple of 16."""
    n, c, h, w = shape
    dx = np.empty((n, h, w, c), dtype=g.dtype)
    rows, columns = (_sources(*axis) for axis in zip(weight.shape[2:], stride, padding))
    first = min(d for phase in rows for d, _ in phase), min(d for phase in columns for d, _ in phase)
    phases = [[(i - first[0], j - first[1]) for i, _ in down for j, _ in across] for down in rows for across in columns]
    matrices = np.stack([weight[:, :, a, b] for down in rows for across in columns for _, a in down for _, b in across])
    _correlate(channels_last(g), first, (1, 1), phases, matrices, np.zeros(c, dtype=g.dtype), dx, stride)
    return channels_first(dx)


def conv2d_weight_gradient(g: Array, x: Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    """As `portable.conv2d_weight_gradient`; O is a multiple of 16."""
    o, c, kh, kw = shape
    images, gradients, taps = channels_last(x), channels_last(g), _taps((kh, kw))
    buffer, band = _buffer_for(c, gradients.shape[1:3], taps, stride)
    offsets = _offsets(taps, stride, buffer)
    vectors = _vectors(o)
    few = min(c, SUMS // vectors)
    kernel = _weight_gradient(4 if few <= 4 else 1 << few.bit_length() - 1, vectors)  # powers of two divide the block

    def work(part: slice) -> Array:
        total = np.zeros((kh * kw, buffer[0] * LANES, o), dtype=g.dtype)
        places = np.zeros(buffer, dtype=g.dtype)
        kernel(
            *_place(images[part]), (-padding[0], -padding[1]), stride, places.ctypes.data, buffer[:4], band, offsets,
            *_place(gradients[part]), total.ctypes.data,
        )  # fmt: skip
        return total[:, :c]

    total = np.sum(share(work, len(x), g.size * kh * kw * c), axis=0)
    return total.reshape(kh, kw, c, o).transpose(3, 2, 0, 1)


def _taps(window: Pair) -> list[Pair]:
    return [(a, b) for a in range(window[0]) for b in range(window[1])]


def _sources(window: int, stride: int, padding: int) -> list[list[Pair]]:
    """Along one axis, for each remainder r: pixel stride * i + r is seen from place i + d by tap a, of all (d, a)."""
    return [
        [((r + padding - a) // stride, a) for a in range(window) if (r + padding - a) % stride == 0]
        for r in range(stride)
    ]


def _vectors(outputs: int) -> int:
    """How many vectors of outputs a tile has."""
    return 2 if WIDE and outputs % (2 * LANES) == 0 else 1


def _buffer_for(channels: int, size: tuple[int, ...], taps: list[Pair], stride: Pair) -> tuple[tuple[int, ...], int]:
    """The buffer's shape (blocks, lines, remainders, columns, 16), and how many rows of `size` places it is for."""
    below, right = (max(tap[axis] for tap in taps) for axis in range(2))
    columns = (size[1] - 1) + right // stride[1] + 1
    blocks = -(-channels // LANES)
    line = blocks * stride[1] * columns * LANES
    band = max(1, min(size[0], (_BUFFER // line - below - 1) // stride[0] + 1))
    return (blocks, (band - 1) * stride[0] + below + 1, stride[1], columns, LANES), band


def _offsets(taps: list[Pair], stride: Pair, buffer: tuple[int, ...]) -> Array:
    """Where the taps of the first place lie in the buffer, in bytes."""
    _, _, remainders, columns, _ = buffer
    cells = [(a * remainders + b % stride[1]) * columns + b // stride[1] for a, b in taps]
    return np.array(cells, dtype=np.int64) * _CELL


def _correlate(
    images: Array, first: Pair, stride: Pair, phases: list[list[Pair]], matrices: Array, start: Array, out: Array,
    spacing: Pair,
) -> None:  # fmt: skip
    """Each of spacing[0] * spacing[1] phases fills that share of `out` (N, H, W, O): at place (i, j), `start` (O,) plus
    the sum over its taps (a, b) of the pixel `first` + (i, j) * stride + (a, b) times the tap's matrix (C, O)."""
    _, h, w, o = out.shape
    taps = [tap for phase in phases for tap in phase]
    buffer, band = _buffer_for(images.shape[3], (-(-h // spacing[0]), -(-w // spacing[1])), taps, stride)
    vectors = _vectors(o)
    lanes = vectors * LANES
    packed = np.ascontiguousarray(matrices.reshape(*matrices.shape[:2], o // lanes, lanes).transpose(2, 0, 1, 3))
    ends = np.cumsum([len(phase) for phase in phases])
    offsets = _offsets(taps, stride, buffer)
    narrowest = max(1, w // spacing[1])
    tiles = -(-narrowest // (SUMS // vectors))
    kernel = _sums(-(-narrowest // tiles), vectors)

    def work(part: slice) -> None:
        places = np.zeros(buffer, dtype=out.dtype)
        kernel(
            *_place(images[part]), first, stride, places.ctypes.data, buffer[:4], band, offsets, ends,
            packed.ctypes.data, start.ctypes.data, *_place(out[part]), spacing,
        )  # fmt: skip

    share(work, len(out), out.size * matrices[0, :, 0].size * len(taps))


def _place(x: Array) -> tuple[int, tuple[int, ...]]:
    """The address and the shape of a contiguous array."""
    return x.ctypes.data, x.shape


# Kernels take addresses, as tiles do, and shapes: code that slices arrays takes a second longer to compile.


@jit
def _fill(image: int, size: Shape, top: int, left: int, buffer: int, shape: Shape) -> None:
    """Copies lines of an image (H, W, C) from `top` on, and zeros where they are outside."""
    height, width, channels = size
    blocks, lines, remainders, columns = shape
    for block in range(0, blocks * LANES, LANES):
        for row in range(top, top + lines):
            pixels = image + 4 * (row * width * channels + block)
            for remainder in range(left, left + remainders):
                for column in range(remainder, remainder + columns * remainders, remainders):
                    inside = 0 <= row < height and 0 <= column < width
                    count = min(channels - block, LANES) if inside else 0
                    store(load_some(pixels + 4 * column * channels, count), buffer, 0)
                    buffer += _CELL


@cache
def _sums(places: int, vectors: int) -> Callable[..., None]:
    """The kernel whose tiles have so many places."""
    lanes = vectors * LANES

    @jit
    def kernel(
        image: int, size: Shape, first: Pair, stride: Pair, buffer: int, shape: Shape, band: int, offsets: Array,
        ends: Array, matrices: int, start: int, out: int, to: Shape, spacing: Pair,
    ) -> None:  # fmt: skip
        count, image_height, image_width, channels = size
        _, height, width, outputs = to
        line = shape[2] * shape[3] * _CELL
        for _ in range(count):
            for i0 in range(0, -(-height // spacing[0]), band):
                _fill(image, size[1:], first[0] + i0 * stride[0], first[1], buffer, shape)
                begin = 0
                for phase in range(len(ends)):
                    down, across = phase // spacing[1], phase % spacing[1]
                    columns = -((across - width) // spacing[1])
                    rows = min(band, -((down - height) // spacing[0]) - i0)
                    for part in range(0, outputs, lanes):
                        for i in range(rows):
                            for at in range(0, columns, places):
                                j = min(at, columns - places)
                                tile = load(places, vectors, start + 4 * part, 0)
                                weights = matrices + 4 * channels * (part * len(offsets) + begin * lanes)
                                for tap in range(begin, ends[phase]):
                                    cells = buffer + i * stride[0] * line + j * _CELL + offsets[tap]
                                    for block in range(0, channels, LANES):
                                        for c in range(min(channels - block, LANES)):
                                            tile = add_products(tile, cells + 4 * c, _CELL, weights)
                                            weights += 4 * lanes
                                        cells += shape[1] * line
                                y, x = down + (i0 + i) * spacing[0], across + j * spacing[1]
                                store(tile, out + 4 * ((y * width + x) * outputs + part), 4 * spacing[1] * outputs)
                    begin = ends[phase]
            image += 4 * image_height * image_width * channels
            out += 4 * height * width * outputs

    return kernel


@cache
def _weight_gradient(inputs: int, vectors: int) -> Callable[..., None]:
    """The kernel whose tiles have so many input channels."""
    lanes = vectors * LANES

    @jit
    def kernel(
        image: int, size: Shape, first: Pair, stride: Pair, buffer: int, shape: Shape, band: int, offsets: Array,
        gradient: int, of: Shape, total: int,
    ) -> None:  # fmt: skip
        count, image_height, image_width, channels = size
        _, height, width, outputs = of
        line = shape[2] * shape[3] * _CELL
        for _ in range(count):
            for i0 in range(0, height, band):
                _fill(image, size[1:], first[0] + i0 * stride[0], first[1], buffer, shape)
                for part in range(0, outputs, lanes):
                    for tap in range(len(offsets)):
                        for c in range(0, channels, inputs):
                            cells = buffer + c // LANES * shape[1] * line + 4 * (c % LANES) + offsets[tap]
                            sums = total + 4 * ((tap * shape[0] * LANES + c) * outputs + part)
                            tile = load(inputs, vectors, sums, 4 * outputs)
                            for i in range(min(band, height - i0)):
                                pixels = cells + i * stride[0] * line
                                place = gradient + 4 * ((i0 + i) * width * outputs + part)
                                for j in range(width):
                                    tile = add_products(tile, pixels + j * _CELL, 4, place + 4 * j * outputs)
                            store(tile, sums, 4 * outputs)
            image += 4 * image_height * image_width * channels
            gradient += 4 * height * width * outputs

    return kernel
