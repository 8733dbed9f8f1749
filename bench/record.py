"""What a benchmark writes for others to read: what was run when and where, its rows, and every sample.

    {"benchmark", "arguments", "date", "machine", "rows": [{"label", "case", "microseconds", ...}],
     "samples": [{"label", "case", "round", "microseconds", "state", ...}]}

A case is a dict of whatever tells the benchmark's lines apart. `mgpu bench diff` compares two such files.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.states import UNKNOWN
from collectives.wording import counted


def about(benchmark: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What was run, when and where."""
    return {
        "benchmark": benchmark,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
    }


def write(
    path: Path, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
) -> None:
    """Write the file."""
    path.write_text(json.dumps({**about, "rows": list(rows), "samples": list(samples)}, indent=1) + "\n")


def samples(label: str, case: Mapping[str, Any], seconds: Iterable[float]) -> list[dict[str, Any]]:
    """A line's samples, round by round, of a benchmark that does not look at the machine's state."""
    return [
        {"label": label, "case": dict(case), "round": round, "microseconds": 1e6 * taken, "state": UNKNOWN}
        for round, taken in enumerate(seconds)
    ]


def machine() -> str:
    """Processor, cores and Python, in a line."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.machine()
    return f"{model}, {counted(len(os.sched_getaffinity(0)), 'core')}, Python {platform.python_version()}"
