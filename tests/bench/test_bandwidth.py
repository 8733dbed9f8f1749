"""nccl-tests' definitions, held against numbers worked out by hand."""

import pytest

from bench.bandwidth import algorithm_bandwidth, bus_bandwidth, bus_factor, memory_limit, memory_traffic
from collectives.contract import COLLECTIVES


def test_algorithm_bandwidth_is_size_over_time_in_decimal_gigabytes() -> None:
    assert algorithm_bandwidth(10**9, 1e6) == 1.0  # 1 GB in a second
    assert algorithm_bandwidth(134217728, 1000.0) == pytest.approx(134.217728)


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_reduce", 1, 0.0),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 8, 0.875),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send_recv", 2, 1.0),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("barrier", 4, 0.0),
    ],
)
def test_bus_bandwidth_says_what_a_link_must_carry(collective: str, ranks: int, factor: float) -> None:
    assert bus_factor(collective, ranks) == factor
    assert bus_bandwidth(collective, ranks, 10**6, 100.0) == pytest.approx(10.0 * factor)


def test_every_collective_is_defined() -> None:
    for name in COLLECTIVES:
        assert bus_factor(name, 4) >= 0 and memory_traffic(name, 4) >= 0
    with pytest.raises(KeyError):
        bus_factor("all_to_none", 4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_memory_limit_is_the_traffic_at_the_speed_of_an_addition(ranks: int) -> None:
    nbytes, seconds = 1 << 20, 100e-6
    reached = ranks * 3 * (nbytes / 2) / seconds  # bytes a second of all ranks: two loads and a store of N/2 each
    for name, traffic in {
        "all_reduce": 2 * ranks,  # read from all, written to all
        "reduce": ranks + 1,  # read from all, written to one
        "reduce_scatter": ranks + 1,
        "broadcast": 2 * (ranks - 1),  # read and written for each who does not have it
        "gather": 2 * (ranks - 1) / ranks,
        "all_to_all": 2 * ranks,
    }.items():
        assert memory_limit(name, ranks, seconds * 1e6) == pytest.approx(traffic * nbytes / reached * 1e6), name
