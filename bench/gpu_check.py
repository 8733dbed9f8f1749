"""Whether the kernels do on this machine's GPUs what they do on the CPU: every program, dtype and operation.

    make gpu-check                      # or python -m bench.gpu_check [--ranks 2 4 8] [--json FILE] [--minutes 10]
    python -m bench.gpu_check --sim     # the same logic in CUDA's simulator, few cases: no GPU needed

Each check is a process of its own with a deadline (`bench/apart.py`). Its ranks are processes where there is a GPU for
each. Where there are fewer, processes that wait for each other on one GPU would take turns of milliseconds: so every
program with every dtype and operation is run by ranks in one process, and every program once by processes. Prints each
row as it is there, and writes JSON after each. The exit code is 0 when all is right, 1 for any wrong byte or failure,
and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import collectives
from bench import apart
from bench.apart import Row
from collectives import Communicator
from collectives.backends import cuda
from collectives.backends.nccl import translate
from collectives.builder import algorithms
from collectives.call import make_call
from collectives.contract import COLLECTIVES
from collectives.device_arrays import DeviceArray
from collectives.initialise import ON_GPU
from kernels import cubin, lowlatency, native, pack
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
FAMOUS = 3  # wrong cases that are told of in detail
BLOCKS = (8, 16, 32, 64)  # of a launch, that are compared
SIZES = (1 << 10, 1 << 20, BIG)  # bytes of the messages that NCCL is timed with, too
LIMITS = {"kernels": 200.0, "training": 90.0}  # seconds that a check may take; the others:
LIMIT = 120.0
TIMEOUT = 40.0  # seconds after which a collective call says who is missing: sooner than a check's end
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


def results(comm: Communicator, given: Sequence[Case], digests: bool = True) -> list[Any]:
    """What each case leaves on this rank, as an array of the CPU or None, or a digest of that."""
    place: Callable[[Any, bool], Any] = _on_gpu(comm) if comm.backend in ON_GPU else lambda values, symmetric: values
    found = []
    for case in given:
        values = _values(_run(comm, case, place))
        found.append(values if not digests else "" if values is None else hashlib.sha256(values.tobytes()).hexdigest())
    return found


def _spawn(function: Callable[..., Any], ranks: int, args: Sequence[Any] = (), backend: str = "cuda") -> list[Any]:
    return collectives.spawn(function, ranks, args, backend=backend, timeout=TIMEOUT)


def in_one_process(ranks: int, given: Sequence[Case], digests: bool = True) -> list[list[Any]]:
    """`results` of ranks that are threads of this process, on the GPUs that are there."""
    from kernels.driver import devices

    gpus = [rank % devices() for rank in range(ranks)]
    comms = collectives.init_all(gpus, timeout=TIMEOUT)

    def run(rank: int) -> list[Any]:
        device.select("cuda", gpus[rank])
        found = results(comms[rank], given, digests)
        comms[rank].close()
        return found

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


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
    given = None if case.collective == "scatter" and comm.rank != root else x
    if case.collective == "broadcast":
        out = comm.broadcast(given, **options)
    else:
        out = getattr(comm, case.collective)(given, out=out, **options)
    if comm.backend in ON_GPU:
        comm.barrier()  # of ranks that share a GPU the last to call launches, perhaps after this one
    return out


def _values(array: Any) -> Any:
    """An array in the CPU's memory."""
    if not isinstance(array, DeviceArray):
        return array
    import cupy

    memory = cupy.asarray(array.view(np.uint8)) if array.size else cupy.empty(0, np.uint8)
    return cupy.asnumpy(memory).view(array.dtype).reshape(array.shape)


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


def compare(backend: str, ranks: int, given: Sequence[Case], together: bool = False) -> Row:
    """Cases on a backend against the CPU's bytes; `together`: by ranks of one process."""
    begun = time.monotonic()

    def run(some: Sequence[Case], *digests: bool) -> list[list[Any]]:
        if together:
            return in_one_process(ranks, some, *digests)
        return _spawn(results, ranks, (some, *digests), backend)

    got = run(given)
    wanted = _spawn(results, ranks, (given,), "shm")
    wrong = [case for case, *both in zip(given, zip(*got), zip(*wanted)) if both[0] != both[1]]
    row = Row(f"programs, {backend}{', one process' if together else ''}", ranks, len(given), len(wrong), 0.0)
    if wrong:
        row.note = f"first wrong: {wrong[0]}"
        some = wrong[:FAMOUS]
        both = zip(some, zip(*run(some, False)), zip(*_spawn(results, ranks, (some, False), "shm")))
        told = [f"{case}:\n  {difference(mine, theirs)}" for case, mine, theirs in both]
        row.details = "\n".join(["run again,", *told, "all that were wrong:", *map(str, wrong)])
    row.seconds = time.monotonic() - begun
    return row


