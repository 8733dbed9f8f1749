"""What each collective promises, and where its data lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.contract import CACHE_LINE, COLLECTIVES, Contract, geometry, split


def test_who_brings_and_who_wants() -> None:
    assert Contract("all_reduce", 3, parts=2).brings(1) == (0, 1)
    assert Contract("all_reduce", 3, parts=2).wants(1) == {0: 0b111, 1: 0b111}
    assert Contract("reduce", 3, root=2).wants(2) == {0: 0b111}
    assert Contract("reduce", 3, root=2).wants(0) == {}
    assert Contract("broadcast", 3, root=1).brings(1) == (0,)
    assert [Contract("broadcast", 3, root=1).wants(r) for r in range(3)] == [{0: 0b010}, {}, {0: 0b010}]
    assert Contract("all_gather", 3, parts=2).brings(1) == (2, 3)
    assert Contract("all_gather", 3).wants(0) == {0: 1, 1: 2, 2: 4}
    assert Contract("reduce_scatter", 3).brings(0) == (0, 1, 2)
    assert Contract("reduce_scatter", 3).wants(2) == {2: 0b111}
    assert Contract("gather", 3, root=1).wants(1) == {0: 1, 1: 2, 2: 4}
    assert Contract("scatter", 3, root=1).brings(1) == (0, 1, 2)
    assert Contract("scatter", 3, root=1).wants(2) == {2: 0b010}
    assert Contract("all_to_all", 3).brings(1) == (3, 4, 5)
    assert Contract("all_to_all", 3).wants(1) == {1: 1, 4: 2, 7: 4}
    assert Contract("send_recv", 2, root=1).wants(0) == {0: 0b10}
    assert Contract("barrier", 3, parts=0).chunks == 0


@pytest.mark.parametrize("wrong", [{"collective": "all_reduced"}, {"size": 0}, {"root": 4}, {"root": -1}, {"parts": 0}])
def test_nonsense_is_refused(wrong: dict[str, int | str]) -> None:
    with pytest.raises(ValueError):
        Contract(**{"collective": "all_reduce", "size": 4} | wrong)  # type: ignore[arg-type]


@given(count=st.integers(0, 10_000), parts=st.integers(1, 70), itemsize=st.sampled_from([1, 2, 4, 8, 16]))
def test_parts_cover_everything_in_whole_cache_lines(count: int, parts: int, itemsize: int) -> None:
    bounds = split(count, parts, itemsize)
    assert bounds[0] == 0 and bounds[-1] == count and (np.diff(bounds) >= 0).all()
    assert all(bound * itemsize % CACHE_LINE == 0 or bound == count for bound in bounds.tolist())
    assert np.ptp(-(-np.diff(bounds) * itemsize // CACHE_LINE)) <= 1


@given(st.data())
def test_every_buffer_is_covered_exactly(data: st.DataObject) -> None:
    """In each rank's INPUT, and in its OUTPUT, the chunks lie one after another without gap or overlap."""
    collective = data.draw(st.sampled_from(sorted(COLLECTIVES)))
    size = 2 if collective == "send_recv" else data.draw(st.integers(1, 5))
    contract = Contract(collective, size, data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 3)))
    counts = np.array(data.draw(st.lists(st.integers(0, 90), min_size=size**2, max_size=size**2)))
    counts = counts[: int(np.prod(contract.shape))].reshape(contract.shape)
    lengths, inputs, outputs = geometry(contract, counts, itemsize=8)
    assert lengths.dtype == inputs.dtype == outputs.dtype == np.int64
    assert lengths.shape == inputs.shape == outputs.shape == (contract.chunks,)
    for rank in range(size):
        for chunks, starts in ((contract.brings(rank), inputs), (list(contract.wants(rank)), outputs)):
            end = 0
            for chunk in chunks:
                assert starts[chunk] == end
                end += lengths[chunk]


def test_blocks_lie_where_a_user_expects_them() -> None:
    assert geometry(Contract("all_gather", 3), 5).outputs.tolist() == [0, 5, 10]
    assert geometry(Contract("all_gather", 3), [2, 0, 7]).outputs.tolist() == [0, 2, 2]
    assert geometry(Contract("all_gather", 3), [2, 0, 7]).inputs.tolist() == [0, 0, 0]
    assert geometry(Contract("scatter", 2), [3, 4]).inputs.tolist() == [0, 3]
    uneven = geometry(Contract("all_to_all", 2), [[1, 2], [3, 4]])
    assert uneven.inputs.tolist() == [0, 1, 0, 3]  # rank 0 sends [1 | 2], rank 1 sends [3 | 4]
    assert uneven.outputs.tolist() == [0, 0, 1, 2]  # rank 0 receives [1 | 3], rank 1 receives [2 | 4]


def test_wrong_counts_are_named() -> None:
    with pytest.raises(ValueError, match=r"all_gather.*shape \(3,\).*got \[1, 2\]"):
        geometry(Contract("all_gather", 3), [1, 2])
    with pytest.raises(ValueError, match="count >= 0"):
        geometry(Contract("all_reduce", 3), -1)
