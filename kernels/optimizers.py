"""Steps of the optimisers over a flat bucket of parameters, in one pass: SGD with momentum and Nesterov's, and AdamW.

Parameters and state are float32 (float64 for float64 gradients). Gradients may be float16 or bfloat16: then what the
model computes with is a *copy* of the parameters in the gradients' dtype, written in the same pass, while the
parameters keep what rounding would lose ("master weights": Micikevicius et al., "Mixed Precision Training", ICLR
2018).

`sgd` and `adamw` say in NumPy what the kernels do. The kernels give the same bits on every target: sums and products
are rounded one by one, divisions and square roots to nearest. A setting is stored as float64 and rounded to the
parameters' dtype; settings lie in the job, in the device's memory, so that a schedule can change them under a
captured graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.elementwise import aligned, load, store
from kernels.portable import portable, primitive
from kernels.primitives import load_word

Array = npt.NDArray[Any]

DTYPES = ("float32", "float64", "float16", "bfloat16")  # of gradients
RULES = ("sgd", "adamw")

# The job: 64-bit words. "->" marks an address.
JOB_PARAMETERS = 0  # ->
JOB_GRADIENTS = 1  # ->
JOB_FIRST = 2  # -> momentum (sgd), or 0 without; the running mean of gradients (adamw)
JOB_SECOND = 3  # -> the running mean of squared gradients (adamw)
JOB_COPY = 4  # -> the parameters in the gradients' dtype, or 0 without
JOB_COUNT = 5
JOB_SETTINGS = 6  # float64, SETTINGS of them
SETTINGS = 8
JOB_WORDS = JOB_SETTINGS + SETTINGS

SGD_LR, SGD_MOMENTUM, SGD_FRESH, SGD_DECAY, SGD_NESTEROV = range(5)
ADAMW_RATE, ADAMW_BETA1, ADAMW_REST1, ADAMW_BETA2, ADAMW_REST2, ADAMW_SCALE, ADAMW_EPS, ADAMW_KEEP = range(8)


def sgd_settings(
    lr: float, *, momentum: float = 0.0, fresh: float = 1.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Array:
    """The settings of a step of SGD, float64 (8,): the gradient counts `fresh` in the momentum, 1 - dampening."""
    return np.array([lr, momentum, fresh, weight_decay, nesterov, 0, 0, 0], np.float64)


def adamw_settings(
    lr: float, step: int, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> Array:
    """The settings of step number `step`, from 1, of AdamW, float64 (8,)."""
    beta1, beta2 = betas
    scale = 1 / math.sqrt(1 - beta2**step)
    rate = lr / (1 - beta1**step)
    return np.array([rate, beta1, 1 - beta1, beta2, 1 - beta2, scale, eps, 1 - lr * weight_decay], np.float64)


def sgd(p: Array, g: Array, momentum: Array | None, copy: Array | None, settings: Array) -> None:
    """A step in place: p and momentum (n,) in float32 or float64; g and, if it is kept, copy (n,) in any float.

    g += decay * p;  m = momentum * m + fresh * g;  p -= lr * m, or with Nesterov  p -= lr * (g + momentum * m).
    """
    lr, factor, fresh, decay = settings[:4].astype(p.dtype)
    g = g.astype(p.dtype) + decay * p
    if momentum is not None:
        momentum[:] = factor * momentum + fresh * g
        g = g + factor * momentum if settings[SGD_NESTEROV] else momentum
    p -= lr * g
    if copy is not None:
        copy[:] = p.astype(copy.dtype)


def adamw(p: Array, g: Array, first: Array, second: Array, copy: Array | None, settings: Array) -> None:
    """A step in place, likewise (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019).

    m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g;
    p = keep * p - rate * m / (sqrt(v) * scale + eps).
    """
    rate, beta1, rest1, beta2, rest2, scale, eps, keep = settings.astype(p.dtype)
    g = g.astype(p.dtype)
    first[:] = beta1 * first + rest1 * g
    second[:] = beta2 * second + rest2 * g * g
    p[:] = keep * p - rate * first / (np.sqrt(second) * scale + eps)
    if copy is not None:
        copy[:] = p.astype(copy.dtype)


def job(addresses: Sequence[int], count: int, settings: Array) -> Array:
    """A kernel's argument, int64 (14,): the five addresses from JOB_PARAMETERS on, of `count` elements each."""
    return np.array([*addresses, count, *settings.view(np.int64)], np.int64)


# The kernels. Values are groups of elements, `width()` of them; `load` and `store` are those of parameters and state.


@primitive
def width() -> int:
    """Elements in a group."""
    raise LookupError("width is bound to a target")


@primitive
def state_bytes() -> int:
    """Bytes of one parameter."""
    raise LookupError("state_bytes is bound to a dtype")


@primitive
def gradient_bytes() -> int:
    """Bytes of one element of the gradient."""
    raise LookupError("gradient_bytes is bound to a dtype")


