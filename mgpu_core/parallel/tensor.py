"""Tensor parallelism: every rank has a part of each large layer, and all work on the same samples.

    model = parallelize(transformer(rng), mesh.tensor, sequence_parallel=True)

The layers are those of Megatron-LM (Shoeybi et al. 2019). A linear layer cut by its outputs (`ColumnParallelLinear`)
followed by one cut by its inputs (`RowParallelLinear`) takes a single sum over the ranks each way; attention is cut by
its heads; the embedding and the loss by the vocabulary. Each is made of the whole layer and takes its part of it, so
the same seed gives the same weights for any number of ranks, and a layer of one rank is the layer itself. Nothing has
to divide: parts are as even as can be, and may be empty. Names of parameters stay what they are in the whole model,
and `Parameter.placement` says which part of the whole a rank has.

Sequence parallelism (Korthikanti et al. 2023) also cuts, along the sequence, what lies between those layers: each rank
normalises, drops and adds its part of the positions. The sums become reduce-scatters and all-gathers, which move as
many bytes, and the activations kept there shrink by the number of ranks.

Ranks draw the same dropout masks for what they all have, and for what is cut the masks of its place in the whole: the
training is that of one process, dropout included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.autocast import narrowed, product, widened
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.tape import VJP, Array, once
from mgpu_core.nn import (
    GELU,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    MultiHeadAttention,
    Parameter,
    ReLU,
    Sequential,
    Sigmoid,
    Tanh,
    TransformerBlock,
)
from mgpu_core.nn import functional as F
from mgpu_core.nn.functional.linear import in_range, nan_unless
from mgpu_core.parallel.functions import Scattered, copy, gather, gathered, lengths, reduce, reduce_scatter, split
from mgpu_core.parallel.placement import Placement, Range, even_part
from mgpu_core.tensor import Tensor, record

SEQUENCE = 1  # the axis of positions in (N, T, D)
ELEMENTWISE = (ReLU, GELU, Tanh, Sigmoid)  # work on a part as on the whole

M = TypeVar("M", bound=Module)


def parallelize(model: M, comm: Any, *, sequence_parallel: bool = False) -> M:
    """Cuts a model over the ranks of `comm`, in place, and returns it. With `comm` None nothing changes.

    It computes what it did before: the same outputs, from the same inputs, on every rank. What is cut: transformer
    blocks, embeddings, and in a `Sequential` linear layers that follow each other with only activation functions
    between. Where blocks follow one another and `sequence_parallel` is set, the first takes its part of the sequence
    and the last gathers. All ranks hand over equal models.
    """
    if comm is None:
        return model
    shared = _shared(model)
    for parent in list(model.modules()):
        if isinstance(parent, (TransformerBlock, MultiHeadAttention)):
            continue
        children = list(parent.children())
        blocks = [type(part) is TransformerBlock for _, part in children]
        for (name, part), before, after in zip(children, [False, *blocks], [*blocks[1:], False]):
            if type(part) is TransformerBlock:
                ends = (not before, not after) if sequence_parallel else None
                _replace(parent, name, ParallelTransformerBlock(part, comm, sequence_ends=ends))
            elif type(part) is Embedding:
                _replace(parent, name, VocabularyParallelEmbedding(part, comm))
        if isinstance(parent, Sequential):
            _cut_pairs(parent, comm)
    if _shared(model) != shared:
        raise ValueError("layers that share a parameter cannot be cut one by one; make their parallel layers yourself")
    return model


class ColumnParallelLinear(Linear):
    """A rank's outputs of a `Linear`: (..., inputs) on all ranks to (..., part of outputs) on each.

    With `sequence_parallel` each rank has a part of axis 1 of the input, and they are gathered first. In backward the
    sum of the input's gradient travels while that of the weight is computed.

    Args:
        whole: the layer to take the part of.
        comm: the ranks that share it; None for one.
        rows: which outputs this rank has, if not an even part.
    """

    def __init__(
        self, whole: Linear, comm: Any, *, rows: Sequence[Range] | None = None, sequence_parallel: bool = False
    ) -> None:
        rows = own_range(whole.weight.shape[0], comm) if rows is None else rows
        self.weight = own_part(whole.weight, comm, 0, rows)
        self.bias = None if whole.bias is None else own_part(whole.bias, comm, 0, rows)
        self.comm, self.sequence_parallel = comm, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.comm is None:
            return super().forward(x)
        return _column_linear(x, self.weight, self.bias, self.comm, SEQUENCE if self.sequence_parallel else None)


class RowParallelLinear(Linear):
    """A rank's inputs of a `Linear`: (..., part of inputs) on each rank to the sum (..., outputs) on all.

    With `sequence_parallel` each rank gets its part of axis 1 of the sum. `columns`: which inputs this rank has, if not
    an even part. All ranks have the whole bias.
    """

    def __init__(
        self, whole: Linear, comm: Any, *, columns: Sequence[Range] | None = None, sequence_parallel: bool = False
    ) -> None:
        columns = own_range(whole.weight.shape[1], comm) if columns is None else columns
        self.weight = own_part(whole.weight, comm, 1, columns)
        self.bias = whole.bias
        self.comm, self.sequence_parallel = comm, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if self.sequence_parallel:
            y = reduce_scatter(y, self.comm, SEQUENCE)
            return y if self.bias is None else y + copy(self.bias, self.comm)
        y = reduce(y, self.comm)
        return y if self.bias is None else y + self.bias


class VocabularyParallelEmbedding(Embedding):
    """A rank's rows of an `Embedding`: looks up the indices that it has, and the ranks' findings are added up."""

    def __init__(self, whole: Embedding, comm: Any) -> None:
        self.count = whole.weight.shape[0]
        ((self.first, _),) = rows = own_range(self.count, comm)
        self.weight = own_part(whole.weight, comm, 0, rows)
        self.comm = comm

    def forward(self, indices: Any) -> Tensor:
        w = self.weight.data
        index = device.beside(Tensor(indices).data, w)
        valid = in_range(index, self.count, "an index into the embedding's rows")
        xp, kernels, (count, size) = array_namespace(w), kernels_for(w), w.shape
        flat = xp.reshape(index, (-1,)) - self.first
        (here,) = xp.nonzero((flat >= 0) & (flat < count))
        rows = xp.take(flat, here, axis=0)
        found = xp.zeros((flat.shape[0], size), dtype=w.dtype)
        found[here] = xp.take(w, rows, axis=0)
        if valid is not None:
            found = nan_unless(xp.reshape(valid, (-1, 1)), found)

        def to_weight(g: Array) -> Array:
            return kernels.add_rows(rows, xp.take(xp.reshape(g, (flat.shape[0], size)), here, axis=0), count)

        return reduce(record(xp.reshape(found, (*index.shape, size)), (self.weight, to_weight)), self.comm)


class ParallelAttention(MultiHeadAttention):
    """A rank's heads of a `MultiHeadAttention`: (N, T, size) to (N, T, size), on all ranks or with `sequence_parallel`
    a part of the T positions on each. A rank may be without heads."""

    def __init__(self, whole: MultiHeadAttention, comm: Any, *, sequence_parallel: bool = False) -> None:
        size = whole.output.weight.shape[0]
        ((first, last),) = own_range(whole.heads, comm)
        start, stop = (size // whole.heads * head for head in (first, last))
        rows = [(block + start, block + stop) for block in (0, size, 2 * size)]  # of queries, keys and values
        self.projection = ColumnParallelLinear(whole.projection, comm, rows=rows, sequence_parallel=sequence_parallel)
        self.output = RowParallelLinear(
            whole.output, comm, columns=[(start, stop)], sequence_parallel=sequence_parallel
        )
        self.heads, self.first_head = last - first, first
        self.causal, self.dropout, self.layer = whole.causal, whole.dropout, whole.layer

    def forward(self, x: Tensor, lengths: Any = None) -> Tensor:
        y = self.projection(x)
        if self.heads:
            y = F.self_attention(
                y,
                self.heads,
                causal=self.causal,
                lengths=lengths,
                dropout=self.dropout if self.training else 0.0,
                layer=self.layer,
                first_head=self.first_head,
            )
        return self.output(y)


class SequenceParallelLayerNorm(LayerNorm):
    """A `LayerNorm` of a rank's part of the positions; its parameters' gradients are summed over the ranks."""

    def __init__(self, whole: LayerNorm, comm: Any) -> None:
        self.weight, self.bias, self.eps, self.comm = whole.weight, whole.bias, whole.eps, comm

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, copy(self.weight, self.comm), copy(self.bias, self.comm), eps=self.eps)


class ParallelDropout(Dropout):
    """A `Dropout` of a rank's part of axis 1 (positions, or features): the masks are those of the whole."""

    def __init__(self, whole: Dropout, comm: Any) -> None:
        self.p, self.layer, self.comm = whole.p, whole.layer, comm

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.comm is None:
            return super().forward(x)
        counts = lengths(x.shape[1], self.comm)
        return F.dropout(x, self.p, self.layer, start=sum(counts[: self.comm.rank]), length=sum(counts))


