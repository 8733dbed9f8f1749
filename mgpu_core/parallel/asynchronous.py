"""Asynchronous data parallelism: workers that pull parameters and push gradients without waiting for one another.

    model = Asynchronous(network, comm, partial(optim.SGD, lr=0.1, momentum=0.9))
    loader = Loader((images, labels), Sampler(len(images), batch=128, seed=1))  # whole batches: no rank, no size
    for epoch in range(epochs):
        for batch in model.batches(loader, epoch):
            model.pull()
            loss = cross_entropy(model(Tensor(images)), labels, reduction="sum") / len(labels)
            loss.backward()
            model.push(lr=schedule(batch.epoch * loader.sampler.steps + batch.step))
        # here all workers have met, and hold the same parameters

It is the parameter server of Downpour SGD (Dean et al., "Large scale distributed deep networks", 2012), without a
server: the parameters lie in shared memory, an equal part with each rank, and whoever pushes does the update. An owner
that did it between steps of its own would let a shard wait for the slowest rank, and a server process would take a core
from the workers.

**What a pull sees.** Each shard as it was after a whole number of pushes, since a lock guards it while it is read and
while it is changed; different shards perhaps after different numbers. (Hogwild of Recht et al. 2011 gives up the lock,
and with it any such promise; that pays where updates are sparse.) A push changes each shard once, by the optimiser's
step for the gradient pushed. So one worker alone does what the plain optimiser does, bit for bit.

**What it gives up.** A gradient is computed at parameters to which others have pushed meanwhile. How often is counted:
a push's *staleness* is the number of other pushes since its pull. With p equally fast workers it is p - 1 on average.

**Momentum** makes it worse. Along a direction of curvature h, one process with a momentum of 0.9 is stable for rates
up to 3.8 / h. If two workers in turn push into one momentum, each a single push late, that becomes 0.1 / h: asynchrony
is a momentum of its own (Mitliagkas et al., "Asynchrony begets momentum", 2016), and the sum is too much. So here each
worker has a momentum (and in general, an optimiser's state) of its own gradients: 0.19 / h. And with `nesterov=True` a
push goes ahead to where its momentum will carry it, which is nearer to where those gradients are computed that come
meanwhile: 0.56 / h, and with four workers 0.22 / h, against 0.035 / h for one momentum. That is DANA-Slim of Hakimi et
al., "Taming momentum in a distributed asynchronous environment", 2019.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from collectives.initialise import ON_GPU
from mgpu_core.autograd.tape import Array
from mgpu_core.data import Batch, Loader
from mgpu_core.data.sampler import split
from mgpu_core.nn import Module, Parameter
from mgpu_core.optim import Optimizer
from mgpu_core.parallel.data import average_buffers
from mgpu_core.tensor import Tensor

MakeOptimizer = Callable[[Iterable[tuple[str, Tensor]]], Optimizer]

_LINE = 64  # bytes
_ROUND = 2**40  # what the workers' clocks advance in a call of `batches`: more than anybody pushes in one
_MEMORY, _EPSILON = 0.95, 1e-7  # of DC-ASGD's running mean of squared gradients


class Staleness:
    """How stale pushes were. `counts[s]` of them came after s pushes of others since their pull."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    @property
    def mean(self) -> float:
        """NaN before the first push."""
        pushes = self.counts.total()
        return sum(s * n for s, n in self.counts.items()) / pushes if pushes else math.nan

    @property
    def max(self) -> int:
        return max(self.counts, default=0)


class Piece(NamedTuple):
    """A shard's part of a parameter: elements [start, stop) of it, flattened."""

    name: str
    start: int
    stop: int


