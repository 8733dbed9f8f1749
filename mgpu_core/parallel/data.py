"""Synchronous data parallelism: every rank holds the whole model and works on its part of each batch.

Gradients are summed over the ranks in buckets, each as soon as backward has completed it, so that communication
hides behind the rest of backward (Li et al., "PyTorch Distributed", VLDB 2020). The sum is the gradient of

    loss = (sum of the losses of a rank's samples) / (number of samples in the global batch), summed over ranks

which is the mean over the global batch, however unequal the ranks' parts are, a rank without samples included.
An average of the ranks' own means would be wrong there.

    model = DataParallel(model, comm)
    loss = cross_entropy(model(images), labels, reduction="sum") / batch.global_count
    loss.backward()
    model.synchronize()
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

import collectives
from collectives.initialise import ON_GPU
from mgpu_core.nn import Module, Parameter
from mgpu_core.tensor import Tensor

Batch = TypeVar("Batch")


class DataParallel:
    """Makes a model's gradients the sums over all ranks.

    At the start every rank takes rank 0's parameters and buffers. With `comm` None or of size 1 nothing is
    communicated, and the same training loop runs alone.

    Args:
        model: the same on every rank, with parameters in the same order.
        comm: the ranks that train it; of a `Mesh`, its `data`.
        options: of `collectives.Bucketer`: `bucket_bytes`, `first_bucket_bytes`, and `hook`, one of
            `mgpu_core.parallel.hooks`, to send less.

    Attributes:
        unused: the parameters that this rank's latest step did not reach, by name.
    """

    def __init__(self, model: Module, comm: Any = None, **options: Any) -> None:
        self.model = model
        self.comm: Any = comm if comm is not None and comm.size > 1 else None
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._complete: set[int] = set()
        self._syncing = True
        self.unused: list[str] = []
        if self.comm is None:
            return
        for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.comm.broadcast(tensor.data, root=0)
        self._share(**options)
        for index, parameter in enumerate(self._parameters.values()):
            parameter.on_grad_ready(partial(self._announce, index))

    def _share(self, **options: Any) -> None:
        """Get ready to communicate."""
        specs = [(p.shape, p.dtype) for p in self._parameters.values()]
        on_host = all(p.device == "cpu" for p in self._parameters.values())
        if not on_host and getattr(options.get("hook"), "on_host", False):
            raise ValueError(
                f"{type(options['hook']).__name__} computes on the host, and the model is on a GPU: take Bfloat16() or "
                f"no hook, or model.to('cpu') first"
            )
        zeros = np.zeros if on_host and self.comm.backend in ON_GPU else None
        self._bucketer = collectives.Bucketer(self.comm, specs, zeros=zeros, **options)
        self._keep_gradients_in_buckets()

    def __call__(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """What this rank's optimiser is to update, by name."""
        return self.model.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The model's state that is not trained, by name."""
        return self.model.named_buffers()

    def parameters(self) -> Iterator[Parameter]:
        """The same without the names, as `clip_grad_norm` takes them."""
        return (parameter for _, parameter in self.named_parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add to this rank's gradients and send nothing.

        For large batches in small pieces: all but the last piece in here, then `synchronize`.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def join(
        self, batches: Iterable[Batch], count: Callable[[Batch], int], *, empty: Batch | None = None
    ) -> Iterator[tuple[Batch | None, int]]:
        """Goes through `batches`, of which ranks may have different numbers, until no rank has any left.

        Yields (batch, total): this rank's next batch and the number of samples of all ranks' batches together; `count`
        says how many a batch has. A rank that has none left yields `empty` in its place, so that it takes part in
        the others' steps with weight zero (the purpose of PyTorch's `Join`):

            for batch, total in model.join(batches, count=lambda batch: len(batch[1])):
                optimizer.zero_grad()
                if batch is not None:
                    (summed_loss(model, batch) / total).backward()
                model.synchronize()
                optimizer.step()

        A model that communicates in its forward pass (synchronised batch norm, parameters sharded in stage 3) has to
        run on every rank: give a batch of no samples as `empty` then, and run that. All ranks must call.
        """
        left = iter(batches)
        while True:
            batch = next(left, None)
            mine = np.array([0 if batch is None else count(batch), batch is not None], np.int64)
            total, ranks = (mine if self.comm is None else self.comm.all_reduce(mine)).tolist()
            if not ranks:
                return
            yield (empty if batch is None else batch), total

    def synchronize(self) -> float:
        """Wait until every gradient is the sum over all ranks; the seconds that took.

        To be called by every rank once between backward and the optimiser's step. A parameter that this rank's
        backward did not reach (no part of the model that ran uses it) takes part with what its gradient holds,
        normally zeros; `unused` names it.
        """
        if self.comm is None:
            return 0.0
        self._announce_unused()
        waited = self._bucketer.finish()
        self._keep_gradients_in_buckets()  # which the first step lays out anew
        return waited

    def refresh(self) -> None:
        """To be called after parameters were changed otherwise than by the optimiser's step: loaded, say."""

    def average_buffers(self) -> None:
        """Make buffers that ranks keep apart (batch norm's running statistics) their average over the ranks.

        Those are moving averages, so averaging them now and then gives what averaging them in every step would.
        """
        if self.comm is not None:
            average_buffers(self.model, self.comm)

    def _announce(self, index: int, parameter: Tensor) -> None:
        if not self._syncing:
            return
        if index in self._complete:
            name = list(self._parameters)[index]
            raise RuntimeError(
                f"the gradient of {name} was completed twice since the last synchronize(), but it is already being "
                "summed over the ranks; run all backward passes but the last inside no_sync()"
            )
        self._complete.add(index)
        self._ready(index, parameter)

    def _announce_unused(self) -> None:
        self.unused = [name for index, name in enumerate(self._parameters) if index not in self._complete]
        for index, parameter in enumerate(self._parameters.values()):
            if index not in self._complete:
                self._ready(index, parameter)
        self._complete.clear()

    def _ready(self, index: int, parameter: Tensor) -> None:
        """This rank's part of a gradient is final."""
        _ = parameter.grad  # what was cleared and not reached is written as zeros now
        self._bucketer.ready(index)

    def _keep_gradients_in_buckets(self) -> None:
        for parameter, view in zip(self._parameters.values(), self._bucketer.views):
            if parameter.grad is not view:
                parameter.grad = view


def average_buffers(model: Module, comm: Any) -> None:
    """Make a model's buffers, in place, their average over the ranks."""
    for buffer in model.buffers():
        comm.all_reduce(buffer.data, op="avg", out=buffer.data)
