"""Starting ranks on this host: `spawn` for a function, `mgpu run` for a script or a module.

Each rank is a fresh interpreter, since a fork after threads have started is unsafe. When one fails, the others have a
few seconds to end by themselves, and what is reported is the first failure that is not the echo of another's. When the
launching process dies, its ranks die with it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from collectives import threads
from collectives.environment import RESTART
from collectives.errors import CollectiveError, PeerLostError
from collectives.failure import Failure, RankTraceback, Reports
from collectives.output import WholeLines
from collectives.ranks import ASKED_GRACE, GRACE, Rank, Ranks, die_with
from collectives.wording import counted

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_FOREVER = float("inf")
# A rank opens the job anew, to read it from its beginning whatever others have read.
_BOOT = (
    "import os, pickle, sys; job = open('/proc/self/fd/{job}', 'rb'); os.close({job}); sys.path[:] = pickle.load(job); "
    "from collectives.launch import _child; _child(job, {descriptor}, {parent})"
)
_importing_main = False


def spawn(
    fn: Callable[..., Any], nprocs: int, args: Sequence[Any] = (), *, backend: str = "auto", timeout: float = 300.0
) -> list[Any]:
    """Call fn(comm, *args) in `nprocs` new processes on this host, and return their results by rank.

    fn, args and results travel by pickle, so fn is a module's function; in a script it stands above
    `if __name__ == "__main__":`, under which spawn is called. comm is closed when fn returns. backend, timeout: as in
    `init`; "sim" sets NUMBA_ENABLE_CUDASIM=1 in the ranks. Each rank's thread pools get its share of the processors,
    where the environment does not say otherwise.

    Ctrl-C reaches the ranks too, which have half a minute to end before this process does. So do SIGTERM and SIGHUP, as
    SIGTERM, in the main thread of a process that has no handlers of its own for them. A second one kills the ranks.

    If ranks fail, the others are stopped after a few seconds, and the first failure that is not another's echo is
    raised: the rank's own exception with its traceback as the cause, or PeerLostError naming the signal that killed it.
    """
    if _importing_main:
        raise RuntimeError(
            "spawn is called while a new rank imports the main script; put the call under `if __name__ == '__main__':`"
        )
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}; expected 1 or more")
    packed = _pack(fn, args, backend, timeout)
    with ExitStack() as stack:
        job = stack.enter_context(open(os.memfd_create("job"), "wb"))
        job.write(pickle.dumps(sys.path) + packed)
        job.flush()
        stack.enter_context(_dying_cleanly())
        ranks = Ranks(nprocs)
        stack.callback(ranks.close)
        connections = [stack.enter_context(_start(ranks, job.fileno(), backend)) for _ in range(nprocs)]
        try:
            return _outcomes(ranks, connections)
        except (KeyboardInterrupt, _Asked) as asked:
            ranks.stop(signal.SIGINT if isinstance(asked, KeyboardInterrupt) else signal.SIGTERM, ASKED_GRACE)
            raise


def _pack(fn: Callable[..., Any], args: Sequence[Any], backend: str, timeout: float) -> bytes:
    """Everything a rank needs; and the main module's place only where fn or args refer to it."""
    from multiprocessing.spawn import get_preparation_data

    try:
        work = pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"spawn sends its function and arguments to new processes by pickle, and that fails: {error}. The function "
            f"must be defined at the top level of a module, not inside another function or as a lambda"
        ) from error
    main = None
    if b"__main__" in work:
        main = get_preparation_data("rank")
        path = main.get("init_main_from_path", "")  # <stdin>, where Python reads the script from there
        if "init_main_from_name" not in main and not os.path.isfile(path):
            raise TypeError(
                f"new processes cannot import {fn!r}, which was defined in a notebook, at a prompt or by python -c; "
                f"put it in a file and import it"
            )
        main = {name: value for name, value in main.items() if name not in ("authkey", "start_method")}
    module = sys.modules.get(getattr(fn, "__module__", ""))
    place = (module.__name__, module.__file__) if module and getattr(module, "__file__", None) else None
    return pickle.dumps((main, place, work, backend, timeout))


