"""What `--parallel` and the options that go with it mean: from a command line to a `Strategy`.

    dp        every rank works on its part of each batch, and gradients are summed (the default)
    async     every rank takes whole batches and does not wait for the others
    ssp       the same, but nobody gets more than --bound steps ahead
    local     every rank trains by itself, and they meet after --every steps
    tp        every rank has a part of each large layer
    pp        every rank has some of the layers, and micro-batches pass through
    zero1     as dp, but the optimiser's state is kept in parts
    zero2     and so are gradients
    zero3     and so are parameters
    hybrid    dp, tp and pp along the axes of a --mesh, such as data=2,tensor=2

`check` refuses what cannot work before any rank is started; `strategy` is called on every rank.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from collectives.wording import counted
from mgpu_core import device, nn
from mgpu_core.autograd.autocast import SHORT
from mgpu_core.parallel import (
    SCHEDULES,
    Asynchronous,
    DataParallel,
    LocalSGD,
    Mesh,
    Pipelined,
    Rounds,
    Sharded,
    Strategy,
    StrategyError,
    Synchronous,
    Workers,
    measure,
    parallelize,
    recompute,
)
from mgpu_core.parallel.asynchronous import MakeOptimizer
from mgpu_core.parallel.hooks import HOOKS
from mgpu_core.parallel.mesh import AXES
from mgpu_core.parallel.speeds import parse_speeds
from mgpu_core.precision import Precision
from mgpu_core.tensor import Tensor

ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
MESHES: dict[str, dict[str, int]] = {  # -1: as many ranks as there are
    **dict.fromkeys(("dp", "async", "ssp", "local", *ZERO), {"data": -1}),
    "tp": {"tensor": -1},
    "pp": {"pipeline": -1},
    "hybrid": {"data": -1, "tensor": 2},
}
BELONGS = {  # which options go with which values of --parallel
    "mesh": ("hybrid", *ZERO),
    "hook": ("dp", "hybrid"),
    "speeds": ("dp", "local"),
    "schedule": ("pp", "hybrid"),
    "microbatches": ("pp", "hybrid"),
    "bound": ("ssp",),
    "delay_compensation": ("async", "ssp"),
    "staleness_aware": ("async", "ssp"),
    "every": ("local",),
    "slow_rank": ("dp", "async", "ssp", "local", *ZERO),
}
SETTINGS: dict[str, Any] = {"parallel": "dp"}  # what a resumed run takes over, unless it has another --parallel
SETTINGS |= dict.fromkeys(
    ("mesh", "hook", "schedule", "microbatches", "bound", "delay_compensation", "staleness_aware", "every")
)


def add_options(it: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """The options of a recipe's command line that say how ranks share the work."""
    add = it.add_argument_group("how the ranks share the work").add_argument
    add("--parallel", choices=MESHES, help="(dp); docs/training.md says which when")
    add("--mesh", metavar="AXES", help="of hybrid, zero1-3: ranks along each axis, as data=2,tensor=2 or pipeline=2")
    add("--hook", choices=HOOKS, help="of dp, hybrid: send less for a gradient (none)")
    add("--speeds", metavar="SPEEDS", help="of dp, local: cut batches by speed, as 3,1, or auto to measure it (even)")
    add("--schedule", choices=SCHEDULES, help="of pp, hybrid: of the pipeline (1f1b)")
    add("--microbatches", type=positive, help="of pp, hybrid: parts of a batch (4 for each stage)")
    add("--bound", type=int, help="of ssp: steps that a rank may be ahead of the slowest (4)")
    add("--delay-compensation", type=float, metavar="LAMBDA", help="of async, ssp: correct late gradients (0)")
    add("--staleness-aware", action="store_true", default=None, help="of async, ssp: late gradients move less")
    add("--every", type=positive, help="of local: steps between two meetings (8)")