@primitive
def load_gradient(address: int, stride: int) -> Any:
    """A group of gradients, widened to the parameters' dtype."""
    raise LookupError("load_gradient is bound to a dtype")


@primitive
def store_copy(address: int, group: Any, stride: int) -> None:
    """Write a group of parameters, rounded to the gradients' dtype."""
    raise LookupError("store_copy is bound to a dtype")


@primitive
def splat(bits: int) -> Any:
    """A group of one number: a float64, given by its bits."""
    raise LookupError("splat is bound to a dtype")


@primitive
def add(left: Any, right: Any) -> Any:
    """left + right."""
    return left + right


@primitive
def subtract(left: Any, right: Any) -> Any:
    """left - right."""
    return left - right


@primitive
def multiply(left: Any, right: Any) -> Any:
    """left * right."""
    return left * right


@primitive
def divide(left: Any, right: Any) -> Any:
    """left / right."""
    return left / right


@primitive
def root(group: Any) -> Any:
    """Square roots."""
    return np.sqrt(group)


@portable
def setting(job: int, index: int) -> Any:
    """A setting, for all elements of a group."""
    return splat(load_word(job + 8 * (JOB_SETTINGS + index)))


@portable
def put(job: int, i: int, group: Any) -> None:
    """Write the parameters from element i on, and their copy."""
    store(load_word(job + 8 * JOB_PARAMETERS) + i * state_bytes(), group, 16)
    copy = load_word(job + 8 * JOB_COPY)
    if copy != 0:
        store_copy(copy + i * gradient_bytes(), group, 16)


@portable
def sgd_groups(job: int, begin: int, end: int, lane: int, lanes: int) -> None:
    """Elements `begin` to `end`, in whole groups."""
    lr, factor = setting(job, SGD_LR), setting(job, SGD_MOMENTUM)
    fresh, decay = setting(job, SGD_FRESH), setting(job, SGD_DECAY)
    nesterov = load_word(job + 8 * (JOB_SETTINGS + SGD_NESTEROV)) != 0
    parameters, gradients = load_word(job + 8 * JOB_PARAMETERS), load_word(job + 8 * JOB_GRADIENTS)
    momentum = load_word(job + 8 * JOB_FIRST)
    i = begin + lane * width()
    while i < end:
        p = load(parameters + i * state_bytes(), 16)
        g = add(load_gradient(gradients + i * gradient_bytes(), 16), multiply(decay, p))
        if momentum != 0:
            place = momentum + i * state_bytes()
            m = add(multiply(factor, load(place, 16)), multiply(fresh, g))
            store(place, m, 16)
            if nesterov:
                g = add(g, multiply(factor, m))
            else:
                g = m
        put(job, i, subtract(p, multiply(lr, g)))
        i += lanes * width()


@portable
def adamw_groups(job: int, begin: int, end: int, lane: int, lanes: int) -> None:
    """Elements `begin` to `end`, in whole groups."""
    rate, scale = setting(job, ADAMW_RATE), setting(job, ADAMW_SCALE)
    beta1, rest1 = setting(job, ADAMW_BETA1), setting(job, ADAMW_REST1)
    beta2, rest2 = setting(job, ADAMW_BETA2), setting(job, ADAMW_REST2)
    eps, keep = setting(job, ADAMW_EPS), setting(job, ADAMW_KEEP)
    parameters, gradients = load_word(job + 8 * JOB_PARAMETERS), load_word(job + 8 * JOB_GRADIENTS)
    first, second = load_word(job + 8 * JOB_FIRST), load_word(job + 8 * JOB_SECOND)
    i = begin + lane * width()
    while i < end:
        at = i * state_bytes()
        p, m, v = load(parameters + at, 16), load(first + at, 16), load(second + at, 16)
        g = load_gradient(gradients + i * gradient_bytes(), 16)
        m = add(multiply(beta1, m), multiply(rest1, g))
        v = add(multiply(beta2, v), multiply(multiply(rest2, g), g))
        store(first + at, m, 16)
        store(second + at, v, 16)
        step = divide(multiply(rate, m), add(multiply(root(v), scale), eps))
        put(job, i, subtract(multiply(keep, p), step))
        i += lanes * width()


@primitive
def update_wide(job: int, begin: int, end: int, lane: int, lanes: int) -> None:
    """A rule's groups, `width()` elements wide."""
    raise LookupError("update_wide is bound to a rule")


@primitive
def update_one(job: int, begin: int, end: int, lane: int, lanes: int) -> None:
    """A rule's groups, one element wide."""
    raise LookupError("update_one is bound to a rule")


@portable
def update(job: int, lane: int, lanes: int) -> int:
    """A step over the whole bucket; the lanes share the work. Returns 0."""
    count = load_word(job + 8 * JOB_COUNT)
    wide = 0
    if aligned(job + 8 * JOB_PARAMETERS, 5):
        wide = count // width() * width()
        update_wide(job, 0, wide, lane, lanes)
    update_one(job, wide, count, lane, lanes)
    return 0
