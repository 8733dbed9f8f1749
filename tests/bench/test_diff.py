"""Noise is told from change: by exact ranks, for many lines at once, and within one state of the machine."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.diff import FASTER, SAME, SLOWER, UNCLEAR, change, compare, cut_off, main, rank_sums
from bench.states import FAR, NEAR


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 3), (4, 5), (7, 2)])
def test_the_distribution_of_u_is_that_of_all_orders(n: int, m: int) -> None:
    counted: Counter[int] = Counter()
    for mine in itertools.combinations(range(n + m), n):
        others = set(range(n + m)) - set(mine)
        counted[sum(x > y for x in mine for y in others)] += 1
    assert rank_sums(n, m) == tuple(counted[u] for u in range(n * m + 1))
    assert sum(rank_sums(n, m)) == math.comb(n + m, n)


def test_samples_may_be_many() -> None:
    assert sum(rank_sums(2, 1500)) == math.comb(1502, 2)
    n = 60
    normal = n * n / 2 - 1.96 * math.sqrt(n * n * (2 * n + 1) / 12)
    assert cut_off(n, n, 0.05) == pytest.approx(normal, abs=2)


def test_the_cut_is_that_of_published_tables() -> None:
    # critical values of U, two-sided: the largest U that is significant; the cut is one more
    assert cut_off(7, 7, 0.05) - 1 == 8
    assert cut_off(7, 7, 0.01) - 1 == 4
    assert cut_off(5, 8, 0.05) - 1 == 6
    assert cut_off(20, 20, 0.05) - 1 == 127
    assert cut_off(3, 3, 0.05) == 0  # no order of six values is as rare as that


def test_the_interval_misses_as_rarely_as_it_says() -> None:
    random = np.random.default_rng(0)
    missed, runs = 0, 2000
    for _ in range(runs):
        a, b = random.lognormal(3, 0.3, 7), 1.5 * random.lognormal(3, 0.3, 7)
        interval = change("x", {}, a, b, 0.05, 0).interval
        assert interval is not None
        missed += not interval[0] <= 1.5 <= interval[1]
    assert missed / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_verdicts() -> None:
    a = [100.0, 101, 102, 103, 104, 105, 106]
    assert change("x", {}, a, [2 * x for x in a], 0.01, 0.05).verdict == SLOWER
    assert change("x", {}, a, [x / 2 for x in a], 0.01, 0.05).verdict == FASTER
    assert change("x", {}, a, a[::-1], 0.01, 0.05).verdict == SAME
    assert change("x", {}, a, [1.08 * x for x in a], 0.01, 0.0).verdict == SLOWER
    assert change("x", {}, a, [1.08 * x for x in a], 0.01, 0.1).verdict == SAME  # real, and too small to count
    assert change("x", {}, a[:3], [2 * x for x in a[:3]], 0.01, 0.05).verdict == UNCLEAR
    wild = [100.0, 300, 90, 500, 110, 95, 250]
    assert change("x", {}, wild, [1.3 * x for x in wild], 0.01, 0.05).verdict == SAME
    doubled = change("x", {}, a, [2 * x for x in a], 0.01, 0.05)
    assert (doubled.before, doubled.after) == (103, 206) and doubled.ratio == pytest.approx(2)


def content(lines: dict[str, list[float]], state: str = NEAR, **about: Any) -> dict[str, Any]:
    samples = [
        {"label": label, "case": {"nbytes": 8}, "state": state, "microseconds": us}
        for label, times in lines.items()
        for us in times
    ]
    return {"benchmark": "all_reduce", "machine": "this one", **about, "samples": samples}


def test_two_runs_of_the_same_differ_nowhere_in_nineteen_of_twenty_comparisons() -> None:
    random = np.random.default_rng(1)
    alarms, runs = 0, 300
    for _ in range(runs):
        before, after = (content({str(line): list(random.lognormal(3, 0.2, 7)) for line in range(20)}) for _ in "ab")
        changes, _ = compare(before, after, 0.05, 0.0)
        alarms += any(one.verdict in (FASTER, SLOWER) for one in changes)
    assert alarms / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_samples_of_one_state_are_compared() -> None:
    steady = [10.0, 11, 12, 13, 14]
    before = content({"mgpu": steady})
    before["samples"] += content({"mgpu": [100.0] * 9}, FAR)["samples"]
    after = content({"mgpu": steady})
    (one,), remarks = compare(before, after, 0.05, 0.05)
    assert one.verdict == SAME and one.before == one.after == 12 and remarks == []
    changes, remarks = compare(before | {"samples": before["samples"][5:]}, after, 0.05, 0.05)
    assert changes == [] and "no state" in remarks[0]


def test_what_cannot_be_compared_is_remarked() -> None:
    times = [1.0] * 5
    changes, remarks = compare(
        content({"mgpu": times, "gloo": times}), content({"mgpu": times, "x": times}, machine="another"), 0.05, 0.05
    )
    assert [one.label for one in changes] == ["mgpu"]
    assert "machine was not the same: this one, then another" in remarks[0]
    assert remarks[1:] == ["1 lines are in the first file only", "1 lines are in the second file only"]


def test_too_few_rounds_are_said_to_be() -> None:
    few = content({str(line): [1.0, 2, 3] for line in range(20)})
    changes, remarks = compare(few, few, 0.05, 0.05)
    assert {one.verdict for one in changes} == {UNCLEAR}
    assert remarks == [
        "to tell 20 lines apart takes 6 samples of each, in one state: more --rounds"
    ]  # 2 of 924 orders are rarer than 1 in 400


def test_the_exit_code_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = [10.0, 11, 12, 13, 14, 15, 16]
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(content({"mgpu": times, "gloo": times})))
    b.write_text(json.dumps(content({"mgpu": [2 * us for us in times], "gloo": times})))
    assert main([str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "1 slower, 1 no difference" in printed and "2.000" in printed
    assert main([str(a), str(b), "--fail-on", "slower"]) == 1
    assert main([str(b), str(a), "--fail-on", "slower"]) == 0
    assert main([str(b), str(a), "--fail-on", "faster"]) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"benchmark": "train_step", "milliseconds": {}}', "\x00"])
def test_another_file_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    for arguments in ([str(path), str(path)], [str(tmp_path / "nothing"), str(path)]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    assert "x.json has no samples" in capsys.readouterr().err or text in ("", "\x00")
