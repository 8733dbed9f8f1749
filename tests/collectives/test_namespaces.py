"""Two hosts, as far as one machine can play them: network namespaces, each with a hostname of its own, and a virtual
cable between them. Ranks meet, reduce and train across it, and then it is pulled: both sides end by themselves, and say
which host they miss."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from over_cable import DEADLINES, SEED, STEPS

from bench import peers
from bench.soak_rank import trainer
from collectives.ranks import die_with
from mgpu_core import metrics

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MORE = 5.0  # seconds beyond the deadline in which everybody has ended
PATIENCE = 110.0
NAMES = ("hosta", "hostb")
SIZE = 4  # ranks 0 and 1 on hosta, 2 and 3 on hostb


class Host(NamedTuple):
    """A namespace. Its first process keeps it."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]

    def command(self, program: Sequence[str]) -> list[str]:
        """What runs a program there."""
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--uts", "--mount", "--", *program]

    def processes(self) -> list[int]:
        """Those that run there, whoever started them."""
        found, mine = [], os.readlink(f"/proc/{self.holder.pid}/ns/net")
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") == mine:
                    found.append(pid)
        return found


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"`{' '.join(command)}` may not be run here: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def host(name: str, address: str) -> Iterator[Host]:
    # /sys is mounted anew, to show this namespace's network: UCX looks there.
    setup = f"hostname {name} && mount -t sysfs sysfs /sys && ip link set lo up && echo made && exec sleep 600"
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", setup]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with(os.getpid()))
    made = Host(name, address, holder)
    with holder:
        try:
            assert holder.stdout is not None and holder.stderr is not None
            if holder.stdout.readline() != b"made\n":
                pytest.skip(f"namespaces may not be made here: {holder.stderr.read().decode().strip()}")
            yield made
        finally:
            if holder.poll() is None:
                for pid in {*made.processes(), holder.pid} - {os.getpid()}:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two, joined by a cable."""
    for tool in ("ip", "unshare", "nsenter", "hostname"):
        if not shutil.which(tool):
            pytest.skip(f"there is no `{tool}` here")
    with ExitStack() as stack:
        both = [stack.enter_context(host(name, f"10.9.0.{i}")) for i, name in enumerate(NAMES, 1)]
        first, second = both
        end = ["type", "veth", "peer", "name", "cable", "netns", str(second.holder.pid)]
        run(first.command(["ip", "link", "add", "cable", *end]))
        for each in both:
            run(each.command(["ip", "addr", "add", f"{each.address}/24", "dev", "cable"]))
            run(each.command(["ip", "link", "set", "cable", "up"]))
        for each in both:  # an end is seen to be up a little after both are: UCX does not find it before
            ends = time.monotonic() + PATIENCE
            while "state UP" not in run(each.command(["ip", "link", "show", "cable"])):
                assert time.monotonic() < ends
                time.sleep(0.01)
        yield both


def pull(hosts: list[Host], folder: Path) -> float:
    """Pull the cable, when all ranks know that it will be; the moment."""
    (folder / "pulling").touch()
    wait_for([folder / f"ready {rank}" for rank in range(SIZE)], [])
    subprocess.run(hosts[0].command(["ip", "link", "set", "cable", "down"]), check=True)
    return time.monotonic()


def wait_for(paths: Sequence[Path], running: Sequence[subprocess.Popen[Any]], seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < ends, [path.name for path in paths if not path.exists()]
        assert all(process.poll() is None for process in running), "a process has ended too early"
        time.sleep(0.05)


def program(folder: Path, job: str, rank: str = "-", address: str = "-") -> list[str]:
    """A rank, and its exit code into a file."""
    line = '"$@"; code=$?; echo $code > "$0/code ${PMI_RANK:-' + rank + '}.new"; mv "$0/code ${PMI_RANK:-' + rank
    line += '}.new" "$0/code ${PMI_RANK:-' + rank + '}"; exit $code'
    python = [sys.executable, str(HERE / "over_cable.py"), str(folder), job, rank, address]
    return ["sh", "-c", line, str(folder), *python]


def environ(**more: str) -> dict[str, str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))
    return {**os.environ, "PYTHONPATH": paths, **more}


def start_by_hand(hosts: list[Host], folder: Path, job: str) -> list[subprocess.Popen[str]]:
    """The ranks, over TCP."""
    address = f"{hosts[0].address}:{20_000 + secrets.randbelow(10_000)}"
    return [
        subprocess.Popen(
            hosts[rank // 2].command(program(folder, job, str(rank), address)),
            env=environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]


def told(folder: Path, what: str) -> list[Any]:
    return [json.loads((folder / f"{what} {rank}").read_text()) for rank in range(SIZE)]


def check_failures(folder: Path, job: str, pulled: float) -> None:
    """All ranks have failed in time, and each names the other host."""
    for rank, (error, moment) in enumerate(told(folder, "failed")):
        other = NAMES[1 - rank // 2]
        assert error.startswith(("CollectiveTimeoutError: ", "PeerLostError: ")) and other in error, (rank, error)
        print(f"rank {rank}, {moment - pulled:.1f} s after: {error}")
        assert moment - pulled < DEADLINES[job] + MORE


def test_ranks_meet_across_the_cable_until_it_is_pulled(hosts: list[Host], tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank) for rank in start_by_hand(hosts, tmp_path, "over_tcp")]
        wait_for([tmp_path / f"told {rank}" for rank in range(SIZE)], ranks)
        for rank, (text, payloads, local, descriptors) in enumerate(told(tmp_path, "told")):
            strangers = [f"rank {other} on {NAMES[other // 2]}" for other in range(SIZE) if other // 2 != rank // 2]
            assert "mpi" in text and all(each in text for each in strangers), text
            assert payloads == [f"from {other}" for other in range(SIZE)]
            assert local == descriptors == [other // 2 == rank // 2 for other in range(SIZE)]
        pulled = pull(hosts, tmp_path)
        ended = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
        assert all(rank.returncode for rank in ranks), ended
        check_failures(tmp_path, "over_tcp", pulled)


def test_calls_of_nccl_until_the_cable_is_pulled(hosts: list[Host], tmp_path: Path) -> None:
    """An NCCL in memory between hosts: a host that is gone is named within the deadline, and NCCL aborted."""
    pytest.importorskip("nccl.bindings", reason="nccl4py is not installed")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank) for rank in start_by_hand(hosts, tmp_path, "over_nccl")]
        wait_for([tmp_path / f"told {rank}" for rank in range(SIZE)], ranks)
        assert told(tmp_path, "told") == [["nccl", [6.0], [" (on hostb)"]]] * SIZE
        pulled = pull(hosts, tmp_path)
        ended = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
        assert all(rank.returncode for rank in ranks), ended
        check_failures(tmp_path, "over_nccl", pulled)


def test_reducing_and_training_over_mpi_until_the_cable_is_pulled(hosts: list[Host], tmp_path: Path) -> None:
    mpi = peers.find_mpis().get("mpich") if peers.has("mpi4py") else None
    if mpi is None:
        pytest.skip("needs mpi4py and MPICH, whose launcher can be told how to reach a host")
    reach = tmp_path / "reach"  # in place of ssh: [-x] HOST COMMAND
    there = [" ".join(each.command(["sh", "-c", '"$*"'])) for each in hosts]
    cases = "\n".join(f"{each.address}) exec {line} ;;" for each, line in zip(hosts, there))
    reach.write_text(f'#!/bin/sh\n[ "$1" = -x ] && shift\nhost=$1; shift\ncase $host in\n{cases}\nesac\n')
    reach.chmod(0o755)
    options = ["-launcher", "ssh", "-launcher-exec", str(reach), "-localhost", hosts[0].address, "-iface", "cable"]
    options += ["-hosts", ",".join(each.address for each in hosts), "-ppn", "2", "-n", str(SIZE)]
    command = hosts[0].command([str(mpi.mpiexec), *options, *program(tmp_path, "over_mpi")])
    over_cable = mpi.environment() | {
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "cable",
    }  # it may try the loopback device else
    with open(tmp_path / "said", "w+") as said:
        launcher = subprocess.Popen(command, env=environ(**over_cable), stdout=said, stderr=said)
        try:
            wait_for([tmp_path / f"told {rank}" for rank in range(SIZE)], [launcher])
            assert told(tmp_path, "told") == [["shm+mpi", [], 1]] * SIZE
            check_training(tmp_path)
            pulled = pull(hosts, tmp_path)
            wait_for([tmp_path / f"failed {rank}" for rank in range(SIZE)], [])
            check_failures(tmp_path, "over_mpi", pulled)
            while running := [line for each in hosts for pid in each.processes() if (line := rank_line(pid))]:
                assert time.monotonic() < pulled + DEADLINES["over_mpi"] + MORE, running
                time.sleep(0.05)
            print(f"no rank runs {time.monotonic() - pulled:.1f} s after")
            while not (codes := [path.read_text().strip() for path in tmp_path.glob("code ?")]):  # of who ended first
                assert time.monotonic() < pulled + DEADLINES["over_mpi"] + MORE
                time.sleep(0.05)
            assert "0" not in codes, codes
        finally:
            launcher.kill()
            launcher.wait()
            said.seek(0)
            print(said.read())


def rank_line(pid: int) -> str:
    """A rank's command line; empty for other processes."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if words[0] == sys.executable and words[1].endswith("over_cable.py"):
            return f"{pid} {' '.join(words)}"
    return ""


def check_training(folder: Path) -> None:
    alone = trainer(None, folder / "alone", SEED)
    alone.fit(2, steps=STEPS)
    ours, its = (
        [record["loss"] for record in metrics.read(folder / name / "metrics.jsonl") if record["event"] == "step"]
        for name in ("run", "alone")
    )
    assert len(ours) == STEPS
    assert ours == pytest.approx(its, rel=1e-10)
