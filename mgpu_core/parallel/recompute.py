"""Activation recomputation: a part of the model keeps its inputs only, and runs again when backward comes to it.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. A model of n layers that is run in sqrt(n) such
parts keeps about 2 sqrt(n) layers' activations instead of n, for one more forward pass.

    x = recompute(block, x)        # in place of x = block(x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from array_api_compat import array_namespace

from mgpu_core import random
from mgpu_core.autograd import tape
from mgpu_core.autograd.autocast import autocast, autocast_dtype
from mgpu_core.autograd.replay import Journal
from mgpu_core.autograd.tape import VJP, Array, Node, once
from mgpu_core.tensor import Tensor, record


def recompute(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, of which nothing is kept for the backward pass but `inputs`.

    `function` is a module or any function; it returns a tensor or a tuple of tensors, and depends on nothing that
    changes until backward. Outputs and gradients have the bits that they have without recomputation: the second run
    has the random numbers of the first (`random.batch`), batch norm finds the statistics that the first one found, and
    moves its running ones in the first only. A parameter's gradient is announced once, after its last use, wherever
    its uses are. Where nothing is recorded, it is a plain call.
    """
    if not tape.is_recording():
        return function(*inputs)
    began, journal, randomness, dtype = tape.mark(), Journal(), random.current(), autocast_dtype()
    with journal.record():
        outputs = function(*inputs)
    parts: tuple[Tensor, ...] = outputs if isinstance(outputs, tuple) else (outputs,)
    sources = list(_cut(parts, began))
    if not sources:
        return outputs

    gradients: dict[int, Array] = {}

    @once
    def run_again(_: Array) -> dict[Any, Array]:
        """The gradients of `sources`, from those of the outputs."""
        began = tape.mark()
        with tape.recording(True), autocast(dtype), random.resumed(randomness), journal.replay():
            again = function(*inputs)
        again = again if isinstance(again, tuple) else (again,)
        ends = _cut(again, began)
        tape.backward([again[i]._node for i in gradients], list(gradients.values()))
        return {source: end.gradient for source, end in ends.items()}

    def to_source(source: Any, token: Array) -> Array:
        xp = array_namespace(token)
        gradient = run_again(token)[source]
        return xp.zeros(source.shape, dtype=source.dtype) if gradient is None else gradient

    # The outputs' gradients come one by one; the segment's node is visited after all of them.
    xp = array_namespace(parts[0].data)
    edges: list[tuple[Any, VJP]] = [(source, partial(to_source, source)) for source in sources]
    segment = Tensor(xp.zeros((0,), dtype=xp.float32))
    segment._node, segment.requires_grad = Node(segment.data, edges), True

    def collect(i: int, gradient: Array) -> Array:
        gradients[i] = gradient
        return segment.data

    results = tuple(
        record(part.data, (segment, partial(collect, i))) if _is_new(part._node, began) else part
        for i, part in enumerate(parts)
    )
    return results if isinstance(outputs, tuple) else results[0]


class _End:
    """Stands where the graph was cut, and keeps the gradient that arrives there."""

    def __init__(self, source: Any) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self.gradient: Array = None

    def accumulate_grad(self, gradient: Array) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def announce_grad(self) -> None:
        """The gradient is taken when the pass is over."""


def _cut(outputs: Iterable[Tensor], began: int) -> dict[Any, _End]:
    """Cuts the graph of `outputs` off from all that was there before `began`: leaves, and nodes of other operations."""
    ends: dict[Any, _End] = {}
    stack: list[Any] = [output._node for output in outputs if _is_new(output._node, began)]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            for i, (target, vjp) in enumerate(node.edges):
                if _is_new(target, began):
                    stack.append(target)
                else:
                    node.edges[i] = ends.setdefault(target, _End(target)), vjp
    return ends


def _is_new(target: Any, began: int) -> bool:
    """Whether it is the node of an operation recorded since `began`."""
    return isinstance(target, Node) and target.order > began
