"""`mgpu bench soak`: hours of mixed collectives and training, with ranks killed and started again at random moments.

`mgpu run --restarts --min-ranks` starts the ranks of an episode, which call collectives of random families, whose
results are known, and train a small network (`bench.soak_rank`). From here a random rank, now and then two, get SIGKILL
at random moments of the first two thirds of an episode; in the last third nobody is killed, so that ranks grow old.
Then, and meanwhile:

    - training has gone on from the last checkpoint each time, and every loss and the weights at the end are those of
      one process that nobody has killed, within rounding: no sample was left out or counted twice;
    - no rank has failed for any other reason, and none of an episode's processes is left;
    - memory and descriptors of the launcher, and of the ranks in the last third, have not grown;
    - nothing of ours lies in /dev/shm.

The exit code is 1 if any of this is not so.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from collectives.ranks import die_with

MARK = "SOAK"  # in the environment of all of an episode's processes
# What is freed goes back to the system: else glibc keeps some megabytes, as it happens, for arrays to come.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
_LOOK = 0.05  # seconds between looks at who runs
_SAMPLE = 2.0  # seconds between samples of memory
_PATIENCE = 180.0  # seconds until an episode that was asked to stop counts as hanging
_WARM = 1000  # calls after which ranks have what they keep: each kind was made in each place of a family
_ALLOWED_KIB, _ALLOWED_DIFFERENCE = 4096, 1e-8
_ENDED = re.compile(r"^mgpu run: (rank \d+ .*)$", re.MULTILINE)


@dataclass
class Process:
    """One of an episode's processes, looked at from outside."""

    pid: int
    rank: int
    attempt: int


@dataclass
class Sample:
    """What a process has: KiB of memory that is no file's, of which what it shares counts in part; open descriptors;
    those of them and of its maps that are memory without a name; and files in /dev/shm that others would find."""

    who: str
    attempt: int
    moment: float
    kib: int
    descriptors: int
    memfds: int
    files: int


@dataclass
class Growth:
    """What a process usually had, early and late; of descriptors the most and then the fewest, since some are open for
    a moment."""

    kib: tuple[int, int]
    descriptors: tuple[int, int]


