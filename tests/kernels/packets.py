"""Ranks that send packets (`kernels/lowlatency.py`): the memory of all, and one rank in a process of its own.

    python packets.py <descriptor of the shared memory> <rank> <cases, as JSON>

runs on the CPU, or in CUDA's simulator where NUMBA_ENABLE_CUDASIM=1; prints each call's result, in hexadecimal.
"""

import json
import mmap
import os
import sys
import time
from typing import Any

import guarded
import numpy as np

from kernels import lowlatency as ll
from kernels.dtypes import find
from kernels.executor import BLOCKED

CASE_BYTES = 1 << 18  # of the shared memory, for each case
ROOM = 1 << 12  # bytes of a rank's input, and of its output
OLD = 0x5A  # every byte of an inbox that has seen many calls: zeros would look like packets of call 2**32


def words(count: int) -> Any:
    """Zeros at a multiple of 64 bytes."""
    return guarded.zeros(-(-count // 8) * 8)[:count]


class World:
    """Inboxes, states, jobs, inputs and outputs of `size` ranks; the inboxes in `memory`, if it is given."""

    def __init__(
        self, size: int, channels: int = 1, most: int = 1024, calls: int = 0, patience: tuple[int, int] = (0, -1),
        scale: int = 0, memory: Any = None,
    ) -> None:  # fmt: skip
        self.size, self.channels, self.capacity = size, channels, ll.capacity_for(most, channels)
        nbytes = ll.inbox_bytes(size, channels, self.capacity)
        if memory is None:
            memory = words(size * nbytes // 8).view(np.uint8)
            memory[:] = OLD if calls else 0
        self.inboxes = memory.view(np.int64)[: size * nbytes // 8].reshape(size, -1)
        self.addresses = np.array([inbox.ctypes.data for inbox in self.inboxes])
        self.states = [words(ll.STATE_WORDS * channels).reshape(channels, -1) for _ in range(size)]
        self.inputs = [words(ROOM // 8).view(np.uint8) for _ in range(size)]
        self.outputs = [words(ROOM // 8).view(np.uint8) for _ in range(size)]
        self.jobs = [words(ll.JOB_WORDS) for _ in range(size)]
        for rank, (job, state) in enumerate(zip(self.jobs, self.states)):
            state[:, ll.STATE_CALLS] = calls
            job[ll.JOB_RANK], job[ll.JOB_SIZE] = rank, size
            job[ll.JOB_SPINS], job[ll.JOB_YIELDS] = patience
            job[ll.JOB_CAPACITY], job[ll.JOB_SCALE] = self.capacity, scale
            job[ll.JOB_INBOXES], job[ll.JOB_STATES] = self.addresses.ctypes.data, state.ctypes.data

    def give(self, rank: int, data: Any, offset: int = 0, in_place: bool = False) -> int:
        """Let a rank's next call be about `data`, so many bytes into its input and output: the job's address."""
        job, inp, out = self.jobs[rank], self.inputs[rank], self.outputs[rank]
        job[ll.JOB_INPUT] = inp.ctypes.data + offset
        job[ll.JOB_OUTPUT] = (inp if in_place else out).ctypes.data + offset
        job[ll.JOB_BYTES], job[ll.JOB_SHARE] = data.size, ll.share_of(data.size, self.channels)
        inp[:], out[:] = 0xA5, 0x5A
        inp[offset : offset + data.size] = data
        return int(job.ctypes.data)

    def result(self, rank: int) -> Any:
        """What the last call has written."""
        job = self.jobs[rank]
        place = self.inputs[rank] if job[ll.JOB_INPUT] == job[ll.JOB_OUTPUT] else self.outputs[rank]
        start = int(job[ll.JOB_OUTPUT]) - place.ctypes.data
        return place[start : start + int(job[ll.JOB_BYTES])].copy()


def contribution(case: dict[str, Any], rank: int, call: int) -> Any:
    """The bytes that a rank brings to a call: any bits at all, sometimes few, sometimes none."""
    dtype = find(case["dtype"])
    count = case["count"] * (call * 7 % 13) // 12
    bits = np.random.default_rng((rank, call)).integers(0, 256, count * dtype.itemsize, np.uint8)
    return bits % 2 if dtype.kind == "bool" else bits


def main(descriptor: int, rank: int, cases: list[dict[str, Any]]) -> None:
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        from kernels.targets.sim import small
    else:
        from kernels import native

        def small(dtype: str, operation: str) -> Any:
            call = native.load(f"small-{dtype}-{operation}").call
            return lambda job, channels, lanes: call(job, 0, channels, 0, lanes)

    memory = np.frombuffer(mmap.mmap(descriptor, len(cases) * CASE_BYTES), np.uint8)
    delays = np.random.default_rng(rank)
    for number, case in enumerate(cases):
        all_reduce = small(case["dtype"], case["operation"])
        piece = memory[number * CASE_BYTES : (number + 1) * CASE_BYTES]
        world = World(case["size"], case["channels"], 512, case["before"], (50, -1), case["scale"], piece)
        for call in range(case["calls"]):
            job = world.give(rank, contribution(case, rank, call), in_place=call % 2 == 1)
            if delays.random() < case["late"]:
                time.sleep(delays.random() * 0.002)
            while all_reduce(job, case["channels"], case["lanes"]) == BLOCKED:
                time.sleep(0)
            print(world.result(rank).tobytes().hex())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
