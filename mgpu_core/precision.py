"""Mixed precision for a training loop: products in 16 bits, float32 parameters, and a scaled loss where that is needed.

    precision = Precision("float16")
    with precision.autocast():
        loss = cross_entropy(model(images), labels)
        precision.backward(loss)
    precision.step(optimizer)

`autocast` says which operations compute in 16 bits, and why it is they and not the model: see
`mgpu_core.autograd.autocast`. bfloat16 has float32's range and needs no more. float16 has numbers from 2**-24 to
65,504, and many gradients are smaller. So the loss is multiplied by a power of two before the backward pass, and the
gradients are divided by it afterwards (Micikevicius et al. 2018). The factor is found by trying, by the rule of
`torch.amp.GradScaler`: a step in which a gradient of any rank is not finite is left out, on all ranks, and halves it;
after 2,000 steps in a row without one it doubles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mgpu_core.autograd.autocast import SHORT, autocast
from mgpu_core.optim import Optimizer
from mgpu_core.tensor import Tensor

PRECISIONS = ("float32", *SHORT)
_LEAST = 2.0**-24  # float16's smallest number: a loss scaled by less is scaled to nothing


class Precision:
    """What a training computes in.

    Args:
        name: "float32", "bfloat16" or "float16".
        scale: of the loss, for float16, at the beginning: a power of two, so that scaling rounds nothing.
        interval: after how many steps in a row without an overflow it doubles.

    Attributes:
        scale: of the loss, in the next step; 1 but for float16.
        steps: how many steps in a row there were no overflows.
        skipped: steps that were left out so far.
    """

    def __init__(self, name: str = "float32", *, scale: float = 2.0**16, interval: int = 2000) -> None:
        if name not in PRECISIONS:
            raise ValueError(f"precision is {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}, not {name!r}")
        if not scale > 0 or math.frexp(scale)[0] != 0.5:
            raise ValueError(f"the loss is scaled by a power of two, not by {scale}")
        self.name, self.interval = name, interval
        self.scales = name == "float16"
        self.scale = scale if self.scales else 1.0
        self.steps = self.skipped = 0

    def autocast(self) -> AbstractContextManager[None]:
        """Inside, operations compute in this precision."""
        return autocast(SHORT.get(self.name))

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()` with the loss scaled; the gradients are those of `loss` only after `step` has begun."""
        (loss * self.scale if self.scales else loss).backward()

    def step(self, optimizer: Optimizer, comm: Any = None) -> bool:
        """Divide the gradients by the scale and take the optimiser's step, unless one of them is not finite.

        All ranks of `comm` (None: one process) call it together, whatever parts of the gradients they have, and all
        take the step or none does. Returns whether they did.

        Raises:
            FloatingPointError: when gradients overflow at every scale.
        """
        if not self.scales:
            optimizer.step()
            return True
        gradients = [p.grad for p in optimizer.parameters.values() if p.grad is not None]
        for gradient in gradients:
            gradient *= 1 / self.scale
        finite = _all_finite(gradients)
        if comm is not None and comm.size > 1:
            finite = bool(comm.all_reduce(np.array([finite]), "min")[0])
        if finite:
            optimizer.step()
        self._adapt(finite)
        return finite

    def state(self) -> dict[str, Any]:
        """What goes on in a resumed run, as JSON values."""
        return {"scale": self.scale, "steps": self.steps, "skipped": self.skipped} if self.scales else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from another's `state`; from the beginning, if that had no scale, or this one has none."""
        if self.scales and state:
            self.scale, self.steps, self.skipped = state["scale"], state["steps"], state["skipped"]

    def _adapt(self, finite: bool) -> None:
        if finite:
            self.steps += 1
            if self.steps == self.interval:
                self.scale, self.steps = self.scale * 2, 0
            return
        self.scale, self.steps, self.skipped = self.scale / 2, 0, self.skipped + 1
        if self.scale < _LEAST:
            raise FloatingPointError(
                "gradients overflow float16 however small the loss is scaled: a rate that is too high, or values in "
                "the model above 65,504; try a longer warm-up, or bfloat16, which has float32's range"
            )


def _all_finite(arrays: list[Any]) -> bool:
    """Whether all their elements are; asks the device once."""
    if not arrays:
        return True
    xp = array_namespace(*arrays)
    return bool(xp.all(xp.stack([xp.all(xp.isfinite(array)) for array in arrays])))
