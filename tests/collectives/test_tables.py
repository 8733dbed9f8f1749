"""What compiled code is given of a communicator: it reads and writes nothing behind the tables, nor behind arrays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from collectives import Communicator, again, job, progress
from kernels import executor as x

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # for `import guarded`; ranks inherit it

import guarded

COUNTS = (1, 1000, 70_001)


def walled(array: Any) -> Any:
    """A copy, behind which nothing can be read or written."""
    copy = guarded.zeros(array.size, array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Link(job.Link):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tables = {place: walled(table) for place, table in self.tables.items()}
        self.counters, self.words = self.tables[x.LINK_COUNTERS], walled(self.words)
        for place, table in self.tables.items():
            self.words[place] = table.ctypes.data
        self.address = int(self.words.ctypes.data)


class Job(job.Job):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tables = {place: walled(table) for place, table in self.tables.items()}
        self.inputs, self.outputs = self.tables[x.JOB_INPUTS], self.tables[x.JOB_OUTPUTS]
        self.words = walled(self.words)
        self.descriptor = self.words[x.JOB_DESCRIPTOR :][: len(self.descriptor)]
        for place, table in self.tables.items():
            self.words[place] = table.ctypes.data
        self.address = int(self.words.ctypes.data)


class Walled:
    """NumPy, whose zeros have a wall behind them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    zeros = staticmethod(guarded.zeros)


def every_call(comm: Communicator) -> None:
    from collectives import signals, stream
    from collectives.backends import shm

    for module in (shm, signals):
        module.Job, module.Link = Job, Link  # type: ignore[attr-defined]
    again.np = progress.np = stream.np = Walled()  # type: ignore[assignment]
    size, rank = comm.size, comm.rank
    with comm.split(0) as walls:  # type: ignore[union-attr]
        for count in COUNTS:
            for dtype in (np.float32, np.int8):
                mine, total = np.full(count, rank + 1, dtype), size * (size + 1) // 2
                for symmetric in (False, True):
                    place = walls.empty if symmetric else guarded.zeros
                    one, other, whole = (place(n, np.dtype(dtype)) for n in (count, count, count * size))
                    for _ in range(3):  # the long way, and twice the short one
                        one[:] = mine
                        walls.all_reduce(one, out=other)
                        assert (other == total).all()
                        walls.reduce(one, "max", root=size - 1, out=other)
                        walls.broadcast(other, root=size - 1)
                        assert (other == size).all()
                        walls.all_gather(one, out=whole)
                        walls.reduce_scatter(whole, out=other)
                        assert (other == size * (rank + 1)).all()
                        walls.all_to_all(whole, out=whole.copy())
                        walls.gather(one, root=0, out=whole)
                        walls.scatter(whole, root=0, out=other)
                        walls.sendrecv(one, (rank + 1) % size, other, (rank - 1) % size)
                        assert (other == (rank - 1) % size + 1).all()
                    works = [walls.all_reduce(one, out=other, async_op=True) for _ in range(3)]
                    assert all((work.wait() == total).all() for work in works)
        walls.signal((rank + 1) % size)
        walls.wait_signal((rank - 1) % size)


def test_nothing_behind_tables_and_arrays_is_touched() -> None:
    for size in (2, 3):
        collectives.spawn(every_call, size, backend="shm")
