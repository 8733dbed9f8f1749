"""The executor in CUDA's simulator: ranks are processes that share memory, and get the CPU's results bit for bit."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest
import simulate

from kernels import executor as x
from kernels import native
from kernels.dtypes import find

HERE = Path(__file__).parents[1]
SIMULATED = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}

pytest.importorskip("numba_cuda", reason="numba-cuda, which brings the simulator, is not installed")


def case(program: str, dtype: str, operation: str, count: int, channels: int, lanes: int, **more: Any) -> Any:
    names = ("program", "dtype", "operation", "count", "channels", "lanes")
    scale = int(np.float64(1.5).view(np.int64))
    values = (program, dtype, operation, count, channels, lanes)
    return {"size": 2, "scale": scale, "late": False, "calls": 1, **dict(zip(names, values)), **more}


CASES = [
    case("two_shot", "float32", "sum", 4099, 1, 4, late=True),
    case("two_shot", "float16", "premul_sum", 1001, 3, 2),
    case("two_shot", "uint8", "max", 0, 2, 2, calls=3),
    case("chain", "bfloat16", "avg", 2500, 2, 3),
    case("chain", "int64", "min", 300, 1, 2, calls=2),
    case("staged_gather", "float8_e4m3fn", "sum", 5001, 2, 3),
]


def inputs(case: dict[str, Any], world: handmade.World) -> None:
    """Any bits at all, in what every rank brings."""
    rng = np.random.default_rng(case["count"])
    for address in world.inputs:
        data = world.at(address, case["count"] * find(case["dtype"]).itemsize, np.uint8)
        data[:] = rng.integers(0, 256, data.size)


def test_two_ranks_in_the_simulator_get_what_the_cpu_gets() -> None:
    descriptor = os.memfd_create("simulated")
    os.ftruncate(descriptor, len(CASES) * simulate.CASE_BYTES)
    shared = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8).reshape(len(CASES), -1)
    worlds = [simulate.world_and_jobs(case, memory, [])[0] for case, memory in zip(CASES, shared)]
    for given, world in zip(CASES, worlds):
        inputs(given, world)
    command = [sys.executable, str(HERE / "simulate.py"), str(descriptor)]
    ranks = [
        subprocess.Popen([*command, str(rank), json.dumps(CASES)], env=SIMULATED, pass_fds=[descriptor], stdout=-1)
        for rank in range(2)
    ]
    try:
        launches_again = [int(rank.communicate(timeout=100)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        os.close(descriptor)
    assert launches_again[0] > 0, "rank 1 came late, so rank 0 was BLOCKED meanwhile"

    for given, simulated in zip(CASES, worlds):
        combine = native.load(f"reduce-{given['dtype']}-{given['operation']}").address
        memory = np.zeros(simulate.CASE_BYTES, np.uint8)
        world, jobs = simulate.world_and_jobs(given, memory, range(2), combine)
        inputs(given, world)
        for _ in range(given["calls"]):
            assert handmade.run(native.load("execute").call, jobs) == [x.DONE] * (2 * given["channels"])
        for one, other in zip(world.outputs, simulated.outputs):
            assert_same(world.at(one, given["count"], find(given["dtype"]).numpy), simulated, other, given)


def assert_same(wanted: Any, simulated: handmade.World, address: int, given: dict[str, Any]) -> None:
    got = simulated.at(address, given["count"], wanted.dtype)
    words = f"u{wanted.itemsize}"
    same = wanted.view(words) == got.view(words)
    if given["program"] != "staged_gather":  # copies keep all bits; of sums, one NaN is as good as another
        same |= np.isnan(wanted.astype(np.float64)) & np.isnan(got.astype(np.float64))
    assert same.all(), given
    beyond = simulated.at(address + got.nbytes, 1000, np.uint8)
    assert not beyond.any(), "written beyond the end"


@pytest.mark.parametrize(("simulated", "outcome"), [("0", "NUMBA_ENABLE_CUDASIM=1 was set"), ("1", "imported")])
def test_the_simulator_must_be_asked_for_before_numba_is_imported(simulated: str, outcome: str) -> None:
    code = "try:\n import kernels.targets.sim\n print('imported')\nexcept ImportError as error:\n print(error)"
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": simulated}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert outcome in said.stdout
