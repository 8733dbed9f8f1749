"""What hooks send and lose, and the table of it."""

import json
from pathlib import Path

import pytest
from crew import Crews

from bench.quantized import NAMES, losses, main


def test_bytes_and_errors_are_those_that_the_hooks_promise(crew: Crews) -> None:
    by_rank = crew(losses, 2, ([1280, 100_000],))
    assert by_rank[0] == by_rank[1]  # the same sums everywhere
    for plain, bf16, int8 in zip(*(by_rank[0][name] for name in NAMES)):
        count = plain["count"]
        assert plain["bytes"] == 4 * count and bf16["bytes"] == 2 * count
        assert count <= int8["bytes"] < 1.1 * count
        assert plain["error"] < 1e-6 < 1e-4 < bf16["error"] < 1e-2
        assert 1e-3 < int8["error"] < 0.05
        assert int8["repeated"] < int8["error"] / 3  # error feedback sends later what was left out
        assert bf16["repeated"] == pytest.approx(bf16["error"])  # and rounding is always the same


@pytest.mark.slow
def test_a_short_run_prints_every_hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = "-n 2 -b 4K -e 64K -f 16 --iters 2 --rounds 1"
    assert main([*short.split(), "--json", f"{tmp_path}/x.json"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert [(line[0], line[1]) for line in lines] == [(name, size) for size in ("4K", "64K") for name in NAMES]
    content = json.loads((tmp_path / "x.json").read_text())
    assert len(content["samples"]) == 6 and set(content["losses"]) == set(NAMES)
