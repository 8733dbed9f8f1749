"""`make gpu-check`: its cases, its verdict, and what it says where there is no GPU."""

from __future__ import annotations

import json
from typing import Any

import fakecupy
import numpy as np
import pytest

from bench import gpu_check
from collectives.builder import algorithms
from collectives.contract import COLLECTIVES
from kernels.dtypes import DTYPES


def test_thorough_cases_are_every_program_with_every_dtype_and_operation() -> None:
    found = {(case.collective, case.algorithm, case.dtype, case.op) for case in gpu_check.cases(thorough=True)}
    for name in algorithms("all_reduce"):
        for dtype in DTYPES:
            for op in dtype.operations():
                assert ("all_reduce", name, dtype.name, op) in found
    programs = {(collective, name) for collective, name, *_ in found}
    assert programs == {(c, n) for c in COLLECTIVES if c not in ("send_recv", "barrier") for n in algorithms(c)}


def test_cases_for_nccl_are_what_it_can_add_in_numbers_that_every_order_adds_alike() -> None:
    found = gpu_check.cases_for_nccl()
    kinds = {(case.collective, case.dtype, case.op) for case in found}
    assert len(kinds) == len(found) and ("all_reduce", "int16", "sum") not in kinds
    assert {("all_reduce", "complex64", "sum"), ("all_gather", "int16", "sum")} <= kinds
    for case in found[::17]:
        assert set(np.unique(gpu_check.inputs(case, 1, 2)).tolist()) <= {0, 1}


def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_missing", lambda: "no GPU can be used here")
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().out == "gpu-check: no GPU can be used here; nothing was checked\n"


def test_wrong_bytes_and_failures_are_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def spawn(function: Any, ranks: int, args: Any, backend: str) -> list[list[str]]:
        if ranks == 3:
            raise RuntimeError("no such luck")
        return [[f"{number} {backend if number == 4 and rank == 1 else ''}" for number in range(len(args[0]))]
                for rank in range(ranks)]  # fmt: skip

    monkeypatch.setattr(gpu_check.collectives, "spawn", spawn)
    path = tmp_path / "rows.json"
    assert gpu_check.main(["--sim", "--ranks", "2", "3", "--json", str(path)]) == 1
    right, failed = json.loads(path.read_text())
    assert right["wrong"] == 1 and "number=4" in right["note"] and failed["wrong"] == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().out


def test_a_training_is_compared_with_the_cpus_and_timed() -> None:
    with fakecupy.installed():
        alone, speed = gpu_check.training(together=False, batch=2, steps=2)
        assert (alone.check, alone.cases, alone.wrong) == ("training", 5, 0) and "of the CPU's" in alone.note
        assert "images/s, ResNet-20" in speed.note
        assert gpu_check.train("cpu", steps=2) != gpu_check.train("cpu", steps=2, batch=32)


@pytest.mark.slow
def test_in_the_simulator_every_program_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda, which brings the simulator, is not installed")
    assert gpu_check.main(["--sim"]) == 0
    assert "programs, sim" in capsys.readouterr().out