def _start(ranks: Ranks, job: int, backend: str) -> Connection:
    from multiprocessing import Pipe
    from multiprocessing.spawn import get_executable

    ours, theirs = Pipe()
    try:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        code = _BOOT.format(job=job, descriptor=theirs.fileno(), parent=os.getpid())
        ranks.start(
            [os.fsdecode(get_executable()), *flags, "-c", code],
            {"NUMBA_ENABLE_CUDASIM": "1"} if backend == "sim" else {},
            pass_fds=[job, theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours


def _outcomes(ranks: Ranks, connections: list[Connection]) -> list[Any]:
    """Results by rank. Raises the root cause if there are failures."""
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    open_ = dict(enumerate(connections))
    deadline = _FOREVER
    while ranks.running and time.monotonic() < deadline:
        ready, ended = ranks.wait(open_.values(), deadline)
        talking = [number for number, connection in open_.items() if connection.fileno() in ready]
        for number in sorted({*talking, *(rank.number for rank in ended)} & open_.keys()):
            outcome = _receive(open_.pop(number), number)
            if isinstance(outcome, Failure):
                failures[number] = outcome
            elif outcome is not None:
                results[number] = outcome[0]
        for rank in ended:
            if rank.number not in results and rank.number not in failures:
                lost = PeerLostError(rank.describe() + (", before it had returned" if (rank.status or 0) >= 0 else ""))
                failures[rank.number] = Failure(rank.number, time.monotonic(), lost, 0)
        if (failures or len(results) == ranks.size) and deadline == _FOREVER:
            deadline = time.monotonic() + GRACE
    if failures:
        root = min(failures.values(), key=lambda failure: failure.order)
        raise root.error from _explain(root, failures, ranks)
    return [results[number] for number in range(ranks.size)]


def _receive(connection: Connection, rank: int) -> tuple[Any] | Failure | None:
    """What a rank has sent; None if it has gone without a word."""
    try:
        return pickle.loads(connection.recv_bytes()) if connection.poll() else None
    except (EOFError, OSError):
        return None
    except Exception as error:  # a class that is found there and not here
        return Failure.of(rank, CollectiveError(f"what rank {rank} returned cannot be read here: {error}"))


def _explain(root: Failure, failures: dict[int, Failure], ranks: Ranks) -> RankTraceback:
    lines = [f"rank {root.rank}:\n{root.traceback}" if root.traceback else f"rank {root.rank} left no traceback"]
    for number in range(ranks.size):
        if number in failures and number != root.rank:
            error = failures[number].error
            lines.append(f"rank {number}: {type(error).__name__}: {error}")
        elif ranks.all[number].status is None:
            lines.append(f"rank {number} was still running {GRACE:g} s later, and was stopped")
    return RankTraceback("\n".join(lines))


def _child(job: BinaryIO, descriptor: int, parent: int) -> None:
    """What a rank that was spawned does: it sends back the result, in a tuple, or the failure."""
    from multiprocessing.connection import Connection

    die_with(parent)()
    comm = None
    with Connection(descriptor) as connection, suppress(BrokenPipeError, ConnectionResetError):  # nobody is there
        try:
            with job:
                main, place, work, backend, timeout = pickle.load(job)
            fn, args = _unpack(main, place, work)
            from collectives import init

            comm = init(backend, timeout=timeout)
            result = fn(comm, *args)
            comm.close()
            connection.send_bytes(pickle.dumps((result,)))
        except BaseException as error:
            connection.send_bytes(pickle.dumps(Failure.of(int(os.environ["MGPU_RANK"]), error)))
            if comm:
                with suppress(Exception):
                    comm.close()


def _unpack(
    main: dict[str, Any] | None, place: tuple[str, str] | None, work: bytes
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments; the main script is imported where they refer to it."""
    if main:
        from multiprocessing.spawn import prepare

        global _importing_main
        _importing_main = True
        prepare(main)
        _importing_main = False
    try:
        return pickle.loads(work)
    except ModuleNotFoundError as error:
        if not place or not error.name or not f"{place[0]}.".startswith(f"{error.name}."):
            raise
    # Its module was loaded from a file that no import finds, as pytest does.
    spec = spec_from_file_location(*place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place[1]} cannot be imported")
    module = module_from_spec(spec)
    packages = place[0].split(".")[:-1]
    for name in (".".join(packages[: depth + 1]) for depth in range(len(packages))):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules[place[0]] = module
    spec.loader.exec_module(module)
    return pickle.loads(work)


def main(argv: Sequence[str]) -> int:
    """The command `mgpu run`. The exit code is that of the first rank to fail, 128 + the signal if one killed it."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.module and options.script != "-" and not os.path.exists(options.script):
        parser.error(f"there is no file {options.script}")  # once, and not by every rank's Python
    size = threads.here(1) if options.ranks is None else options.ranks
    least = size if options.min_ranks is None else options.min_ranks
    if least > size:
        parser.error(f"--min-ranks {least} is more than the {counted(size, 'rank')} to begin with")
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # as some parents leave it: exit codes would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    suspect = None
    for attempt in range(options.restarts + 1):
        code, cause = _run(options, size, attempt)
        if cause is None or attempt == options.restarts:
            return code
        if cause == suspect and size > least:  # twice in a row: its place is bad, not its luck
            size, suspect = size - 1, None
        else:
            suspect = cause
        now = f"restart {attempt + 1} of {options.restarts}, with {counted(size, 'rank')}"
        print(f"mgpu run: {now}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns")


def _run(options: argparse.Namespace, size: int, attempt: int) -> tuple[int, int | None]:
    """Run all ranks to their ends. Returns the exit code, and the rank that was the cause of a failure; None if there
    was no failure, or if somebody has asked the ranks to stop."""
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    with ExitStack() as stack:
        ranks = Ranks(size, options.threads, options.pin)
        stack.callback(ranks.close)
        received = stack.enter_context(_forwarding_signals(ranks))
        reports = stack.enter_context(Reports())
        output = WholeLines(options.prefix)
        out, err = (_way(descriptor, size, options.prefix) for descriptor in (1, 2))
        if out == err == subprocess.PIPE and os.path.sameopenfile(1, 2):
            err = subprocess.STDOUT  # what a rank writes to the two keeps its order
        # Lines that say whose they are are for somebody who watches.
        extra = {"PYTHONUNBUFFERED": "1"} if options.prefix else {}
        extra[RESTART] = str(attempt)
        if options.timeline:
            extra["MGPU_TIMELINE"] = options.timeline
        for number in range(size):
            ranks.start(
                command,
                {**reports.variables, **extra},
                stdin=None if number == 0 else subprocess.DEVNULL,  # as with mpirun
                stdout=out,
                stderr=err,
                pass_fds=[reports.writer],
                preexec_fn=die_with(os.getpid()),  # this process has one thread
            )
            process = ranks.all[-1].process
            for pipe, sink in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
                if pipe:
                    output.add(pipe.fileno(), number, sink)
        if received:  # while they were started
            ranks.send_signal(received[-1])
        failed = _watch(ranks, reports, output, received)
        stopped = [rank.number for rank in ranks.running]
        ranks.stop(output=output)
        reports.read()
        output.drain()
        if received:
            return 128 + received[0], None
        if not failed:
            return 0, None
        root = min(failed, key=lambda rank: reports.weight(rank.number))  # the earliest of the least
        output.end_lines()
        print(f"mgpu run: {root.describe()}{reports.reason(root.number)}", file=sys.stderr)
        if stopped:
            names = ", ".join(map(str, stopped))
            print(f"mgpu run: still running {GRACE:g} s later, and stopped: {names}", file=sys.stderr)
        status = root.status or 0
        return status if status > 0 else 128 - status, root.number


def _way(descriptor: int, size: int, prefixed: bool) -> int | None:
    """Where a rank's output goes: through a pipe and on in whole lines, or (None) straight to where ours goes.

    Straight to a terminal, so that ranks see one: there Python writes a line in one piece. Elsewhere it writes buffers,
    which end within a line, or without buffers a line's text and its end apart.
    """
    return subprocess.PIPE if prefixed or (size > 1 and not os.isatty(descriptor)) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mgpu run",
        usage="mgpu run [-n N] [--threads K] [--pin] [--prefix] [--restarts R [--min-ranks M]] [--timeline FILE] "
        "(SCRIPT | -m MODULE) [ARGUMENTS ...]",
        description="Start a Python script or module in N ranks on this host. When one fails, the others have "
        f"{GRACE:g} seconds to end, and its exit code is the command's. Ctrl-C reaches every rank; a second one kills. "
        "With --restarts all ranks are then started afresh: the recipes go on from their last checkpoint, and other "
        "scripts find the number of restarts so far in MGPU_RESTART.",
    )
    parser.add_argument("-n", "-np", type=_count, metavar="N", dest="ranks", help="ranks (default: one per processor)")
    parser.add_argument("--threads", type=_count, metavar="K", help="threads in each rank's pools (default: its share)")
    parser.add_argument("--pin", action="store_true", help="keep each rank on processors of its own")
    parser.add_argument("--prefix", action="store_true", help="put [rank] before every line of output, at once")
    parser.add_argument("--restarts", type=_number, default=0, metavar="R", help="start again after up to R failures")
    parser.add_argument(
        "--min-ranks",
        type=_count,
        metavar="M",
        help="when a rank fails twice in a row, start again with one fewer, but not fewer than M (default: N)",
    )
    parser.add_argument("--timeline", metavar="FILE", help="write a timeline of all ranks' calls, for Perfetto")
    parser.add_argument("-m", action="store_true", dest="module", help="run a module, as python -m does")
    parser.add_argument("script", help="a Python file, or with -m a module's name")
    arguments = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    arguments.required = False  # else both are asked for where the script is missing
    return parser


def _count(text: str) -> int:
    return _number(text, 1)


def _number(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")
    return int(text)


def _watch(ranks: Ranks, reports: Reports, output: WholeLines, received: list[int]) -> list[Rank]:
    """Wait until all ranks have ended, or until a few seconds after the first failure; the failed ones, in order."""
    failed: list[Rank] = []
    deadline = _FOREVER
    while ranks.running and time.monotonic() < deadline:
        ready, ended = ranks.wait([reports.reader, *output.pipes], deadline)
        reports.read()
        output.pump(ready)
        failed += [rank for rank in ended if rank.status and not rank.signalled]
        if failed and not received:
            deadline = min(deadline, time.monotonic() + GRACE)
    return failed


class _Asked(BaseException):
    """A signal has asked this process to end."""


@contextmanager
def _dying_cleanly() -> Iterator[None]:
    """Where SIGTERM or SIGHUP would end this process at once, and its ranks with it: let those stop before."""
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        raise _Asked

    numbers = [signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if asked:
            os.kill(os.getpid(), asked[0])


@contextmanager
def _forwarding_signals(ranks: Ranks) -> Iterator[list[int]]:
    """Pass the first signal to the ranks, and kill them at the second; yields those that came."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        ranks.send_signal(number if len(received) == 1 else signal.SIGKILL)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(number, forward)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
