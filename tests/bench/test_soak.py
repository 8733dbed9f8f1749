"""A short soak: ranks are killed, others go on, and what is wrong is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import soak
from bench.soak import Episode, Sample


def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    flags = ["-n", "2", "--minutes", "0.05", "--every", "1", "--json", str(figures)]
    code = soak.main(flags)
    printed = capsys.readouterr().out
    assert code == 0, printed
    (found,) = json.loads(figures.read_text())["episodes"]
    assert found["kills"] >= max(1, found["restarts"])
    assert found["steps"] > 0 and found["samples"] > 0 and found["collectives"] > 0
    assert not found["wrong"] and "nothing was found to be wrong" in printed


def note(attempt: int, steps: int, moment: float, calls: int = 0) -> dict[str, float]:
    return {"attempt": attempt, "ranks": 3, "steps": steps, "calls": calls, "moment": moment}


def test_attempts_go_on_where_the_last_one_had_saved() -> None:
    notes = [note(0, 0, 1), note(0, 30, 2, 9), note(1, 50, 9, 0), note(1, 70, 10, 11)]
    found = Episode(1.0)
    soak.went_on(found, notes, kills=[5.0])
    assert (found.wrong, found.seconds, found.steps, found.collectives) == ([], [4.0], 70, 20)
    found = Episode(1.0)
    soak.went_on(found, [note(0, 30, 2), note(1, 20, 9)], kills=[5.0])
    assert "went on after step 20, and 30 were saved" in found.wrong[0]


def samples(who: str, kib: list[int], descriptors: list[int], attempt: int = 4) -> list[Sample]:
    return [Sample(who, attempt, float(i), kib[i], descriptors[i], 3, 0) for i in range(len(kib))]


def test_growth_is_found() -> None:
    flat, leak = [1000, 5000] * 25, [1000 + 200 * i for i in range(50)]
    for kib, descriptors, wrong in (
        (flat, [9, 30] * 25, []),
        (leak, [9] * 50, ["rank 0 has grown"]),
        (flat, [9] * 30 + [10, 10, 9, 10] * 5, []),
        (flat, [9 + i // 20 for i in range(50)], ["rank 0 has grown"]),
    ):
        found = Episode(1.0)
        soak.grown(found, samples("rank 0", kib, descriptors) + samples("rank 0", [1] * 9, [1] * 9, attempt=3), -1.0)
        assert [text[: len("rank 0 has grown")] for text in found.wrong] == wrong
        assert found.growth["rank 0"].kib[0] < 4000


@pytest.mark.parametrize("wrong", [["-n", "1"], ["--minutes", "0"], ["--every", "0"], ["--pause", "-1"]], ids=str)
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(wrong)
