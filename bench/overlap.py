"""`mgpu bench overlap`: how much of the communication of a network with much of it hides behind backward.

A perceptron, 784-W-W-10, has about W * W weights and little to compute for each where the batch is small. Data-parallel
steps of three kinds take turns, as in `mgpu bench train_step`; from their medians,

    hidden    1 - (train - compute) / communicate: the part of communication's own time that does not lengthen a step

A timeline of more steps says where communication took place:

    beside    the part of the time of asynchronous calls that fell into forward and backward (`mgpu timeline`)

Where ranks have no core to spare for communication, the second is large and the first small: what is done beside
computation is taken from it. Figures mean something with as many cores as ranks at least.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from bench import record, table
from bench.crew import Launch, python, start
from bench.train_step import KINDS, Ours, answering, data, hidden_share, measure, milliseconds, rows
from bench.worker import serve
from collectives import trace
from collectives.timeline import span
from collectives.wording import counted
from mgpu_core import nn

_WARM_UPS = 3
TIMELINE = "MGPU_TIMELINE"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    flags = parser()
    arguments = flags.parse_args(argv)
    ranks, batch, steps = arguments.ranks, arguments.batch, arguments.steps
    if ranks < 2 or batch < ranks or min(arguments.width) < 1 or min(steps, arguments.rounds) < 1:
        flags.error("-n is at least 2, --batch at least -n, --width, --steps and --rounds at least 1")
    code = "from collectives import spawn; from bench.overlap import train; spawn(train, {}, ({}, {}))"
    launches = {name_of(width): Launch([python(code.format(ranks, width, batch))], [{}]) for width in arguments.width}
    with ExitStack() as stack:
        crews, _ = start(stack, launches, ranks, timeout=arguments.timeout, needed="")
        samples, _ = measure(crews, arguments.rounds, steps)
    beside = {name_of(width): beside_computation(ranks, width, batch, steps) for width in arguments.width}
    medians = milliseconds(samples)
    print(
        f"# overlap: {counted(ranks, 'rank')}, {counted(batch, 'sample')} a step, "
        f"{counted(arguments.rounds, 'round')}; {record.machine()}"
    )
    for line in report(medians, beside):
        print(line)
    if arguments.json:
        about = {**record.about("overlap", vars(arguments)), "beside": beside}
        record.write(arguments.json, about, rows(medians), samples)
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench overlap", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("--width", type=int, nargs="+", default=[256, 1024, 2048], help="of the hidden layers (default %(default)s)")
    add("--batch", type=int, default=32, help="samples of all ranks together in a step (default 32)")
    add("--steps", type=int, default=10, help="steps in a sample (default 10)")
    add("--rounds", type=int, default=7, help="samples of each kind, taken in turn (default 7)")
    add("--timeout", type=float, default=120, help="seconds in which a rank must answer (default 120)")
    add("--json", type=Path, metavar="FILE", help="write medians and samples, for mgpu bench diff")
    return flags


def name_of(width: int) -> str:
    """A crew's name: the network's."""
    return f"784-{width}-{width}-10"


def stepper(comm: Any, width: int, batch: int) -> Ours:
    """One rank's training."""
    rng = np.random.default_rng(0)
    layers = nn.Linear(784, width, rng=rng), nn.Linear(width, width, rng=rng), nn.Linear(width, 10, rng=rng)
    model = nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return Ours(comm, model, *data(batch, comm.rank, comm.size), batch)


def train(comm: Any, width: int, batch: int) -> None:
    """One rank of a crew."""
    serve(comm.rank, f"backend {comm.backend}", answering(stepper(comm, width, batch)))


def beside_computation(ranks: int, width: int, batch: int, steps: int) -> float:
    """What part of the time of all ranks' asynchronous calls falls into their forward and backward."""
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as folder:
        path = Path(folder) / "trace.json"
        before = os.environ.get(TIMELINE)
        os.environ[TIMELINE] = str(path)
        try:
            collectives.spawn(trained, ranks, (width, batch, steps))
        finally:
            if before is None:
                del os.environ[TIMELINE]
            else:
                os.environ[TIMELINE] = before
        shares = trace.shares(trace.read(path)).values()
    return sum(share.hidden for share in shares) / sum(share.communicating for share in shares)


def trained(comm: Any, width: int, batch: int, steps: int) -> None:
    """One rank, whose environment asks for a timeline."""
    training = stepper(comm, width, batch)
    for _ in range(_WARM_UPS + steps):
        comm.barrier()
        with span("forward and backward"):
            training.forward_and_backward()
        training.communicate()
        training.update()


def report(medians: Mapping[str, Mapping[str, float]], beside: Mapping[str, float]) -> Iterator[str]:
    """A line per network."""
    titles = ["network", "train (ms)", "compute (ms)", "communicate (ms)", "hidden", "beside"]
    lines = []
    for name, kinds in medians.items():
        times = [f"{kinds[kind]:.2f}" for kind in KINDS]
        lines.append([name, *times, f"{hidden_share(kinds):.0%}", f"{beside[name]:.0%}"])
    yield from table.columns(titles, lines)


if __name__ == "__main__":
    sys.exit(main())
