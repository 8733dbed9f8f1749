"""`mgpu timeline`: what a timeline says in numbers, and its picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from collectives.timeline import COMMUNICATION

Interval = tuple[float, float]  # microseconds


class Share(NamedTuple):
    """Seconds of one rank. computing: in spans of computation; communicating: asynchronously, beside them; hidden: of
    that, what fell into computation; blocked: in calls that kept the rank from computing."""

    computing: float
    communicating: float
    hidden: float
    blocked: float


def read(path: str | Path) -> list[dict[str, Any]]:
    """The events of a timeline. Raises ValueError where the file is none."""
    try:
        events = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no timeline: {error}") from error
    found = events.get("traceEvents", []) if isinstance(events, dict) else events
    return [event for event in found if isinstance(event, dict)]


def shares(events: Iterable[dict[str, Any]]) -> dict[int, Share]:
    """By rank, how its time was spent."""
    computing: dict[int, list[Interval]] = defaultdict(list)
    beside: dict[int, list[Interval]] = defaultdict(list)
    blocked: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            interval = event["ts"], event["ts"] + event["dur"]
            if event["tid"] == COMMUNICATION:
                beside[event["pid"]].append(interval)
            elif event["cat"] == "communication":
                blocked[event["pid"]].append(interval)
            elif event["cat"] == "compute":
                computing[event["pid"]].append(interval)
    found = {}
    for rank in sorted({*computing, *beside, *blocked}):
        compute, communication = union(computing[rank]), union(beside[rank])
        waiting = union(blocked[rank])
        compute = without(compute, waiting)
        seconds = [length(part) / 1e6 for part in (compute, communication, common(compute, communication), waiting)]
        found[rank] = Share(*seconds)
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that neither overlap nor touch, in order."""
    joined: list[Interval] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time in both of two unions."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        first, last = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if first < last:
            found.append((first, last))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time in the first of two unions and not in the second."""
    found = []
    for first, last in one:
        for start, stop in common([(first, last)], other):
            if first < start:
                found.append((first, start))
            first = stop
        if first < last:
            found.append((first, last))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Microseconds in all."""
    return sum(last - first for first, last in intervals)


def report(events: Sequence[dict[str, Any]]) -> str:
    """A table: for each rank its seconds, and the share of communication that was hidden behind computation."""
    lines = [f"{'rank':>4} {'computing s':>12} {'blocked s':>10} {'beside it s':>12} {'hidden':>7}"]
    for rank, share in shares(events).items():
        hidden = f"{share.hidden / share.communicating:.0%}" if share.communicating else "-"
        lines.append(
            f"{rank:>4} {share.computing:>12.3f} {share.blocked:>10.3f} {share.communicating:>12.3f} {hidden:>7}"
        )
    lines.append("beside it: communication while the rank could compute; hidden: what of that fell into computation")
    return "\n".join(lines)


def draw(events: Sequence[dict[str, Any]], path: str | Path, first: float | None = None, seconds: float = 0.1) -> None:
    """A picture of `seconds` of a timeline, from `first` seconds after its beginning (its middle without)."""
    from matplotlib.figure import Figure

    spans = [event for event in events if event.get("ph") == "X"]
    if not spans:
        raise ValueError("this timeline has no events")
    start, stop = min(event["ts"] for event in spans), max(event["ts"] + event["dur"] for event in spans)
    left = start + first * 1e6 if first is not None else max(start, (start + stop - seconds * 1e6) / 2)
    right = left + seconds * 1e6
    ranks = sorted({event["pid"] for event in spans})
    figure = Figure(figsize=(12, 1.2 + 0.8 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    names = sorted({_kind(event) for event in spans})
    for event in spans:
        if event["ts"] < right and event["ts"] + event["dur"] > left:
            row = 2 * ranks.index(event["pid"]) + (event["tid"] == COMMUNICATION)
            box = ((event["ts"] - left) / 1000, event["dur"] / 1000)
            axes.broken_barh([box], (row - 0.4, 0.8), facecolors=f"C{names.index(_kind(event)) % 10}", linewidth=0)
    for index, name in enumerate(names):
        axes.broken_barh([(0, 0)], (0, 0), facecolors=f"C{index % 10}", label=name)
    axes.set_yticks(range(2 * len(ranks)), [f"rank {rank} {what}" for rank in ranks for what in ("computes", "sends")])
    axes.invert_yaxis()
    axes.set_xlim(0, seconds * 1000)
    axes.set_xlabel("milliseconds")
    figure.legend(loc="outside upper center", ncols=min(6, len(names)), frameon=False)
    figure.savefig(path, dpi=110)


def _kind(event: dict[str, Any]) -> str:
    """What an event is called in the legend: a call without its terms."""
    return str(event["name"]).partition("(")[0]


def main(argv: list[str]) -> int:
    """The command `mgpu timeline`."""
    it = argparse.ArgumentParser("mgpu timeline", description="What a run's timeline (MGPU_TIMELINE) says in numbers.")
    it.add_argument("file", type=Path, help="the timeline, JSON in Chrome's trace event format")
    it.add_argument("--plot", type=Path, metavar="PNG", help="draw a part of it")
    it.add_argument("--first", type=float, metavar="S", help="seconds at which the picture begins (the middle)")
    it.add_argument("--seconds", type=float, default=0.1, help="seconds that it shows (%(default)s)")
    options = it.parse_args(argv)
    events = read(options.file)
    if not shares(events):
        print(f"{options.file} has no events", file=sys.stderr)
        return 1
    print(report(events))
    if options.plot:
        draw(events, options.plot, options.first, options.seconds)
    return 0
