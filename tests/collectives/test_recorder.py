"""The flight recorder: a run that hangs is looked into from outside, and says by itself who is late."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives import recorder
from collectives.memory import Segment
from collectives.region import FAILED, Region

HANGS = """
import time
import numpy as np
import collectives

with collectives.init(timeout=60) as comm:
    half = comm.split(comm.rank % 2)
    half.all_reduce(np.ones(7, np.float64))
    comm.all_reduce(np.ones(10, np.float32))
    print("ready\\n", end="", flush=True)  # in one write, unbuffered too
    if comm.rank == 2:
        time.sleep(100)  # in the middle of something
    comm.broadcast(np.ones(3, np.int64), root=1)
"""


@pytest.fixture
def hanging(tmp_path):
    """Three ranks, of which rank 2 does not come to the last call."""
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    command = [sys.executable, "-m", "mgpu_core", "run", "-n", "3", str(script)]
    environ = {**os.environ, "MGPU_STALL": "0.5"}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for _ in range(3):
            assert "ready" in process.stdout.readline()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def until(condition):
    deadline = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def test_a_hanging_run_is_looked_into_and_names_who_is_late(hanging, capsys):
    def text():
        assert recorder.main(hanging.pid) == 0
        told = capsys.readouterr().out
        return told if "late" in told and told.count("is in call") >= 2 else None

    told = until(text)
    assert "3 ranks, of which 3 live on this host" in told
    assert re.search(r"rank 0, process \d+: is in call \d+, broadcast\(int64, count 3, root 1\)", told)
    assert re.search(r"rank 2, process \d+: has ended call \d+, all_reduce\(float32, count 10, sum\)", told)
    assert "late: rank 2: the others have begun call" in told
    assert re.search(r"as rank 1 of 2 in sub-communicator \d+: has ended call 1, all_reduce\(float64, count 7", told)

    # unasked, the run says the same
    line = until(lambda: hanging.stderr.readline())
    assert "has waited for" in line and "ranks 0, 1 arrived, rank 2 did not" in line

    # and a rank says where it is when asked
    sleeper = int(re.search(r"rank 2, process (\d+)", told)[1])
    os.kill(sleeper, signal.SIGUSR1)
    seen = ""
    while "time.sleep(100)" not in seen:
        seen += hanging.stderr.readline()
    assert f"process {sleeper} is at:" in seen and "late: rank 2" in seen


def test_files_that_only_have_the_name_are_nobody_s_run():
    """Another program, or version, may have other ideas of what lies there; an error would end whom SIGUSR1 asks."""
    mark = (0x7570676D).to_bytes(8, "little")
    for content in (b"", b"short", bytes(100), bytes(8) + mark, bytes(8) + mark + b"\x7f" * 32 + bytes(1 << 20)):
        for seals in (0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL):
            file = os.memfd_create("mgpu", os.MFD_ALLOW_SEALING)
            os.write(file, content)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            descriptors = len(os.listdir("/proc/self/fd"))
            recorder.runs()  # which may see those of other tests
            assert recorder._seats(Path(f"/proc/self/fd/{file}")) == []
            assert len(os.listdir("/proc/self/fd")) == descriptors
            os.close(file)


@pytest.mark.parametrize("text", ["plain " * 1000, "日本語のエラー" * 300, "\0" * 5000, "🙂" * 3000, "", "ok"])
def test_a_reason_is_cut_to_its_room_and_stays_readable(text):
    segment = Segment.create(0, 0, 1 << 16)
    region = Region(segment, 0, 2)
    region.leave(FAILED, {"kind": "PeerLostError", "text": text})
    found = region.reason()
    assert region.state == FAILED and found["kind"] == "PeerLostError"
    assert text.startswith(found["text"]) and len(found["text"]) >= min(len(text), 120)
    segment.close()


def test_no_run_and_no_such_run(capsys):
    assert recorder.main(1 << 22) == 1
    assert "belongs to no run" in capsys.readouterr().err


def test_a_user_s_own_handler_stays(monkeypatch):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        recorder.answer_signals()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
