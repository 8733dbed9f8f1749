"""Calls as ranks publish them: equal words exactly for calls that belong together, and readable again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import premul_sum
from collectives.call import INTERNAL, Call, describe, disagreement, make_call, scale_bits, scale_value
from collectives.contract import COLLECTIVES
from kernels.dtypes import DTYPES, OPERATIONS, find

CALLS = st.builds(
    make_call,
    collective=st.sampled_from(sorted(COLLECTIVES)),
    dtype=st.sampled_from(DTYPES),
    count=st.sampled_from([0, 1, 7, 2**40]),
    op=st.sampled_from(OPERATIONS),
    root=st.sampled_from([0, 1, 63, 65535]),
    scale=st.sampled_from([0, 2, -3]),
    counts=st.sampled_from([None, (), (0, 0), (1, 2), (2, 1)]),
    algorithm=st.sampled_from([None, "ring", "two_shot"]),
)


@given(CALLS, CALLS)
def test_signatures_are_equal_for_equal_calls_only(one: Call, other: Call) -> None:
    assert (one.signature() == other.signature()) == (one is other)
    assert all(-(2**63) <= word < 2**63 for word in one.signature())


def test_equal_calls_are_one_object() -> None:
    assert make_call("all_reduce", find("float32"), 3) is make_call("all_reduce", find("float32"), 3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (make_call("all_reduce", find("float32"), 10), "all_reduce(float32, count 10, sum)"),
        (make_call("reduce", find("int8"), 0, "max", 3), "reduce(int8, count 0, max, root 3)"),
        (
            make_call("broadcast", find("bfloat16"), 2**33, root=65535),
            "broadcast(bfloat16, count 8589934592, root 65535)",
        ),
        (make_call("barrier", find("uint8"), 0), "barrier()"),
        (make_call("all_gather", find("bool"), 5), "all_gather(bool, count 5)"),
        (
            make_call("reduce_scatter", find("float64"), 4, "premul_sum", scale=scale_bits(0.5, find("float64"))),
            "reduce_scatter(float64, count 4, premul_sum(0.5))",
        ),
        (
            make_call("all_reduce", find("int32"), 4, "premul_sum", scale=scale_bits(-3, find("int32"))),
            "all_reduce(int32, count 4, premul_sum(-3))",
        ),
        (
            make_call("all_gather", find("int64"), 1, scale=INTERNAL),
            "all_gather(int64, count 1, as a part of empty or split)",
        ),
    ],
)
def test_in_words(call: Call, text: str) -> None:
    assert describe(call.signature()) == text
    assert describe((*call.signature(), 1, 2, 3)) == text  # a whole descriptor


def test_counts_and_algorithm_show_as_hashes() -> None:
    text = describe(make_call("gather", find("float32"), 3, counts=(1, 2), algorithm="tree").signature())
    assert text.startswith("gather(float32, count 3, root 0, counts with hash ") and "algorithm with hash" in text


def test_other_numbers_of_rows_are_told_of_counts() -> None:
    def told(collective: str, other: str = "float32") -> str:
        kinds = (("float32", 6), (other, 9))
        return disagreement(2, [make_call(collective, find(name), count).signature() for name, count in kinds])

    assert told("all_gather").endswith("; where ranks have different numbers of rows, each passes the same counts=")
    assert "counts" not in told("all_reduce") + told("all_gather", "float64")


@given(st.floats())
def test_a_scale_keeps_its_bits(scale: float) -> None:
    for dtype in map(find, ("float32", "float16", "complex64")):
        what = make_call("all_reduce", dtype, 1, "premul_sum").signature()[0]
        back = scale_value(what, scale_bits(scale, dtype))
        assert back == scale or math.isnan(back) and math.isnan(scale)


def test_the_scale_of_integers_is_an_integer() -> None:
    assert scale_bits(3.0, find("uint8")) == 3
    with pytest.raises(
        ValueError, match=r"premul_sum\(0.5\) of int32: the scale of an integer type must be an integer"
    ):
        scale_bits(0.5, find("int32"))


def test_premul_sums_are_equal_by_value() -> None:
    assert premul_sum(2) == premul_sum(2.0) != premul_sum(3)
    assert hash(premul_sum(2)) == hash(premul_sum(2.0))
