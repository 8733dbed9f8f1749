"""The picture is drawn from whatever rows there are."""

from pathlib import Path

import pytest

from bench.candidates import LIMIT
from bench.case import Case
from bench.plot import draw
from bench.samples import Sample, summarise


@pytest.mark.parametrize("sizes", [[8], [8, 1 << 10, 1 << 20]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_picture_of_one_or_many_sizes(sizes: list[int], ranks: int, tmp_path: Path) -> None:
    labels = ["mgpu", "mgpu ordinary", "gloo", LIMIT]
    samples = [
        Sample(
            label,
            Case("all_reduce", nbytes, nbytes // 4, "float32", "sum", -1, True),
            0,
            100.0,
            100.0,
            20,
            1.0 + place,
            0,
        )
        for nbytes in sizes
        for place, label in enumerate(labels)
    ]
    draw(summarise(samples, ranks, labels, ["gloo"]), tmp_path / "x.png", "a title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