class ParallelTransformerBlock(TransformerBlock):
    """A rank's heads and hidden units of a `TransformerBlock`.

    `sequence_ends` makes it sequence parallel: whether it takes its part of positions that all ranks have, and whether
    it gathers them in the end. Otherwise its input or output is a part (N, part of T, size) on each rank.
    """

    def __init__(self, whole: TransformerBlock, comm: Any, *, sequence_ends: tuple[bool, bool] | None = None) -> None:
        cut = sequence_ends is not None
        self.norm1, self.dropout1, self.norm2, self.dropout2 = whole.norm1, whole.dropout1, whole.norm2, whole.dropout2
        self.attention = ParallelAttention(whole.attention, comm, sequence_parallel=cut)
        self.widen = ColumnParallelLinear(whole.widen, comm, sequence_parallel=cut)
        self.narrow = RowParallelLinear(whole.narrow, comm, sequence_parallel=cut)
        if cut:
            self.norm1, self.norm2 = (SequenceParallelLayerNorm(norm, comm) for norm in (self.norm1, self.norm2))
            self.dropout1, self.dropout2 = (ParallelDropout(drop, comm) for drop in (self.dropout1, self.dropout2))
        self.comm = comm
        self.splits, self.gathers = sequence_ends or (False, False)

    def forward(self, x: Tensor, lengths: Any = None) -> Tensor:
        if self.splits:
            x = split(x, self.comm, SEQUENCE)
        x = super().forward(x, lengths)
        return gather(x, self.comm, SEQUENCE) if self.gathers else x


