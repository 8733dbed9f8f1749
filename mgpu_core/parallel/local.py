"""Local SGD: ranks train by themselves, and bring their parameters together every so many steps.

    model = LocalSGD(network, comm, optim.SGD(network.named_parameters(), lr=0.1), every=8)
    for batch in batches:  # this rank's parts
        images, labels = batch.arrays
        model.zero_grad()
        if len(labels):
            (cross_entropy(model(Tensor(images)), labels, reduction="sum") / len(labels)).backward()
        model.step(len(labels))
    model.synchronize()  # at the end: the same parameters everywhere

Every rank starts a round from the same parameters and takes `every` steps of its own, *inner* optimiser. Then the mean
over the ranks of what their parameters have moved by, taken as a gradient, is given to an *outer* optimiser.

- Outer SGD with rate 1, the default, makes the parameters the ranks' mean: local SGD (Stich, "Local SGD converges fast
  and communicates little", 2019). With `every=1` and plain SGD inside it is synchronous training, up to rounding.
- Outer SGD with Nesterov momentum, and AdamW inside: DiLoCo (Douillard et al., "DiLoCo: distributed low-communication
  training of language models", 2023), who take a rate of 0.7, a momentum of 0.9 and some hundred steps:
  `outer=partial(optim.SGD, lr=0.7, momentum=0.9, nesterov=True)`.

Ranks count in the mean by the samples they trained on in the round (McMahan et al., "Communication-efficient learning
of deep networks from decentralized data", 2017), so that a slow rank may be given less work, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mgpu_core.nn import Module
from mgpu_core.optim import SGD, Optimizer
from mgpu_core.parallel.data import average_buffers
from mgpu_core.tensor import Tensor


class LocalSGD:
    """Trains a model on every rank, apart, and together every so many steps; see the module's docstring.

    Args:
        model: the same on every rank; all take rank 0's parameters and buffers.
        comm: the ranks. One rank alone (or None) is the inner optimiser, moved on by the outer one.
        inner: this rank's optimiser, of the model's parameters. Its state stays with the rank.
        every: steps in a round.
        outer: makes the outer optimiser for (name, tensor) pairs, the same on every rank; None: SGD with rate 1.

    Attributes:
        steps: steps taken in the present round.
        outer: the outer optimiser; its parameters are those with which the round began.
    """

    def __init__(
        self,
        model: Module,
        comm: Any,
        inner: Optimizer,
        *,
        every: int,
        outer: Callable[[Iterable[tuple[str, Tensor]]], Optimizer] | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"a round has at least one step; got every={every}")
        self.model, self.inner, self.every = model, inner, every
        self.comm = comm if comm is not None and comm.size > 1 else None
        if self.comm is not None:
            for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
                self.comm.broadcast(tensor.data, root=0)
        start = {name: Tensor(p.data.copy(), requires_grad=True) for name, p in inner.parameters.items()}
        self._moved = {name: array_namespace(t.data).zeros_like(t.data) for name, t in start.items()}
        for name, tensor in start.items():
            tensor.grad = self._moved[name]
        self.outer = SGD(start.items(), 1.0) if outer is None else outer(start.items())
        self.steps = 0
        self._samples = 0

    def __call__(self, *inputs: Any) -> Tensor:
        return self.model(*inputs)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self, samples: int) -> bool:
        """One inner step, with the mean gradient of this rank's `samples`; none if there were 0. Ends the round after
        `every` steps: returns whether it did. All ranks call it as often.
        """
        if samples:
            self.inner.step()
        self.steps += 1
        self._samples += samples
        if self.steps < self.every:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """End the round here, if it has begun: the outer step, after which all ranks hold the same parameters."""
        if not self.steps:
            return
        weight = 1.0
        if self.comm is not None:
            samples = self.comm.all_reduce(np.array([self._samples], np.float64)).item()
            weight = self._samples / samples if samples else 1 / self.comm.size
        start = self.outer.parameters
        for name, parameter in self.inner.parameters.items():
            moved = self._moved[name]
            moved[...] = (start[name].data - parameter.data) * weight
        if self.comm is not None:
            everything = list(self._moved.values())
            self.comm.all_reduce(everything, out=everything)
        self.outer.step()
        for name, parameter in self.inner.parameters.items():
            parameter.data[...] = start[name].data
        self.steps = self._samples = 0

    def refresh(self) -> None:
        """To be called after parameters were changed otherwise, to the same on all ranks: a round begins from them."""
        for name, parameter in self.inner.parameters.items():
            self.outer.parameters[name].data[...] = parameter.data
        self.steps = self._samples = 0

    def average_buffers(self) -> None:
        """Make buffers (batch norm's running statistics) their average over the ranks; all call it together."""
        if self.comm is not None:
            average_buffers(self.model, self.comm)
