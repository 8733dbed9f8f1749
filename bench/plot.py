"""The picture of a benchmark: time and bus bandwidth against message size, with what the memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.candidates import LIMIT, is_ours
from bench.samples import Row
from bench.sizes import format_size


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG (or what `path`'s suffix says): a line per candidate, quartiles as a band. In place, unless more
    candidates have rows out of place."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, (time, bandwidth) = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    seen = {placed: {row.label for row in rows if row.case.in_place == placed} - {LIMIT} for placed in (True, False)}
    shown = max(seen, key=lambda placed: len(seen[placed]))
    chosen = [row for row in rows if row.case.in_place == shown or row.label == LIMIT]
    ranks_communicate = any(row.busbw for row in chosen)
    for label in dict.fromkeys(row.label for row in chosen):
        mine = [row for row in chosen if row.label == label]
        sizes = [row.case.nbytes for row in mine]
        style: dict[str, Any] = {"linewidth": 1.2, "marker": ".", "label": label}
        if label == LIMIT:
            style = {"color": "0.45", "linestyle": "--", "label": f"memory limit (at the speed of {LIMIT})"}
        elif is_ours(label):
            style = {"linewidth": 2.2, "marker": "o", "markersize": 4, "label": label}
        (line,) = time.plot(sizes, [row.microseconds for row in mine], **style)
        low, high = [row.low for row in mine], [row.high for row in mine]
        time.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        style["color"] = line.get_color()
        bandwidth.plot(sizes, [row.busbw for row in mine], **style)
    for axes, name in ((time, "time (us)"), (bandwidth, "bus bandwidth (GB/s)")):
        axes.set_xscale("log", base=2)
        if ranks_communicate or axes is time:
            axes.set_yscale("log")
        axes.set_xlabel("bytes (the longer of a rank's input and output)")
        axes.set_ylabel(name)
        axes.grid(True, which="major", alpha=0.3)
        ticks = sorted({row.case.nbytes for row in chosen})
        axes.set_xticks(ticks[:: max(1, len(ticks) // 12)])
        axes.xaxis.set_major_formatter(lambda size, _: format_size(int(size)))
        axes.xaxis.set_minor_locator(NullLocator())
    time.legend(fontsize=8)
    figure.suptitle(f"{title}; {'in' if shown else 'out of'} place")
    figure.savefig(path, dpi=130)
    plt.close(figure)
