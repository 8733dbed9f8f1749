"""`make gpu-check`: its cases, its verdict, and what it says where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakecupy
import numpy as np
import pytest

from bench import gpu_check
from bench.apart import Row
from collectives.builder import algorithms
from collectives.contract import COLLECTIVES
from kernels import lowlatency
from kernels.dtypes import DTYPES

sys.path.append(str(Path(__file__).parents[1] / "collectives"))  # for `import fakegpu`


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
    def spawn(function: Any, ranks: int, args: Any, backend: str, timeout: float) -> list[list[Any]]:
        if ranks == 3:
            raise RuntimeError("no such luck")
        given, *digests = args
        if digests:
            return [[np.arange(4.0) + (rank == 1 and backend == "sim") for _ in given] for rank in range(ranks)]
        return [[f"{number} {backend if number == 4 and rank == 1 else ''}" for number in range(len(given))]
                for rank in range(ranks)]  # fmt: skip

    monkeypatch.setattr(gpu_check.collectives, "spawn", spawn)
    path = tmp_path / "rows.json"
    assert gpu_check.main(["--sim", "--ranks", "2", "3", "--json", str(path)]) == 1
    right, failed = json.loads(path.read_text())["rows"]
    assert right["wrong"] == 1 and "number=4" in right["note"] and failed["wrong"] == 1
    said = (
        "4 of 4 elements differ, the first at 0: it is 1.0 (0x3ff0000000000000) and the CPU's 0.0 (0x0000000000000000)"
    )
    assert f"rank 1: {said}" in right["details"] and "raise RuntimeError" in failed["details"]
    assert "RuntimeError: no such luck" in capsys.readouterr().out


def test_what_is_right_when_it_is_run_again_is_told() -> None:
    nan, one = np.array([np.nan], np.float32), np.ones(1, np.float32)
    assert gpu_check.difference([None, nan, one], [None, nan, one]) == "right this time"


def test_each_check_is_a_process_and_each_row_is_kept_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    path, seen = tmp_path / "rows.json", []

    def run(name: str, ranks: int, command: Any, limit: float) -> list[Row]:
        seen.append((name, ranks, len(json.loads(path.read_text())["rows"]) if path.exists() else 0))
        assert command[-3:] == ["--check", name, str(ranks)] and name in gpu_check.CHECKS
        assert limit == gpu_check.LIMITS.get(name, gpu_check.LIMIT)
        return [Row(name, ranks, 1, int(name == "buckets"), 0.5)]

    monkeypatch.setattr(gpu_check.apart, "run", run)
    monkeypatch.setattr(gpu_check, "_missing", lambda: "")
    monkeypatch.setattr("kernels.driver.devices", lambda: 1)
    assert gpu_check.main(["--json", str(path), "--ranks", "4", "2"]) == 1
    assert [number for *_, number in seen] == list(range(len(seen)))
    order = [(name, ranks) for name, ranks, _ in seen]
    assert order[:5] == [("kernels", 1), ("processes", 2), ("programs", 2), ("programs", 4), ("processes", 4)]
    assert {name for name, _ in order} >= {"memcheck", "graph replay", "timings", "training"}
    assert "python" in json.loads(path.read_text())["machine"]
    assert gpu_check.planned([2, 4, 8], 8).count(("programs", 8)) == 1
    assert ("processes", 8) not in gpu_check.planned([2, 4, 8], 8), (
        "programs are processes where there are GPUs for them"
    )
    monkeypatch.setattr(gpu_check.apart, "run", lambda *_: pytest.fail("no time is left"))
    assert gpu_check.main(["--minutes", "0"]) == 0
    assert "no time left of 0 minutes" in capsys.readouterr().out


def test_every_kernel_that_programs_need_is_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(gpu_check.cubin, "load", lambda name, dtype, op, capability: loaded.append((name, dtype, op)))
    monkeypatch.setattr(gpu_check.native, "load", lambda name: loaded.append((name,)))
    for rank in range(3):
        gpu_check.build(SimpleNamespace(rank=rank, size=3), (9, 0))  # type: ignore[arg-type]
    assert len(loaded) == len(set(loaded)) == len(gpu_check.kernels((9, 0)))
    for case in gpu_check.cases(True):
        if COLLECTIVES[case.collective].source is None:
            assert {("execute", case.dtype, case.op), (f"reduce-{case.dtype}-{case.op}",)} <= set(loaded)
    assert ("small", "float32", "sum") in loaded and ("small", "complex128", "sum") not in loaded


def test_a_training_is_compared_with_the_cpus_and_timed() -> None:
    with fakecupy.installed():
        alone, speed = gpu_check.training(together=False, batch=2, steps=2)
        assert (alone.check, alone.cases, alone.wrong) == ("training", 5, 0) and "of the CPU's" in alone.note
        assert "images/s, ResNet-20" in speed.note
        assert gpu_check.train("cpu", steps=2) != gpu_check.train("cpu", steps=2, batch=32)


def test_ranks_that_share_a_gpu_are_threads_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    from fakegpu import FakeDriver

    from collectives.initialise import join_all

    driver, selected = FakeDriver(), []
    monkeypatch.setattr(gpu_check.cubin, "load", lambda name, dtype, operation, *_: f"{dtype}-{operation}".encode())
    monkeypatch.setattr(lowlatency, "MOST_BYTES", 1 << 11)
    monkeypatch.setattr("kernels.driver.devices", lambda: 1)
    monkeypatch.setattr(
        gpu_check.collectives, "init_all", lambda gpus, timeout: join_all([driver] * len(gpus), timeout)
    )
    monkeypatch.setattr(gpu_check.device, "select", lambda *where: selected.append(where))
    monkeypatch.setattr(gpu_check, "_on_gpu", lambda comm: lambda values, symmetric: driver.array(values))
    monkeypatch.setattr(gpu_check, "_values", lambda array: None if array is None else driver.values(array))
    some = [case for case in gpu_check.cases(False) if case.rows < 8][::3]
    row = gpu_check.compare("cuda", 2, some, together=True)
    assert (row.check, row.cases, row.wrong, row.note) == ("programs, cuda, one process", len(some), 0, "")
    assert len(some) > 2 and selected == [("cuda", 0)] * 2 and not driver.errors
    assert {entry[1] for entry in driver.log if entry[0] == "launch"} == {(1, 2)}, "both ranks are one launch"


@pytest.mark.slow
def test_in_the_simulator_every_program_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda, which brings the simulator, is not installed")
    assert gpu_check.main(["--sim"]) == 0
    assert "programs, sim" in capsys.readouterr().out
