"""One rank of `targets/test_sim.py`, in a process of its own: runs hand-made programs in CUDA's simulator.

    NUMBA_ENABLE_CUDASIM=1 python simulate.py <descriptor of the shared memory> <rank> <cases, as JSON>

Prints how often it had to launch again because a channel was BLOCKED.
"""

import json
import mmap
import sys
import time
from typing import Any

import handmade
import numpy as np

from kernels import executor as x
from kernels.dtypes import find

CASE_BYTES = 1 << 20  # of the shared memory, for each case


def world_and_jobs(case: dict[str, Any], memory: Any, ranks: Any, combine: int = 0) -> tuple[Any, list[handmade.Job]]:
    """The world of a case in its memory, and the jobs of some ranks; the same in every process."""
    size, count, itemsize = case["size"], case["count"], find(case["dtype"]).itemsize
    world = handmade.World(
        size, channels=case["channels"], slots=2, cells=size, cell_bytes=2048, room=1 << 15, memory=memory
    )
    if case["program"] == "chain":
        bodies, lengths, starts, step = handmade.chain(size, 2), [count], [0], 2048 // itemsize
    else:
        starts = [count * rank // size for rank in range(size + 1)]
        lengths = [after - before for before, after in zip(starts, starts[1:])]
        if case["program"] == "two_shot":
            bodies, step = handmade.two_shot(size), None
        else:
            bodies, step = handmade.staged_gather(size, 2), 2048 // itemsize
    rest = {"starts": starts, "step": step, "combine": combine, "scale": case["scale"], "descriptor": [1]}
    jobs = [world.job(rank, bodies, itemsize, lengths, **rest) for rank in ranks]
    return world, jobs


def main(descriptor: int, rank: int, cases: list[dict[str, Any]]) -> None:
    from kernels.targets import sim

    memory = np.frombuffer(mmap.mmap(descriptor, len(cases) * CASE_BYTES), np.uint8)
    again = 0
    for number, case in enumerate(cases):
        piece = memory[number * CASE_BYTES : (number + 1) * CASE_BYTES]
        while case["late"] and rank == 1 and not piece[-1]:
            time.sleep(0.01)  # until rank 0 has come back BLOCKED
        reduction = sim.load(f"reduce-{case['dtype']}-{case['operation']}")
        world, (job,) = world_and_jobs(case, piece, [rank], reduction.address)
        launch = sim.kernel
        for _ in range(case["calls"]):
            job.renew()
            launch[case["channels"], case["lanes"]](job.address)
            while x.BLOCKED in (statuses := [job.place(x.PLACE_STATUS, c) for c in range(case["channels"])]):
                piece[-1] = 1
                launch[case["channels"], case["lanes"]](job.address)
                again += 1
            assert statuses == [x.DONE] * world.channels, statuses
    print(again)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
