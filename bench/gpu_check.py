"""Whether the kernels do on this machine's GPUs what they do on the CPU: every program, dtype and operation.

    make gpu-check                      # or python -m bench.gpu_check [--ranks 2 4 8] [--json FILE] [--minutes 10]
    python -m bench.gpu_check --sim     # the same logic in CUDA's simulator, few cases: no GPU needed

Ranks are processes, that share a GPU where there are fewer GPUs than ranks. Prints a table and writes JSON. The exit
code is 0 when all is right, 1 for any wrong byte or failure, and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator
from collectives.backends.nccl import translate
from collectives.builder import algorithms
from collectives.call import make_call
from collectives.contract import COLLECTIVES
from collectives.device_arrays import DeviceArray
from collectives.initialise import ON_GPU
from kernels import pack
from kernels.dtypes import DTYPES, find
from mgpu_core import Tensor, device, nn, optim, parallel
from mgpu_core.nn import functional as F
from mgpu_core.recipes import image_classification

ROOTED = ("reduce", "broadcast", "gather", "scatter")
SPLIT = ("reduce_scatter", "scatter", "all_to_all")  # x has a block for each rank
REPLAYS = 20
ENQUEUED = 500  # calls of which the host's time is taken
NODES = 100  # of the graph that is timed
BIG = 256 << 20  # bytes of the timed messages
CLOSE = 1e-3  # how far a loss may be from the CPU's, relatively: other sums in another order


class Case(NamedTuple):
    """One call: its data are drawn from its number. Without an algorithm it is for NCCL, which adds in an order of its
    own: the data are small whole numbers, which every order adds alike."""

    number: int
    collective: str
    algorithm: str
    dtype: str
    op: str
    rows: int
    symmetric: bool


@dataclass
class Row:
    """One line of the table. `wrong`: cases that gave other bytes than the CPU; -1 for a check that was not run."""

    check: str
    ranks: int
    cases: int
    wrong: int
    seconds: float
    note: str = ""


def cases(thorough: bool) -> list[Case]:
    """Every program with every dtype and operation; or every program once, and every dtype and operation once."""
    found: list[Case] = []
    pick = random.Random(0)
    for collective, terms in COLLECTIVES.items():
        if collective in ("send_recv", "barrier"):
            continue
        for name in algorithms(collective):
            pairs = [(d.name, op) for d in DTYPES for op in (d.operations() if terms.source is None else ("sum",))]
            for dtype, op in pairs if thorough else [pick.choice(pairs)]:
                rows = pick.choice([0, 1, 7, 64, 1000, 40_000] if thorough else [0, 1, 7, 64])
                found.append(Case(len(found), collective, name, dtype, op, rows, pick.random() < 0.5))
    return found


def cases_for_nccl() -> list[Case]:
    """Every collective with every dtype and operation that NCCL has."""
    first: dict[tuple[str, str, str], Case] = {}
    for case in cases(True):
        try:
            translate(make_call(case.collective, find(case.dtype), case.rows, case.op))
        except TypeError:
            continue
        first.setdefault((case.collective, case.dtype, case.op), case._replace(algorithm=""))
    return list(first.values())


def inputs(case: Case, rank: int, size: int) -> Any:
    """One rank's contribution: numbers of any magnitude, which every order of adding rounds differently."""
    generator = np.random.default_rng([case.number, rank])
    count = case.rows * (size if case.collective in SPLIT else 1)
    values = generator.standard_normal(count) * 2.0 ** generator.integers(-4, 5, count)
    kind = find(case.dtype)
    if not case.algorithm:
        return generator.integers(0, 2, count).astype(kind.numpy)
    if kind.kind in ("int", "uint"):
        return generator.integers(0, 100, count).astype(kind.numpy)
    return (values > 0 if kind.kind == "bool" else values).astype(kind.numpy)


def results(comm: Communicator, given: Sequence[Case]) -> list[str]:
    """A digest of what each case leaves on this rank."""
    place: Callable[[Any, bool], Any] = _on_gpu(comm) if comm.backend in ON_GPU else lambda values, symmetric: values
    return [_digest(_run(comm, case, place)) for case in given]


