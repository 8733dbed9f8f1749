"""Pipeline parallelism: each rank holds some consecutive layers, and micro-batches stream through the ranks.

    pipeline = Pipeline(model, mesh.pipeline, loss=loss, schedule=SCHEDULES["1f1b"], microbatches=8, data=mesh.data)
    optimizer = optim.SGD(pipeline.module.named_parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        with random.batch(seed=seed, step=step, samples=places):
            loss = pipeline.forward_backward(*batch.arrays, count=batch.global_count)
        optimizer.step()

All ranks of a pipeline get the same batch, and each uses what its stages need of it. The batch is cut into
micro-batches (Huang et al., "GPipe", 2019), and a schedule says who works on which when: see `pipeline_schedules`. The
gradients are those of one process that runs the same micro-batches one after another: the same sums in the same order.

What a layer computes from a batch as a whole it computes here from a micro-batch: batch norm normalises with the mean
and variance of the micro-batch, and moves its running averages once for each, as in GPipe. Dropout does not notice: its
masks depend on the samples' places in the global batch.

With `data`, replicas of the pipeline share a batch, as in `DataParallel`: gradients are summed over them in buckets
while the last micro-batch goes back.

Layers of different stages may share a parameter, as the embedding and the output layer of a language model do (Press
and Wolf, "Using the output embedding to improve language models", 2017). Every rank that uses it trains a copy, and the
copies' gradients are summed at the end of a batch, as in Megatron-LM (Narayanan et al., SC 2021).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from kernels.messages import SLOT_BYTES, SLOTS
from mgpu_core import device, random
from mgpu_core.autograd import no_grad
from mgpu_core.autograd.autocast import autocast_dtype
from mgpu_core.autograd.tape import Array
from mgpu_core.data.sampler import split
from mgpu_core.nn import Module, Parameter, Sequential
from mgpu_core.parallel.balance import cut
from mgpu_core.parallel.boundary import Form, Value, is_real, tensors
from mgpu_core.parallel.data import DataParallel
from mgpu_core.parallel.pipeline_schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    LoadMicroBatch,
    Message,
    OneForwardOneBackward,
    ReceiveActivation,
    ReduceGradients,
    Schedule,
    SendGradient,
    check,
    programs,
    steps,
)
from mgpu_core.parallel.weight_gradients import WeightGradients
from mgpu_core.tensor import Tensor, backward

# By backend, how long messages may be for two of them to be sent before their receiver asks: with their headers they
# fill the slots of a stream.
_EAGER_BYTES = dict.fromkeys(("shm", "sim"), (SLOTS // 2 - 1) * SLOT_BYTES)


class Pipeline:
    """The stages of a model that this rank holds, and what runs them.

    Args:
        model: the same on every rank. Its layers are cut into `schedule.chunks` stages a rank, of about equal cost.
            What a layer hands to the next is a tensor or a tuple of tensors, whose shapes follow from the inputs'.
        comm: the ranks of the pipeline; None for a single one.
        loss: of the model's outputs for a micro-batch and its targets: the sum over the samples, one element.
        schedule, microbatches: how a batch goes through, and in how many parts; proven here.
        costs: what each layer costs (see `balance.measure`); those of rank 0 of all replicas count, so ranks of tensor
            parallelism must give the same ones. None: all the same.
        data: the ranks that hold the same stages in all replicas; None for a single replica.
        bucketing: as for `DataParallel`.

    Attributes:
        module: this rank's layers: parameters for the optimiser, states to save, under their names in `model`.
        stages: the same layers, by the number of the stage.
        waited: seconds of the latest step in which this rank waited for messages, or for gradients to be summed.

    Raises:
        ScheduleError: for a schedule that does not fit the numbers of ranks and micro-batches.
        ValueError: for fewer layers than stages; with `data` also for a parameter that stages of one rank share, since
            it would be summed before it is complete.
    """

    def __init__(
        self,
        model: Sequential,
        comm: Any = None,
        *,
        loss: Callable[..., Tensor],
        schedule: Schedule,
        microbatches: int,
        costs: Sequence[float] | None = None,
        data: Any = None,
        **bucketing: int,
    ) -> None:
        self.comm: Any = comm if comm is not None and comm.size > 1 else None
        self.rank: int = 0 if self.comm is None else comm.rank
        self.ranks: int = 1 if self.comm is None else comm.size
        if self.ranks == 1:
            schedule = OneForwardOneBackward()  # the order that keeps least; alone there is no other reason
        check(schedule, self.ranks, microbatches)
        costs = [1.0] * len(model) if costs is None else list(map(float, costs))
        for axis in (data, self.comm):  # measured times differ between ranks, cuts must not
            costs = costs if axis is None else axis.broadcast_object(costs)
        parts = cut(costs, schedule.chunks * self.ranks)
        own = range(self.rank, len(parts), self.ranks)
        self.last = len(parts) - 1
        self.stages = {stage: model[parts[stage]] for stage in own}
        self.module = _Layers(model, [i for stage in own for i in range(len(model))[parts[stage]]])
        self._tied = self._tie(_shared(model, parts, self.ranks, replicated=data is not None and data.size > 1))
        self.replicas = DataParallel(self.module, data, **bucketing)
        self.loss, self.microbatches = loss, microbatches
        self.waited = 0.0
        self._programs = {
            (training, eager): programs(schedule, self.ranks, microbatches, training=training, eager=eager)[self.rank]
            for training in (True, False)
            for eager in (True, False)
        }
        self._boundaries: dict[tuple[Any, ...], _Boundaries] = {}

    def forward_backward(self, inputs: Array, *targets: Array, count: int) -> float:
        """Adds a batch's gradients to those of `module`, summed over the replicas.

        To be called by every rank of the pipeline with the same arrays, the samples on their first axis: this replica's
        part of a global batch of `count` samples. Returns this rank's share of the mean loss over the global batch,
        which is zero but on the rank of the last stage. Dropout needs `random.batch` around the call, as anywhere.

        With replicas or shared parameters, which are summed here, gradients have to be zero before.
        """
        step = _Step(self, inputs, targets, count, training=True)
        step.run(self._programs[True, step.eager])
        self.waited = step.waited
        if not step.losses:
            return 0.0
        losses = array_namespace(*step.losses).stack(step.losses)  # so that a GPU is asked once
        return float(sum(device.to_host(losses).reshape(-1).tolist()))

    def __call__(self, inputs: Array) -> Tensor | None:
        """The model's outputs for a batch, on the rank of the last stage; None on the others.

        Nothing goes on the tape. Whether layers behave as in training is for `module.train` and `module.eval` to say.
        """
        step = _Step(self, inputs, (), count=len(inputs), training=False)
        with no_grad():
            step.run(self._programs[False, step.eager])
        self.waited = step.waited
        return Tensor(array_namespace(inputs).concat(step.outputs)) if step.outputs else None

    def sum_gradients(self) -> float:
        """Sums gradients over the replicas, and those of shared parameters over the stages; the seconds that took."""
        waited = self.replicas.synchronize()
        began = time.perf_counter()
        for ranks, parameters in self._tied:
            for parameter in parameters:
                if parameter.grad is None:  # this rank's stages did not come to use it
                    parameter.grad = array_namespace(parameter.data).zeros_like(parameter.data)
            gradients = [parameter.grad for parameter in parameters]
            ranks.all_reduce(gradients, out=gradients)
        return waited + time.perf_counter() - began

    def _tie(self, shared: Mapping[tuple[int, ...], list[Parameter]]) -> list[tuple[Any, list[Parameter]]]:
        """The parameters that this rank shares with others, and a communicator of these ranks."""
        tied = []
        for ranks, parameters in shared.items():
            among = self.comm.split(0 if self.rank in ranks else None)
            if among is not None:
                tied.append((among, parameters))
                for parameter in parameters:
                    parameter.counts = self.rank == ranks[0]
        return tied

    def boundaries(self, inputs: Array) -> _Boundaries:
        """What crosses the boundaries between stages for a micro-batch like `inputs`.

        For inputs of a new shape the ranks find out together: each computes its outputs for zeros, in evaluation mode
        and so without a trace, and tells the next one their form.
        """
        key = (inputs.shape, inputs.dtype, autocast_dtype())
        if key not in self._boundaries:
            self._boundaries[key] = self._agree(inputs)
        return self._boundaries[key]

    def _agree(self, inputs: Array) -> _Boundaries:
        xp = array_namespace(inputs)
        forms: dict[int, Form] = {}
        value: Value = Tensor(xp.zeros_like(inputs))
        for stage, layers in self.stages.items():
            if stage > 0:
                header = np.empty(Form.HEADER_WORDS, np.int64)
                self.comm.recv(header, (stage - 1) % self.ranks)
                forms[stage - 1] = form = Form.from_header(header)
                value = form.wrap([xp.zeros(shape, dtype=dtype) for shape, dtype in form.parts])
            if stage < self.last:
                with no_grad(), _evaluation(self.module), np.errstate(all="ignore"):
                    forms[stage] = Form.of(layers(value))
                self.comm.send(forms[stage].header(), (stage + 1) % self.ranks)
        if self.comm is None:
            return _Boundaries(forms, eager=True)
        largest = self.comm.all_reduce(np.asarray(max(form.nbytes for form in forms.values())), "max")
        return _Boundaries(forms, eager=int(largest) <= _EAGER_BYTES.get(self.comm.backend, 0))


@dataclass(frozen=True)
class _Boundaries:
    """The forms of what this rank's stages receive and send, by the stage that sends it, and whether all messages of
    the pipeline are small enough to be sent before they are asked for."""

    forms: Mapping[int, Form]
    eager: bool


@dataclass
class _Kept:
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    inputs: Value
    targets: Sequence[Array] = ()  # in the last stage
    outputs: Value | None = None  # in the last stage the loss
    gradients: list[Any] = field(default_factory=list)  # of the outputs, and after backward of the inputs


class _Step:
    """One batch on its way through this rank's stages: what the instructions of a program work on."""

    def __init__(
        self, pipeline: Pipeline, inputs: Array, targets: Sequence[Array], count: int, *, training: bool
    ) -> None:
        lengths = [len(array) for array in (inputs, *targets)]
        if len(set(lengths)) > 1:
            raise ValueError(f"inputs and targets must all have the samples on their first axis; they have {lengths}")
        ends = list(accumulate(split(len(inputs), [1] * pipeline.microbatches), initial=0))
        self.pipeline, self.inputs, self.targets, self.count = pipeline, inputs, targets, count
        self.training, self.xp = training, array_namespace(inputs)
        self.rows = [slice(start, stop) for start, stop in zip(ends, ends[1:])]
        boundaries = [pipeline.boundaries(inputs[rows]) for rows in self.rows]
        self.forms = [boundary.forms for boundary in boundaries]
        self.eager = all(boundary.eager for boundary in boundaries)
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.weights: dict[tuple[int, int], WeightGradients] = {}
        self.losses: list[Array] = []
        self.outputs: list[Array] = []
        self.waited = 0.0

    def run(self, program: Iterable[Instruction]) -> None:
        """Does what the program says."""
        for together in steps(program, eager=self.eager):
            match together[0]:
                case Message():
                    self.exchange([message for message in together if isinstance(message, Message)])
                case LoadMicroBatch(stage, microbatch):
                    self.load(stage, microbatch)
                case Forward(stage, microbatch):
                    self.forward(stage, microbatch)
                case Backward(stage, microbatch):
                    self.backward(stage, microbatch)
                case BackwardInput(stage, microbatch):
                    self.backward(stage, microbatch, put_off_weights=True)
                case BackwardWeight(stage, microbatch):
                    with self.reducing(microbatch):
                        self.weights.pop((stage, microbatch)).backward()
                case ReduceGradients():
                    self.waited += self.pipeline.sum_gradients()

    def load(self, stage: int, microbatch: int) -> None:
        rows = self.rows[microbatch]
        if stage == 0:
            self.kept[stage, microbatch] = _Kept(Tensor(self.inputs[rows]))
        if stage == self.pipeline.last:
            self.kept[stage, microbatch].targets = [target[rows] for target in self.targets]

    def forward(self, stage: int, microbatch: int) -> None:
        kept = self.kept[stage, microbatch]
        with random.batch_rows(self.rows[microbatch]):
            outputs = self.pipeline.stages[stage](kept.inputs)
            if stage < self.pipeline.last:
                form = self.forms[microbatch][stage]
                if Form.of(outputs) != form:
                    raise ValueError(f"stage {stage} made {Form.of(outputs)}, but for zeros of the same shape {form}")
                kept.outputs = outputs
            elif self.training:
                kept.outputs, kept.gradients = self.pipeline.loss(outputs, *kept.targets) / self.count, [None]
                self.losses.append(tensors(kept.outputs)[0].data)
            else:
                self.outputs.append(outputs.data)
                del self.kept[stage, microbatch]

    def backward(self, stage: int, microbatch: int, *, put_off_weights: bool = False) -> None:
        kept = self.kept[stage, microbatch]
        assert kept.outputs is not None
        outputs = [output for output in tensors(kept.outputs) if is_real(output.dtype)]
        ends = [(output, g) for output, g in zip(outputs, kept.gradients, strict=True) if output.requires_grad]
        outputs = [output for output, _ in ends]
        if put_off_weights:
            self.weights[stage, microbatch] = WeightGradients(outputs, tensors(kept.inputs))
        with self.reducing(microbatch):
            backward(outputs, [gradient for _, gradient in ends])
        if stage == 0:
            del self.kept[stage, microbatch]
        else:
            kept.outputs = None
            inputs = [tensor for tensor in tensors(kept.inputs) if tensor.requires_grad]
            kept.gradients = [self.xp.zeros_like(x.data) if x.grad is None else x.grad for x in inputs]

    def reducing(self, microbatch: int) -> AbstractContextManager[None]:
        """The last micro-batch completes the gradients: as they come they start on their way to the replicas."""
        return nullcontext() if microbatch == len(self.rows) - 1 else self.pipeline.replicas.no_sync()

    def exchange(self, messages: Sequence[Message]) -> None:
        """Sends and receives at the same time."""
        begin = time.perf_counter()
        comm = self.pipeline.comm
        with comm.group() if len(messages) > 1 else nullcontext():
            for message in messages:
                peer = message.peer.stage % comm.size
                if message.sends:
                    comm.send(self.parcel(message), peer, tag=message.tag)
                else:
                    comm.recv(self.room_for(message), peer, tag=message.tag)
        self.waited += time.perf_counter() - begin

    def parcel(self, message: Message) -> Array:
        """What is sent. What the stage does not need any more is let go of."""
        place, forms = (message.stage, message.microbatch), self.forms[message.microbatch]
        kept = self.kept[place]
        if isinstance(message, SendGradient):
            del self.kept[place]
            return forms[message.stage - 1].gradients().message(kept.gradients, self.xp)
        assert kept.outputs is not None
        outputs = tensors(kept.outputs)
        parcel = forms[message.stage].message([output.data for output in outputs], self.xp)
        if self.training:
            for output in outputs:  # backward looks at its shape only
                output.data = self.xp.broadcast_to(self.xp.zeros((), dtype=output.dtype), output.shape)
        else:
            del self.kept[place]
        return parcel

    def room_for(self, message: Message) -> Array:
        """Where a message is received, and where the stage will look for it."""
        place, forms = (message.stage, message.microbatch), self.forms[message.microbatch]
        if isinstance(message, ReceiveActivation):
            form = forms[message.stage - 1]
            memory, arrays = form.room(self.xp)
            self.kept[place] = _Kept(form.wrap(arrays))
        else:
            memory, self.kept[place].gradients = forms[message.stage].gradients().room(self.xp)
        return memory


