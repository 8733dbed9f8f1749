"""Crews: they sleep while they are not asked, and whatever goes wrong in one is said within bounded time."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.crew import Crew, CrewError, Launch, Track, python

CPUS = sorted(os.sched_getaffinity(0))
ENGINE = """
from bench import candidates, worker
class Engine(candidates.Addition):
    def prepare(self, candidate, case, x, out):
        {body}
import os
worker.sample_with(Engine(int(os.environ["MGPU_BENCH_RANK"])))
"""


def crew(folder: Path, track: Track, body: str, ranks: int = 2, timeout: float = 30) -> Crew:
    code = ENGINE.format(body=body)
    return Crew("test", ranks, folder, track, Launch.each(ranks, python(code)), timeout=timeout)


@pytest.fixture
def track() -> Iterator[Track]:
    made = Track(2)
    yield made
    made.close()


def sample(calls: int, first: int) -> dict:
    candidate = {"crew": "test", "memory": "ordinary", "algorithm": None, "plan": False}
    case = {"collective": "all_reduce", "nbytes": 400, "count": 100, "dtype": "float32", "op": "sum", "root": -1}
    what = {"candidate": candidate, "case": {**case, "in_place": True}}
    return {"do": "sample", "with": {**what, "warmups": 1, "calls": calls, "check": True, "first": first}}


def processor_time(crew: Crew) -> float:
    """Seconds that its processes have run so far."""
    ticks = 0
    for process in crew._processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_ranks_take_samples_play_ping_pong_and_otherwise_sleep(tmp_path: Path, track: Track) -> None:
    ours = crew(tmp_path, track, "return lambda: out.__setitem__(slice(None), 0)")
    try:
        ours.ready(CPUS)
        assert ours.version.startswith("NumPy")
        ours.ask({"do": "allocate", "with": {"memory": "ordinary", "nbytes": 400}})
        answers = ours.ask(sample(calls=7, first=track.take(8)))
        assert [answer["rank"] for answer in answers] == [0, 1]
        for answer in answers:
            assert len(answer["ns"]) == 7 and all(ns > 0 for ns in answer["ns"])
            assert answer["wrong"] > 0  # zeros are not the sum
        for answer in ours.ask({"do": "ping", "with": {"first": track.take(450)}}):
            assert answer["ns"] > 0
        before = processor_time(ours)
        time.sleep(0.5)
        assert processor_time(ours) - before <= 0.05
    finally:
        ours.close()
    assert all(process.returncode == 0 for process in ours._processes)


def test_a_rank_that_raises_is_quoted(tmp_path: Path, track: Track) -> None:
    ours = crew(tmp_path, track, "raise ArithmeticError('no such sum')")
    try:
        ours.ready(CPUS)
        ours.ask({"do": "allocate", "with": {"memory": "ordinary", "nbytes": 400}})
        with pytest.raises(CrewError, match=r"(?s)rank \d failed in 'sample'.*no such sum"):
            ours.ask(sample(calls=1, first=track.take(2)))
    finally:
        ours.close()


def test_what_an_unsupported_candidate_says_is_an_answer(tmp_path: Path, track: Track) -> None:
    ours = crew(tmp_path, track, "raise candidates.UnsupportedError('not this one')")
    try:
        ours.ready(CPUS)
        ours.ask({"do": "allocate", "with": {"memory": "ordinary", "nbytes": 400}})
        answers = ours.ask(sample(calls=1, first=track.take(2)))
        assert [answer["unsupported"] for answer in answers] == ["not this one"] * 2
    finally:
        ours.close()


def test_a_rank_that_dies_is_noticed_at_once(tmp_path: Path, track: Track) -> None:
    ours = crew(tmp_path, track, "__import__('time').sleep(60)")
    try:
        ours.ready(CPUS)
        ours.ask({"do": "allocate", "with": {"memory": "ordinary", "nbytes": 400}})
        os.kill(ours._processes[1].pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(CrewError, match="ended during 'sample'|is gone"):
            ours.ask(sample(calls=1, first=track.take(2)))
        assert time.monotonic() - start < 20
    finally:
        ours.kill()
        ours.close()


def test_silence_has_an_end(tmp_path: Path, track: Track) -> None:
    ours = crew(tmp_path, track, "__import__('time').sleep(60)", timeout=15)
    try:
        ours.ready(CPUS)
        ours.ask({"do": "allocate", "with": {"memory": "ordinary", "nbytes": 400}})
        ours.timeout = 0.3
        with pytest.raises(CrewError, match="no answer to 'sample' within 0.3 s"):
            ours.ask(sample(calls=1, first=track.take(2)))
    finally:
        ours.kill()
        ours.close()


def test_a_program_that_does_not_start_is_quoted(tmp_path: Path, track: Track) -> None:
    ours = Crew("test", 2, tmp_path, track, Launch([python("raise SystemExit('wrong library')")], [{}]), timeout=30)
    try:
        with pytest.raises(CrewError, match=r"(?s)ended before it was ready.*wrong library"):
            ours.ready(CPUS)
    finally:
        ours.close()


def test_ranks_that_do_not_come_are_named(tmp_path: Path, track: Track) -> None:
    ours = Crew("test", 2, tmp_path, track, Launch([python("import time; time.sleep(60)")], [{}]), timeout=0.5)
    try:
        with pytest.raises(CrewError, match=r"ranks \[0, 1\] did not come within 0.5 s"):
            ours.ready(CPUS)
    finally:
        ours.kill()
        ours.close()


def test_ranks_leave_when_their_conductor_is_gone(tmp_path: Path, track: Track) -> None:
    """Rank 0 waits at the start line for rank 1, which never gets there."""
    body = "__import__('time').sleep(0 if self.rank == 0 else 60); return int"
    ours = crew(tmp_path, track, body)
    try:
        ours.ready(CPUS)
        ours.ask({"do": "allocate", "with": {"memory": "ordinary", "nbytes": 400}})
        ours.timeout = 0.3
        with pytest.raises(CrewError):
            ours.ask(sample(calls=1, first=track.take(2)))
        for connection in ours._sockets:
            connection.close()
        ours._processes[0].wait(timeout=30)
    finally:
        ours.kill()
        ours.close()