def _run(comm: Communicator, case: Case, place: Callable[[Any, bool], Any]) -> Any:
    kind, size, root = find(case.dtype).numpy, comm.size, case.number % comm.size
    x = place(inputs(case, comm.rank, size), case.symmetric)
    rows = {"all_gather": case.rows * size, "gather": case.rows * size, "all_to_all": case.rows * size}
    has_result = case.collective not in ("reduce", "gather") or comm.rank == root
    out = place(np.zeros(rows.get(case.collective, case.rows), kind), case.symmetric) if has_result else None
    options: dict[str, Any] = {"algorithm": case.algorithm or None}
    if case.collective in ROOTED:
        options["root"] = root
    if COLLECTIVES[case.collective].source is None:
        options["op"] = collectives.premul_sum(3 if case.algorithm else 2) if case.op == "premul_sum" else case.op
    if case.collective == "broadcast":
        return comm.broadcast(x, **options)
    if case.collective == "scatter" and comm.rank != root:
        x = None
    return getattr(comm, case.collective)(x, out=out, **options)


def _digest(array: Any) -> str:
    if array is None:
        return ""
    if isinstance(array, DeviceArray):
        import cupy

        memory = cupy.asarray(array.view(np.uint8)) if array.size else cupy.empty(0, np.uint8)
        return hashlib.sha256(cupy.asnumpy(memory).tobytes()).hexdigest()
    return hashlib.sha256(array.tobytes()).hexdigest()


def _on_gpu(comm: Communicator) -> Callable[[Any, bool], DeviceArray]:
    """What puts values into GPU memory, symmetric or not; of any dtype, as bytes."""
    import cupy

    half = 1 << 22
    pool: Any = comm.empty(2 * half, np.uint8)
    used = [0]

    def place(values: Any, symmetric: bool) -> DeviceArray:
        memory = cupy.empty(max(values.nbytes, 1), cupy.uint8)
        address = memory.data.ptr
        if symmetric and values.nbytes <= half:
            used[0] ^= half  # a call's input and output take turns
            address = pool.__cuda_array_interface__["data"][0] + used[0]
        array = DeviceArray(address, values.shape, values.dtype, cupy.cuda.get_current_stream().ptr, (memory, pool))
        if values.size:
            cupy.asarray(array.view(np.uint8))[:] = cupy.asarray(values.reshape(-1).view(np.uint8))
        return array

    return place


def compare(backend: str, ranks: int, given: Sequence[Case]) -> Row:
    """Cases on a backend against the CPU's bytes."""
    begun = time.monotonic()
    got = collectives.spawn(results, ranks, (given,), backend=backend)
    wanted = collectives.spawn(results, ranks, (given,), backend="shm")
    wrong = [case for case, *both in zip(given, zip(*got), zip(*wanted)) if both[0] != both[1]]
    note = f"first wrong: {wrong[0]}" if wrong else ""
    return Row(f"programs, {backend}", ranks, len(given), len(wrong), time.monotonic() - begun, note)


def replays(comm: Communicator) -> int:
    """Captured all-reduces, a small one and a large one, replayed: how many replays gave a wrong average."""
    import cupy

    wrong, stream = 0, cupy.cuda.Stream(non_blocking=True)
    for count in (1000, 100_000):
        with stream:
            x = cupy.ones(count, np.float32)
            comm.all_reduce(x, "avg", out=x)  # compiled and loaded before the capture
            stream.synchronize()
            stream.begin_capture()
            comm.all_reduce(x, "avg", out=x)
            graph = stream.end_capture()
            for replay in range(REPLAYS):
                x[:] = comm.rank + replay
                graph.launch(stream)
                stream.synchronize()
                wrong += not bool((x == (comm.size - 1) / 2 + replay).all())
    return wrong


