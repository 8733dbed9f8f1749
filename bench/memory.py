"""`mgpu bench memory`: what a rank of data-parallel training holds, by stage of ZeRO, beside what the formulas say.

A network of equal linear layers learns by AdamW, for a few steps with each stage; stage 0 is `DataParallel`. With P
bytes of parameters on p ranks a rank holds

    stage 0   P + P + 2 P          parameters, gradients, and the optimiser's two means
    stage 1   P + P + 2 P / p
    stage 2   P + P / p + 2 P / p
    stage 3   P / p + P / p + 2 P / p

between two steps. What is found is what the kernel says that the process has (its proportional set size: of pages that
ranks share, a part each) beyond what it had before; the most is of what was seen during steps, activations included,
which are small here. All in MiB, of the rank that has most.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_core import Tensor, nn, optim
from mgpu_core.parallel import DataParallel, Sharded

STAGES = (0, 1, 2, 3)
_STEPS, _ROWS = 4, 8
_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0."""
    flags = argparse.ArgumentParser(prog="mgpu bench memory", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=2, help="processes on this host (default 2)")
    add("--layers", type=int, default=16, help="linear layers (default 16)")
    add("--width", type=int, default=1024, help="of each, whose weights take 4 * width * width bytes (default 1024)")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    options = flags.parse_args(argv)
    if options.ranks < 2 or options.layers < 1 or options.width < 1:
        flags.error("-n is at least 2, --layers and --width at least 1")
    import collectives

    by_rank = collectives.spawn(run, options.ranks, (options.layers, options.width))
    parameters = 4 * options.layers * options.width**2
    found = summarise(by_rank)
    for line in report(found, parameters, options.ranks):
        print(line)
    if options.json:
        settings = {"ranks": options.ranks, "layers": options.layers, "width": options.width}
        options.json.write_text(json.dumps({"benchmark": "memory", **settings, "stages": found}) + "\n")
    return 0


def run(comm: Any, layers: int, width: int) -> list[dict[str, float]]:
    """One rank. For each stage, bytes: `between` steps, and the `most` seen."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # what arrays free goes back at once, and what is found is what is alive
    learn(comm, 0, 1, width)  # kernels are compiled, and the communicator has its scratch memory
    return [learn(comm, stage, layers, width) for stage in STAGES]


def learn(comm: Any, stage: int, layers: int, width: int) -> dict[str, float]:
    """Some steps, and what they took."""
    before = settled(comm)
    rng = np.random.default_rng(0)
    network = nn.Sequential(*(nn.Linear(width, width, bias=False, rng=rng) for _ in range(layers)))
    model = Sharded(network, comm, stage=stage) if stage else DataParallel(network, comm)
    optimizer = optim.AdamW(model.named_parameters())
    inputs = Tensor(rng.standard_normal((_ROWS, width), np.float32))
    with Watch() as watch:
        for _ in range(_STEPS):
            optimizer.zero_grad()
            (model(inputs) ** 2).mean().backward()
            model.synchronize()
            optimizer.step()
    between = settled(comm)
    if isinstance(model, Sharded):
        model.close()
    return {"between": between - before, "most": watch.most - before}


def settled(comm: Any) -> int:
    """Bytes that this process has, once everything that was dropped has been given back."""
    gc.collect()
    comm.empty(1, np.uint8)  # symmetric memory is given back at the next allocation
    comm.barrier()
    return resident()


def resident() -> int:
    """Bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


class Watch:
    """Looks again and again, inside of it, at what the process has; `most` is the most it saw."""

    def __enter__(self) -> Watch:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(1e-3):
            self.most = max(self.most, resident())


def formula(stage: int, parameters: float, ranks: int) -> float:
    """Bytes between two steps."""
    parts = [1 if stage < since else 1 / ranks for since in (3, 2, 1, 1)]  # parameters, gradients, two means
    return parameters * sum(parts)


def summarise(by_rank: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """By stage, of the rank that has most."""
    return [{key: max(row[key] for row in rows) for key in rows[0]} for rows in zip(*by_rank, strict=True)]


def report(found: Sequence[Mapping[str, float]], parameters: int, ranks: int) -> Iterator[str]:
    """The table."""
    yield f"# memory: {ranks} ranks, {parameters / 2**20:.1f} MiB of parameters, AdamW; MiB of a rank"
    yield f"# {'stage':>5} {'formula':>9} {'found':>9} {'of it':>6} {'most in a step':>15}"
    for stage, row in zip(STAGES, found, strict=True):
        wanted = formula(stage, parameters, ranks)
        numbers = f"{wanted / 2**20:9.1f} {row['between'] / 2**20:9.1f} {row['between'] / wanted:6.0%}"
        yield f"  {stage:5} {numbers} {row['most'] / 2**20:15.1f}"


if __name__ == "__main__":
    sys.exit(main())
