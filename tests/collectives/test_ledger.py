"""The ledger of calls: ranks that differ are told apart whoever comes later, in any order of what is seen."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.call import make_call
from collectives.errors import CollectiveMismatchError
from collectives.ledger import NBYTES, ROWS, Ledger
from kernels.dtypes import find


def ledgers(size: int) -> tuple[list[Ledger], list[np.ndarray]]:
    pages = [np.zeros(NBYTES, np.uint8) for _ in range(size)]
    return [Ledger(pages, rank) for rank in range(size)], pages


def signature(count: int) -> tuple[int, ...]:
    return make_call("all_reduce", find("float32"), count).signature()


def test_equal_calls_pass_and_the_later_of_two_different_ones_finds_it() -> None:
    (a, b, c), _ = ledgers(3)
    for count in (1, 2, 3):
        a.begin(signature(count))
        a.compare()
    for count in (1, 2):
        b.begin(signature(count))
        b.compare()
    c.begin(signature(1))
    c.compare()
    b.begin(signature(7))
    for rank in (a, b):
        with pytest.raises(
            CollectiveMismatchError, match=r"call 3: rank 0 called .*count 3.*; rank 1 called .*count 7"
        ):
            rank.compare()
    c.compare()
    assert [a.begun(rank) for rank in range(3)] == [3, 3, 1]
    assert "rank 2 did not begin it" in a.arrivals(3) and "rank 2 has begun call 1, all_reduce" in a.arrivals(3)


def test_what_is_still_being_written_is_compared_later() -> None:
    (a, b), pages = ledgers(2)
    a.begin(signature(1))
    b.begin(signature(2))
    row = pages[1].view(np.int64).reshape(-1, 8)[2]
    written, row[1:] = row.copy(), 0
    a.compare()
    row[:] = written
    with pytest.raises(CollectiveMismatchError, match="call 1"):
        a.compare()


def test_nobody_runs_further_ahead_than_the_page_is_long() -> None:
    (a, b), _ = ledgers(2)
    for _ in range(ROWS):
        assert not a.behind()
        a.begin(signature(1))
    assert a.behind() == [1]
    b.begin(signature(1))
    b.compare()
    assert not a.behind() and b.begun(0) == ROWS
    a.begin(None)
    a.end(5)
    assert b.ended(0) == 5 and b.begun(0) == ROWS + 1
