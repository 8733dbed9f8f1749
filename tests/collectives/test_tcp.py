"""What the nccl backend has beside NCCL where there are several hosts: agreement, objects, messages and small arrays,
by way of the hub, and who is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("nccl.bindings", reason="nccl4py is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from apart import over_tcp
from over_mpi import every_collective, messages

from collectives import CollectiveError, CollectiveMismatchError, Communicator


def every_call(comm: Communicator) -> list[str]:
    with Communicator(over_tcp(comm, "aba")) as there:
        return every_collective(there)


@pytest.mark.slow
def test_every_collective_dtype_and_operation_is_as_on_one_host(crew: Any) -> None:
    assert crew(every_call, 3) == [[]] * 3


def other_calls(comm: Communicator) -> list[Any]:
    with Communicator(over_tcp(comm, "aba")) as there:
        told = messages(there)
        with there.split(0, -there.rank) as back, back.split(back.rank // 2) as half:  # type: ignore[union-attr]
            told += [family.all_reduce(np.full(3, 1.0 + comm.rank))[0] for family in (half, back)]
        large = there.all_reduce(np.arange(200_000) + comm.rank)  # of several letters
        told.append((large == 3 * np.arange(200_000) + 3).all())
        work = there.all_gather(np.array([there.rank]), async_op=True)
        told.append(there.scatter(np.arange(3) if there.rank == 1 else None, root=1, out=np.zeros(1, int))[0])
        told.append(work.wait().tolist())
    return told


def test_messages_families_and_large_arrays_are_as_on_one_host(crew: Any) -> None:
    for rank, told in enumerate(crew(other_calls, 3)):
        *_, half, back, large, scattered, gathered = told
        assert (half, back) == (1.0 if rank == 0 else 5.0, 6.0)
        assert large and scattered == rank and gathered == [0, 1, 2]
        assert told[:3] == [[], [], True]


def apart(comm: Communicator) -> list[str]:
    with Communicator(over_tcp(comm, "ab")) as there:
        word, told = there.zeros(1, np.int64), []
        for act in (lambda: there.fetch_add(word, 1, 1 - there.rank), lambda: there.all_reduce(word, algorithm="ring")):
            with pytest.raises((CollectiveError, ValueError)) as caught:
                act()
            told.append(str(caught.value))
        there.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            there.all_reduce(np.ones(3 + there.rank))
        return [*told, str(caught.value)]


def test_what_cannot_be_is_refused_on_every_rank(crew: Any) -> None:
    for told in crew(apart, 2):
        for text, part in zip(
            told, ("cannot be reached", "go one way only", "rank 1 called all_reduce(float64, count 4")
        ):
            assert part in text
