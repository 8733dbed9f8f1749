"""Optimisers: they change parameters in place, and keep their state in arrays that a checkpoint can store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd import gpu
from mgpu_core.autograd.gpu import Update
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.tape import Array
from mgpu_core.tensor import Tensor

if TYPE_CHECKING:
    from mgpu_core.parallel.mesh import Mesh


class Optimizer(ABC):
    """What the optimisers share: parameters, learning rate, number of steps, and state by name.

    `parameters` are tensors, or (name, tensor) pairs as `Module.named_parameters` gives; the names appear in the state.
    `lr` may be assigned at any time. A parameter that the loss did not use has gradient zero: decay and
    momentum still move it, on one rank as on many. There may be none, as on a rank whose layers have no parameters.
    """

    rule: ClassVar[str]  # the kernel: "sgd" or "adamw"

    def __init__(self, parameters: Iterable[Tensor | tuple[str, Tensor]], lr: float) -> None:
        named = (p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(parameters))
        self.parameters: dict[str, Tensor] = {name: p for name, p in named if p.requires_grad}
        self.lr = lr
        self._steps = np.zeros((), np.int64)
        self.state: dict[str, dict[str, Array]] = {}  # of each kind, one array for each parameter

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return int(self._steps)

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps[...] = count

    def zero_grad(self) -> None:
        """Makes every gradient zero; see `Tensor.zero_grad`."""
        for parameter in self.parameters.values():
            parameter.zero_grad()

    def step(self) -> None:
        """Updates every parameter from its gradient."""
        self._steps += 1
        self._fill_gradients()
        at_once = []
        for name, parameter in self.parameters.items():
            state = (arrays[name] for arrays in self.state.values())
            update = Update((parameter.data, parameter.grad, *state), self._settings(name))
            if gpu.takes(update):
                at_once.append(update)
            else:
                getattr(kernels_for(parameter.data), self.rule)(*update.arrays, **update.settings)
        if at_once:
            gpu.step(self.rule, at_once)

    def _fill_gradients(self) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = array_namespace(parameter.data).zeros_like(parameter.data)

    @abstractmethod
    def _settings(self, name: str) -> dict[str, Any]:
        """The kernel's keyword arguments in this step, for one parameter."""

    def _keep(self, *kinds: str) -> None:
        for kind in kinds:
            self.state[kind] = {name: array_namespace(p.data).zeros_like(p.data) for name, p in self.parameters.items()}

    def state_dict(self) -> dict[str, Array]:
        """ "steps" (0-d int64) and "KIND.NAME", the state itself and not a copy; the learning rate is a schedule's."""
        arrays = {f"{kind}.{name}": array for kind, state in self.state.items() for name, array in state.items()}
        return {"steps": self._steps, **arrays}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copies `state` into this optimiser's own. Raises KeyError or ValueError where it does not fit."""
        own = self.state_dict()
        if own.keys() != state.keys():
            raise KeyError(
                f"the state is of another optimiser or model: missing {sorted(own.keys() - state.keys())}, "
                f"not expected {sorted(state.keys() - own.keys())}"
            )
        for name, array in own.items():
            if array.shape != state[name].shape:
                raise ValueError(f"{name} has shape {state[name].shape} in the state, expected {array.shape}")
            array[...] = array_namespace(array).asarray(device.beside(state[name], array))


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, in PyTorch's form.

    g += weight_decay * p;  v = momentum * v + (1 - dampening) * g  (v = g at the first step);
    p -= lr * v, or with `nesterov` (Sutskever et al. 2013)  p -= lr * (g + momentum * v).
    """

    rule = "sgd"

    def __init__(
        self,
        parameters: Iterable[Tensor | tuple[str, Tensor]],
        lr: float,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening):
            raise ValueError("Nesterov momentum needs momentum > 0 and no dampening")
        super().__init__(parameters, lr)
        self.momentum, self.dampening, self.weight_decay, self.nesterov = momentum, dampening, weight_decay, nesterov
        if momentum:
            self._keep("momentum")

    def _settings(self, name: str) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "fresh": 1.0 if self.steps == 1 else 1 - self.dampening,
            "weight_decay": self.weight_decay,
            "nesterov": self.nesterov,
        }


class LARS(Optimizer):
    """SGD with momentum and a rate for each layer (You, Gitman and Ginsburg, "Large batch training", 2017).

    rate = trust * |p| / (|g| + weight_decay * |p|);  v = momentum * v + lr * rate * (g + weight_decay * p);  p -= v.

    The norms are Euclidean, over a whole parameter; where one of them is 0, rate = 1. Biases and the parameters of
    normalisation layers (those of one axis or none) have rate 1 and no weight decay, as is usual.
    Parameters that are sharded need the `mesh` that they are sharded over: their norms are summed there in each step,
    which all its ranks take together. ValueError without it.
    """

    rule = "sgd"

    def __init__(
        self,
        parameters: Iterable[Tensor | tuple[str, Tensor]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(parameters, lr)
        self.momentum, self.weight_decay, self.trust, self.mesh = momentum, weight_decay, trust, mesh
        from mgpu_core.parallel.norm import whole_norms  # not above: the strategies import the optimisers

        self._norms = whole_norms
        for name, p in self.parameters.items():
            if strange := set(getattr(p, "sharded_over", ())) - {"data", "tensor", "pipeline"}:
                raise ValueError(
                    f"LARS needs the norms of whole parameters, and {name} is cut over {strange}, which no mesh has"
                )
        self._adapted = {name: p for name, p in self.parameters.items() if _axes(p) > 1}
        self._norms([p.data for p in self._adapted.values()], list(self._adapted.values()), mesh)  # raises now or never
        self._keep("momentum")

    def step(self) -> None:
        """Updates every parameter from its gradient."""
        self._fill_gradients()
        parameters = list(self._adapted.values())
        sizes = self._norms([p.data for p in parameters], parameters, self.mesh)
        slopes = self._norms([p.grad for p in parameters], parameters, self.mesh)
        self._rates = {
            name: self.trust * size / (slope + self.weight_decay * size) if size and slope else 1.0
            for name, size, slope in zip(self._adapted, sizes, slopes)
        }
        super().step()

    def _settings(self, name: str) -> dict[str, Any]:
        return {
            "lr": 1.0,
            "momentum": self.momentum,
            "fresh": self.lr * self._rates.get(name, 1.0),
            "weight_decay": self.weight_decay if name in self._adapted else 0.0,
            "nesterov": False,
        }


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), in PyTorch's form.

    p *= 1 - lr * weight_decay;  m, v: running means of g and g^2 with weights beta1, beta2, divided by 1 - beta^step
    since they start from zero;  p -= lr * m / (sqrt(v) + eps).
    """

    rule = "adamw"

    def __init__(
        self,
        parameters: Iterable[Tensor | tuple[str, Tensor]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(parameters, lr)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self._keep("m", "v")

    def _settings(self, name: str) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "step": self.steps,
        }


def _axes(parameter: Tensor) -> int:
    """How many axes the whole parameter has, of which this may be a part."""
    placement = getattr(parameter, "placement", None)
    return parameter.ndim if placement is None else len(placement.shape)
