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

from collectives import Communicator


def all_of_it(comm: Communicator) -> list[Any]:
    there = Communicator(over_tcp(comm, ["a", "b", "a"]))
    told = [every_collective(there), *messages(there)]
    with there.split(0, -there.rank) as back, back.split(back.rank // 2) as half:  # type: ignore[union-attr]
        told.append([family.all_reduce(np.full(3, 1.0 + comm.rank)).tolist() for family in (half, back)])
    large = np.arange(700_000) + comm.rank
    assert there.all_reduce(large).tolist() == (3 * np.arange(700_000) + 3).tolist()
    there.close()
    return told


def test_everything_is_as_on_one_host(crew: Any) -> None:
    for told in crew(all_of_it, 3):
        print(told)
