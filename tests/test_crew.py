"""The crews that tests share: what one test does to its ranks is no other's trouble."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import pytest
from crew import Crew, Crews

from collectives import Communicator


def sleep(comm: Communicator) -> None:
    time.sleep(60)


def add(comm: Communicator, number: int) -> int:
    return comm.rank + number


def test_a_test_that_is_cut_off_leaves_no_ranks_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    crews = Crews()
    assert crews(add, 1, (5,)) == [5]

    def cut_off(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    (crew,) = crews._crews.values()
    monkeypatch.setattr(type(crew._connections[0]), "recv", cut_off)
    with pytest.raises(KeyboardInterrupt):
        crews(sleep, 1)
    monkeypatch.undo()
    assert isinstance(crew, Crew) and not crew.works
    assert crews(add, 1, (7,)) == [7]
    crews.close()
