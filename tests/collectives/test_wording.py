"""How messages say counts, and that all of them say one as one."""

from __future__ import annotations

import pytest

from collectives.lowering import build
from collectives.wording import counted


@pytest.mark.parametrize(("count", "said"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1000, "1,000 ranks")])
def test_one_is_no_plural(count: int, said: str) -> None:
    assert counted(count, "rank") == said


def test_a_program_of_one_rank_says_so() -> None:
    assert str(build("all_reduce", "ring", 1)).startswith("all_reduce by ring: 1 rank, symmetric memory")
