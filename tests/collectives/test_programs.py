"""Which program a call gets: premul_sum of more ranks than one Move can scale adds step by step."""

from __future__ import annotations

from itertools import product

import pytest

from collectives.call import make_call, scale_bits
from collectives.job import Link
from collectives.programs import for_call
from kernels.dtypes import find
from kernels.executor import MOST_SCALED

FLOAT = find("float32")


def link(size: int) -> Link:
    """Of rank 1, in a communicator that never runs anything."""
    nowhere = [0] * size
    return Link(
        1, scratch=nowhere, boards=nowhere, flags_in=nowhere, flags_out=nowhere, finished=0, slots=4,
        slot_bytes=1 << 16, patience=(1, 1),
    )  # fmt: skip


QUICK = {
    ("all_reduce", "staged", MOST_SCALED + 1),
    ("reduce", "symmetric", MOST_SCALED + 1),
    ("reduce_scatter", "symmetric", MOST_SCALED),
}
EVERY = product(("all_reduce", "reduce", "reduce_scatter"), ("staged", "symmetric"), (MOST_SCALED, MOST_SCALED + 1))


@pytest.mark.parametrize(
    ("collective", "memory", "size"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in EVERY],
)
def test_premul_sum_of_any_number_of_ranks(collective: str, memory: str, size: int) -> None:
    call = make_call(collective, FLOAT, 1000, "premul_sum", 0, scale_bits(0.5, FLOAT))
    encoded, _ = for_call(call, link(size), memory)
    assert encoded.program.fan_in <= MOST_SCALED
    plain, _ = for_call(make_call(collective, FLOAT, 1000, "sum"), link(size), memory)
    assert (plain.program.fan_in == size) or size <= MOST_SCALED


def test_an_algorithm_that_would_scale_too_many_at_once_is_refused() -> None:
    scale = scale_bits(0.5, FLOAT)
    call = make_call("all_reduce", FLOAT, 1000, "premul_sum", 0, scale, algorithm="two_shot")
    for_call(call, link(MOST_SCALED), "symmetric")
    with pytest.raises(ValueError, match="premul_sum by two_shot among 65 ranks .* choose another algorithm"):
        for_call(call, link(MOST_SCALED + 1), "symmetric")
