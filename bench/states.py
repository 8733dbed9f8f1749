"""Which state was the machine in? Statistics over samples that were taken while it changed.

Two cores of a virtual machine may be near each other (a round trip of about 100 ns) or far (about 490 ns), and change
within seconds, which changes results by up to ten times. So a ping-pong is measured beside every sample, the sample
is tagged with what it says, and only samples of one state are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

NEAR, FAR, MIXED = "near", "far", "mixed"
UNKNOWN = "unknown"  # of benchmarks that do not look
_USUAL_THRESHOLD = 250.0  # ns, for a machine that showed one state only


def threshold(round_trips: Sequence[float]) -> float:
    """The round trip in ns that parts near from far: where the two groups are tightest, on a scale of logarithms.

    That is Otsu's method. Groups less than a factor of two apart are one state, which `_USUAL_THRESHOLD` names.
    """
    logs = np.sort(np.log(np.asarray(round_trips, dtype=float)))
    if logs.size < 2:
        return _USUAL_THRESHOLD
    counts = np.arange(1, logs.size)
    lower = np.cumsum(logs)[:-1] / counts
    upper = np.cumsum(logs[::-1])[:-1][::-1] / counts[::-1]
    best = int(np.argmax(counts * counts[::-1] * (upper - lower) ** 2))
    if upper[best] - lower[best] < np.log(2):
        return _USUAL_THRESHOLD
    return float(np.exp((logs[best] + logs[best + 1]) / 2))


def state(before: float, after: float, limit: float) -> str:
    """Near or far if the ping-pongs before and after a sample agree, else mixed: it changed in between."""
    sides = {NEAR if trip < limit else FAR for trip in (before, after)}
    return sides.pop() if len(sides) == 1 else MIXED


def common_state(tags: Mapping[str, Sequence[str]], wanted: str | None = None) -> str:
    """The state to compare candidates in: `wanted`, or the one in which the worst-off candidate has most samples.

    `tags` has each candidate's samples' states. Mixed samples count for nothing unless there are no others.
    """
    if wanted is not None:
        return wanted
    fewest = {s: min(Counter(seen)[s] for seen in tags.values()) for s in (NEAR, FAR)}
    best = max(fewest, key=lambda s: fewest[s])
    if fewest[best]:
        return best
    return Counter(s for seen in tags.values() for s in seen).most_common(1)[0][0]


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    ordered = sorted(values)
    low, high = np.quantile(ordered, [0.25, 0.75])
    return float(low), float(median(ordered)), float(high)
