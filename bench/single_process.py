"""`mgpu bench single_process`: training steps of four networks in one process, ours beside PyTorch on the CPU.

    mlp           784-1024-1024-10 with ReLU, 128 samples, SGD with momentum
    resnet        ResNet-20, 128 images of 28 x 28, SGD with momentum; PyTorch with both layouts of images
    lstm          two layers of 256 on 32 sequences of 100 vectors of 64, AdamW
    transformer   four causal blocks of 256 with 4 heads on 16 sequences of 128 tokens, AdamW

All start from the same weights and take the same batch at every step (forward, backward, optimiser), in float32 with
the same number of threads. Each has a process of its own; a few steps of each take turns, while the others sleep.
Memory is the most that a process holds during steps, beyond what it held before it made the network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import peers, record
from bench.crew import python
from bench.networks import LAST, NETWORKS, OURS, TORCH
from bench.states import quartiles
from collectives.threads import VARIABLES

Result = dict[str, Any]  # of one side: its version, its first loss, each step's ns, bytes of memory


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 where the sides' first losses differ."""
    arguments = parser().parse_args(argv)
    if unknown := set(arguments.network) - set(NETWORKS):
        parser().error(f"no network is called {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    if not (arguments.alone or peers.has("torch")):
        parser().error("there is no PyTorch to compare with: pip install torch, or measure ours --alone")
    found = {}
    for network in arguments.network or NETWORKS:
        theirs = [] if arguments.alone else [TORCH, LAST] if network == "resnet" else [TORCH]
        found[network] = measure(network, [OURS, *theirs], arguments.threads, arguments.rounds, arguments.steps)
        for line in report(network, found[network]):
            print(line, flush=True)
    if arguments.json:
        rows, samples = [], []
        for network, results in found.items():
            for side, result in results.items():
                seconds = [ns / 1e9 for ns in result.pop("ns")]
                case = {"network": network, "threads": arguments.threads}
                rows.append({"label": side, "case": case, "microseconds": 1e6 * median(seconds), **result})
                samples += record.samples(side, case, seconds)
        record.write(arguments.json, record.about("single_process", vars(arguments)), rows, samples)
    losses = {network: [result["loss"] for result in results.values()] for network, results in found.items()}
    wrong = {network: values for network, values in losses.items() if not np.allclose(values, values[0], rtol=1e-4)}
    if wrong:
        print(f"# the first losses differ: {wrong}")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench single_process", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("network", nargs="*", help=f"which to measure, of {', '.join(NETWORKS)} (default: all)")
    add("--threads", type=int, default=1, help="of each side (default 1)")
    add("--steps", type=int, default=3, help="steps in a turn (default 3)")
    add("--rounds", type=int, default=9, help="turns of each side (default 9)")
    add("--alone", action="store_true", help="without PyTorch")
    add("--json", type=Path, metavar="FILE", help="write medians and all steps, for mgpu bench diff")
    return flags


def measure(network: str, sides: list[str], threads: int, rounds: int, steps: int) -> dict[str, Result]:
    """Each side's result: all sides take turns, in both orders. Raises RuntimeError where one of them fails."""
    with ExitStack() as stack:
        runners = {side: stack.enter_context(Runner(network, side, threads)) for side in sides}
        results = {side: {**runner.hear(), "ns": []} for side, runner in runners.items()}
        for round in range(rounds):
            for side in sides[:: 1 if round % 2 else -1]:
                answer = runners[side].steps(steps)
                results[side]["ns"] += answer["ns"]
                results[side]["memory"] = answer["memory"]
    return results


def report(network: str, results: Mapping[str, Result]) -> Iterator[str]:
    """A line for each side: median and quartiles, memory; and ours over the best of theirs."""
    medians = {side: quartiles(result["ns"])[1] for side, result in results.items()}
    best = {
        "time": min((ns for side, ns in medians.items() if side != OURS), default=None),
        "memory": min((result["memory"] for side, result in results.items() if side != OURS), default=None),
    }
    yield f"# {network:21} {'ms a step':>9} {'(quartiles)':>19} {'MB':>7}   ours / best of theirs"
    for side, result in results.items():
        low, middle, high = (ns / 1e6 for ns in quartiles(result["ns"]))
        line = f"  {side:21} {middle:9.2f} {f'({low:.2f} to {high:.2f})':>19} {result['memory'] / 1e6:7.0f}"
        if side == OURS and best["time"] and best["memory"]:
            line += f"   time {medians[side] / best['time']:.2f}, memory {result['memory'] / best['memory']:.2f}"
        yield line
    yield f"#   {'; '.join(sorted({result['version'] for result in results.values()}))}"


class Runner:
    """A process that trains one side's network for as many steps as it is told to (`bench.networks.serve`)."""

    def __init__(self, network: str, side: str, threads: int) -> None:
        self._name = f"{side}'s {network}"
        self._process = subprocess.Popen(
            python(f"from bench.networks import serve; serve({network!r}, {side!r}, {threads})"),
            env={**os.environ, **dict.fromkeys(VARIABLES, str(threads))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # which closes its input, and so ends it

    def steps(self, count: int) -> Result:
        """Train for `count` steps."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return self.hear()

    def hear(self) -> Result:
        """Its next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended with code {self._process.wait()}; what it says is above")
        answer: Result = json.loads(line)
        return answer


if __name__ == "__main__":
    sys.exit(main())
