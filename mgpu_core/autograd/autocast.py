"""Mixed precision: which operations compute in 16 bits inside `autocast`, and which in float32.

The scheme is that of `torch.amp` (Micikevicius et al., "Mixed Precision Training", ICLR 2018): parameters stay float32,
and each operation rounds, or widens, what it is given.

    16 bits     matrix products, `linear`, `conv2d`, `self_attention`: most of the arithmetic, on a GPU's matrix units
    float32     `exp`, `log`, `**`, sums and means, softmax, losses, `layer_norm`, `lstm`, `gru`: sums of many terms,
                and functions that leave the range or lose the digits of 16 bits
    as it is    everything else, in the wider type of its arguments

It is not the model that is cast, once a step, as some libraries do: then every strategy would have to know two copies
of each parameter. Here gradients, optimisers, shards and checkpoints see float32 parameters only, and what they do is
what they do without. The price is a copy of the weights for every use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from array_api_compat import array_namespace

from mgpu_core.autograd.tape import Array

SHORT = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_SHORT = frozenset(SHORT.values())


class _Mode(threading.local):
    dtype: Any = None


_mode = _Mode()


@contextmanager
def autocast(dtype: Any) -> Iterator[None]:
    """Inside (this thread only), operations compute in `dtype`, bfloat16 or float16, where that is safe.

    None: in the types of their arguments, as outside. Raises ValueError for another type.
    """
    if dtype is not None and np.dtype(dtype) not in _SHORT:
        raise ValueError(f"autocast is to {' or '.join(SHORT)}, not {dtype}")
    before, _mode.dtype = _mode.dtype, None if dtype is None else np.dtype(dtype)
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found in the gradients
            yield
    finally:
        _mode.dtype = before


def autocast_dtype() -> Any:
    """The type of the surrounding `autocast`; None outside."""
    return _mode.dtype


def is_short(dtype: Any) -> bool:
    """Whether it is bfloat16 or float16."""
    return isinstance(dtype, np.dtype) and dtype in _SHORT


def narrowed(*arrays: Array) -> tuple[Array, ...]:
    """An operation's real arguments in the 16 bits of `autocast`; outside, and for None, as they are."""
    dtype = _mode.dtype
    return arrays if dtype is None else tuple(None if x is None else cast(x, dtype) for x in arrays)


def widened(x: Array) -> Array:
    """Inside `autocast`, a 16-bit array as float32; anything else as it is."""
    return x if _mode.dtype is None else widen(x)


def widen(x: Array) -> Array:
    """A 16-bit array as float32; anything else as it is."""
    return cast(x, np.dtype(np.float32)) if is_short(x.dtype) else x


def cast(x: Array, dtype: Any) -> Array:
    """`x`, or a copy of it in another dtype."""
    return x if x.dtype == dtype else array_namespace(x).astype(x, dtype)


def product(a: Array, b: Array) -> Array:
    """a @ b, where 16-bit numbers are summed in float32 and rounded once. NumPy cannot, and is given wider ones."""
    if isinstance(a, np.ndarray) and is_short(a.dtype):
        return cast(widen(a) @ widen(b), a.dtype)
    return a @ b
