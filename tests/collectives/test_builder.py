"""The language of algorithms: what is recorded, and what is refused."""

from __future__ import annotations

import pytest

from collectives import builder
from collectives.builder import Chunks, algorithm, algorithms, lookup, trace
from collectives.errors import ProgramError


def test_a_share_knows_where_it_is_and_whose_contributions_it_holds() -> None:
    chunks = Chunks("all_reduce", 4, root=0)
    share = chunks(rank=2, index=1)
    assert share.rank == 2
    share = share.reduce_into(rank=3).reduce_into(rank=0)
    assert share.rank == 0
    assert [(value.rank, value.contributions) for value in chunks.values] == [
        (2, 0b0100),
        (3, 0b1000),
        (3, 0b1100),
        (0, 0b0001),
        (0, 0b1101),
    ]


def test_what_a_rank_brings_is_recorded_once() -> None:
    chunks = Chunks("all_reduce", 2, root=0)
    chunks(rank=0).copy_to(1)
    chunks(rank=0).copy_to(1)
    assert sum(not value.sources for value in chunks.values) == 1


def test_copying_to_where_it_is_changes_nothing() -> None:
    chunks = Chunks("all_gather", 3, root=0)
    share = chunks(rank=1)
    assert share.copy_to(1) is share
    assert [copy.rank for copy in share.copy_to(range(3))] == [0, 1, 2]
    assert len(chunks.values) == 3


def test_several_shares_are_reduced_in_the_order_given() -> None:
    chunks = Chunks("all_reduce", 3, root=0)
    chunks.reduce([chunks(rank=2), chunks(rank=0), chunks(rank=1)], rank=1)
    assert [chunks.values[source].rank for source in chunks.values[-1].sources] == [2, 0, 1]


def test_the_number_of_parts_is_what_the_algorithm_names() -> None:
    chunks = Chunks("all_reduce", 2, root=0)
    assert chunks.contract.chunks == 1
    chunks(rank=0, index=4)
    assert chunks.contract.chunks == 5
    blocks = Chunks("all_gather", 3, root=0)
    blocks(rank=2, part=1)
    assert (blocks.contract.blocks, blocks.contract.parts, blocks.contract.chunks) == (3, 2, 6)


@pytest.mark.parametrize(
    ("collective", "arguments", "complaint"),
    [
        ("all_reduce", {"rank": 3}, "rank 3 does not exist: expected 0 to 2"),
        ("all_gather", {"rank": 1, "index": 2}, "rank 1 brings nothing of block 2"),
        ("scatter", {"rank": 1, "index": 2}, "rank 1 brings nothing of block 2"),
        ("reduce_scatter", {"rank": 1, "index": 3}, "index 3 is not a rank"),
    ],
)
def test_what_is_not_there_cannot_be_taken(collective: str, arguments: dict[str, int], complaint: str) -> None:
    with pytest.raises(ProgramError, match=complaint):
        Chunks(collective, 3, root=0)(**arguments)


def test_only_one_chunk_is_reduced_at_a_time() -> None:
    chunks = Chunks("all_reduce", 2, root=0)
    with pytest.raises(ProgramError, match="one chunk"):
        chunks.reduce([chunks(rank=0, index=0), chunks(rank=1, index=1)], rank=0)
    with pytest.raises(ProgramError, match="one chunk"):
        chunks.reduce([], rank=0)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    known = {collective: algorithms(collective) for collective in builder.COLLECTIVES}
    monkeypatch.setattr(builder, "_registered", known)


def test_registering_and_finding(registry: None) -> None:
    @algorithm("all_reduce")
    def only(chunks: Chunks, size: int) -> None: ...

    @algorithm("all_gather", name="only")
    def another(chunks: Chunks, size: int) -> None: ...

    assert lookup("all_reduce", "only") is only
    assert algorithms("all_gather")["only"] is another
    with pytest.raises(ValueError, match="no broadcast algorithm is called 'only'; there are"):
        lookup("broadcast", "only")
    with pytest.raises(ValueError, match="no collective is called 'all_reduced'; there are all_reduce, reduce"):
        algorithm("all_reduced")
    with pytest.raises(ValueError, match="no collective is called 'all_reduced'"):
        algorithms("all_reduced")


def test_options_are_checked_before_the_algorithm_runs() -> None:
    def picky(chunks: Chunks, size: int, root: int, width: int = 1) -> None:
        chunks(rank=root).copy_to(range(size))

    assert trace(picky, "broadcast", 3, 1, {"width": 2}).values[0].rank == 1
    with pytest.raises(TypeError, match="broadcast by picky: got an unexpected keyword argument 'depth'"):
        trace(picky, "broadcast", 3, 1, {"depth": 2})