def check(options: argparse.Namespace, ranks: int) -> dict[str, int]:
    """The sizes of the mesh's axes.

    Raises:
        StrategyError: for options that do not go together, or do not fit so many ranks.
    """
    way = options.parallel or "dp"
    for name, ways in BELONGS.items():
        if getattr(options, name) is not None and way not in ways:
            raise StrategyError(f"--{name.replace('_', '-')} is for --parallel {', '.join(ways)}; this is {way}")
    if options.speeds:
        _speeds(options.speeds, ranks)
    if options.device == "cuda" and (reason := needs_host(options)):
        raise StrategyError(f"{reason}: give --device cpu, or leave that out")
    if options.slow_rank is not None and not 0 <= options.slow_rank < ranks:
        raise StrategyError(f"--slow-rank {options.slow_rank} is none of the ranks 0 to {ranks - 1}")
    adds_up = options.hook not in (None, "none", "bf16")
    if options.precision == "float16" and (way in ("async", "ssp", "local") or adds_up):
        raise StrategyError(
            "--precision float16 leaves out the steps in which a gradient overflows, which "
            + (f"--hook {options.hook} would go on adding up" if adds_up else f"--parallel {way} cannot")
            + "; bfloat16 has float32's range"
        )
    if options.precision in SHORT and options.dtype == "float64":
        raise StrategyError(f"--precision {options.precision} is for float32 parameters; leave --dtype out")
    if (options.bound or 0) < 0:
        raise StrategyError(f"--bound is a whole number from 0, not {options.bound}")
    if not 0 <= (options.delay_compensation or 0) < math.inf:
        raise StrategyError(f"--delay-compensation is a finite number from 0, not {options.delay_compensation}")
    if way in ("tp", "pp") and ranks < 2:
        raise StrategyError(f"--parallel {way} cuts the model over ranks, and needs at least 2; here is {ranks}")
    if way == "hybrid" and not options.mesh and (ranks < 4 or ranks % 2):
        raise StrategyError(
            f"--parallel hybrid is data=N,tensor=2 if --mesh says nothing else, and needs 4, 6, ... ranks for it; "
            f"here are {ranks}"
        )
    axes = _parse_mesh(options.mesh) if options.mesh else dict(MESHES[way])
    if way in ZERO and axes.get("pipeline", 1) != 1:
        raise StrategyError(f"--parallel {way} goes along data and tensor, not pipeline: that is hybrid's")
    known = math.prod(size for size in axes.values() if size != -1)
    if -1 in axes.values() and ranks % known == 0:
        axes = {axis: ranks // known if size == -1 else size for axis, size in axes.items()}
    if math.prod(axes.values()) != ranks:
        raise StrategyError(
            f"--mesh {options.mesh} has {counted(known, 'place')}, and here are {counted(ranks, 'rank')}"
        )
    return axes


def strategy(
    comm: Any,
    options: argparse.Namespace,
    network: nn.Module,
    optimizer: MakeOptimizer,
    *,
    sample: Any,
    say: Callable[[str], Any],
    recomputed: tuple[type[nn.Module], ...] = (),
) -> Strategy:
    """How the ranks of `comm` train `network`; all call it together, with equal networks.

    Args:
        optimizer: makes one for the (name, parameter) pairs that a rank updates.
        sample: a function from a number of samples to the network's inputs for so many; a pipeline is cut by the time
            that each layer takes for them.
        recomputed: modules of which backward keeps the inputs only, and runs them again.
    """
    if comm is None:  # else `collectives.init` has made a GPU this thread's
        device.select(options.device)
    network.to(options.device)
    made = _strategy(comm, options, network, optimizer, sample, say, recomputed)
    made.precision = Precision(options.precision)
    given = {"workers": options.workers, "depth": options.prefetch, "device": options.device}
    made.part |= {name: value for name, value in given.items() if value is not None}
    made.test_part["device"] = options.device
    return made


def _strategy(
    comm: Any,
    options: argparse.Namespace,
    network: nn.Module,
    optimizer: MakeOptimizer,
    sample: Any,
    say: Callable[[str], Any],
    recomputed: tuple[type[nn.Module], ...],
) -> Strategy:
    ranks = 1 if comm is None else comm.size
    axes, way = check(options, ranks), options.parallel
    if way in ("async", "ssp") and comm is not None:
        bound = None if way == "async" else 4 if options.bound is None else options.bound
        _recompute(network, recomputed)
        say(
            "asynchronous: each rank takes whole batches"
            + ("" if bound is None else f", at most {counted(bound, 'step')} ahead")
        )
        return Workers(
            Asynchronous(
                network,
                comm,
                optimizer,
                bound=bound,
                delay_compensation=options.delay_compensation or 0.0,
                staleness_aware=bool(options.staleness_aware),
            )
        )
    speeds = _speeds(options.speeds, ranks) if options.speeds else None
    if way == "local":
        _recompute(network, recomputed)
        inner = optimizer(network.named_parameters())
        return Rounds(LocalSGD(network, comm, inner, every=options.every or 8), speeds=speeds)

    mesh = Mesh(comm, **axes)
    hook = {"hook": HOOKS[options.hook]()} if options.hook else {}
    costs = None
    stages = axes.get("pipeline", 1)
    microbatches = options.microbatches or 4 * stages
    if stages > 1:
        if not isinstance(network, nn.Sequential):
            raise StrategyError(f"a pipeline is cut between the layers of a Sequential, and {_name(network)} is none")
        rows = max(1, options.batch // axes.get("data", 1) // microbatches)
        costs = comm.broadcast_object(measure(network, Tensor(sample(rows)).to(options.device)))
    if mesh.tensor is not None:
        parallelize(network, mesh.tensor)
        if not any(parameter.sharded_over for parameter in network.parameters()):
            raise StrategyError(f"tensor parallelism can cut no layer of {_name(network)}; try dp or zero1-3")
    _recompute(network, recomputed)
    if len(axes) > 1 or stages > 1:
        say(f"mesh: {' x '.join(f'{axis} {axes.get(axis, 1)}' for axis in AXES)}")
    if stages > 1:
        schedule = SCHEDULES[options.schedule or "1f1b"]
        say(f"pipeline: {counted(stages, 'rank')}, {microbatches} micro-batches, {schedule.name}")
        return Pipelined(network, optimizer, mesh, schedule=schedule, microbatches=microbatches, costs=costs, **hook)
    model: DataParallel
    if way in ZERO:
        model = Sharded(network, mesh.data, stage=ZERO[way])
    else:
        model = DataParallel(network, mesh.data, **hook)
    return Synchronous(model, optimizer(model.named_parameters()), mesh=mesh, speeds=speeds)


def needs_host(options: argparse.Namespace) -> str:
    """Why the options are for the CPU alone; empty if they are not."""
    if options.parallel in ("async", "ssp", "zero3"):
        return f"--parallel {options.parallel} keeps parameters in the host's memory"
    if options.hook not in (None, "none", "bf16"):
        return f"--hook {options.hook} computes on the host"
    if options.speeds == "auto" or getattr(options, "auto", False):
        return f"--{'speeds ' if options.speeds else ''}auto measures by the host's clock, which sees nothing of a GPU"
    return ""


def _recompute(network: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    for module in network.modules():
        if isinstance(module, kinds):
            module.forward = partial(recompute, module.forward)


def _speeds(text: str, ranks: int) -> list[float] | str:
    try:
        return parse_speeds(text, ranks) or text
    except ValueError as error:
        raise StrategyError(str(error)) from None


def _parse_mesh(text: str) -> dict[str, int]:
    try:
        axes = {axis.strip(): int(size) for axis, size in (word.split("=") for word in text.split(","))}
    except ValueError:
        raise StrategyError(f"--mesh is like data=2,tensor=2, not {text!r}") from None
    if unknown := [axis for axis in axes if axis not in AXES]:
        raise StrategyError(f"--mesh has the axes {', '.join(AXES)}, not {', '.join(unknown)}")
    if any(size < 1 and size != -1 for size in axes.values()) or list(axes.values()).count(-1) > 1:
        raise StrategyError(f"--mesh {text}: sizes are from 1, and one of them may be -1 for the rest")
    return axes


def _name(network: nn.Module) -> str:
    return type(network).__name__