@dataclass
class Episode:
    """What one run of the launcher came to. seconds: from each kill to where all ranks have met again and gone on."""

    minutes: float
    kills: int = 0
    restarts: int = 0
    seconds: list[float] = field(default_factory=list)
    steps: int = 0
    samples: int = 0
    collectives: int = 0
    ranks: list[int] = field(default_factory=list)
    losses: tuple[float, float] = (0.0, 0.0)
    difference: float = 0.0
    growth: dict[str, Growth] = field(default_factory=dict)
    memfds: int = 0
    wrong: list[str] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Run the soak; the exit code is 0 if nothing was found."""
    flags = parser()
    options = flags.parse_args(argv)
    if options.ranks < 2 or min(options.minutes, options.episode, options.every) <= 0 or options.pause < 0:
        flags.error("-n is at least 2; --minutes, --episode and --every are above 0, and --pause not below")
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"# soak: {options.minutes:g} minutes, {options.ranks} ranks, seed {seed}", flush=True)
    print(f"# {titles()}", flush=True)
    episodes: list[Episode] = []
    ends = time.monotonic() + 60 * options.minutes
    while (left := ends - time.monotonic()) > 0 and (not episodes or left > 10):
        with tempfile.TemporaryDirectory(prefix="mgpu-soak-") as folder:
            seconds = min(left, 60 * options.episode)
            episodes.append(episode(Path(folder), options, seed + len(episodes), seconds))
        print(f"  {line(len(episodes), episodes[-1])}", flush=True)
        if options.json:
            settings = {"ranks": options.ranks, "minutes": options.minutes, "every": options.every, "seed": seed}
            options.json.write_text(
                json.dumps({"benchmark": "soak", **settings, "episodes": list(map(asdict, episodes))})
            )
    for text in summary(episodes):
        print(text)
    return int(any(episode.wrong for episode in episodes))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="mgpu bench soak", description=(__doc__ or "").split("\n\n")[0])
    add = flags.add_argument
    add("-n", "--ranks", type=int, default=3, help="processes on this host, and one fewer after bad luck (default 3)")
    add("--minutes", type=float, default=60.0, help="how long (default 60)")
    add("--episode", type=float, default=15.0, help="minutes after which a training begins anew (default 15)")
    add("--every", type=float, default=12.0, help="mean seconds from one kill to the next (default 12)")
    add("--pause", type=float, default=0.0, help="mean seconds that ranks sleep between turns (default 0)")
    add("--seed", type=int, help="of everything that is drawn (default: any)")
    add("--json", type=Path, metavar="FILE", help="write the figures, after each episode")
    return flags


def episode(folder: Path, options: argparse.Namespace, seed: int, seconds: float) -> Episode:
    """Start ranks, kill some of them, let the others grow old, stop them, and look at what they leave."""
    from bench.soak_rank import PROGRESS, STOP

    draw = random.Random(seed)
    began = time.monotonic()
    found = Episode(0.0)
    kills: list[float] = []
    samples: list[Sample] = []
    command = [sys.executable, "-m", "mgpu_core", "run", "-n", str(options.ranks), "--restarts", str(10**6)]
    command += ["--min-ranks", str(max(2, options.ranks - 1)), "-m", "bench.soak_rank", str(folder), str(seed)]
    with open(folder / "output", "w+") as output:
        launcher = subprocess.Popen(
            [*command, str(options.pause)],
            stdout=output,
            stderr=output,
            env={**os.environ, **_MALLOC, MARK: str(folder)},
            preexec_fn=die_with(os.getpid()),  # this process has one thread
        )
        try:
            next_kill, next_sample = began + draw.expovariate(1 / options.every), began
            while launcher.poll() is None and (now := time.monotonic()) < began + seconds + _PATIENCE:
                ranks = ranks_of(launcher.pid)
                if now > next_kill and ranks and (now < began + seconds * 2 / 3 or not kills):
                    many = 2 if draw.random() < 0.1 else 1
                    for process in draw.sample(ranks, min(many, len(ranks))):
                        kill(process)
                    kills.append(time.monotonic())
                    next_kill = now + draw.expovariate(1 / options.every)
                if now > began + seconds and kills:
                    (folder / STOP).touch()
                if next_sample < now < began + seconds:  # and not of ranks that close
                    next_sample = now + _SAMPLE
                    looked = [sample("launcher", launcher.pid, -1)]
                    looked += [sample(f"rank {rank.rank}", rank.pid, rank.attempt) for rank in ranks]
                    samples += [each for each in looked if each is not None]
                time.sleep(_LOOK)
            if launcher.poll() is None:
                found.wrong.append(f"still running {_PATIENCE:g} s after it was asked to stop")
        finally:
            launcher.kill()  # and its ranks die with it
            code = launcher.wait()
        output.seek(0)
        said = output.read()
    found.minutes, found.kills = (time.monotonic() - began) / 60, len(kills)
    if code:
        found.wrong.append(f"mgpu run ended with exit code {code}")
    causes = _ENDED.findall(said)
    found.restarts = len(causes)
    if others := [cause for cause in causes if "SIGKILL" not in cause]:
        found.wrong += [*others, said[-4000:]]
    if found.restarts > found.kills:
        found.wrong.append(f"{found.restarts} restarts after {found.kills} kills")
    if left := left_over(folder):
        found.wrong.append(f"left behind: {left}")
    if not (folder / PROGRESS).exists():
        found.wrong.append(f"no ranks have met:\n{said[-4000:]}")
        return found
    notes = [json.loads(text) for text in (folder / PROGRESS).read_text().splitlines()]
    went_on(found, notes, kills)
    as_one_process(found, folder, seed)
    grown(found, samples, max(began + seconds * 2 / 3, *old(notes)))
    return found


def went_on(found: Episode, notes: Sequence[Mapping[str, Any]], kills: Sequence[float]) -> None:
    """What rank 0 has noted: each attempt began where the one before had saved, or beyond."""
    attempt, steps = -1, 0
    calls: dict[int, int] = {}
    for note in notes:
        if note["attempt"] != attempt:
            attempt = note["attempt"]
            found.ranks.append(note["ranks"])
            if note["steps"] < steps:
                found.wrong.append(f"attempt {attempt} went on after step {note['steps']}, and {steps} were saved")
            before = [moment for moment in kills if moment < note["moment"]]
            if attempt and before:
                found.seconds.append(note["moment"] - before[-1])
        steps, calls[attempt] = note["steps"], note["calls"]
    found.steps, found.collectives = steps, sum(calls.values())


def old(notes: Sequence[Mapping[str, Any]]) -> list[float]:
    """From when on the last attempt's ranks had made `_WARM` calls: not before."""
    last = [note["moment"] for note in notes if note["attempt"] == notes[-1]["attempt"] and note["calls"] >= _WARM]
    return last[:1] or [float("inf")]


