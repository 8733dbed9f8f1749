"""`mgpu doctor`: what is there, what will be chosen and why, and what to do about every trouble that it knows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from collectives import recorder
from collectives.doctor import gpus, machine, software, trial
from collectives.doctor.finding import Finding


def examine(*, trials: bool = True) -> list[Finding]:
    """Everything found on this machine; without `trials` no ranks are started."""
    found = [*machine.examine(), *software.examine(), *gpus.examine()]
    if trials:
        found += trial.examine()
    return [*found, choice(found)]


def choice(found: Sequence[Finding]) -> Finding:
    """What `init()` will take, and why."""
    by_topic = {finding.topic: finding for finding in found}
    count = by_topic["GPUs"].facts["count"] if "GPUs" in by_topic else 0
    if count:
        what = "backend='auto' takes cuda where all ranks are on this host; arrays of the CPU go as with shm there"
        return Finding("choice", what, facts={"backend": "cuda"})
    why = "there is no GPU, and ranks on one host share its memory"
    return Finding("choice", f"backend='auto' takes shm: {why}", facts={"backend": "shm"})


def report(found: Sequence[Finding]) -> str:
    """The findings as people read them."""
    width = max(len(finding.topic) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{finding.mark} {finding.topic:{width}}  {finding.what}")
        if finding.advice:
            lines.append(f"  {'':{width}}  → {finding.advice}")
    serious = sum(finding.serious for finding in found)
    lines += ["", f"needs attention (✗): {serious}" if serious else "nothing here stands in the way"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """The command `mgpu doctor`; 1 if something needs attention."""
    it = argparse.ArgumentParser("mgpu doctor", description=(__doc__ or "").split("\n")[0])
    it.add_argument("--json", action="store_true", help="print the findings as JSON")
    it.add_argument("--quick", action="store_true", help="start no ranks")
    it.add_argument(
        "--run", nargs="?", type=int, const=0, metavar="ID",
        help="instead of this machine, look into a run: where its ranks are. ID: the process id of its launcher or of "
        "any rank; every run without",
    )  # fmt: skip
    options = it.parse_args(argv)
    if options.run is not None:
        return recorder.main(options.run or None)
    found = examine(trials=not options.quick)
    if options.json:
        print(json.dumps([finding.as_json() for finding in found], indent=1, default=str))
    else:
        print(report(found))
    return int(any(finding.serious for finding in found))
