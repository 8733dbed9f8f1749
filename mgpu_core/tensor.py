"""Tensor: an array that remembers how it was made, and the arithmetic that it supports.

Written against the array API, so that the data may be a NumPy array or any other array with that interface. Functions
of several tensors and the layers' functions are in `mgpu_core.nn.functional`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj, is_cupy_array

from mgpu_core import device
from mgpu_core.autograd import tape
from mgpu_core.autograd.autocast import cast, is_short, narrowed, product, widen, widened
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.tape import VJP, Array, Node

Axis = int | tuple[int, ...] | None


class Tensor:
    """An array with a gradient.

    `data` is the array (real or integer); Python numbers and lists become float32 or int64 arrays. A tensor with
    `requires_grad` that no operation made is a leaf: `backward` leaves its gradient in `grad`. `data` may be assigned,
    with an array of the same shape: an optimiser or a communication library may keep it where it likes.
    """

    __slots__ = ("data", "requires_grad", "_node", "_grad", "_cleared", "_hooks", "__weakref__")
    __array_ufunc__ = None  # array + tensor asks the tensor

    def __init__(self, data: Any, *, dtype: Any = None, requires_grad: bool = False) -> None:
        self.data: Array = _as_array(data, dtype)
        if requires_grad and not _is_a(self.data, "real floating"):
            raise TypeError(f"only floating-point tensors have gradients, this one is {self.data.dtype}")
        self.requires_grad = requires_grad
        self._node: Node | None = None
        self._grad: Array | None = None
        self._cleared = False
        self._hooks: dict[object, Callable[[Tensor], None]] = {}

    # What it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return math.prod(self.data.shape)

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made it."""
        return self._node is None

    @property
    def device(self) -> str:
        """Where it is: "cpu" or "cuda"."""
        return device.of(self.data)

    def to(self, where: str) -> Tensor:
        """This tensor, or its copy on the device "cpu" or "cuda"; gradients go the way back. See `mgpu_core.device`."""
        origin = self.device
        if origin == device.checked(where):
            return self
        return record(device.move(self.data, where), (self, lambda g: device.move(g, origin)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def item(self) -> float | int:
        """The value of a tensor with one element, as a Python number."""
        return self.data.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.device != "cpu":
            raise TypeError(f'a tensor on "{self.device}" is no NumPy array; take tensor.to("cpu") first')
        return np.array(self.data, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}{', requires_grad=True' if self.requires_grad else ''})"

    def detach(self) -> Tensor:
        """The same data, without history."""
        return Tensor(self.data)

    # Its gradient

    @property
    def grad(self) -> Array | None:
        """A leaf's gradient: the sum over all backward passes since `zero_grad`; None if there never was one.

        The array stays the same from step to step, and passes add to it in place. Assign an array of the tensor's
        shape (a view of a bucket, say) and gradients are kept there from then on, added to what it holds.
        """
        if self._cleared:
            self._grad[...] = 0  # type: ignore[index]
            self._cleared = False
        return self._grad

    @grad.setter
    def grad(self, array: Array | None) -> None:
        if array is not None and array.shape != self.shape:
            raise ValueError(f"a gradient must have its tensor's shape {self.shape}, not {array.shape}")
        self._grad, self._cleared = array, False

    def zero_grad(self) -> None:
        """Makes the gradient zero and keeps its array.

        Nothing is written yet: the next gradient overwrites what is there, or the next look at `grad` writes zeros.
        """
        self._cleared = self._grad is not None

    def on_grad_ready(self, hook: Callable[[Tensor], None]) -> Callable[[], None]:
        """Calls `hook(tensor)` once in every backward pass that reaches this leaf, when its gradient is complete.

        That is as soon as all its uses have been added to `grad`, while the pass goes on with earlier operations:
        the moment to start sending it. Hooks of different leaves run in the order in which they are completed, which
        depends on nothing but the order of the forward pass. What a hook raises ends the backward pass.
        Returns a function that removes the hook.
        """
        if not self.is_leaf or not self.requires_grad:
            raise ValueError("only a leaf that requires a gradient announces it; this tensor is not one")
        key = object()
        self._hooks[key] = hook
        return lambda: self._hooks.pop(key, None) and None

    def accumulate_grad(self, gradient: Array) -> None:
        """Adds `gradient` to `grad`, in place; the first time, and after `zero_grad`, overwrites it."""
        if self._grad is None:
            self._grad, self._cleared = array_namespace(self.data).empty_like(self.data), True
        if self._cleared:
            self._grad[...] = gradient
            self._cleared = False
        else:
            self._grad += gradient

    def announce_grad(self) -> None:
        """Calls the hooks: the gradient is complete for this backward pass."""
        for hook in tuple(self._hooks.values()):
            hook(self)

    def backward(self, gradient: Any = None) -> None:
        """Adds d(self)/d(leaf) to `grad` of every leaf; `gradient` is that of self, 1 for a single element.

        The graph is freed on the way. Raises RuntimeError if it was used before or if nothing requires a gradient,
        ValueError for a gradient of the wrong shape, or none for a tensor of several elements.
        """
        if gradient is None and self.size != 1:
            raise ValueError(f"backward() without a gradient needs a tensor of one element, this one is {self.shape}")
        backward([self], [gradient])

    # Elementwise

    def __neg__(self) -> Tensor:
        return record(-self.data, (self, lambda g: -g))

    def __add__(self, other: Any) -> Tensor:
        return record(self.data + _value(other), (self, lambda g: g), (other, lambda g: g))

    def __sub__(self, other: Any) -> Tensor:
        return record(self.data - _value(other), (self, lambda g: g), (other, lambda g: -g))

    def __rsub__(self, other: Any) -> Tensor:
        return record(_value(other) - self.data, (self, lambda g: -g))

    def __mul__(self, other: Any) -> Tensor:
        a, b = self.data, _value(other)
        return record(a * b, (self, lambda g: g * b), (other, lambda g: g * a))

    def __truediv__(self, other: Any) -> Tensor:
        b = _value(other)
        y = self.data / b
        return record(y, (self, lambda g: g / b), (other, lambda g: -g * y / b))

    def __rtruediv__(self, other: Any) -> Tensor:
        a = self.data
        y = _value(other) / a
        return record(y, (self, lambda g: -g * y / a))

    def __pow__(self, exponent: Any) -> Tensor:
        a, b = widened(self.data), _value(exponent)
        y = a**b

        def to_exponent(g: Array) -> Array:  # 0**b has no slope in b for b > 0, although log 0 is infinite
            xp = array_namespace(a)
            return g * y * xp.log(xp.where(a == 0, xp.ones_like(a), a))

        return record(y, (self, lambda g: g * b * a ** (b - 1)), (exponent, to_exponent))

    __radd__, __rmul__ = __add__, __mul__

    def exp(self) -> Tensor:
        x = widened(self.data)
        y = array_namespace(x).exp(x)
        return record(y, (self, lambda g: g * y))

    def log(self) -> Tensor:
        x = widened(self.data)
        return record(array_namespace(x).log(x), (self, lambda g: g / x))

    def sqrt(self) -> Tensor:
        y = array_namespace(self.data).sqrt(self.data)
        return record(y, (self, lambda g: 0.5 * g / y))

    def tanh(self) -> Tensor:
        y = array_namespace(self.data).tanh(self.data)
        return record(y, (self, lambda g: g * (1 - y * y)))

    def sigmoid(self) -> Tensor:
        y = 0.5 * array_namespace(self.data).tanh(0.5 * self.data) + 0.5  # overflows nowhere
        return record(y, (self, lambda g: g * y * (1 - y)))

    def relu(self) -> Tensor:
        kernels = kernels_for(self.data)
        y = kernels.relu(self.data)
        return record(y, (self, lambda g: kernels.relu_gradient(g, y)))

    # Over axes

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        x = widened(self.data)
        expand = _expander(x, axis, keepdims)
        return record(
            array_namespace(x).sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype), (self, lambda g: expand(g))
        )

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        axes = range(self.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
        count = math.prod(self.shape[i] for i in axes)
        return self.sum(axis, keepdims) / count

    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The largest elements; where several are equally large, they share the gradient evenly."""
        x = self.data
        xp = array_namespace(x)
        y = xp.max(x, axis=axis, keepdims=keepdims)
        expand = _expander(x, axis, keepdims)

        def vjp(g: Array) -> Array:
            largest = xp.astype(x == expand(y), x.dtype)
            return largest * (expand(g) / xp.sum(largest, axis=axis, keepdims=True))

        return record(y, (self, vjp))

    # Shape

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        x = self.data
        xp = array_namespace(x)
        before = x.shape
        return record(xp.reshape(x, wanted), (self, lambda g: xp.reshape(g, before)))

    def flatten(self, start: int = 0) -> Tensor:
        """Joins the axes from `start` on into one."""
        return self.reshape(*self.shape[:start], math.prod(self.shape[start:]))

    def permute(self, *axes: int) -> Tensor:
        """Axis i of the result is axis `axes[i]` of this tensor."""
        xp = array_namespace(self.data)
        positive = [axis % self.ndim for axis in axes]
        inverse = tuple(positive.index(i) for i in range(self.ndim))
        return record(xp.permute_dims(self.data, axes), (self, lambda g: xp.permute_dims(g, inverse)))

    def transpose(self, first: int = -2, second: int = -1) -> Tensor:
        """Exchanges two axes."""
        axes = list(range(self.ndim))
        axes[first], axes[second] = axes[second], axes[first]
        return self.permute(*axes)

    def __getitem__(self, index: Any) -> Tensor:
        """Slices, integers, None, Ellipsis, a boolean mask, or integer arrays (repeated indices add up)."""
        x = self.data
        index = tuple(map(_value, index)) if isinstance(index, tuple) else _value(index)
        parts = index if isinstance(index, tuple) else (index,)
        repeats = any(isinstance(part, list) or (is_array_api_obj(part) and not _is_mask(part)) for part in parts)
        shape, dtype = x.shape, x.dtype

        def vjp(g: Array) -> Array:
            xp = array_namespace(g)
            if repeats:  # 16-bit numbers are summed in float32, not least as CuPy adds no bfloat16
                whole = xp.zeros(shape, dtype=xp.float32 if is_short(dtype) else dtype)
                xp.add.at(whole, index, widen(g))
                return cast(whole, dtype)
            whole = xp.zeros(shape, dtype=dtype)
            whole[index] = g
            return whole

        return record(x[index], (self, vjp))

    # Matrices

    def __matmul__(self, other: Any) -> Tensor:
        """The matrix product, batched over leading axes, which broadcast; a vector counts as one row, or column."""
        other = other if isinstance(other, Tensor) else Tensor(other)
        if self.ndim == 1:
            return (self.reshape(1, -1) @ other).squeeze(-2 if other.ndim > 1 else -1)
        if other.ndim == 1:
            return (self @ other.reshape(-1, 1)).squeeze(-1)
        a, b = narrowed(self.data, other.data)
        xp = array_namespace(a, b)
        if b.ndim == 2 and a.ndim > 2:  # one large product instead of many small ones
            rows = xp.reshape(a, (-1, a.shape[-1]))
            return record(
                xp.reshape(product(rows, b), (*a.shape[:-1], b.shape[-1])),
                (self, lambda g: product(g, b.T)),
                (other, lambda g: product(rows.T, xp.reshape(g, (-1, g.shape[-1])))),
            )
        return record(
            product(a, b),
            (self, lambda g: product(g, xp.matrix_transpose(b))),
            (other, lambda g: product(xp.matrix_transpose(a), g)),
        )

    def __rmatmul__(self, other: Any) -> Tensor:
        return Tensor(other) @ self

    def squeeze(self, axis: int) -> Tensor:
        """Without an axis of length 1."""
        shape = list(self.shape)
        if shape.pop(axis) != 1:
            raise ValueError(f"axis {axis} of a tensor of shape {self.shape} has not length 1")
        return self.reshape(shape)


def record(output: Array, *inputs: tuple[Any, VJP]) -> Tensor:
    """The tensor for an operation's `output`, recorded on the tape. What new operations are written with.

    Each of `inputs` is a tensor and its vector-Jacobian product: a function from the gradient of `output` (an array of
    its shape and dtype, not to be changed) to that of the tensor. Where the tensor was broadcast, the gradient may keep
    the broadcast shape. Inputs that are no tensors, or require no gradient, are left out. For example

        def square(x: Tensor) -> Tensor:
            return record(x.data**2, (x, lambda g: 2 * g * x.data))
    """
    result = Tensor(output)
    if tape.is_recording():
        edges = [(_target(x), vjp) for x, vjp in inputs if isinstance(x, Tensor) and x.requires_grad]
        if edges:
            result._node = Node(result.data, edges)
            result.requires_grad = True
    return result


def backward(outputs: Sequence[Tensor], gradients: Sequence[Any]) -> None:
    """One backward pass from several outputs, each with its gradient (None: ones). See `Tensor.backward`."""
    for output in outputs:
        if not output.requires_grad:
            raise RuntimeError("backward: nothing that this tensor was made from requires a gradient")
    seeds = []
    for output, gradient in zip(outputs, gradients, strict=True):
        xp = array_namespace(output.data)
        given = xp.ones_like(output.data) if gradient is None else xp.asarray(_value(gradient), dtype=output.dtype)
        if given.shape != output.shape:
            raise ValueError(f"the gradient of a tensor of shape {output.shape} must have it too, not {given.shape}")
        seeds.append(given)
    tape.backward([_target(output) for output in outputs], seeds)


def _target(tensor: Tensor) -> Any:
    return tensor if tensor._node is None else tensor._node


def _as_array(data: Any, dtype: Any) -> Array:
    if dtype is None and (type(data) is np.ndarray or is_cupy_array(data)) and data.dtype.kind in "fiub":  # most often
        return data
    if isinstance(data, Tensor):
        data = data.data
    if not is_array_api_obj(data):
        data = np.asarray(data)
        if dtype is None and data.dtype == np.float64:
            dtype = np.float32
    xp = array_namespace(data)
    array = xp.asarray(data, dtype=dtype)
    if not _is_a(array, ("bool", "integral", "real floating")):
        raise TypeError(f"a tensor holds real numbers, integers or booleans, not {array.dtype}")
    return array


def _value(operand: Any) -> Any:
    """An operand's array; Python numbers stay as they are and take on the other operand's dtype."""
    if isinstance(operand, Tensor):
        return operand.data
    return float(operand) if isinstance(operand, float) else operand  # numpy.float64 is a float, but would promote


def _is_a(x: Array, kind: Any) -> bool:
    """Whether its dtype is of one of the array API's kinds; 16-bit floats count as "real floating"."""
    if is_short(x.dtype):
        return "real floating" in kind
    return array_namespace(x).isdtype(x.dtype, kind)


def _is_mask(index: Array) -> bool:
    return _is_a(index, "bool")


def _expander(x: Array, axis: Axis, keepdims: bool) -> Callable[[Array], Array]:
    """The function that broadcasts what was reduced over `axis` back to the shape of `x`."""
    xp, shape = array_namespace(x), x.shape
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    kept = list(shape)
    for i in axes:
        kept[i] = 1

    def expand(reduced: Array) -> Array:
        return xp.broadcast_to(xp.reshape(reduced, tuple(kept)), shape)

    return expand