def vocabulary_parallel_cross_entropy(
    logits: Tensor, targets: Any, comm: Any, *, classes: int, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """`functional.cross_entropy` of logits (..., this rank's part of the classes).

    A `ColumnParallelLinear` makes them (Shoeybi et al. 2019). Two sums over the ranks, of a number or two for each
    sample, stand for all logits. `classes`: how many there are on all ranks. Every rank gets the same loss.
    Raises IndexError for a target that is no class (on a GPU the loss is NaN instead), ValueError for logits that are
    not the rank's part.
    """
    if comm is None:
        return F.cross_entropy(logits, targets, reduction=reduction)
    ((first, last),) = own_range(classes, comm)
    labels = device.beside(Tensor(targets).data, logits.data)
    if logits.shape != (*labels.shape, last - first):
        raise ValueError(
            f"this rank's part of {classes} classes for targets {labels.shape} are logits "
            f"{(*labels.shape, last - first)}, not {logits.shape}"
        )
    valid = in_range(labels, classes, "a class")
    xp, shape, count = array_namespace(logits.data), logits.shape, math.prod(labels.shape)
    rows, labels = xp.reshape(widened(logits.data), (count, last - first)), xp.reshape(labels, (count,)) - first
    (here,) = xp.nonzero((labels >= 0) & (labels < last - first))
    own = xp.take(labels, here, axis=0)

    peaks = xp.max(rows, axis=1) if last > first else xp.full((count,), -math.inf, dtype=rows.dtype)
    peaks = comm.all_reduce(peaks, "max")
    sums = xp.zeros((2, count), dtype=rows.dtype)  # of exponentials, and the target's logit
    sums[0, :] = xp.sum(xp.exp(rows - peaks[:, None]), axis=1)
    sums[1, here] = rows[here, own]
    total, target = comm.all_reduce(sums)
    log_sums = xp.log(total) + peaks
    if valid is not None:
        log_sums = nan_unless(xp.reshape(valid, (count,)), log_sums)
    scale = 1 / max(count, 1) if reduction == "mean" else 1.0

    def vjp(g: Array) -> Array:
        gradient = xp.exp(rows - log_sums[:, None])
        gradient[here, own] -= 1
        return xp.reshape(gradient * (g * scale), shape)

    return record(xp.sum((log_sums - target) * scale), (logits, vjp))


def own_range(count: int, comm: Any) -> list[Range]:
    """This rank's even part of `count` things."""
    return [(0, count) if comm is None else even_part(count, comm.rank, comm.size)]


def own_part(whole: Parameter, comm: Any, axis: int, ranges: Sequence[Range]) -> Parameter:
    """A parameter with the part of `whole` that has these ranges along an axis; `whole` itself for a single rank."""
    if comm is None:
        return whole
    placement = Placement(whole.shape, axis, tuple(ranges))
    held = array_namespace(whole.data).asarray(whole.data[placement.index], copy=True, order="C")
    return Parameter(held, sharded_over=("tensor",), placement=placement)


def _column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, comm: Any, axis: int | None) -> Tensor:
    """`functional.linear` of the copies or, with `axis`, the parts of x."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: the last axis of x {x.shape} must be as long as that of the weight {weight.shape}")
    a, w, b = narrowed(x.data, weight.data, None if bias is None else bias.data)
    xp = array_namespace(a, w)
    counts = [] if axis is None else lengths(x.shape[axis], comm)
    a = a if axis is None else gathered(a, comm, axis, counts)
    shape, outputs = a.shape, w.shape[0]
    count = math.prod(shape[:-1])
    rows = xp.reshape(a, (count, shape[-1]))
    y = product(rows, w.T)
    if b is not None:
        y += b

    @once
    def summing(g: Array) -> Any:
        """The sum of the input's gradient, under way."""
        partial = xp.reshape(product(xp.reshape(g, (count, outputs)), w), shape)
        if axis is None:
            return comm.all_reduce(partial, out=partial, async_op=True)
        return Scattered(partial, comm, axis, counts)

    def meanwhile(vjp: VJP) -> VJP:
        def start_the_sum_first(g: Array) -> Array:
            summing(g)
            return vjp(g)

        return start_the_sum_first if x.requires_grad else vjp

    return record(
        xp.reshape(y, (*shape[:-1], outputs)),
        (weight, meanwhile(lambda g: product(xp.reshape(g, (count, outputs)).T, rows))),
        (bias, meanwhile(lambda g: kernels_for(g).channel_sums(xp.reshape(g, (count, outputs))))),
        (x, lambda g: summing(g).wait()),
    )


def _cut_pairs(model: Sequential, comm: Any) -> None:
    """Cuts linear layers in pairs: the outputs of the first and the inputs of the second."""
    first: tuple[int, Linear] | None = None
    for i, layer in enumerate(model.layers):
        if type(layer) is not Linear:
            first = first if isinstance(layer, ELEMENTWISE) else None
        elif first is None:
            first = i, layer
        else:
            model.layers[first[0]] = ColumnParallelLinear(first[1], comm)
            model.layers[i] = RowParallelLinear(layer, comm)
            first = None


def _shared(model: Module) -> dict[Tensor, int]:
    """The parameters that several layers have, and how many do."""
    values = (value for module in model.modules() for value in vars(module).values())
    counts = Counter(value for value in values if isinstance(value, Tensor))
    return {parameter: count for parameter, count in counts.items() if count > 1}


def _replace(parent: Module, name: str, part: Module) -> None:
    """Puts another module in the place that `Module.children` calls `name`."""
    attribute, _, index = name.partition(".")
    if index:
        getattr(parent, attribute)[int(index)] = part
    else:
        setattr(parent, attribute, part)
