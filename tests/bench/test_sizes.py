"""Sizes as nccl-tests writes them, and sweeps over them."""

import argparse
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sizes import format_size, parse_size, sweep


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("8", 8),
        ("1000", 1000),
        ("4K", 4096),
        ("4k", 4096),
        ("128M", 128 << 20),
        ("2G", 2 << 30),
        ("1 KiB", 1024),
    ],
)
def test_suffixes_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-8", "1.5.5M", "8X", "8 bytes"])
def test_what_is_no_size_is_named_in_the_error(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 1 << 40))
def test_what_is_printed_can_be_read_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


def test_a_factor_multiplies_and_a_step_adds() -> None:
    assert list(sweep(8, 1024, factor=4)) == [8, 32, 128, 512]
    assert list(sweep(8, 8, factor=2)) == [8]
    assert list(sweep(0, 4, factor=2)) == [0, 1, 2, 4]
    assert list(sweep(100, 400, step=150)) == [100, 250, 400]
    assert list(sweep(16, 8, factor=2)) == []


@given(st.integers(0, 10_000), st.integers(0, 1 << 30), st.floats(1.0001, 16))
def test_a_sweep_rises_and_ends(first: int, last: int, factor: float) -> None:
    sizes = list(itertools.islice(sweep(first, last, factor=factor), 1000))
    assert sizes == sorted(set(sizes))
    assert all(first <= size <= last for size in sizes)


@pytest.mark.parametrize("arguments", [{"factor": 1}, {"factor": 0.5}, {"step": 0}, {"step": -8}, {}])
def test_a_sweep_without_end_is_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="never gets to"):
        list(sweep(8, 64, **arguments))
