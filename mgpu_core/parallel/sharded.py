"""Sharded data parallelism: ranks work on parts of each batch, and keep parts of what the others keep too.

ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020). With P
bytes of parameters on p ranks, and an optimiser that keeps K of them for each, a rank holds

    stage   parameters   gradients   optimiser's state
    0       P            P           K P                  `DataParallel`
    1       P            P           K P / p
    2       P            P / p       K P / p
    3       P / p        P / p       K P / p

and in stages 2 and 3, for as long as they are used, whole gradients and whole parameters of the part of the model that
is running (and of the next, whose parameters are on their way). Stages 1 and 2 send what `DataParallel` sends, stage 3
half as much again. Stage 3 is also known as FSDP (Zhao et al., "PyTorch FSDP", VLDB 2023).

    model = Sharded(network, comm, stage=3)
    optimizer = optim.AdamW(model.named_parameters())      # of this rank's parts

The rest of the loop is `DataParallel`'s. The parameters of a part of the model, a *unit*, lie in one flat array that is
cut evenly whatever their sizes are, so a rank's part of a parameter is a range of it, flattened, and may be empty.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.tape import Array, is_recording
from mgpu_core.nn import Module, Parameter
from mgpu_core.parallel.data import DataParallel
from mgpu_core.parallel.placement import FlatPlacement
from mgpu_core.tensor import Tensor, record

_LINE = 64  # bytes: every parameter starts on a cache line


class Shard(Parameter):
    """This rank's part of a parameter: a range of its elements, flattened. `whole` is the parameter's shape."""

    __slots__ = ("whole",)

    def __init__(self, data: Array, parameter: Parameter, start: int) -> None:
        assert not isinstance(parameter.placement, FlatPlacement)
        placement = FlatPlacement(parameter.shape, start, start + data.size, parameter.placement)
        super().__init__(data, sharded_over=(*parameter.sharded_over, "data"), placement=placement)
        self.whole = parameter.shape
        self.requires_grad = parameter.requires_grad


class Sharded(DataParallel):
    """Data parallelism in which ranks hold parts of optimiser state (stage 1), gradients (2) and parameters (3).

    The optimiser is given `named_parameters()`: this rank's parts, `Shard`s, each named as the parameter that it is a
    part of. In stage 3 `units` are gathered for their forward pass, freed, gathered again for their backward pass and
    freed, with the next one on its way: all ranks must then run the same units in the same order, or all raise
    CollectiveMismatchError. Freed parameters lose their memory, not their place, so what backward keeps of them stays
    valid; code that looks at one outside of its unit's forward pass gets an error that says so.

    Gradients of several backward passes are added up in `no_sync()`, where whole gradients are kept, or in stages 2 and
    3 by calling `synchronize()` after each pass, which keeps parts only.

    Args:
        model, comm: as for `DataParallel`; with tensor parallel layers `comm` is the mesh's `data`.
        stage: 1, 2 or 3; 3 is for models on the CPU, whose memory is freed page by page.
        units: parts of the model; by default its children. What is in none of them makes one more.

    Attributes:
        held: bytes of "parameters" and "gradients" on this rank now.
        peak: the same, the most since it was last set to `{}`.
    """

    def __init__(
        self, model: Module, comm: Any = None, *, stage: int = 3, units: Sequence[Module] | None = None
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"there are stages 1, 2 and 3 of sharding, not {stage!r}")
        if stage == 3 and any(parameter.device != "cpu" for parameter in model.parameters()):
            raise ValueError("stage 3 frees parameters page by page, which memory of a GPU is not: take stage 1 or 2")
        self.stage = stage
        self.peak: dict[str, int] = {}
        chosen = [child for _, child in model.children()] if units is None else units
        super().__init__(model, comm, units=[unit for unit in chosen if any(True for _ in unit.parameters())])

    def _share(self, **options: Any) -> None:
        units: Sequence[Module] = options["units"]
        self._gathering = self.comm.split(0)  # two more, since the order of gathering and reducing may differ
        self._reducing = self.comm.split(0)
        self._units: list[_Unit] = []
        self._of: dict[Parameter, _Unit] = {}
        self._calls: dict[_Call, None] = {}  # those whose backward pass has begun
        self._stale = False
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        lengths: set[int] = set()
        for module in (*units, self.model):
            kinds: dict[Any, list[Parameter]] = {}
            for parameter in module.parameters():
                if parameter not in self._of:
                    kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
            for members in kinds.values():
                unit = _Unit({names[p]: p for p in members}, self.comm, self.stage, lengths)
                self._units.append(unit)
                self._of |= dict.fromkeys(members, unit)
        self._index = {parameter: index for index, parameter in enumerate(self._parameters.values())}
        self._turns = [unit for unit in reversed(self._units) if unit.trained]  # all ranks reduce in this order
        self._begin_step()
        self._needs = [self._homes(module.parameters()) for module in units]
        inside = {parameter for module in units for parameter in module.parameters()}
        for position, module in enumerate(units):
            self._surround(module, self._needs[position], position)
        self._surround(self.model, self._homes(p for p in self.model.parameters() if p not in inside), -1)
        self._note()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """This rank's parts of the parameters, by name."""
        if self.comm is None:
            yield from super().named_parameters()
            return
        for name, parameter in self.model.named_parameters():
            yield name, self._of[parameter].shards[name]

    def synchronize(self) -> float:
        """As `DataParallel.synchronize`: afterwards the gradients of this rank's parts are summed over all ranks."""
        if self.comm is None:
            return 0.0
        for call in list(self._calls):
            call.end_backward()
        self._announce_unused()
        began = time.perf_counter()
        for unit in self._turns:
            unit.finish_reduction()
        for unit in self._units:
            unit.drop()  # gathered ahead for a use that did not come
        waited = time.perf_counter() - began
        self._begin_step()
        self._note()
        self.refresh()
        return waited

    def refresh(self) -> None:
        """To be called after this rank's parts were changed otherwise than by the optimiser's step: loaded, say."""
        if self.comm is not None and self.stage < 3:
            self._stale = True
            for unit in self._units:
                unit.finish_gathering()  # of a unit that was not used since
                unit.hide()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all parameters of the model are whole and up to date, to be read. All ranks must call."""
        units = [] if self.comm is None else self._units
        for unit in units:
            self._acquire([unit])
        try:
            yield
        finally:
            self._release(units)

    def close(self) -> None:
        """Close the communicators that were split from `comm`. Closing twice is fine."""
        if self.comm is not None:
            self._gathering.close()
            self._reducing.close()

    @property
    def held(self) -> dict[str, int]:
        """Bytes of "parameters" and "gradients" on this rank now."""
        if self.comm is None:
            arrays = [p.data.nbytes for p in self.model.parameters()]
            return {"parameters": sum(arrays), "gradients": sum(p.data.nbytes for p in self._parameters.values())}
        return {kind: sum(unit.held()[kind] for unit in self._units) for kind in ("parameters", "gradients")}

    # Parameters: gathered before they are used

    def _homes(self, parameters: Iterable[Parameter]) -> list[_Unit]:
        return list(dict.fromkeys(self._of[parameter] for parameter in parameters))

    def _surround(self, module: Module, units: list[_Unit], position: int) -> None:
        """Lets `module.forward` gather these units, and backward do so too when it enters what forward recorded."""
        forward = module.forward

        def surrounded(*inputs: Any, **options: Any) -> Any:
            if not units:
                return forward(*inputs, **options)
            call = _Call(self, units, position) if is_recording() else None
            if call is not None:
                inputs, options = _each_tensor((inputs, options), call.watch_input)
            self._acquire(units, position + 1)
            try:
                outputs = forward(*inputs, **options)
            finally:
                self._release(units)
            return outputs if call is None else _each_tensor(outputs, call.watch_output)

        module.forward = surrounded

    def _acquire(self, units: Iterable[_Unit], ahead: int = -1) -> None:
        """Makes parameters whole, and starts to gather those of the units at position `ahead`."""
        if self._stale:
            self._stale = False
            for unit in self._units:
                unit.start_gathering(self._gathering)
        for unit in units:
            unit.users += 1
            unit.start_gathering(self._gathering)
        if self.stage == 3 and 0 <= ahead < len(self._needs):
            for unit in self._needs[ahead]:
                unit.start_gathering(self._gathering)
        for unit in units:
            unit.finish_gathering()
        self._note()

    def _release(self, units: Iterable[_Unit]) -> None:
        for unit in units:
            unit.users -= 1
            unit.drop()

    # Gradients: reduced as soon as they are complete

    def _begin_step(self) -> None:
        for unit in self._turns:
            unit.missing = {self._index[p] for p in unit.parameters.values()}
        self._next = 0

    def _ready(self, index: int, parameter: Tensor) -> None:
        self._of[parameter].missing.remove(index)  # type: ignore[index]
        while self._next < len(self._turns) and not self._turns[self._next].missing:
            self._turns[self._next].start_reduction(self._reducing)
            self._next += 1
        for unit in self._turns:
            unit.finish_reduction(wait=False)
        self._note()

    def _note(self) -> None:
        for kind, nbytes in self.held.items():
            self.peak[kind] = max(self.peak.get(kind, 0), nbytes)


class _Call:
    """One use of a module: in its backward pass, from the first gradient of its outputs on, until that of its inputs.

    Backward visits the operations latest first. So when it comes to what was recorded ahead of the module's own
    operations, these are done.
    """

    def __init__(self, model: Sharded, units: list[_Unit], position: int) -> None:
        self._model, self._units, self._position = model, units, position

    def watch_output(self, x: Tensor) -> Tensor:
        return record(x.data, (x, self._begin_backward))

    def watch_input(self, x: Tensor) -> Tensor:
        return record(x.data, (x, self.end_backward))

    def _begin_backward(self, gradient: Array) -> Array:
        if self not in self._model._calls:
            self._model._calls[self] = None
            for unit in self._units:
                unit.open_gradients()
            self._model._acquire(self._units, self._position - 1)
        return gradient

    def end_backward(self, gradient: Array = None) -> Array:
        if self in self._model._calls:
            del self._model._calls[self]
            self._model._release(self._units)
        return gradient


class _Unit:
    """Parameters that are gathered, reduced and freed together: of one dtype, all trained or all frozen.

    `flat` has room for all of them; `own` is this rank's part of it, in stage 3 an array of its own.
    """

    def __init__(self, parameters: dict[str, Parameter], comm: Any, stage: int, lengths: set[int]) -> None:
        self.parameters, self.stage, self.users = parameters, stage, 0
        self.missing: set[int] = set()
        some = next(iter(parameters.values()))
        self.dtype, self.trained = some.dtype, some.requires_grad
        line = max(1, _LINE // self.dtype.itemsize)
        starts = np.cumsum([0, *(-(-p.size // line) * line for p in parameters.values())]).tolist()
        length = -(-starts[-1] // comm.size)
        while length in lengths:  # no two units are equally long, so ranks that gather different ones are told so
            length += 1
        lengths.add(length)
        first = comm.rank * length
        self._mine = slice(first, first + length)
        self._places = {p: (start, p.size) for p, start in zip(parameters.values(), starts)}
        self._xp = array_namespace(some.data)
        if device.of(some.data) == "cpu":
            self._pages = mmap.mmap(-1, max(1, comm.size * length * self.dtype.itemsize), mmap.MAP_PRIVATE)
            self._flat = np.frombuffer(self._pages, self.dtype, comm.size * length)
        else:
            self._flat = self._xp.zeros(comm.size * length, dtype=self.dtype)
        for view, parameter in zip(self._views(self._flat), parameters.values()):
            view[...] = parameter.data
        self.own = self._flat[self._mine]
        if stage == 3:
            self.own = self.own.copy()
        self.shards: dict[str, Shard] = {}
        self._ranges: dict[str, slice] = {}  # of `own`
        for (name, parameter), start in zip(parameters.items(), starts):
            low, high = (min(max(edge, first), first + length) for edge in (start, start + parameter.size))
            self._ranges[name] = slice(low - first, high - first)
            self.shards[name] = Shard(self.own[self._ranges[name]], parameter, max(0, low - start) if low < high else 0)
        self._gathering: Any = None
        self._whole = True
        self._show()
        self._gradient: Array | None = None
        self._reduction: tuple[Any, Array] | None = None
        self._own_gradient: Array | None = None
        if stage == 1:
            self.open_gradients()
        elif self.trained:
            self._own_gradient = self._xp.zeros(length, dtype=self.dtype)
            self._show_gradients(self._own_gradient)
            for shard in self.shards.values():
                shard.zero_grad()
        self.drop()

    def held(self) -> dict[str, int]:
        """Bytes."""
        parameters = self.own.nbytes if self.stage == 3 else 0
        if self.stage < 3 or self._whole or self._gathering is not None:
            parameters += self._flat.nbytes
        reducing = [self._reduction[1]] if self._reduction is not None and self.stage > 1 else []
        gradients = [array for array in (self._gradient, self._own_gradient, *reducing) if array is not None]
        return {"parameters": parameters, "gradients": sum(array.nbytes for array in gradients)}

    def start_gathering(self, comm: Any) -> None:
        """Begin to make the parameters whole, all ranks together, unless they are."""
        if self._gathering is None and not self._whole:
            self._gathering = comm.all_gather(self.own, out=self._flat, async_op=True)

    def finish_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._show()

    def drop(self) -> None:
        """Frees the whole parameters in stage 3, unless they are in use."""
        if self.stage == 3 and not self.users and (self._whole or self._gathering is not None):
            self.finish_gathering()
            self.hide()
            self._pages.madvise(mmap.MADV_DONTNEED)

    def hide(self) -> None:
        """The whole parameters are not there, or not up to date."""
        self._whole = False
        for name, parameter in self.parameters.items():
            if not isinstance(parameter.data, _Freed):
                parameter.data = _Freed(name, parameter.data)

    def open_gradients(self) -> None:
        """Gives the parameters whole gradients, zero, where they have none."""
        if self.trained and self._gradient is None:
            self._gradient = self._xp.zeros(self._flat.size, dtype=self.dtype)
            for parameter, view in zip(self.parameters.values(), self._views(self._gradient)):
                parameter.grad = view
                parameter.zero_grad()

    def start_reduction(self, comm: Any) -> None:
        """Sums the whole gradients over the ranks; this rank keeps its part."""
        before = [(parameter, parameter._grad) for parameter in self.parameters.values()]
        self.open_gradients()
        assert self._gradient is not None
        for parameter, grad in before:
            if grad is not None and parameter._grad is not grad:  # kept elsewhere: it was used outside of its unit
                parameter.accumulate_grad(grad)
            _ = parameter.grad  # what was cleared and not reached is written as zeros now
        mine = self._gradient[self._mine]
        if self.stage == 1:
            for name, shard in self.shards.items():
                if shard._grad is not None and not shard._cleared:
                    raise RuntimeError(
                        f"{name} still has the gradient of an earlier synchronize(), which stage 1 would overwrite: "
                        "call the optimiser's zero_grad() in every step, and accumulate in no_sync()"
                    )
        else:
            mine = self._xp.empty_like(mine)
        self._reduction = comm.reduce_scatter(self._gradient, out=mine, async_op=True), mine

    def finish_reduction(self, wait: bool = True) -> None:
        """Adds the sums to the gradients of this rank's parts, if they are there or with `wait`."""
        if self._reduction is None or not (wait or self._reduction[0].done()):
            return
        work, mine = self._reduction
        work.wait()
        self._reduction = None
        if self.stage == 1:
            self._show_gradients(mine)
            for parameter in self.parameters.values():
                parameter.zero_grad()
            return
        for name, shard in self.shards.items():
            shard.accumulate_grad(mine[self._ranges[name]])
        self._gradient = None
        for parameter in self.parameters.values():
            parameter.grad = None

    def _show(self) -> None:
        self._whole = True
        for view, parameter in zip(self._views(self._flat), self.parameters.values()):
            parameter.data = view

    def _show_gradients(self, own: Array) -> None:
        for name, shard in self.shards.items():
            shard.grad = own[self._ranges[name]]

    def _views(self, flat: Array) -> Iterator[Array]:
        for parameter, (start, size) in self._places.items():
            yield flat[start : start + size].reshape(parameter.shape)


class _Freed:
    """In the place of a parameter's array while that is shared out among the ranks."""

    def __init__(self, name: str, whole: Array) -> None:
        self.name, self.shape, self.dtype = name, whole.shape, whole.dtype

    def __getattr__(self, attribute: str) -> Any:
        raise RuntimeError(
            f"{self.name} is shared out among the ranks and was used outside of the forward pass of its unit: make a "
            "module that holds all its uses one of Sharded's units, or read it in `with model.gathered():`"
        )


def _each_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure of tuples, lists and dicts, with `function` of each tensor that requires a gradient."""
    if isinstance(value, Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, (tuple, list)):
        return type(value)(_each_tensor(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, function) for key, item in value.items()}
    return value
