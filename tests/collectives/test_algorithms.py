"""Every algorithm that comes with the package: proven, and run by the oracle under random interleavings."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import reference
from collectives.builder import algorithms
from collectives.contract import COLLECTIVES, geometry
from collectives.lowering import Memory, build
from collectives.reference import Array, Call
from collectives.verify import verified, verify

SHIPPED = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
MEMORIES: tuple[Memory, ...] = ("symmetric", "staged")
COUNTS = (0, 1, 2, 3, 7, 13, 64, 101)


def expected(collective: str, root: int, inputs: list[Array], counts: Array) -> list[Array]:
    """What each rank must end up with, said in NumPy alone."""
    size, nothing = len(inputs), np.zeros(0, dtype=np.int64)
    blocks = [
        np.split(x, np.cumsum(c)[:-1]) for x, c in zip(inputs, np.broadcast_to(counts, (size, size)), strict=True)
    ]
    match collective:
        case "all_reduce":
            return [np.sum(inputs, axis=0)] * size
        case "reduce":
            return [np.sum(inputs, axis=0) if rank == root else nothing for rank in range(size)]
        case "broadcast" | "send_recv":
            return [nothing if rank == root else inputs[root] for rank in range(size)]
        case "all_gather":
            return [np.concatenate(inputs)] * size
        case "gather":
            return [np.concatenate(inputs) if rank == root else nothing for rank in range(size)]
        case "scatter":
            return blocks[root]
        case "reduce_scatter":
            return [np.sum([theirs[rank] for theirs in blocks], axis=0) for rank in range(size)]
        case "all_to_all":
            return [np.concatenate([theirs[rank] for theirs in blocks]) for rank in range(size)]
        case _:
            return [nothing] * size


def random_call(collective: str, name: str, size: int, slots: int, chance: random.Random) -> tuple[Call, list[Array]]:
    """One call with everything else drawn by chance, and what it must give."""
    root, pipelined = chance.randrange(size), chance.random() < 0.7
    program = verified(
        collective, name, size, memory=chance.choice(MEMORIES), slots=slots, root=root, pipelined=pipelined
    )
    contract = program.contract
    choices = (0,) if collective == "barrier" else (*COUNTS, size - 1, size + 1)
    counts = np.array([chance.choice(choices) for _ in range(contract.blocks)], dtype=np.int64).reshape(contract.shape)
    if chance.random() < 0.5:
        counts[...] = chance.choice(choices)  # even
    lengths = geometry(contract, counts).lengths
    brought = [sum(int(lengths[chunk]) for chunk in contract.brings(rank)) for rank in range(size)]
    inputs = [np.array([chance.randrange(-999, 1000) for _ in range(n)], dtype=np.int64) for n in brought]
    step = chance.choice([1, 3, 8, 40]) if pipelined else 0
    in_place = collective != "all_to_all" and chance.random() < 0.5
    return Call(program, inputs, counts, step=step, in_place=in_place), expected(collective, root, inputs, counts)


def check(calls: list[tuple[Call, list[Array]]], seed: int) -> None:
    results = reference.execute([call for call, _ in calls], seed)
    for (call, wanted), got in zip(calls, results, strict=True):
        for rank, (mine, right) in enumerate(zip(got, wanted, strict=True)):
            assert mine.tolist() == right.tolist(), (call.program, rank, call.counts, call.step, call.in_place)


@pytest.mark.parametrize(("collective", "name"), SHIPPED)
@pytest.mark.parametrize("size", [1, 2, 3, 5, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 6, 7, 8))])
def test_right_result(collective: str, name: str, size: int) -> None:
    if collective == "send_recv" and size != 2:
        pytest.skip("between two ranks")
    for seed in range(2):
        chance = random.Random(f"{collective} {name} {size} {seed}")
        check([random_call(collective, name, size, 2, chance) for _ in range(2)], seed)


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "name"), [pair for pair in SHIPPED if pair[0] != "send_recv"])
@pytest.mark.parametrize("size", [*range(9, 17), 64])
def test_right_result_among_more_ranks(collective: str, name: str, size: int) -> None:
    check([random_call(collective, name, size, 2, random.Random(size))], size)


@settings(max_examples=50)
@given(size=st.integers(2, 4), slots=st.integers(2, 3), seed=st.integers(0, 2**32), data=st.data())
def test_any_program_may_follow_any(size: int, slots: int, seed: int, data: st.DataObject) -> None:
    names = st.sampled_from([pair for pair in SHIPPED if pair[0] != "send_recv" or size == 2])
    chance = random.Random(seed)
    check([random_call(*data.draw(names), size, slots, chance) for _ in range(4)], seed)


@pytest.mark.parametrize(("collective", "name"), SHIPPED)
def test_proven_for_every_number_of_ranks(collective: str, name: str) -> None:
    """Up to 5 ranks, and 8, here; up to 64 in the slow tests."""
    for size in (1, 2, 3, 4, 5, 8) if collective != "send_recv" else (2,):
        for memory in MEMORIES:
            verify(build(collective, name, size, memory=memory, slots=2 + size % 3, root=size // 2))
            verify(build(collective, name, size, memory=memory, root=size // 3, pipelined=False))


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "name"), [pair for pair in SHIPPED if pair[0] != "send_recv"])
@pytest.mark.parametrize("size", [6, 7, 9, 11, 13, 16, 17, 24, 31, 32, 33, 48, 63, 64])
def test_proven_for_many_ranks(collective: str, name: str, size: int) -> None:
    for memory in MEMORIES:
        verify(build(collective, name, size, memory=memory, root=size // 3))


@pytest.mark.parametrize("groups", [1, 2, 3, 7, ((0, 3, 6), (1, 4), (2, 5)), ((6, 0), (1, 2, 3, 4), (5,))])
@pytest.mark.parametrize("inner", ["direct", "ring", "tree"])
@pytest.mark.parametrize("outer", ["direct", "ring", "tree"])
def test_hierarchies_of_any_kind(groups: int | tuple[tuple[int, ...], ...], inner: str, outer: str) -> None:
    for memory in MEMORIES:
        program = verified("all_reduce", "hierarchical", 7, memory=memory, groups=groups, inner=inner, outer=outer)
        inputs = [np.arange(r, r + 30) for r in range(7)]
        for output in reference.run(program, inputs, 30, step=2):
            assert output.tolist() == np.sum(inputs, axis=0).tolist()


def test_every_rank_is_in_one_group() -> None:
    with pytest.raises(ValueError, match="every rank must be in one group"):
        build("all_reduce", "hierarchical", 4, groups=((0, 1), (1, 2, 3)))
