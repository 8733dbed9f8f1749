"""The tape: a graph of the operations that made a tensor, and the walk over it that yields gradients.

Reverse-mode differentiation. Each operation leaves one `Node` with an edge for every differentiable input: where
that input came from, and its vector-Jacobian product (the function that turns the gradient of the output into the
gradient of that input; the formulation of Maclaurin, Duvenaud and Adams, "Autograd", 2015). One function per input
means that an input which needs no gradient costs nothing, and that input and weight gradients can be taken apart.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from array_api_compat import array_namespace

Array = Any  # anything with the array API: numpy.ndarray, cupy.ndarray
VJP = Callable[[Array], Array]

_clock = itertools.count()


class _Mode(threading.local):
    recording = True


_mode = _Mode()


@contextmanager
def recording(mode: bool) -> Iterator[None]:
    """Inside (this thread only), operations go on the tape, or leave nothing there."""
    before, _mode.recording = _mode.recording, mode
    try:
        yield
    finally:
        _mode.recording = before


@contextmanager
def no_grad() -> Iterator[None]:
    """Inside (this thread only), operations leave nothing on the tape. Works as a decorator as well."""
    with recording(False):
        yield


def mark() -> int:
    """A point in time: every node made so far has a smaller `order`, every later one a larger."""
    return next(_clock)


def is_recording() -> bool:
    """Whether operations of this thread go on the tape."""
    return _mode.recording


class Target(Protocol):
    """Where a gradient can go: a `Node`, or a tensor at the edge of the graph."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class Leaf(Target, Protocol):
    """A tensor that no operation made: its gradient is kept."""

    def accumulate_grad(self, gradient: Array) -> None: ...

    def announce_grad(self) -> None: ...


class Node:
    """One recorded operation. `edges` is None once a backward pass has used, and freed, what the operation saved."""

    __slots__ = ("edges", "order", "shape", "dtype", "__weakref__")

    def __init__(self, output: Array, edges: list[tuple[Any, VJP]]) -> None:
        self.shape: tuple[int, ...] = output.shape
        self.dtype = output.dtype
        self.edges: list[tuple[Any, VJP]] | None = edges
        self.order = next(_clock)  # inputs are made before outputs, so descending order is a topological order


def backward(targets: Sequence[Node | Leaf], gradients: Sequence[Array]) -> None:
    """Propagates `gradients` of `targets` to every leaf that they depend on.

    Nodes are visited latest first. What a node saved, and the gradient of its output, are freed as soon as it has
    been visited. A leaf's gradient is added to in place, use by use; when its last use has been added the leaf
    announces it, once, while the walk goes on.

    Raises RuntimeError where the graph, or a part of it, was freed by an earlier backward pass.
    """
    nodes, uses = _reach(targets)
    pending: dict[Node, Array] = {}
    summed: set[Node] = set()  # nodes whose pending gradient is our own array, free to be added to in place

    def deliver(target: Any, gradient: Array) -> None:
        gradient = _fit(gradient, target)
        if not isinstance(target, Node):
            target.accumulate_grad(gradient)
            uses[target] -= 1
            if not uses[target]:
                target.announce_grad()
        elif target not in pending:
            pending[target] = gradient
        elif target in summed:
            pending[target] += gradient
        else:
            pending[target] = pending[target] + gradient
            summed.add(target)

    def visit(node: Node) -> None:
        edges, node.edges = node.edges, None
        gradient = pending.pop(node)
        for target, vjp in edges or ():
            deliver(target, vjp(gradient))

    for target, gradient in zip(targets, gradients, strict=True):
        deliver(target, gradient)
    for node in sorted(nodes, key=lambda node: node.order, reverse=True):
        visit(node)


def once(function: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """For what several inputs' gradients have in common: computed for the first of them, remembered for the others."""
    result: list[Any] = []

    def call(gradient: Array) -> Any:
        if not result:
            result.append(function(gradient))
        return result[0]

    return call


def _reach(targets: Sequence[Node | Leaf]) -> tuple[set[Node], dict[Leaf, int]]:
    """Every node below `targets`, and how often each leaf is used there."""
    nodes: set[Node] = set()
    uses: dict[Leaf, int] = {}
    stack: list[Any] = list(targets)
    while stack:
        target = stack.pop()
        if not isinstance(target, Node):
            uses[target] = uses.get(target, 0) + 1
        elif target not in nodes:
            if target.edges is None:
                raise RuntimeError(
                    "this graph was already used by a backward pass, which freed it; run the forward pass again "
                    "(losses that share a graph: add them up and call backward once)"
                )
            nodes.add(target)
            stack.extend(source for source, _ in target.edges)
    return nodes, uses


def _fit(gradient: Array, target: Target) -> Array:
    """Sums `gradient` over the axes along which `target` was broadcast, and gives it the dtype of `target`."""
    if gradient.shape != target.shape:
        xp = array_namespace(gradient)
        extra = gradient.ndim - len(target.shape)
        shape = (1,) * extra + target.shape
        axes = tuple(i for i, (have, want) in enumerate(zip(gradient.shape, shape)) if want == 1 and have != 1)
        summed = xp.sum(gradient, axis=axes, keepdims=True) if axes else gradient
        if extra < 0 or summed.shape != shape:
            raise ValueError(f"a gradient of shape {gradient.shape} was given for an array of shape {target.shape}")
        gradient = xp.reshape(summed, target.shape)
    return gradient if gradient.dtype == target.dtype else array_namespace(gradient).astype(gradient, target.dtype)
