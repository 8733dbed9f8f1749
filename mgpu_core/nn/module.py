"""Module: a function with parameters, made of other modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.tape import Array
from mgpu_core.tensor import Tensor

if TYPE_CHECKING:
    from mgpu_core.parallel.placement import FlatPlacement, Placement

Self = TypeVar("Self", bound="Module")


class Parameter(Tensor):
    """A tensor that is trained: a leaf that requires a gradient. Set `requires_grad` to False to freeze it.

    `sharded_over` names the axes of a mesh of ranks along which each rank holds a different part of it; along all
    others the ranks hold copies. `placement` says which part of a whole parameter this is; None: all of it. `counts` is
    False for a copy that another stage of a pipeline has too, where that one is to count in norms.
    """

    __slots__ = ("counts", "placement", "sharded_over")

    def __init__(
        self,
        data: Any,
        *,
        dtype: Any = None,
        sharded_over: tuple[str, ...] = (),
        placement: Placement | FlatPlacement | None = None,
    ) -> None:
        super().__init__(data, dtype=dtype, requires_grad=True)
        self.sharded_over = sharded_over
        self.placement = placement
        self.counts = True


class Module:
    """Base of all layers. Subclasses set attributes in `__init__` and define `forward`.

    Attributes are found by what they are, in the order in which they were first set: a `Parameter` is trained, any
    other `Tensor` is a buffer (state that is saved but not trained), a `Module`, or a list or tuple of them, is a part.
    A parameter that is shared counts once, under its first name.
    """

    training: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    forward: Any

    def children(self) -> Iterator[tuple[str, Module]]:
        """This module's own parts, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, (list, tuple)):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module, named `prefix`, and all its parts, outer before inner."""
        yield prefix, self
        for name, child in self.children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, tensor in self._named_tensors():
            if isinstance(tensor, Parameter):
                yield name, tensor

    def parameters(self) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named_tensors():
            if not isinstance(tensor, Parameter):
                yield name, tensor

    def buffers(self) -> Iterator[Tensor]:
        return (buffer for _, buffer in self.named_buffers())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[Tensor] = set()
        for path, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value not in seen:
                    seen.add(value)
                    yield (f"{path}.{name}" if path else name), value

    def train(self: Self, mode: bool = True) -> Self:
        """Makes this module and its parts behave as in training: dropout drops, batch norm uses the batch."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self: Self) -> Self:
        """The opposite of `train`."""
        return self.train(False)

    def to(self: Self, where: str) -> Self:
        """Moves parameters, their gradients and buffers to the device "cpu" or "cuda"; see `mgpu_core.device`.

        To be called before an optimiser or a strategy is made of them, which keep their own arrays beside these.
        """
        for _, tensor in self._named_tensors():
            gradient = tensor.grad
            tensor.data = device.move(tensor.data, where)
            if gradient is not None:
                tensor.grad = device.move(gradient, where)
        return self

    def zero_grad(self) -> None:
        """Makes the gradients of all parameters zero; see `Tensor.zero_grad`."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def state_dict(self) -> dict[str, Array]:
        """The arrays of parameters and buffers by name: the arrays themselves, not copies."""
        return {name: tensor.data for name, tensor in self._named_tensors()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copies `state` into the parameters' and buffers' own arrays, in their dtype.

        Raises KeyError for missing or unexpected names, ValueError for another shape; nothing is changed then.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            raise KeyError(
                f"the state is of another model: missing {sorted(own.keys() - state.keys())}, "
                f"not expected {sorted(state.keys() - own.keys())}"
            )
        for name, array in own.items():
            if array.shape != state[name].shape:
                raise ValueError(f"{name} has shape {state[name].shape} in the state, expected {array.shape}")
        for name, array in own.items():
            array[...] = array_namespace(array).asarray(device.beside(state[name], array))


class Sequential(Module):
    """Modules one after another. `model[i]` is a part, `model[i:j]` a Sequential of the same parts."""

    def __init__(self, *layers: Module) -> None:
        self.layers = list(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)

    @overload
    def __getitem__(self, index: int) -> Module: ...

    @overload
    def __getitem__(self, index: slice) -> Sequential: ...

    def __getitem__(self, index: int | slice) -> Module:
        return Sequential(*self.layers[index]) if isinstance(index, slice) else self.layers[index]