def as_one_process(found: Episode, folder: Path, seed: int) -> None:
    """The same training by one process, here: its losses step by step, and its weights."""
    from bench.soak_rank import trainer
    from mgpu_core import checkpoint, metrics
    from mgpu_core.trainer import CHECKPOINT, METRICS

    alone = trainer(None, folder / "alone", seed)
    with redirect_stdout(io.StringIO()):
        alone.fit(sys.maxsize, steps=found.steps)
    found.samples = alone.samples_done
    ours, its = (
        [(record["samples"], record["loss"]) for record in metrics.read(path / METRICS) if record["event"] == "step"]
        for path in (folder, folder / "alone")
    )
    if [samples for samples, _ in ours] != [samples for samples, _ in its]:
        found.wrong.append("the steps that were taken are not those of one process")
        return
    found.losses = ours[0][1], median(loss for _, loss in ours[-50:])
    found.difference = max(abs(mine - one) / abs(one) for (_, mine), (_, one) in zip(ours, its))
    weights, expected = (checkpoint.load(path / CHECKPOINT)[0] for path in (folder, folder / "alone"))
    for name, tensor in expected.items():
        found.difference = max(found.difference, float(abs(weights[name] - tensor).max()))
    if not found.difference < _ALLOWED_DIFFERENCE:
        found.wrong.append(f"losses or weights differ from one process's by {found.difference:.1e}")


def grown(found: Episode, samples: Sequence[Sample], calm: float) -> None:
    """What processes had at first and at last: the launcher all the time, ranks in the calm at the end, from when they
    are warm; there those are not judged that have not come so far."""
    found.memfds = max((each.memfds for each in samples), default=0)
    if files := max((each.files for each in samples), default=0):
        found.wrong.append(f"{files} files in /dev/shm were in use")
    last = max((each.attempt for each in samples), default=0)
    for who in sorted({each.who for each in samples}):
        theirs = [each for each in samples if each.who == who]
        if who != "launcher":
            theirs = [each for each in theirs if each.attempt == last and each.moment > calm]
        part = len(theirs) // 5
        if part < 2:
            continue
        early, late = theirs[part : 2 * part], theirs[-part:]
        growth = found.growth[who] = Growth(
            (usual(each.kib for each in early), usual(each.kib for each in late)),
            (max(each.descriptors for each in early), min(each.descriptors for each in late)),
        )
        if growth.kib[1] > growth.kib[0] + _ALLOWED_KIB or growth.descriptors[1] > growth.descriptors[0]:
            found.wrong.append(f"{who} has grown: {growth}")


