"""`mgpu bench diff a.json b.json`: what is faster or slower in b than in a, and what is noise.

Both are what a benchmark's `--json` wrote. Each line of a table has a sample from every round; rounds are independent
enough, and of unknown distribution, so the ratio b/a has an interval by ranks alone: that of all ratios between a
sample of b and one of a, without as many at each end as the Mann-Whitney test allows (J. L. Hodges and E. L. Lehmann,
"Estimates of location based on rank tests", 1963, on logarithms). Its confidence is shared out among the lines
(Bonferroni), so that two runs of the same program have a difference anywhere with the probability of `--alpha` only,
as far as the machine was the same. A machine's mood differs by more than chance between runs, so changes below
`--least` are called none.

Where cores were near in some samples and far in others, those of one state are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from bench import states, table

FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "no difference", "too few samples"

Key = tuple[str, tuple[tuple[str, Any], ...]]  # a label, and its case
Samples = Mapping[str, Sequence[float]]  # microseconds, by the machine's state


class FileError(ValueError):
    """A file that is not what a benchmark's --json writes."""


@dataclass(frozen=True)
class Change:
    """One line of both tables: medians in microseconds, and the ratio b/a with an interval, None if there is none."""

    label: str
    case: Mapping[str, Any]
    before: float
    after: float
    ratio: float
    interval: tuple[float, float] | None
    verdict: str


def main(argv: list[str] | None = None) -> int:
    """Compare; the exit code is 1 where a line's verdict is the one of `--fail-on`."""
    flags = argparse.ArgumentParser(prog="mgpu bench diff", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("before", type=Path, metavar="a.json", help="what --json wrote before")
    add("after", type=Path, metavar="b.json", help="and after a change")
    add("--alpha", type=float, default=0.05, help="probability of a difference where there is none (default 0.05)")
    add("--least", type=float, default=0.05, help="the smallest change that counts, as a part of a (default 0.05)")
    add("--fail-on", choices=[SLOWER, FASTER], help="the verdict of any line that makes the exit code 1")
    options = flags.parse_args(argv)
    if not 0 < options.alpha < 1 or options.least < 0:
        flags.error("--alpha is between 0 and 1, and --least not negative")
    try:
        contents = read(options.before), read(options.after)
    except FileError as error:
        flags.error(str(error))
    changes, remarks = compare(*contents, options.alpha, options.least)
    for line in report(changes):
        print(line)
    for remark in remarks:
        print(f"# note: {remark}")
    return int(any(change.verdict == options.fail_on for change in changes))


def read(path: Path) -> dict[str, Any]:
    """A benchmark's file. Raises FileError for another."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise FileError(f"{path} has no samples: expected what `mgpu bench all_reduce --json`, or its like, writes")
    return content


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], alpha: float, least: float
) -> tuple[list[Change], list[str]]:
    """(a change for each line that both have; remarks on whatever makes them hard to compare)."""
    remarks = [
        f"the {what} was not the same: {before.get(what)}, then {after.get(what)}"
        for what in ("benchmark", "machine")
        if before.get(what) != after.get(what)
    ]
    old, new = by_line(before["samples"]), by_line(after["samples"])
    common = [key for key in old if key in new]
    for where, one, other in (("first", old, new), ("second", new, old)):
        if missing := sum(key not in other for key in one):
            remarks.append(f"{missing} lines are in the {where} file only")
    changes = []
    for key in common:
        seen = {side: [s for s, us in lines[key].items() for _ in us] for side, lines in (("a", old), ("b", new))}
        state = states.common_state(seen)
        a, b = old[key].get(state, ()), new[key].get(state, ())
        if not a or not b:
            remarks.append(f"{_name(key)}: no state of the machine has samples of both")
            continue
        changes.append(change(key[0], dict(key[1]), a, b, alpha / len(common), least))
    if any(one.verdict == UNCLEAR for one in changes):
        needed = next(n for n in itertools.count(1) if cut_off(n, n, alpha / len(common)))
        remarks.append(f"to tell {len(common)} lines apart takes {needed} samples of each, in one state: more --rounds")
    return changes, remarks


def by_line(samples: Sequence[Mapping[str, Any]]) -> dict[Key, Samples]:
    """The samples of each label and case."""
    lines: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        key = sample["label"], tuple(sample["case"].items())
        lines[key][sample["state"]].append(sample["microseconds"])
    return {key: dict(by_state) for key, by_state in lines.items()}


def change(
    label: str, case: Mapping[str, Any], a: Sequence[float], b: Sequence[float], alpha: float, least: float
) -> Change:
    """How b's samples differ from a's."""
    ratios = sorted(y / x for x in a for y in b)
    cut = cut_off(len(a), len(b), alpha)
    interval = (ratios[cut - 1], ratios[-cut]) if cut else None
    ratio = median(ratios)
    if interval is None:
        verdict = UNCLEAR
    elif interval[0] > 1 and ratio > 1 + least:
        verdict = SLOWER
    elif interval[1] < 1 and ratio < 1 / (1 + least):
        verdict = FASTER
    else:
        verdict = SAME
    return Change(label, case, median(a), median(b), ratio, interval, verdict)


def cut_off(n: int, m: int, alpha: float) -> int:
    """Of the n m sorted ratios, the interval goes from number `cut_off` to the one as far from the end, counted from 1.

    It misses with a probability of at most alpha. 0: so few samples allow no such interval.
    """
    counts = rank_sums(n, m)
    allowed = alpha / 2 * math.comb(n + m, n)
    below, cut = 0, 0
    while cut < n * m and below + counts[cut] <= allowed:
        below += counts[cut]
        cut += 1
    return cut


@cache
def rank_sums(n: int, m: int) -> tuple[int, ...]:
    """In how many of the orders of n and m values Mann and Whitney's U is 0, 1, ..., n m.

    They are the coefficients of the Gaussian binomial, the product of (1 - x^(m + i)) / (1 - x^i) for i from 1 to n.
    """
    found = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            found[u] -= found[u - m - i]
        for u in range(i, n * m + 1):
            found[u] += found[u - i]
    return tuple(found)


def report(changes: Sequence[Change]) -> Iterator[str]:
    """The table, and a count of the verdicts."""
    varying = [
        name for name in (changes[0].case if changes else {}) if len({str(c.case.get(name)) for c in changes}) > 1
    ]
    lines = []
    for one in changes:
        interval = "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval)
        times = map(table.significant, (one.before, one.after))
        what = (str(one.case.get(name)) for name in varying)
        lines.append([one.label, *what, *times, f"{one.ratio:.3f}", interval, one.verdict])
    yield from table.columns(["candidate", *varying, "a (us)", "b (us)", "b/a", "interval", "verdict"], lines)
    counted = Counter(one.verdict for one in changes)
    yield "# " + (", ".join(f"{count} {verdict}" for verdict, count in counted.items()) or "no line is in both")


def _name(key: Key) -> str:
    return " ".join([key[0], *(f"{name}={value}" for name, value in key[1])])


if __name__ == "__main__":
    sys.exit(main())
