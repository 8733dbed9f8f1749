"""Starting ranks: what they see, what comes back, which failure is reported, and that nothing is left behind."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from collectives import failure, launch, ranks
from collectives.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from collectives.launch import spawn
from collectives.output import WholeLines


@pytest.fixture(autouse=True)
def nothing_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.5)
    monkeypatch.setattr(ranks, "GRACE", 0.5)


@contextlib.contextmanager
def started(command, **options):
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def gone(pid, seconds=3.0):
    """Whether a process that need not be our child ends in this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


# What spawned ranks do. They stand here since ranks find them by their module's name.


class Mishap(Exception):
    def __init__(self, code, *, where):
        super().__init__(f"mishap {code}")
        self.where = where

    def __reduce__(self):
        return _mishap, (self.args[0], self.where)


def _mishap(text, where):
    return Mishap(text.split()[1], where=where)


class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def standing(comm, *args):
    names = ["MGPU_RANK", "MGPU_SIZE", "MGPU_LOCAL_RANK", "MGPU_LOCAL_SIZE", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"]
    child = subprocess.Popen(["sleep", "100"])  # outlives its rank, but not spawn
    return comm.rank, comm.size, args, {name: os.environ.get(name) for name in names}, sys.stdin.read(), child.pid


def fail_with(comm, kind):
    if comm.rank == 1:
        if kind == "mishap":
            raise Mishap(7, where="there")
        if kind == "unsendable":
            raise Unsendable(1, 2)
        if kind == "exit":
            sys.exit(3)
        if kind == "vanish":
            os._exit(0)
        if kind == "result":
            return lambda: None
        os.kill(os.getpid(), getattr(signal, kind))
    try:
        comm.barrier()
    except PeerLostError as error:
        if comm.rank == 2:
            raise RuntimeError("a program's own error, for want of rank 1") from error
        raise


def fail_or_dawdle(comm):
    if comm.rank == 0:
        raise KeyError("first")
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def test_results_come_back_by_rank(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    before = dict(os.environ)
    results = spawn(standing, 3, ("a", [1]))
    assert dict(os.environ) == before
    share = str(max(1, len(os.sched_getaffinity(0)) // 3))
    for rank, (number, size, args, environ, stdin, child) in enumerate(results):
        assert (number, size, args, stdin) == (rank, 3, ("a", [1]), "")
        assert list(environ.values()) == [str(rank), "3", str(rank), "3", share, share]
        assert gone(child)


@pytest.mark.parametrize(
    "kind,error,text",
    [
        ("mishap", Mishap, "mishap 7"),
        pytest.param("unsendable", CollectiveError, "Unsendable: 1 and 2", marks=pytest.mark.slow),
        pytest.param("exit", CollectiveError, r"rank 1 called sys\.exit\(3\)", marks=pytest.mark.slow),
        ("vanish", PeerLostError, "rank 1 ended with exit code 0, before it had returned"),
        ("result", Exception, "pickle|local object"),  # before Python 3.13, and from it on
        ("SIGKILL", PeerLostError, "rank 1 was killed by SIGKILL"),
        ("SIGSEGV", PeerLostError, "rank 1 was killed by SIGSEGV .PYTHONFAULTHANDLER=1"),
    ],
)
def test_the_cause_is_raised_and_not_its_echo(kind, error, text):
    with pytest.raises(error, match=text) as caught:
        spawn(fail_with, 3, (kind,))
    assert type(caught.value) is error or kind == "result"
    story = str(caught.value.__cause__)
    if kind != "result":
        assert "rank 0: PeerLostError" in story and "rank 2: RuntimeError: a program's own error" in story
    if kind == "mishap":
        assert caught.value.where == "there"
        assert "test_launch.py" in story and 'raise Mishap(7, where="there")' in story


def test_ranks_that_do_not_end_are_ended(impatient):
    with pytest.raises(KeyError, match="first") as caught:
        spawn(fail_or_dawdle, 3)
    assert "rank 1 was still running" in str(caught.value.__cause__)
    assert "rank 2 was still running" in str(caught.value.__cause__)


def test_what_cannot_be_sent_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))

    def inner(comm):
        return None

    for function in (inner, lambda comm: None):
        with pytest.raises(TypeError, match="top level of a module"):
            spawn(function, 2)
    with pytest.raises(TypeError, match="pickle"):
        spawn(standing, 2, (threading.Lock(),))
    for nprocs in (0, -1):
        with pytest.raises(ValueError, match=f"nprocs={nprocs}"):
            spawn(standing, nprocs)


@pytest.mark.parametrize("name", ["hidden_module", "nowhere.hidden"])
def test_a_module_that_no_import_finds_is_loaded_from_its_file(name, tmp_path, monkeypatch):
    (tmp_path / "hidden.py").write_text("def rank_of(comm):\n    return comm.rank\n")
    spec = importlib.util.spec_from_file_location(name, tmp_path / "hidden.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nowhere", types.ModuleType("nowhere"))
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert spawn(module.rank_of, 1) == [0]


SCRIPT = """
import os, signal, sys, time
from collectives import spawn

def say(*words):  # a line at once, even with PYTHONUNBUFFERED
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def hello(comm, word):
    return Word(word * (comm.rank + 1))

def wait(comm):
    try:
        say(os.getpid())
        time.sleep(60)
    except KeyboardInterrupt:
        say("interrupted", comm.rank)
        raise

class Word(str):
    pass
"""


def script(folder, end):
    (folder / "script.py").write_text(SCRIPT + end)
    return [sys.executable, str(folder / "script.py")]


def test_functions_and_classes_of_the_main_script(tmp_path):
    end = 'if __name__ == "__main__":\n    words = spawn(hello, 2, ("ab",))\n    print(words, type(words[0]) is Word)\n'
    done = subprocess.run(script(tmp_path, end), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("['ab', 'abab'] True\n", 0), done.stderr


def test_a_main_script_without_its_guard(tmp_path):
    done = subprocess.run(script(tmp_path, 'spawn(hello, 2, ("ab",))\n'), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "put the call under `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]


def test_a_function_typed_at_a_prompt():
    code = "from collectives import spawn\ndef f(comm): pass\nspawn(f, 2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "put it in a file" in done.stderr


INTERRUPTED = """
def keep(comm, folder, number):
    stopped = []
    signal.signal(number, lambda *_: stopped.append(1))
    say(os.getpid())
    while not stopped:
        time.sleep(0.05)
    time.sleep(0.3)
    open(f"{folder}/checkpoint {comm.rank}", "w").write("kept")

if __name__ == "__main__":
    from collectives import ranks
    ranks.GRACE = 0.01  # of failures: who is asked to end has longer
    spawn(keep, 2, (sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_lets_its_ranks_save_what_they_have(tmp_path, number):
    heard = signal.SIGTERM if number == signal.SIGHUP else number
    command = [*script(tmp_path, INTERRUPTED), str(tmp_path), str(int(heard))]
    with started(command, stderr=subprocess.PIPE) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        parent.communicate(timeout=30)
        assert all(gone(pid) for pid in pids)
    assert [(tmp_path / f"checkpoint {rank}").read_text() for rank in range(2)] == ["kept"] * 2
    assert parent.returncode == -number


DEAF = """
def sleep(comm, number):
    signal.signal(number, signal.SIG_IGN)
    say(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    from collectives import launch
    launch.ASKED_GRACE = 100.0  # the first signal alone ends nobody in this test's time
    spawn(sleep, 2, (int(sys.argv[1]),))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_to_the_parent_kills(tmp_path, number):
    command = script(tmp_path, DEAF)
    with started([*command, str(int(number))], stderr=subprocess.PIPE) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        time.sleep(0.5)
        assert parent.poll() is None and not any(gone(pid, 0.1) for pid in pids)
        parent.send_signal(number)
        parent.communicate(timeout=30)
        assert all(gone(pid) for pid in pids)
    assert parent.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_when_the_parent_is_interrupted_or_killed_its_ranks_end(tmp_path, number):
    command = script(tmp_path, 'if __name__ == "__main__":\n    spawn(wait, 2)\n')
    with started(command, stderr=subprocess.PIPE) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        out, err = parent.communicate(timeout=30)
        assert all(gone(pid) for pid in pids)
    if number == signal.SIGINT:
        assert sorted(out.split("\n")) == ["", "interrupted 0", "interrupted 1"]  # each of them once
        assert err.rstrip().endswith("KeyboardInterrupt")
    assert parent.returncode == -number


# mgpu run

RUN = """
import sys
from collectives import launch, ranks
launch.GRACE = ranks.GRACE = float(sys.argv[1])
sys.exit(launch.main(sys.argv[2:]))
"""
PRELUDE = """
import os, signal, sys, time
from collectives.errors import PeerLostError, CollectiveTimeoutError
from collectives.failure import report_failures
rank = int(os.environ["MGPU_RANK"])
report_failures()

def say(*words):  # a line at once, even with PYTHONUNBUFFERED
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def run(folder, text, *arguments, options=("-n", "3"), grace=0.5, **changes):
    (folder / "program.py").write_text(PRELUDE + text)
    command = [sys.executable, "-c", RUN, str(grace), *options, str(folder / "program.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **changes)


def test_a_script_sees_its_rank_and_its_arguments(tmp_path):
    text = """
names = ["MGPU_SIZE", "MGPU_LOCAL_RANK", "MGPU_LOCAL_SIZE", "OMP_NUM_THREADS"]
open(f"{sys.argv[1]}/{rank}", "w").write(" ".join([os.environ[name] for name in names] + sys.argv[2:]))
assert os.environ["MGPU_ADDRESS"].startswith("unix:") and len(os.environ["MGPU_SECRET"]) == 64
"""
    done = run(tmp_path, text, str(tmp_path), "-n", "--threads", options=("-n", "3", "--threads", "5"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"3 {rank} 3 5 -n --threads"


def test_a_module_and_pinned_ranks(tmp_path):
    (tmp_path / "pinned.py").write_text("import os, sys; print(sorted(os.sched_getaffinity(0)), sys.argv[1:])")
    command = [sys.executable, "-c", RUN, "0.5", "-n", "2", "--pin", "--prefix", "-m", "pinned", "-x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    from collectives.threads import pins

    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {sorted(pin)} ['-x']" for rank, pin in enumerate(pins(2))]


@pytest.mark.parametrize(
    "text,code,said",
    [
        ("if rank == 1: sys.exit(7)", 7, "rank 1 ended with exit code 7"),
        ("if rank == 2: os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 2 was killed by SIGKILL"),
        ("if rank == 1: raise ValueError('so')", 1, "rank 1 ended with exit code 1: ValueError: so"),
        ("time.sleep(rank / 5)\nraise [PeerLostError, CollectiveTimeoutError, OSError][rank]('x')", 1, "rank 2 ended"),
        (
            "time.sleep(rank / 5)\nif rank < 2: raise [PeerLostError, CollectiveTimeoutError][rank]('x')",
            1,
            "rank 1 ended",
        ),
        ("time.sleep(60 if rank == 0 else 0.1)\nsys.exit(4)", 4, "still running 0.5 s later, and stopped: 0"),
    ],
)
def test_the_exit_code_is_the_cause_s(tmp_path, text, code, said):
    done = run(tmp_path, text, grace=0.5 if "still running" in said else 30)  # ranks may start far apart
    assert done.returncode == code, done.stderr
    assert f"mgpu run: {said}" in done.stderr
    assert done.stderr.count("mgpu run: rank") == 1


MISHAPS = """
import collectives, numpy
comm = collectives.init(timeout=60)
comm.barrier()
kind = sys.argv[1]
if kind == "forks":
    child = os.fork()
    if child == 0:
        time.sleep(100)  # outlives its rank, but not the launcher
    say(child)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    if kind == "raises": raise ValueError("so")
    if kind == "exits": sys.exit(3)
    if kind == "ends": sys.exit(0)
    if kind == "vanishes": os._exit(5)
    if kind == "vanishes quietly": os._exit(0)
comm.all_reduce(numpy.ones(3))
"""


@pytest.mark.parametrize(
    "kind,code,said",
    [
        ("raises", 1, "rank 1 ended with exit code 1: ValueError: so"),
        pytest.param("exits", 3, "rank 1 ended with exit code 3", marks=pytest.mark.slow),
        pytest.param("vanishes", 5, "rank 1 ended with exit code 5", marks=pytest.mark.slow),
        ("forks", 137, "rank 1 was killed by SIGKILL"),
        # Whose fault it is that rank 1 has gone, nobody can tell: what the others say of it is reported.
        ("ends", 1, r"rank \d ended with exit code 1: PeerLostError: .*rank 1 closed its communicator after call 1"),
        ("vanishes quietly", 1, r"rank \d ended with exit code 1: PeerLostError: .*rank 1 .*has died after call 1"),
    ],
)
def test_mishaps_while_others_wait_in_a_collective(tmp_path, kind, code, said):
    done = run(tmp_path, MISHAPS, kind)
    assert done.returncode == code, done.stderr
    assert re.search(f"mgpu run: {said}", done.stderr), done.stderr
    assert done.stderr.count("mgpu run: rank") == 1
    assert all(gone(int(pid)) for pid in done.stdout.split())


def test_output_with_the_rank_before_every_line(tmp_path):
    text = """
print("one\\ntwo", flush=True)
sys.stderr.write("10%\\r20%\\r")
print("no end", end="")
"""
    done = run(tmp_path, text, options=("-n", "2", "--prefix"))
    for rank in range(2):
        lines = [line for line in done.stdout.split("\n") if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] one", f"[{rank}] two", f"[{rank}] no end"]
    lines = [line for line in done.stderr.split("\n") if line]  # subprocess has made line ends of the carriage returns
    assert sorted(lines) == ["[0] 10%", "[0] 20%", "[1] 10%", "[1] 20%"]
    assert run(tmp_path, text, options=("-n", "1")).stdout == "one\ntwo\nno end"


@pytest.mark.parametrize("way", ["-", "-c"])
def test_a_function_that_is_in_no_file_is_refused(tmp_path, way):
    script = "import collectives\ndef f(comm): pass\ncollectives.spawn(f, 2)"
    command = [sys.executable, "-c", script] if way == "-c" else [sys.executable, "-"]
    done = subprocess.run(command, input=script, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "put it in a file and import it" in done.stderr.splitlines()[-1]


def test_lines_stay_whole_where_output_is_no_terminal(tmp_path):
    text = """
for number in range(300):
    print(sys.argv[1] * 50)  # text and end apart, where there are no buffers
    print(sys.argv[1] * 50, file=sys.stderr)
print("no end", end="")
"""
    (tmp_path / "program.py").write_text(f"import sys\n{text}")
    for unbuffered in ("1", ""):
        done = subprocess.run(
            [sys.executable, "-c", RUN, "0.5", "-n", "3", "program.py", "long "],
            cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50,
        )  # fmt: skip
        assert done.returncode == 0
        assert sorted(done.stdout.splitlines()) == ["long " * 50] * 1800 + ["no end"] * 3


def test_one_pipe_for_both_keeps_a_rank_s_order(tmp_path):
    text = "import sys\nfor n in range(50): print(n, flush=True); print(n + 0.5, file=sys.stderr)"
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-c", RUN, "0.5", "-n", "2", "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50
    )
    seen = {}
    for number in map(float, done.stdout.split()):  # two of each, one behind the other in either rank
        seen.setdefault(number, []).append(len(seen))
    assert list(seen) == sorted(seen) and len(seen) == 100


BYTES = """
import os, sys, time
rank = int(os.environ["MGPU_RANK"])
"""


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("if rank == 1: sys.stdout.buffer.write(bytes(range(256)))", bytes(range(256))),
        ("if rank == 0: print('no end', end='', flush=True)", b"no end"),
        ("time.sleep(rank); print(rank, end='', flush=True)", b"0\n1"),
        ("time.sleep(rank); print('10%\\r20%\\r' if rank == 0 else 1, end='', flush=True)", b"10%\r20%\r\n1"),
        ("if rank == 0: sys.stdout.write('no end'); sys.stdout.flush(); os._exit(3)", b"no end\n"),
    ],
)
def test_output_is_passed_on_as_it_is_but_for_an_end_between_two_lines(tmp_path, program, told):
    (tmp_path / "program.py").write_text(BYTES + program)
    command = [sys.executable, "-c", RUN, "0.5", "-n", "2", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, timeout=50)
    assert done.stdout == told


@pytest.mark.parametrize("prefix", [b"", b"[3] "])
def test_of_a_line_without_an_end_little_is_kept(prefix):
    reader, writer = os.pipe()
    sink, output, piece = io.BytesIO(), WholeLines(prefixed=bool(prefix)), b"x" * (1 << 16)
    output.add(reader, 3, sink)
    for number in range(1, 101):
        os.write(writer, piece)
        output.pump([reader])
        assert number * len(piece) - len(sink.getvalue()) <= (1 << 20) + len(piece)
    os.write(writer, b"\nnext\nno end")
    os.close(writer)
    output.drain()
    os.close(reader)
    expected = prefix + 100 * piece + b"\n" + prefix + b"next\n" + prefix + b"no end" + (b"\n" if prefix else b"")
    assert sink.getvalue() == expected


def test_a_rank_may_say_much_as_it_is_ended(tmp_path):
    """More than a pipe holds, before it saves what it has."""
    text = """
def end(number, frame):
    print("last words " * 100_000, flush=True)
    open(f"{sys.argv[1]}/saved", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
if rank == 1:
    sys.exit(3)
while True:
    time.sleep(10)
"""
    done = run(tmp_path, text, str(tmp_path), options=("-n", "2"), grace=2)
    assert done.returncode == 3 and done.stdout == "last words " * 100_000 + "\n" and (tmp_path / "saved").exists()


def test_what_ranks_have_started_may_go_on_writing(tmp_path):
    text = """
import subprocess
subprocess.Popen(["yes"])
sys.stderr.write("no end")
"""
    done = run(tmp_path, text, options=("-n", "1", "--prefix"))
    assert done.returncode == 0 and "[0] y\n[0] y\n" in done.stdout
    assert done.stderr == "[0] no end\n"


def test_exit_codes_count_where_a_parent_ignores_sigchld(tmp_path):
    (tmp_path / "program.py").write_text("import sys; sys.exit(7)")
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", RUN, "0.5", "-n", "2", str(tmp_path / "program.py")]
    done = subprocess.run([sys.executable, "-c", ignoring, *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7 and "ended with exit code 7" in done.stderr


FAILS = """
with open(f"{sys.argv[1]}/{os.environ['MGPU_RESTART']}", "a") as file:
    file.write(os.environ["MGPU_SIZE"])
if rank == 1 and (os.environ["MGPU_SIZE"] == "3" or os.environ["MGPU_RESTART"] in sys.argv[2:]):
    time.sleep(0.2)
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("options", "failing", "sizes", "code"),
    [
        (["--restarts", "0"], [], "3", 7),
        (["--restarts", "2"], [], "333", 7),
        (["--restarts", "4", "--min-ranks", "2"], [], "332", 0),
        (["--restarts", "4", "--min-ranks", "2"], ["2", "3"], "33222", 0),  # no fewer than two, however often
    ],
)
def test_fresh_ranks_after_a_failure_and_fewer_after_a_second_of_the_same_rank(tmp_path, options, failing, sizes, code):
    done = run(tmp_path, FAILS, str(tmp_path), *failing, options=("-n", "3", *options), grace=30)
    assert done.returncode == code, done.stderr
    assert [(tmp_path / str(k)).read_text() for k in range(len(sizes))] == [size * int(size) for size in sizes]
    assert not (tmp_path / str(len(sizes))).exists()
    assert done.stderr.count("mgpu run: rank 1 ended with exit code 7") == len(sizes) - (code == 0)
    told = [f"restart {k} of {options[1]}, with {size} ranks" for k, size in enumerate(sizes[1:], 1)]
    assert re.findall("restart .*", done.stderr) == told


def test_rank_0_has_the_input(tmp_path):
    done = run(tmp_path, "say(rank, repr(sys.stdin.read()))", input="data")
    assert sorted(done.stdout.splitlines()) == ["0 'data'", "1 ''", "2 ''"]


STUBBORN = """
import subprocess
count = 0
def note(number, frame):
    global count
    count += 1
    say("signal", number, count)
    if sys.argv[1] == "leaves" : sys.exit(0)
signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
helper = subprocess.Popen(["sleep", "100"])
say(os.getpid(), helper.pid)
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_reaches_every_rank_once_and_a_second_kills(tmp_path, number):
    (tmp_path / "program.py").write_text(PRELUDE + STUBBORN)
    for manner in ("leaves", "stays"):
        command = [sys.executable, "-c", RUN, "0.5", "-n", "2", str(tmp_path / "program.py"), manner]
        with started(command, start_new_session=True) as launcher:
            pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()]
            os.killpg(launcher.pid, number)  # as a terminal does
            assert [launcher.stdout.readline() for _ in range(2)] == [f"signal {int(number)} 1\n"] * 2
            if manner == "stays":
                launcher.send_signal(number)
            assert launcher.wait(timeout=30) == 128 + number
            assert launcher.stdout.read() == ""
            assert all(gone(pid) for pid in pids)


def test_when_the_launcher_is_killed_its_ranks_die(tmp_path):
    (tmp_path / "program.py").write_text(PRELUDE + "say(os.getpid())\ntime.sleep(60)")
    command = [sys.executable, "-c", RUN, "0.5", "-n", "2", str(tmp_path / "program.py")]
    with started(command) as launcher:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.kill()
        assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "the following arguments are required: script"),
        (["-n", "0", __file__], "'0' is not a whole number, 1 or more"),
        (["-n", "two", __file__], "'two' is not a whole number, 1 or more"),
        (["--threads", "0", __file__], "'0' is not a whole number, 1 or more"),
        (["-n", "3", "not_there.py"], "there is no file not_there.py"),
    ],
)
def test_wrong_usage(options, complaint):
    done = subprocess.run([sys.executable, "-c", RUN, "0.5", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("usage: mgpu run")
    assert done.stderr.count("\n") == 2 and done.stderr.endswith(f"{complaint}\n")


def test_the_launcher_starts_quickly_for_want_of_imports():
    heavy = {"numpy", "numba", "multiprocessing"}
    code = f"import sys; from collectives import launch; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# Causes and echoes


def chained(error, cause):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error,weight",
    [
        (ValueError(), 0),
        (KeyboardInterrupt(), 0),
        (CollectiveTimeoutError(), 1),
        (PeerLostError(), 2),
        (chained(RuntimeError(), PeerLostError()), 2),
        (chained(PeerLostError(), ValueError()), 2),
        (chained(OSError(), chained(KeyError(), CollectiveTimeoutError())), 1),
    ],
)
def test_the_weight_of_a_failure(error, weight):
    assert failure.weight(error) == weight


def test_reports_are_not_written_to_a_descriptor_that_means_something_else(monkeypatch):
    reader, writer = os.pipe()
    other = os.open(os.devnull, os.O_RDWR)
    hook = sys.excepthook
    inode = os.fstat(writer).st_ino
    for value in ("", "x", "99999:1", f"{other}:{inode}"):
        monkeypatch.setenv("MGPU_REPORT", value)
        failure.report_failures()
        assert "MGPU_REPORT" not in os.environ
        assert sys.excepthook is hook
    for descriptor in (reader, writer, other):
        os.close(descriptor)


@pytest.mark.parametrize("flags", [["-n", "2"], ["-n2"], ["-np", "2"]], ids=" ".join)
def test_the_number_of_ranks_as_other_launchers_are_told(flags, tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("print('here')\n")
    assert launch.main([*flags, str(script)]) == 0
    assert capfd.readouterr().out.split() == ["here"] * 2
