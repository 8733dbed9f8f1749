"""The oracle itself: geometry, counters, poison, operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collectives import reference
from collectives.errors import ProgramError
from collectives.lowering import build
from collectives.program import Enter, Instruction, Program, Wait


def without(program: Program, rank: int, instruction: type[Instruction]) -> Program:
    bodies = list(program.bodies)
    bodies[rank] = tuple(i for i in bodies[rank] if not isinstance(i, instruction))
    return replace(program, bodies=tuple(bodies))


def test_it_adds() -> None:
    inputs = [np.arange(10) * 10**r for r in range(3)]
    for output in reference.run(build("all_reduce", "ring", 3), inputs, 10, step=2):
        assert output.tolist() == (np.arange(10) * 111).tolist()


def test_uneven_blocks_land_where_they_belong() -> None:
    counts = [[1, 2], [3, 0]]
    inputs = [np.array([1, 2, 3]), np.array([4, 5, 6])]
    outputs = reference.run(build("all_to_all", "direct", 2), inputs, counts)
    assert [output.tolist() for output in outputs] == [[1, 4, 5, 6], [2, 3]]


def test_a_missing_wait_is_found() -> None:
    program = without(build("broadcast", "chain", 3, memory="staged"), 2, Wait)
    with pytest.raises(ProgramError, match="rank 2, in call 0, slice 0, chunk 0, reads what was never written"):
        for seed in range(50):
            reference.run(program, [np.arange(5), np.arange(0), np.arange(0)], 5, seed=seed)


def test_a_missing_enter_is_found() -> None:
    program = without(build("broadcast", "chain", 3), 2, Enter)
    with pytest.raises(ProgramError, match=r"ranks \[0, 1, 2\] wait for ever"):
        reference.run(program, [np.arange(5), np.arange(0), np.arange(0)], 5)


def test_a_scaled_sum_scales_each_contribution_once() -> None:
    inputs = [np.array([1.0, 2.0]), np.array([10.0, 20.0]), np.array([100.0, 200.0])]
    for algorithm in ("ring", "two_shot", "one_shot", "double_tree"):
        for memory in ("symmetric", "staged"):
            program = build("all_reduce", algorithm, 3, memory=memory)
            for output in reference.run(program, inputs, 2, scale=0.5):
                assert output.tolist() == [55.5, 111.0]
    assert reference.run(build("all_reduce", "ring", 1), [np.array([4.0])], 1, scale=0.5)[0].tolist() == [2.0]


def test_an_average_divides_once() -> None:
    inputs = [np.array([3.0]), np.array([6.0]), np.array([0.0])]
    for algorithm in ("ring", "two_shot", "one_shot", "double_tree"):
        for output in reference.run(build("all_reduce", algorithm, 3), inputs, 1, average=True):
            assert output.tolist() == [3.0]


def test_other_reductions() -> None:
    inputs = [np.array([3, 9]), np.array([5, 1])]
    for output in reference.run(build("all_reduce", "two_shot", 2), inputs, 2, op=np.maximum):
        assert output.tolist() == [5, 9]
