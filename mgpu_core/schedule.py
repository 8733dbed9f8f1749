"""Learning rates as pure functions of the step, so that a resumed run needs nothing but its step.

    rate = schedule.cosine(0.4, steps=1000, warmup=100)
    for step in range(1000):
        optimizer.lr = rate(step)

All start with a linear warm-up: step s of the first `warmup` steps has (s + 1) / warmup of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """`peak` throughout."""
    return _after_warmup(warmup, peak, lambda step: peak)


def cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """From `peak` after the warm-up to `final` at step `steps`, along half a cosine (Loshchilov and Hutter 2017)."""

    def rate(step: int) -> float:
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return _after_warmup(warmup, peak, rate)


def step_decay(peak: float, *, boundaries: Sequence[int], factor: float = 0.1, warmup: int = 0) -> Schedule:
    """`peak`, multiplied by `factor` at each of `boundaries`, given in steps."""
    return _after_warmup(warmup, peak, lambda step: peak * factor ** sum(step >= boundary for boundary in boundaries))


def linear_scaling(base_lr: float, base_batch: int, global_batch: int) -> float:
    """The learning rate for a global batch, in proportion to one known to be good for `base_batch` samples.

    Goyal et al., "Accurate, large minibatch SGD", 2017, who pair it with a warm-up.
    """
    return base_lr * global_batch / base_batch


def _after_warmup(warmup: int, peak: float, rate: Schedule) -> Schedule:
    return lambda step: peak * (step + 1) / warmup if step < warmup else rate(step)
