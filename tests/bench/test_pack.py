"""Tensors of a bucket, and the table of the ways to pack them."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.case import Case
from bench.pack import WAYS, Packing, cut, main


@pytest.mark.parametrize("tensors", [1, 2, 64])
@pytest.mark.parametrize("count", [1024, 1040, 1 << 20])
def test_tensors_fill_the_bucket_and_each_has_whole_lines(tensors: int, count: int) -> None:
    ends = cut(count, tensors)
    assert len(ends) == tensors and ends[-1] == count
    sizes = np.diff([0, *ends])
    assert (sizes >= 16).all() and not (sizes % 16).any()


@pytest.mark.parametrize("way", WAYS)
def test_every_way_moves_everything(way: str) -> None:
    random = np.random.default_rng()
    case = Case("pack", 4096 * 4, 4096, "float32", "none", -1, False)
    x, out = random.standard_normal(4096, np.float32), np.full(4096, np.nan, np.float32)
    Packing(way, 7).prepare(None, case, x, out)()  # type: ignore[arg-type]
    assert np.array_equal(x, out)


def test_a_short_run_prints_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"-b 8K -e 64K -f 8 --iters 2 --rounds 1 --json {tmp_path}/x.json".split()) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert [(line[0], line[1]) for line in lines] == [(way, size) for size in ("8K", "64K") for way in WAYS]
    assert all(row["wrong"] == 0 for row in json.loads((tmp_path / "x.json").read_text())["rows"])
    for wrong in ("-b 1K", "--tensors 0", "-f 1"):
        with pytest.raises(SystemExit):
            main(wrong.split())