def cut(sizes: Mapping[str, int], shards: int) -> list[list[Piece]]:
    """The parameters, laid end to end in their order, cut into shards of equally many elements.

    >>> cut({"weight": 4}, 2)
    [[Piece(name='weight', start=0, stop=2)], [Piece(name='weight', start=2, stop=4)]]
    """
    pieces: list[list[Piece]] = [[] for _ in range(shards)]
    left = split(sum(sizes.values()), [1] * shards)
    shard = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            while not left[shard]:
                shard += 1
            stop = min(size, start + left[shard])
            pieces[shard].append(Piece(name, start, stop))
            left[shard] -= stop - start
            start = stop
    return pieces


class ParameterStore:
    """Parameters in symmetric memory, a shard with each rank; all ranks read and change them, each by an optimiser of
    its own.

    Args:
        comm: the ranks, on one host. All make their stores together.
        parameters: by name, the same on every rank; rank 0's values count, and all have them afterwards.
        optimizer: makes an optimiser for some (name, tensor) pairs: `partial(optim.SGD, lr=0.1)`. It has to be one that
            works element by element; one that needs whole parameters (LARS) refuses.
        delay_compensation: lambda_0 of DC-ASGD-a (Zheng et al., "Asynchronous stochastic gradient descent with delay
            compensation", 2017; they use 2): to a gradient g computed at w_0, and applied at w, it adds
            lambda_0 / sqrt(m + 1e-7) * g * g * (w - w_0), m being the running mean of g * g. 0 leaves gradients alone.
    """

    def __init__(
        self, comm: Any, parameters: Mapping[str, Tensor], optimizer: MakeOptimizer, *, delay_compensation: float = 0.0
    ) -> None:
        if not 0 <= delay_compensation < math.inf:
            raise ValueError(f"delay_compensation is a finite number from 0; got {delay_compensation}")
        if comm.backend in ON_GPU:
            raise ValueError(
                f"workers share parameters in the host's memory, and a {comm.backend} communicator's is a GPU's: take "
                f'collectives.init("shm")'
            )
        if away := [name for name, parameter in parameters.items() if parameter.device != "cpu"]:
            raise ValueError(
                f"workers share parameters in the host's memory, and {away[0]} is on a GPU: model.to('cpu') first; on "
                f"GPUs train by DataParallel, Sharded(stage=1 or 2) or LocalSGD"
            )
        self.comm = comm
        self.parameters = dict(parameters)
        for name, parameter in self.parameters.items():
            if not parameter.data.flags.c_contiguous:
                raise ValueError(f"{name} must be C-contiguous to be shared; its strides are {parameter.data.strides}")
            comm.broadcast(parameter.data, root=0)
        flat = {name: parameter.data.reshape(-1) for name, parameter in self.parameters.items()}
        pieces = cut({name: x.size for name, x in flat.items()}, comm.size)
        self._shards = [_Shard(part, flat, optimizer, delay_compensation) for part in pieces]
        memory = comm.zeros(max(shard.nbytes for shard in self._shards), np.uint8)
        self._memory = memory  # which lives as long as the store
        for owner, shard in enumerate(self._shards):
            shard.settle(memory, comm.peer(memory, owner), fill=owner == comm.rank)
        comm.barrier()

    def pull(self) -> None:
        """Copy every shard into this rank's parameters, and remember how many pushes each has had."""
        for owner, shard in self._in_turn():
            with self.comm.lock(shard.lock, owner):
                shard.read()

    def push(self, lr: float | Callable[[int], float]) -> int:
        """Let the optimiser do one step with this rank's gradients, shard by shard; the largest staleness of these.

        `lr` is the learning rate, or a function from the staleness, an integer from 0, to it. Parameters without a
        gradient count as having zeros. The rank's own parameters stay what was last pulled.
        """
        gradients = {name: p.grad.reshape(-1) for name, p in self.parameters.items() if p.grad is not None}
        stalest = 0
        for owner, shard in self._in_turn():
            with self.comm.lock(shard.lock, owner):
                staleness = shard.pushes - shard.pulled
                shard.apply(gradients, lr(staleness) if callable(lr) else lr)
            stalest = max(stalest, staleness)
        return stalest

    def state_dict(self) -> dict[str, Array]:
        """The state of this rank's optimiser, as `Optimizer.state_dict` gives it for whole parameters; of steps, all
        ranks'."""
        shards = [shard for _, shard in self._in_turn()]
        kinds = list(shards[0].optimizer.state)
        state: dict[str, Array] = {"steps": np.asarray(shards[0].pushes)}
        for kind in kinds:
            for name, parameter in self.parameters.items():
                whole = np.empty_like(parameter.data)
                for shard in shards:
                    shard.copy(kind, name, whole.reshape(-1), out=True)
                state[f"{kind}.{name}"] = whole
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take on parameters (this rank's own tensors hold them) and optimiser state. All ranks call it together, with
        the same parameters.

        Raises KeyError where the state is of another optimiser or model.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            raise KeyError(
                f"the state is of another optimiser or model: missing {sorted(own.keys() - state.keys())}, "
                f"not expected {sorted(state.keys() - own.keys())}"
            )
        self.comm.barrier()
        for owner, shard in self._in_turn():
            shard.optimizer.steps = shard.pushes = int(state["steps"])
            for name, parameter in self.parameters.items():
                if owner == self.comm.rank:  # its owner's to write
                    shard.copy("", name, parameter.data.reshape(-1), out=False)
                for kind in shard.optimizer.state:
                    shard.copy(kind, name, np.ascontiguousarray(state[f"{kind}.{name}"]).reshape(-1), out=False)
        self.comm.barrier()

    def average_state(self) -> None:
        """Make the state of the ranks' optimisers its mean, which has the same sum: for a checkpoint, say. All ranks
        call it together."""
        for shard in self._shards:
            if shard.pieces:
                for arrays in shard.optimizer.state.values():
                    for array in arrays.values():
                        self.comm.all_reduce(array, "avg", out=array)

    def _in_turn(self) -> Iterator[tuple[int, _Shard]]:
        """The shards that hold anything, from this rank's own on: so that ranks are rarely at the same one."""
        size = self.comm.size
        for i in range(size):
            owner = (self.comm.rank + i) % size
            if self._shards[owner].pieces:
                yield owner, self._shards[owner]


class _Shard:
    """One shard, as this rank sees it: tensors over its owner's memory, this rank's optimiser over those, and what this
    rank has pulled of it."""

    optimizer: Optimizer

    def __init__(
        self, pieces: list[Piece], flat: Mapping[str, Array], optimizer: MakeOptimizer, compensation: float
    ) -> None:
        self.pieces, self.compensation, self.pulled = pieces, compensation, 0
        self._own = {piece: flat[piece.name][piece.start : piece.stop] for piece in pieces}  # this rank's parameters
        self._tensors = {
            piece: Parameter(own.copy(), sharded_over=("shard",) if own.size < flat[piece.name].size else ())
            for piece, own in self._own.items()
        }
        self._squares = {piece: np.zeros_like(own) for piece, own in self._own.items()} if compensation else {}
        if pieces:
            self.optimizer = optimizer([(piece.name, tensor) for piece, tensor in self._tensors.items()])
        self.nbytes = sum(self._sizes())

    def settle(self, memory: Array, view: Array, fill: bool) -> None:
        """Move everything into `view`, the owner's counterpart of this rank's symmetric `memory`.

        With `fill` the present values are written there.
        """
        starts = np.cumsum([0, *self._sizes()])[:-1].tolist()
        self.lock = memory[:8].view(np.int64)
        self._pushes = view[_LINE : _LINE + 8].view(np.int64)

        def place(array: Array, start: int) -> Array:
            there: Array = view[start : start + array.nbytes].view(array.dtype)
            if fill:
                there[...] = array
            return there

        for (keep, key), start in zip(self._places(), starts[2:], strict=True):
            if isinstance(keep[key], Tensor):
                keep[key].data = place(keep[key].data, start)
            else:
                keep[key] = place(keep[key], start)

    def _places(self) -> list[tuple[Any, Any]]:
        """Everything that lies in the shard, as (dictionary, key)."""
        return [(keep, key) for keep in (self._tensors, self._squares) for key in keep]

    def _sizes(self) -> list[int]:
        """Bytes of the lock, the count of pushes and the arrays, each on lines of its own."""
        arrays = [keep[key].data if isinstance(keep[key], Tensor) else keep[key] for keep, key in self._places()]
        return [_LINE, _LINE, *(-(-array.nbytes // _LINE) * _LINE for array in arrays)]

    @property
    def pushes(self) -> int:
        """How many the shard has had."""
        return self._pushes.item()

    @pushes.setter
    def pushes(self, count: int) -> None:
        self._pushes[0] = count

    def read(self) -> None:
        self.pulled = self.pushes
        for piece, own in self._own.items():
            own[...] = self._tensors[piece].data

    def apply(self, gradients: Mapping[str, Array], lr: float) -> None:
        for piece, tensor in self._tensors.items():
            gradient = gradients[piece.name][piece.start : piece.stop] if piece.name in gradients else None
            if gradient is not None and self.compensation:
                gradient = self._compensated(piece, gradient)
            tensor.grad = gradient
        self.optimizer.lr = lr
        self.optimizer.step()
        self.pushes += 1

    def _compensated(self, piece: Piece, gradient: Array) -> Array:
        number = gradient.dtype.type
        square, mean = gradient * gradient, self._squares[piece]
        mean *= number(_MEMORY)
        mean += number(1 - _MEMORY) * square
        rate = number(self.compensation) / np.sqrt(mean + number(_EPSILON))
        drift = self._tensors[piece].data - self._own[piece]
        return gradient + rate * square * drift

    def copy(self, kind: str, name: str, flat: Array, *, out: bool) -> None:
        """Copy the shard's part of a parameter's state ("": of the parameter) into the flat array, or from it."""
        for piece in self.pieces:
            if piece.name == name:
                there = self.optimizer.state[kind][name] if kind else self._tensors[piece].data
                here = flat[piece.start : piece.stop]
                (here if out else there)[...] = there if out else here


class Asynchronous:
    """Makes a model one of several workers that train the same parameters, each at its own pace.

    See the module's docstring for an example. A worker that dies or fails raises on the others at their next pull.

    Args:
        model: the same on every rank; all take rank 0's parameters and buffers.
        comm: the ranks. One rank alone is plain training.
        optimizer: as for `ParameterStore`; with momentum, better Nesterov's, as the module's docstring says.
        bound: stale-synchronous (Ho et al., "More effective distributed machine learning via a stale synchronous
            parallel parameter server", 2013): a worker whose pushes are more than this ahead of the slowest worker's
            waits for it in `pull`; nobody else waits, nor anybody for a worker that has no batch left. That evens out
            delays that come and go; a worker that is always slower slows the others down to its pace in the end.
            None: nobody ever waits.
        delay_compensation: as for `ParameterStore`.
        staleness_aware: divide the learning rate of a push by its staleness, where that is above 1 (Zhang et al.,
            "Staleness-aware async-SGD for distributed deep learning", 2016).

    Attributes:
        staleness: of this worker's pushes.
        reached, halted: the step before which the latest `batches` ended, and whether `halt` ended it.
        ahead: the most pushes that this worker was ahead of the slowest one when it pulled.
    """

    def __init__(
        self,
        model: Module,
        comm: Any,
        optimizer: MakeOptimizer,
        *,
        bound: int | None = None,
        delay_compensation: float = 0.0,
        staleness_aware: bool = False,
    ) -> None:
        if bound is not None and bound < 0:
            raise ValueError(f"a staleness bound is a whole number from 0, or None; got {bound}")
        self.model, self.comm, self.bound, self.staleness_aware = model, comm, bound, staleness_aware
        for buffer in model.buffers():
            comm.broadcast(buffer.data, root=0)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.store = ParameterStore(comm, trained, optimizer, delay_compensation=delay_compensation)
        self.staleness = Staleness()
        self.ahead = 0
        self._drawn = comm.zeros(1, np.int64)  # rank 0's counts the batches that have been taken
        self._end = comm.zeros(1, np.int64)  # rank 0's: where they end
        self._end_of_all = comm.peer(self._end, 0)
        self.reached, self.halted = 0, False
        self._clock = comm.zeros(1, np.int64)  # every rank's counts its pushes; those who have finished are far ahead
        self._clocks = [comm.peer(self._clock, rank) for rank in range(comm.size)]
        self._round = 0

    def __call__(self, *inputs: Any) -> Tensor:
        return self.model(*inputs)

    def batches(self, loader: Loader, epoch: int, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The batches of `epoch` from step `start` to before `stop` (None: to the end) that this worker gets: each goes
        to one worker, whoever asks first. So all samples are used once, and who is fast takes more.

        All workers call it together, and go through it to its end, where they `meet`. `loader` gives whole batches (it
        is made for one rank of one); with `depth=1` few batches are left with a slow worker at the end.
        """
        if len(loader.shares) != 1:
            raise ValueError(f"workers take whole batches: make the loader for 1 rank, not for {len(loader.shares)}")
        stop = loader.sampler.steps if stop is None else stop
        self.comm.barrier()
        self._round += _ROUND
        if self.comm.rank == 0:
            self._drawn[0], self._end[0] = start, stop
        self.comm.barrier()
        try:
            with loader.epoch(epoch, steps=self._draw(stop)) as batches:
                yield from batches
        finally:
            self._clock[0] = self._round  # also where the communicator has failed
        self.meet()
        self.reached = self._end_of_all.item()
        self.halted = self.comm.get(self._drawn, 0).item() >= _ROUND

    def halt(self) -> None:
        """Nobody is given another batch in the present `batches`; those already given are trained on."""
        taken = self.comm.fetch_add(self._drawn, _ROUND, 0)
        if taken < _ROUND:
            self._end_of_all[0] = min(taken, self._end_of_all.item())

    def _draw(self, stop: int) -> Iterator[int]:
        while (step := self.comm.fetch_add(self._drawn, 1, 0)) < stop:
            yield step

    def pull(self) -> None:
        """Take the present parameters, and clear the gradients. Waits only where `bound` is set, as it says.

        Raises PeerLostError if a worker that has not finished died, and what a worker gave up with.
        """
        mine = self._clock.item()
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank and not self._finished(rank)]
        self.comm.check(others)
        if self.bound is not None:
            for rank in others:
                self.comm.wait_until(self._clock, mine - self.bound, rank)
        self.ahead = max([self.ahead, *(mine - self._clocks[rank].item() for rank in others)])
        self.store.pull()
        self.model.zero_grad()

    def push(self, lr: float) -> int:
        """Apply this worker's gradients to the shared parameters, as one step of the optimiser; how stale they were."""
        staleness = self.store.push((lambda s: lr / max(1, s)) if self.staleness_aware else lr)
        self.comm.fetch_add(self._clock, 1, self.comm.rank)
        self.staleness.counts[staleness] += 1
        return staleness

    def meet(self) -> None:
        """Wait for all workers, and take the parameters: the same on all of them. All call it together."""
        self.comm.barrier()
        self.store.pull()
        self.comm.barrier()

    def average_buffers(self) -> None:
        """Make buffers (batch norm's running statistics) their average over the ranks; all call it together."""
        average_buffers(self.model, self.comm)

    def _finished(self, rank: int) -> bool:
        return self._clocks[rank].item() >= self._round
