"""What each collective gives every rank, against its definition; and where inputs and outputs lie."""

import numpy as np
import pytest

from bench.case import ROOTED, Case, blocks, outcome, placements, reduces, views
from bench.inputs import PERIOD, count_wrong, fill
from bench.inputs import blocks as input_blocks
from bench.inputs import expected as reduced_block
from collectives.contract import COLLECTIVES

SIZES = (1, 3, 1000, PERIOD, 3 * PERIOD + 7)


def cases(ranks: int) -> list[Case]:
    return [
        Case(name, count * blocks(name, ranks) * 4, count, "float32", "sum" if reduces(name) else "none", root, placed)
        for name in COLLECTIVES
        for count in SIZES
        for root in (range(ranks) if name in ROOTED else (-1,))
        for placed in placements(name)
    ]


def by_definition(name: str, root: int, inputs: list[np.ndarray], rank: int) -> np.ndarray | None:
    """A rank's output; None where there is none."""
    ranks = len(inputs)
    match name:
        case "all_reduce":
            return np.sum(inputs, axis=0)
        case "reduce":
            return np.sum(inputs, axis=0) if rank == root else None
        case "reduce_scatter":
            return np.split(np.sum(inputs, axis=0), ranks)[rank]
        case "broadcast":
            return inputs[root]
        case "scatter":
            return np.split(inputs[root], ranks)[rank]
        case "all_gather":
            return np.concatenate(inputs)
        case "gather":
            return np.concatenate(inputs) if rank == root else None
        case "all_to_all":
            return np.concatenate([np.split(x, ranks)[rank] for x in inputs])
        case "send_recv":
            return inputs[rank - 1]
    return None


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_expected_is_what_the_definition_says(ranks: int) -> None:
    for case in cases(ranks):
        given = input_blocks(ranks, np.float32, case.op)
        reduced = reduced_block(ranks, np.float32, "sum")
        whole = case.nbytes // 4
        memory = [(np.empty(whole, np.float32), np.empty(whole, np.float32)) for _ in range(ranks)]
        pairs = [views(case, rank, ranks, *memory[rank]) for rank in range(ranks)]
        for (x, _), block in zip(pairs, given):
            fill(x, block)
        right = [by_definition(case.collective, case.root, [x.copy() for x, _ in pairs], r) for r in range(ranks)]
        for rank, ((_, out), result) in enumerate(zip(pairs, right)):
            parts = outcome(case, rank, given, reduced)
            assert (result is None) == (parts == []), case
            if result is None:
                continue
            assert out.size == result.size == sum(out[part].size for part, _ in parts), case
            out[...] = result
            assert not any(count_wrong(out[part], block) for part, block in parts), case
            out[-1] += 1
            assert sum(count_wrong(out[part], block) for part, block in parts) == 1, case


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_in_place_is_in_one_array_and_out_of_place_in_two(ranks: int) -> None:
    for case in cases(ranks):
        whole = case.nbytes // 4
        source, target = np.empty(whole, np.float32), np.empty(whole, np.float32)
        for rank in range(ranks):
            x, out = views(case, rank, ranks, source, target)
            assert max(x.size, out.size) == whole, case
            assert np.shares_memory(x, source)
            assert np.shares_memory(out, source) == case.in_place, case
            if case.in_place and x.size == out.size:
                assert out is x
            elif case.in_place:  # the smaller is this rank's block of the larger
                small, large = sorted((x, out), key=np.size)
                assert np.shares_memory(small, np.split(large, ranks)[rank])