def usual(values: Iterable[int]) -> int:
    """The median: neither what it takes for a moment nor what it lets go of between two attempts."""
    return int(median(values))


def ranks_of(launcher: int) -> list[Process]:
    """The launcher's ranks that run."""
    found = []
    with suppress(OSError):
        for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
            variables = environ(pid)
            if "MGPU_RANK" in variables:
                found.append(Process(pid, int(variables["MGPU_RANK"]), int(variables["MGPU_RESTART"])))
    return found


def environ(pid: int) -> dict[str, str]:
    """A process's environment; empty for one that has ended, or is not ours to look at."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def kill(process: Process) -> None:
    """As the kernel does when memory runs out. (Its number may have passed on to another process.)"""
    with suppress(OSError):
        pidfd = os.pidfd_open(process.pid)
        try:
            if environ(process.pid).get("MGPU_RANK") == str(process.rank):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def sample(who: str, pid: int, attempt: int) -> Sample | None:
    """What a process has; None if it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        maps = {text.split(None, 5)[-1] for text in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        handles = []
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                handles.append(os.readlink(handle))
    except OSError:
        return None
    # Not Pss_File, which depends on who else has mapped the same libraries.
    kib = re.findall(r"^(?:Pss_Anon|Pss_Shmem|SwapPss): +(\d+) kB", rollup, re.MULTILINE)
    names = [*handles, *maps]
    return Sample(
        who,
        attempt,
        time.monotonic(),
        sum(map(int, kib)),
        len(handles),
        sum("/memfd:" in name for name in names),
        sum(name.startswith("/dev/shm/") and not name.endswith("(deleted)") for name in names),
    )


def left_over(folder: Path) -> list[str]:
    """What still runs of an episode's processes, a second after its end at the latest."""
    deadline = time.monotonic() + 1.0
    while True:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        left = [pid for pid in pids if pid != os.getpid() and environ(pid).get(MARK) == str(folder)]
        if not left or time.monotonic() > deadline:
            return [f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()}" for pid in left]
        time.sleep(_LOOK)


def titles() -> str:
    """The table's columns."""
    columns = ("episode", "min", "kills", "restarts", "back in s", "most", "steps", "samples", "calls", "loss", "")
    return "{:>7} {:>6} {:>6} {:>8} {:>9} {:>6} {:>8} {:>9} {:>8} {:>7} {:>8}  difference".format(*columns)


def line(number: int, found: Episode) -> str:
    """An episode's line in the table."""
    seconds = found.seconds or [0.0]
    what = (
        f"{number:7} {found.minutes:6.1f} {found.kills:6} {found.restarts:8} {median(seconds):9.1f} {max(seconds):6.1f}"
    )
    loss = f"{found.losses[0]:7.3f} {found.losses[1]:8.3f}"
    return f"{what} {found.steps:8} {found.samples:9} {found.collectives:8} {loss}  {found.difference:.1e}"


def summary(episodes: Sequence[Episode]) -> Iterator[str]:
    """Memory and descriptors, and what was found."""
    yield f"# {'at first and at last':>20} {'KiB':>8} {'':>8} {'descriptors':>12} {'':>4}"
    for number, found in enumerate(episodes, 1):
        for who, growth in found.growth.items():
            numbers = f"{growth.kib[0]:8} {growth.kib[1]:8} {growth.descriptors[0]:12} {growth.descriptors[1]:4}"
            yield f"  {f'episode {number}, {who}':>20} {numbers}"
    kills, calls = (sum(getattr(found, name) for found in episodes) for name in ("kills", "collectives"))
    yield f"# {kills} kills, {calls} collectives, {sum(found.samples for found in episodes)} samples"
    wrong = [f"episode {number}: {text}" for number, found in enumerate(episodes, 1) for text in found.wrong]
    yield from wrong or ["# nothing was found to be wrong"]


if __name__ == "__main__":
    sys.exit(main())
