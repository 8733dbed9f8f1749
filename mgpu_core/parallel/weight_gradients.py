"""Backward in two halves: the gradient that the stage before waits for now, those of the parameters later.

The tape has an edge with its own vector-Jacobian product for each input of an operation, so the two come apart by
taking the parameters' edges out of the graph (the B and W of Qi et al., "Zero Bubble Pipeline Parallelism", 2024).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from mgpu_core.autograd import tape
from mgpu_core.autograd.tape import VJP, Array, Node
from mgpu_core.tensor import Tensor


class WeightGradients:
    """Takes the edges to all leaves but `inputs` out of the graph of `outputs`; `backward` goes along them.

    A backward pass from `outputs` must come between. It leaves here the gradients of the operations that had such
    edges, so the arrays that these saved are kept until `backward` is over.
    """

    def __init__(self, outputs: Iterable[Tensor], inputs: Collection[Tensor]) -> None:
        self._ends: list[_End] = []
        for node in sorted(_nodes(outputs), key=lambda node: node.order):
            assert node.edges is not None
            is_weight = [isinstance(target, Tensor) and target not in inputs for target, _ in node.edges]
            if any(is_weight):
                end = _End(node, [edge for edge, weight in zip(node.edges, is_weight) if weight])
                node.edges = [edge for edge, weight in zip(node.edges, is_weight) if not weight]
                node.edges.append((end, lambda gradient: gradient))
                self._ends.append(end)

    def backward(self) -> None:
        """Adds to the parameters' gradients, in the order in which an undivided backward pass would."""
        tape.backward([end.operation for end in self._ends], [end.gradient for end in self._ends])
        self._ends.clear()


class _End:
    """A leaf in the parameters' place, which keeps the gradient of the operation that used them."""

    def __init__(self, node: Node, weights: list[tuple[Any, VJP]]) -> None:
        self.shape, self.dtype = node.shape, node.dtype
        self.operation = Node(node, weights)
        self.gradient: Array = None

    def accumulate_grad(self, gradient: Array) -> None:
        self.gradient = gradient

    def announce_grad(self) -> None:
        """Nobody waits for it."""


def _nodes(outputs: Iterable[Tensor]) -> set[Node]:
    found: set[Node] = set()
    stack: list[Any] = [output._node for output in outputs]
    while stack:
        target = stack.pop()
        if isinstance(target, Node) and target not in found:
            found.add(target)
            stack.extend(source for source, _ in target.edges or ())
    return found