def timings(comm: Communicator) -> tuple[float, float]:
    """Bytes a second of a copy on the device, and of the 2pN bytes of a two-shot all-reduce (p ranks, N bytes)."""
    import cupy

    x, y = comm.zeros(BIG // 4, np.float32), cupy.zeros(BIG // 4, np.float32)

    copied = seconds(lambda: cupy.copyto(y, cupy.asarray(x)), comm.barrier)
    reduced = seconds(lambda: comm.all_reduce(x, out=x, algorithm="two_shot"), comm.barrier)
    return 2 * BIG / copied, 2 * comm.size * BIG / reduced


def emulated(ranks: int) -> list[Row]:
    """Ranks that share one GPU, as one cooperative launch: a two-shot all-reduce against the copy limit, and how long a
    small one takes as a node of a replayed graph. An emulation of as many GPUs, whose memory is all equally near."""
    import cupy

    comms = collectives.init_all([0] * ranks)
    stream = cupy.cuda.Stream(non_blocking=True)
    rows = []
    with ThreadPoolExecutor(ranks) as threads, stream:
        begun = time.monotonic()
        large = list(threads.map(lambda comm: comm.zeros(BIG // 4, np.float32), comms))
        other = cupy.zeros(BIG // 4, np.float32)

        def reduce(xs: Sequence[Any], algorithm: str | None = None) -> None:
            for comm, x in zip(comms, xs):
                comm.all_reduce(x, out=x, algorithm=algorithm)

        copied = 2 * BIG / seconds(lambda: cupy.copyto(other, cupy.asarray(large[0])))
        reduced = 2 * ranks * BIG / seconds(lambda: reduce(large, "two_shot"))
        note = f"copy {copied / 1e9:.0f} GB/s, two-shot {reduced / 1e9:.0f} GB/s: {reduced / copied:.0%} (target 85%)"
        rows.append(Row("two-shot, one GPU", ranks, 1, 0, time.monotonic() - begun, note))
        for nbytes in (1 << 10, 16 << 10):
            begun = time.monotonic()
            small = [cupy.zeros(nbytes // 4, np.float32) for _ in comms]
            reduce(small)  # compiled and loaded before the capture
            stream.synchronize()
            stream.begin_capture()
            for _ in range(NODES):
                reduce(small)
            graph = stream.end_capture()
            node = seconds(partial(graph.launch, stream)) / NODES
            note = f"{1e6 * node:.2f} us a graph node (target 8 us with 4 ranks)"
            rows.append(Row(f"{nbytes >> 10} KB, one GPU", ranks, NODES, 0, time.monotonic() - begun, note))
        list(threads.map(Communicator.close, comms))
    return rows


def packing() -> list[Row]:
    """Tensors to a bucket and back, with and without a cast and a scale, against the copy limit."""
    import cupy

    sizes = [4 * n for n in random.Random(0).choices([1, 100, 10_000, 1_000_000], k=200)]
    starts, length = np.cumsum([0, *sizes])[:-1].tolist(), sum(sizes)
    tensors = [cupy.ones(size, np.float32) for size in sizes]
    source, other = cupy.ones(length, np.float32), cupy.empty(length, np.float32)
    copied = 8 * length / seconds(lambda: cupy.copyto(other, source))
    rows = []
    for kind, scale in (("float32", 1.0), ("bfloat16", 0.5)):
        begun, dtype, wide = time.monotonic(), find(kind), find("float32")
        bucket = cupy.zeros(length * dtype.itemsize, np.uint8)
        table = pack.table([t.data.ptr for t in tensors], sizes, starts, length)
        rows_there = cupy.asarray(table)
        job = cupy.asarray(pack.job(table.shape[1], rows_there.data.ptr, bucket.data.ptr, length, scale))
        most = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
        blocks, notes = pack.blocks(length, wide, dtype, most), []
        for direction in pack.DIRECTIONS:
            kernel = pack.raw_kernel(direction, "float32", kind, scale != 1)
            move = partial(kernel, (blocks,), (pack.THREADS,), (job.data.ptr,))
            move()  # compiled before it is timed
            rate = length * (4 + dtype.itemsize) / seconds(move)
            notes.append(f"{direction} {rate / 1e9:.0f} GB/s: {rate / copied:.0%}")
        wrong = sum(not bool((t == scale**2).all()) for t in tensors)
        for t in tensors:
            t[:] = 1
        note = f"{', '.join(notes)} of a copy's {copied / 1e9:.0f} GB/s (target 85%)"
        rows.append(Row(f"buckets, {kind}", 1, len(sizes), wrong, time.monotonic() - begun, note))
    return rows


def train(where: str, comm: Any = None, *, batch: int = 64, steps: int = 5) -> list[float]:
    """The losses of the first steps of the image classification recipe's network on a device, of random images, of
    which the ranks of `comm` share each batch."""
    device.select(where, 0 if comm is None else comm.rank)
    model = parallel.DataParallel(image_classification.network(np.random.default_rng(0)).to(where), comm)
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    generator, losses = np.random.default_rng(1), []
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    mine = slice(rank * batch // size, (rank + 1) * batch // size)
    for _ in range(steps):
        images = generator.standard_normal((batch, 1, 28, 28)).astype(np.float32)[mine]
        labels = generator.integers(0, 10, batch)[mine]
        optimizer.zero_grad()
        loss = image_classification.loss(model, (device.move(images, where), device.move(labels, where))) / batch
        loss.backward()
        model.synchronize()
        optimizer.step()
        total = np.array([float(loss)])
        losses.append(float((total if comm is None else comm.all_reduce(total))[0]))
    return losses


def train_together(comm: Communicator) -> list[float]:
    """The same on this rank's GPU."""
    return train("cuda", comm)


def training(together: bool = True, batch: int = 512, steps: int = 20) -> list[Row]:
    """Steps of a network on a GPU, alone and by two ranks, against the CPU's; and images a second of ResNet-20."""
    begun, wanted = time.monotonic(), train("cpu")
    rows = []
    for ranks in (1, 2) if together else (1,):
        got = train("cuda") if ranks == 1 else collectives.spawn(train_together, ranks, backend="cuda")[0]
        furthest = max(abs(a - b) / abs(b) for a, b in zip(got, wanted))
        note = f"losses within {furthest:.1e} of the CPU's (at most {CLOSE:g})"
        rows.append(Row("training", ranks, len(got), int(not furthest <= CLOSE), time.monotonic() - begun, note))
        begun = time.monotonic()

    model = nn.resnet20(channels=1, classes=10, rng=np.random.default_rng(0)).to("cuda")
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = Tensor(np.random.default_rng(1).standard_normal((batch, 1, 28, 28)).astype(np.float32)).to("cuda")
    labels = device.move(np.arange(batch) % 10, "cuda")
    times = []
    for _ in range(steps):
        before = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        float(loss)
        device.synchronize(images.data)
        times.append(time.perf_counter() - before)
    note = f"{batch / statistics.median(times):,.0f} images/s, ResNet-20 in float32, {batch} in a step"
    rows.append(Row("training, speed", 1, steps, 0, time.monotonic() - begun, note))
    return rows


def seconds(work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """What the GPU needs for it, on the current stream, the best of ten."""
    import cupy

    times = []
    for _ in range(10):
        before()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1000)
    return min(times)


def enqueueing(comm: Communicator) -> float:
    """Seconds that an all-reduce of 8 bytes takes on the host."""
    import cupy

    x = cupy.ones(2, np.float32)
    plan = comm.plan("all_reduce", x, out=x)
    plan()
    comm.barrier()
    begun = time.perf_counter()
    for _ in range(ENQUEUED):
        plan()
    return (time.perf_counter() - begun) / ENQUEUED


def comparing(ranks: int) -> Row:
    """What it costs that NCCL's ranks compare their calls."""
    begun, seconds = time.monotonic(), []
    for checks in ("1", "0"):
        os.environ["MGPU_NCCL_CHECK"] = checks
        seconds.append(max(collectives.spawn(enqueueing, ranks, backend="nccl")))
    del os.environ["MGPU_NCCL_CHECK"]
    with_, without = (1e6 * each for each in seconds)
    note = f"{with_:.1f} us of the host for a call, {without:.1f} us with MGPU_NCCL_CHECK=0"
    return Row("cost of comparing", ranks, 1, 0, time.monotonic() - begun, note)


def sanitize(tool: str) -> Row:
    """The programs once more, under a tool of compute-sanitizer."""
    begun, program = time.monotonic(), shutil.which("compute-sanitizer")
    if program is None:
        return Row(tool, 2, 0, -1, 0.0, "compute-sanitizer is not installed")
    command = [program, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "bench.gpu_check", "--ranks", "2", "--programs-only"],
        capture_output=True,
        text=True,
    )
    note = done.stdout.strip().splitlines()[-1] if done.returncode and done.stdout.strip() else ""
    return Row(tool, 2, 1, int(done.returncode != 0), time.monotonic() - begun, note)


def check(backend: str, ranks: Sequence[int], minutes: float, programs_only: bool) -> list[Row]:
    """All checks that this backend allows, within the time; the rest say why they were left out."""
    deadline, rows = time.monotonic() + 60 * minutes, []

    def attempt(name: str, size: int, make: Callable[[], list[Row]]) -> None:
        if time.monotonic() > deadline:
            rows.append(Row(name, size, 0, -1, 0.0, f"no time left of {minutes:g} minutes"))
            return
        try:
            rows.extend(make())
        except Exception as error:
            rows.append(Row(name, size, 1, 1, 0.0, f"{type(error).__name__}: {error}"))

    def alone(make: Callable[[], Row]) -> Callable[[], list[Row]]:
        return lambda: [make()]

    def replayed(size: int) -> list[Row]:
        begun = time.monotonic()
        wrong = max(collectives.spawn(replays, size, backend="cuda"))
        return [Row("graph replay", size, 2 * REPLAYS, wrong, time.monotonic() - begun)]

    def timed(size: int) -> list[Row]:
        from kernels.driver import devices

        if devices() < size:
            return emulated(size)
        begun = time.monotonic()
        copy, reduce = collectives.spawn(timings, size, backend="cuda")[0]
        note = f"copy {copy / 1e9:.0f} GB/s, two-shot {reduce / 1e9:.0f} GB/s: {reduce / copy:.0%}"
        return [Row("timings, 256 MiB", size, 1, 0, time.monotonic() - begun, note)]

    given = cases(backend == "cuda" and not programs_only)
    for size in ranks:
        attempt("programs", size, alone(partial(compare, backend, size, given)))
    if backend == "cuda" and not programs_only:
        attempt("graph replay", 2, lambda: replayed(2))
        for size in ranks:
            attempt("timings", size, partial(timed, size))
        attempt("buckets", 1, packing)
        attempt("training", 1, training)
        if find_spec("nccl") is not None:
            os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
            attempt("programs, nccl", ranks[0], alone(lambda: compare("nccl", ranks[0], cases_for_nccl())))
            attempt("cost of comparing", ranks[0], alone(partial(comparing, ranks[0])))
        for tool in ("memcheck", "racecheck"):
            attempt(tool, 2, alone(partial(sanitize, tool)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sim", action="store_true", help="in CUDA's simulator")
    parser.add_argument("--ranks", type=int, nargs="+", help="how many ranks (default 2 4 8; with --sim 2)")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no check after so long")
    parser.add_argument("--programs-only", action="store_true", help="every program once, and nothing else")
    parser.add_argument("--json", metavar="FILE", help="where the rows go as JSON")
    options = parser.parse_args(argv)
    if not options.sim and (missing := _missing()):
        print(f"gpu-check: {missing}; nothing was checked")
        return 2
    ranks = options.ranks or ([2] if options.sim else [2, 4, 8])
    rows = check("sim" if options.sim else "cuda", ranks, options.minutes, options.programs_only)
    lines = [
        [
            row.check,
            str(row.ranks),
            str(row.cases),
            "-" if row.wrong < 0 else str(row.wrong),
            f"{row.seconds:.1f}",
            row.note,
        ]
        for row in rows
    ]
    for line in [["check", "ranks", "cases", "wrong", "seconds", "note"], *lines]:
        print(table_line(line))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)
    return int(any(row.wrong > 0 for row in rows))


def table_line(cells: Sequence[str]) -> str:
    """One line: words to the left, numbers to the right."""
    check, ranks, number, wrong, seconds, note = cells
    return f"{check:<18}{ranks:>6}{number:>7}{wrong:>7}{seconds:>9}  {note}".rstrip()


def _missing() -> str:
    """What keeps this machine from running kernels on a GPU; empty if nothing does."""
    try:
        from kernels.driver import devices

        count = devices()
    except Exception as error:
        return f"no GPU can be used here ({str(error).splitlines()[0]})"
    if count == 0:
        return "the driver shows no GPU"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "CuPy is not installed; pip install '.[cuda12]' or '.[cuda13]'"
    return ""


if __name__ == "__main__":
    sys.exit(main())