class _Layers(Module):
    """The layers of a model that a rank holds, and their parameters and buffers under the names they have there."""

    def __init__(self, model: Sequential, layers: Iterable[int]) -> None:
        self._layers = {f"layers.{i}": model[i] for i in layers}
        self._names = {tensor: name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def children(self) -> Iterator[tuple[str, Module]]:
        return iter(self._layers.items())

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((self._names[tensor], tensor) for _, tensor in super()._named_tensors())


def _shared(
    model: Sequential, parts: Sequence[slice], ranks: int, *, replicated: bool
) -> dict[tuple[int, ...], list[Parameter]]:
    """The parameters that stages of different ranks share, by these ranks."""
    users: dict[Parameter, list[int]] = {}
    for stage, part in enumerate(parts):
        for name, parameter in model[part].named_parameters():
            users.setdefault(parameter, []).append(stage % ranks)
            if replicated and users[parameter].count(stage % ranks) > 1:
                raise ValueError(
                    f"stages of rank {stage % ranks} share a parameter, {name} of stage {stage}, which replicas of the "
                    "pipeline could not sum in time; take another schedule, or let `costs` cut elsewhere"
                )
    shared: dict[tuple[int, ...], list[Parameter]] = {}
    for parameter, those in users.items():
        if len(set(those)) > 1:
            shared.setdefault(tuple(sorted(set(those))), []).append(parameter)
    return shared


@contextmanager
def _evaluation(module: Module) -> Iterator[None]:
    """Inside, the module and its parts behave as outside of training."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