def difference(got: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Where the ranks' results differ from the CPU's, byte for byte."""
    found = []
    for rank, (mine, theirs) in enumerate(zip(got, wanted)):
        if mine is None or theirs is None or mine.tobytes() == theirs.tobytes():
            continue
        flat = [array.reshape(-1).view(np.uint8).reshape(array.size, -1) for array in (mine, theirs)]
        places = np.flatnonzero((flat[0] != flat[1]).any(1))
        first = int(places[0])
        values = (array.reshape(-1)[first] for array in (mine, theirs))
        texts = " and the CPU's ".join(f"{value} (0x{value.tobytes()[::-1].hex()})" for value in values)
        found.append(f"rank {rank}: {len(places)} of {mine.size} elements differ, the first at {first}: it is {texts}")
    return "\n  ".join(found) or "right this time"


def kernels(capability: tuple[int, int]) -> list[Callable[[], object]]:
    """What loads each kernel that programs need, the GPU's and the CPU's, or compiles it."""
    found: list[Callable[[], object]] = []
    for dtype in DTYPES:
        for op in dtype.operations():
            found.append(partial(cubin.load, "execute", dtype.name, op, capability))
            found.append(partial(native.load, f"reduce-{dtype.name}-{op}"))
            if dtype.itemsize <= lowlatency.DATA_BYTES:
                found.append(partial(cubin.load, "small", dtype.name, op, capability))
    return found


def build(comm: Communicator, capability: tuple[int, int]) -> None:
    """Compile this rank's share of all kernels."""
    for load in kernels(capability)[comm.rank :: comm.size]:
        load()


def building() -> list[Row]:
    """Every kernel that the checks need, compiled by as many processes as there are cores: checks then find it."""
    from kernels.driver import Driver

    begun, capability = time.monotonic(), Driver(0).capability
    processes = min(32, len(os.sched_getaffinity(0)))
    collectives.spawn(build, processes, (capability,), backend="shm")
    note = f"compiled for sm_{capability[0]}{capability[1]}, by {processes} processes"
    return [Row("kernels", 1, len(kernels(capability)), 0, time.monotonic() - begun, note)]


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


def emulated(ranks: int, sizes: Sequence[int] = (1 << 10, 16 << 10)) -> list[Row]:
    """Ranks that share one GPU, as one cooperative launch: a two-shot all-reduce against the copy limit, and how long
    small ones of `sizes` bytes take as nodes of a replayed graph. An emulation of as many GPUs, whose memory is all
    equally near."""
    import cupy

    comms = collectives.init_all([0] * ranks, timeout=TIMEOUT)
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
        for nbytes in sizes:
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
        got = train("cuda") if ranks == 1 else _spawn(train_together, ranks)[0]
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


def paces(comm: Communicator) -> list[float]:
    """Seconds of an all-reduce of SIZES bytes of symmetric memory, on the GPU."""
    found = []
    for nbytes in SIZES:
        x = comm.zeros(nbytes // 4, np.float32)
        comm.all_reduce(x, out=x)
        found.append(seconds(partial(comm.all_reduce, x, out=x), comm.barrier))
    return found


def paces_with(comm: Communicator, blocks: int) -> list[float]:
    """The same with launches of so many blocks, at most."""
    cuda.CHANNELS = blocks
    part = comm.split(0)
    assert part is not None
    with part:
        return paces(part)


def widths(ranks: int) -> list[Row]:
    """All-reduces by launches of few blocks and of many: what `cuda.CHANNELS` should be here."""
    from kernels.driver import devices

    rows = []
    for blocks in BLOCKS:
        begun = time.monotonic()
        if devices() < ranks:
            cuda.CHANNELS = blocks
            note = emulated(ranks, ())[0].note
        else:
            took = [max(each) for each in zip(*_spawn(paces_with, ranks, (blocks,)))]
            note = "; ".join(f"{nbytes >> 10} KB {1e6 * each:.1f} us" for nbytes, each in zip(SIZES, took))
        rows.append(Row(f"{blocks} blocks", ranks, 1, 0, time.monotonic() - begun, note))
    return rows


def racing(ranks: int) -> list[Row]:
    """Our all-reduces and NCCL's, on a GPU for each rank."""
    begun = time.monotonic()
    ours, theirs = ([max(each) for each in zip(*_spawn(paces, ranks, (), backend))] for backend in ("cuda", "nccl"))
    notes = []
    for nbytes, mine, nccl in zip(SIZES, ours, theirs):
        rates = [2 * (ranks - 1) / ranks * nbytes / each / 1e9 for each in (mine, nccl)]
        notes.append(
            f"{nbytes >> 10} KB {1e6 * mine:.1f} us ({rates[0]:.0f} GB/s), NCCL {1e6 * nccl:.1f} ({rates[1]:.0f})"
        )
    return [Row("all-reduce, NCCL's", ranks, len(SIZES), 0, time.monotonic() - begun, "; ".join(notes))]


def comparing(ranks: int) -> Row:
    """What it costs that NCCL's ranks compare their calls."""
    begun, seconds = time.monotonic(), []
    for checks in ("1", "0"):
        os.environ["MGPU_NCCL_CHECK"] = checks
        seconds.append(max(_spawn(enqueueing, ranks, (), "nccl")))
    del os.environ["MGPU_NCCL_CHECK"]
    with_, without = (1e6 * each for each in seconds)
    note = f"{with_:.1f} us of the host for a call, {without:.1f} us with MGPU_NCCL_CHECK=0"
    return Row("cost of comparing", ranks, 1, 0, time.monotonic() - begun, note)


def sanitizer() -> str | None:
    """Where compute-sanitizer is: on the path, with CUDA 13's packages, or in a toolkit that is installed."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility("compute-sanitizer")
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    return found or (usual if os.access(usual, os.X_OK) else None)


def sanitize(tool: str) -> Row:
    """The programs once more, by two processes, under a tool of compute-sanitizer. Only kernels' accesses are looked
    at: what the driver refuses is an exception anyway."""
    begun, program = time.monotonic(), sanitizer()
    if program is None:
        where = "CUDA's toolkit has it, and the package nvidia-cuda-sanitizer-api"
        return Row(tool, 2, 0, -1, 0.0, f"compute-sanitizer is not installed; {where}")
    command = [program, "--tool", tool, "--target-processes", "all", "--report-api-errors", "no"]
    done = subprocess.run(
        [
            *command,
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "bench.gpu_check",
            "--check",
            "processes",
            "2",
            os.devnull,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()
    told = [line for line in lines if re.search(r"Invalid|hazard|Error", line)] or lines
    note = f"exit code {done.returncode}: {told[0][:200] if told else 'it said nothing'}" if done.returncode else ""
    return Row(
        tool, 2, 1, int(done.returncode != 0), time.monotonic() - begun, note, "\n".join(lines[:200]) if note else ""
    )


def replayed(ranks: int) -> list[Row]:
    """`replays`, by processes."""
    begun = time.monotonic()
    wrong = max(_spawn(replays, ranks))
    return [Row("graph replay", ranks, 2 * REPLAYS, wrong, time.monotonic() - begun)]


def timed(ranks: int) -> list[Row]:
    """`timings`, or where there are too few GPUs `emulated`."""
    from kernels.driver import devices

    if devices() < ranks:
        return emulated(ranks)
    begun = time.monotonic()
    copy, reduce = _spawn(timings, ranks)[0]
    note = f"copy {copy / 1e9:.0f} GB/s, two-shot {reduce / 1e9:.0f} GB/s: {reduce / copy:.0%}"
    return [Row("timings, 256 MiB", ranks, 1, 0, time.monotonic() - begun, note)]


def programs(ranks: int) -> list[Row]:
    """Every program, dtype and operation."""
    from kernels.driver import devices

    return [compare("cuda", ranks, cases(True), together=devices() < ranks)]


def one_by_one(ranks: int) -> list[Row]:
    """Every program once, by processes."""
    return [compare("cuda", ranks, cases(False))]


def over_nccl(ranks: int) -> list[Row]:
    """Every call of NCCL's, and what it costs that ranks compare them."""
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return [compare("nccl", ranks, cases_for_nccl()), comparing(ranks)]


CHECKS: dict[str, Callable[[int], list[Row]]] = {
    "kernels": lambda ranks: building(),
    "programs": programs,
    "processes": one_by_one,
    "graph replay": replayed,
    "timings": timed,
    "blocks": widths,
    "buckets": lambda ranks: packing(),
    "training": lambda ranks: training(),
    "nccl": over_nccl,
    "all-reduce, NCCL's": racing,
    "memcheck": lambda ranks: [sanitize("memcheck")],
    "racecheck": lambda ranks: [sanitize("racecheck")],
}


def planned(ranks: Sequence[int], gpus: int) -> list[tuple[str, int]]:
    """The checks and their ranks, in their order: what others need comes first, and what takes long last."""
    few = min(ranks)
    found = [("kernels", 1), ("processes", few)]
    found += [("programs", size) for size in ranks]
    found += [("processes", size) for size in ranks if few < size and gpus < size]
    found += [
        ("graph replay", few),
        *(("timings", size) for size in ranks),
        ("blocks", few),
        ("buckets", 1),
        ("training", 1),
    ]
    if find_spec("nccl") is not None:
        found += [("nccl", few), *(("all-reduce, NCCL's", size) for size in ranks if size <= gpus)]
    return [*found, ("memcheck", 2), ("racecheck", 2)]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = {name: each.version for each in distributions() if (name := each.name.lower()).startswith(_PACKAGES)}
    said = {}
    for words in ("-L", "topo -m", "--query-gpu=driver_version,compute_mode,mig.mode.current --format=csv"):
        try:
            done = subprocess.run(["nvidia-smi", *words.split()], capture_output=True, text=True, timeout=20)
            said[f"nvidia-smi {words}"] = done.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            said[f"nvidia-smi {words}"] = str(error)
    return {"python": sys.version, "system": platform.platform(), "cores": os.cpu_count(), "packages": packages, **said}


_PACKAGES = ("nvidia", "cuda", "cupy", "nccl", "numba", "numpy", "ml-dtypes", "ml_dtypes", "mgpu")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's text."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sim", action="store_true", help="in CUDA's simulator")
    parser.add_argument("--ranks", type=int, nargs="+", help="how many ranks (default 2 4 8; with --sim 2)")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="begin no check after so long, and end the last then"
    )
    parser.add_argument("--check", nargs=3, metavar=("NAME", "RANKS", "FILE"), help="this one alone, in this process")
    parser.add_argument("--json", metavar="FILE", help="where the rows go as JSON")
    options = parser.parse_args(argv)
    if options.check:
        name, size, path = options.check
        rows = apart.attempt(name, int(size), lambda: CHECKS[name](int(size)))
        apart.write(rows, path)
        return int(any(row.wrong > 0 for row in rows))
    if not options.sim and (missing := _missing()):
        print(f"gpu-check: {missing}; nothing was checked")
        return 2
    ranks = sorted(set(options.ranks or ([2] if options.sim else [2, 4, 8])))
    print(table_line(["check", "ranks", "cases", "wrong", "seconds", "note"]))
    if options.sim:
        return _verdict((partial(_simulated, size) for size in ranks), {}, options.json)
    from kernels.driver import devices

    begun = time.monotonic()

    def run(name: str, size: int) -> list[Row]:
        left = 60 * options.minutes - (time.monotonic() - begun)
        if left <= 0:
            return [Row(name, size, 0, -1, 0.0, f"no time left of {options.minutes:g} minutes")]
        command = [sys.executable, "-m", "bench.gpu_check", "--check", name, str(size)]
        return apart.run(name, size, command, min(LIMITS.get(name, LIMIT), max(left, 10.0)))

    return _verdict((partial(run, *each) for each in planned(ranks, devices())), machine(), options.json)


def _simulated(size: int) -> list[Row]:
    return apart.attempt("programs", size, lambda: [compare("sim", size, cases(False))])


def _verdict(checks: Iterable[Callable[[], list[Row]]], where: Any, path: str | None) -> int:
    """Make all checks, tell of each as it is there, and keep what is known of them in the file."""
    rows: list[Row] = []
    for make in checks:
        for row in make():
            rows.append(row)
            wrong = "-" if row.wrong < 0 else str(row.wrong)
            cells = [row.check, str(row.ranks), str(row.cases), wrong, f"{row.seconds:.1f}", row.note]
            print(table_line(cells), flush=True)
        if path:
            with open(path, "w") as file:
                json.dump({"machine": where, "rows": [asdict(row) for row in rows]}, file, indent=1)
    return int(any(row.wrong > 0 for row in rows))


def table_line(cells: Sequence[str]) -> str:
    """One line: words to the left, numbers to the right."""
    check, ranks, number, wrong, seconds, note = cells
    return f"{check:<28}{ranks:>6}{number:>7}{wrong:>7}{seconds:>9}  {note}".rstrip()


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
