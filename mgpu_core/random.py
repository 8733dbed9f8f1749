"""Random numbers that do not depend on how work is split: counter-based streams, addressed by name.

A stream is Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), NumPy's, whose key is
hashed from what the numbers are for: (seed, step, layer) for a dropout mask, (seed, epoch) for an order of samples.
Any part of a stream can be drawn by itself, so each rank draws the parts of its own samples, and the same mask
falls on a sample whatever the number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

_WORDS_PER_BLOCK = 8  # Philox 4x64 makes 256 bits at a time


def key(*path: int) -> np.ndarray:
    """The key of the stream for `path`, integers from 0 to 2**64 - 1 such as (seed, step, layer): 128 hashed bits."""
    words = np.asarray([len(path), *path], np.uint64).view(np.uint32)  # fixed widths: no two paths look alike
    return np.random.SeedSequence(words).generate_state(2, np.uint64)


def generator(*path: int) -> np.random.Generator:
    """A NumPy generator at the start of the stream for `path`."""
    return np.random.Generator(np.random.Philox(key=key(*path)))


State = tuple[int, int, Sequence[int]] | None


class _Current(threading.local):
    batch: State = None


_current = _Current()


@contextmanager
def batch(*, seed: int, step: int, samples: Sequence[int]) -> Iterator[None]:
    """Inside (this thread only), randomness is that of training step `step`, for these samples.

    `samples` has, for each row of this rank's part of the batch, its place in the global batch: range(8, 16), say, on
    the second of two ranks. Every forward pass in training that has dropout needs this around it.
    """
    with resumed((seed, step, samples)):
        yield


def current() -> State:
    """What the surrounding `batch` said, for `resumed`; None outside of one."""
    return _current.batch


@contextmanager
def resumed(state: State) -> Iterator[None]:
    """Inside (this thread only), randomness is what it was where `current` returned this state."""
    before, _current.batch = _current.batch, state
    try:
        yield
    finally:
        _current.batch = before


@contextmanager
def batch_rows(rows: slice) -> Iterator[None]:
    """Inside, the current `batch`, where there is one, is that of some of its rows."""
    state = current()
    if state is not None:
        seed, step, samples = state
        state = seed, step, samples[rows]
    with resumed(state):
        yield


def sample_words(
    layer: int | tuple[int, ...], count: int, width: int, part: tuple[int, int] | None = None
) -> np.ndarray:
    """Random uint32 (count, width) for the current batch: row i belongs to its i-th sample, in stream `layer`.

    Sample s owns the Philox blocks from s * ceil(width / 8) on, of the stream (seed, step, layer). A layer's number may
    have several parts. With `part`, only the columns from its first to before its second number are made, and returned.
    Raises RuntimeError outside of `batch`, ValueError if the batch has not `count` samples.
    """
    if _current.batch is None:
        raise RuntimeError(
            "randomness per sample (dropout in training) needs to know the step and the samples: run the forward pass "
            "inside `with mgpu_core.random.batch(seed=..., step=..., samples=range(...)):`"
        )
    seed, step, samples = _current.batch
    if len(samples) != count:
        raise ValueError(f"the current random.batch has {len(samples)} samples, but the tensor has {count} rows")
    stream = key(seed, step, *(layer if isinstance(layer, tuple) else (layer,)))
    start, stop = (0, width) if part is None else part
    blocks = -(-width // _WORDS_PER_BLOCK)  # of a sample, of which we need those from `skipped` to before `last`
    skipped, last = start // _WORDS_PER_BLOCK, -(-stop // _WORDS_PER_BLOCK)
    needed = last - skipped
    rows = np.empty((count, needed * _WORDS_PER_BLOCK), np.uint32)
    # The blocks of consecutive samples follow one another, where none is skipped.
    runs = _runs(samples) if needed == blocks else ((i, i + 1) for i in range(count))
    for first, after in runs:
        counter = np.random.Philox(key=stream, counter=int(samples[first]) * blocks + skipped)
        words = counter.random_raw((after - first) * needed * _WORDS_PER_BLOCK // 2)
        rows[first:after] = words.view(np.uint32).reshape(after - first, -1)
    return rows[:, start - skipped * _WORDS_PER_BLOCK : stop - skipped * _WORDS_PER_BLOCK]


def _runs(samples: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The longest ranges of positions whose samples are consecutive numbers."""
    breaks = np.flatnonzero(np.diff(np.asarray(samples, dtype=np.int64)) != 1) + 1
    edges = [0, *breaks.tolist(), len(samples)]
    return ((first, last) for first, last in zip(edges, edges[1:]) if first < last)
