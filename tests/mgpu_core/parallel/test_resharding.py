"""A checkpoint of any number of ranks, on any mesh, is gone on with by any other, with the same losses."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mgpu_core import checkpoint, nn, optim, random
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel, Mesh, Placement, Sharded
from mgpu_core.tensor import Tensor

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 90)
INPUTS = RNG.standard_normal((90, 7)) + LABELS[:, None]
STEPS = 3  # before the checkpoint, and after


def network():
    rng = np.random.default_rng(1)
    return nn.Sequential(
        nn.Linear(7, 11, bias=False, rng=rng, dtype=np.float64),
        nn.BatchNorm1d(11, dtype=np.float64),
        nn.Tanh(),
        nn.Dropout(0.2, rng=rng),
        nn.Linear(11, 3, rng=rng, dtype=np.float64),
    )


def set_up(comm, stage):
    module = network()
    if comm is not None:
        nn.synchronize_batch_norm(module, comm.all_reduce)
    model = Sharded(module, comm, stage=stage) if stage else DataParallel(module, comm)
    return model, optim.AdamW(model.named_parameters(), 0.01)


def train(comm, model, updates, first):
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    losses = []
    for step in range(first, first + STEPS):
        samples = np.arange(step * 10, step * 10 + 10)
        mine = np.array_split(samples, size)[rank]
        updates.zero_grad()
        with random.batch(seed=5, step=step, samples=(mine - step * 10).tolist()):
            output = model(Tensor(INPUTS[mine]))
        loss = F.cross_entropy(output, LABELS[mine], reduction="sum") / len(samples)
        loss.backward()
        model.synchronize()
        updates.step()
        losses.append(float(np.array(loss.item()) if comm is None else comm.all_reduce(np.array(loss.item()))))
    return losses


def begin(comm, path, stage):
    """Train, save in the background, and train on: the losses after the checkpoint."""
    model, updates = set_up(comm, stage)
    train(comm, model, updates, 0)
    with checkpoint.Writer(path, comm) as writer:
        writer.save(checkpoint.parts(model, updates), {"step": STEPS})
        return train(comm, model, updates, STEPS)  # which must not reach what is being written


def go_on(comm, paths, stage):
    """The losses from each of the checkpoints on."""
    found = []
    for path in paths:
        model, updates = set_up(comm, stage)
        train(comm, model, updates, 0)  # something else to overwrite
        meta = checkpoint.restore(path, checkpoint.parts(model, updates), comm)
        model.refresh()
        found.append(train(comm, model, updates, meta["step"]))
        if stage:
            model.close()
    return found


FEW = [(1, 0), (2, 1), (3, 3)], [(1, 0), (2, 3), (3, 2)]
MANY = [(1, 0), (2, 0), (4, 3), (3, 2), (2, 1)], [(1, 0), (2, 3), (3, 1), (4, 2)]


@pytest.mark.parametrize(
    "saved, loaded", [pytest.param(*FEW, id="few"), pytest.param(*MANY, id="many", marks=pytest.mark.slow)]
)
def test_saved_by_any_loaded_by_any(crew, tmp_path, saved, loaded):
    """So many ranks, sharded so far."""
    paths = {(size, stage): str(tmp_path / f"{size}-{stage}") for size, stage in saved}
    expected = begin(None, paths[1, 0], 0)
    for (size, stage), path in paths.items():
        if size > 1:
            for losses in crew(begin, size, (path, stage)):
                np.testing.assert_allclose(losses, expected, rtol=1e-10)
    everything = [checkpoint.load(path) for path in paths.values()]
    for tensors, meta in everything:
        assert meta == {"step": STEPS} and tensors.keys() == everything[0][0].keys()
        for name, array in tensors.items():
            np.testing.assert_allclose(array, everything[0][0][name], rtol=1e-9, atol=1e-12, err_msg=name)
    for size, stage in loaded:
        arguments = list(paths.values()), stage
        ranks = [go_on(None, *arguments)] if size == 1 else crew(go_on, size, arguments)
        for found in ranks:
            for losses in found:
                np.testing.assert_allclose(losses, expected, rtol=1e-10)


def tensor_parallel(comm, path, mesh_shape):
    """Columns cut over "tensor" in three runs, their optimiser's state cut over "data" as well: saved, and loaded."""
    with Mesh(comm, **mesh_shape) as mesh:
        place, count = mesh.index("tensor"), mesh.shape["tensor"]
        whole = np.arange(60.0).reshape(5, 12)
        ranges = tuple((4 * i + 4 * place // count, 4 * i + 4 * (place + 1) // count) for i in range(3))
        placement = Placement((5, 12), 1, ranges)
        module = nn.Sequential()
        module.weight = nn.Parameter(whole[placement.index].copy(), sharded_over=("tensor",), placement=placement)
        module.bias = nn.Parameter(np.arange(7.0))
        model = Sharded(module, mesh.data, stage=3)
        updates = optim.SGD(model.named_parameters(), 0.1, momentum=0.9)
        for array in updates.state["momentum"].values():
            array += 1 + mesh.index("tensor")
        with checkpoint.Writer(path, mesh.comm) as writer:
            writer.save(checkpoint.parts(model, updates), {})
        before = {name: p.data.copy() for name, p in model.named_parameters()}
        for _, p in model.named_parameters():
            p.data[...] = -1
        checkpoint.restore(path, checkpoint.parts(model, updates), comm)
        return all(np.array_equal(p.data, before[name]) for name, p in model.named_parameters())


def test_a_mesh_of_two_by_two_saves_whole_tensors(crew, tmp_path):
    path = str(tmp_path / "c")
    assert crew(tensor_parallel, 4, (path, {"data": 2, "tensor": 2})) == [True] * 4
    tensors, _ = checkpoint.load(path)
    np.testing.assert_array_equal(tensors["model.weight"], np.arange(60.0).reshape(5, 12))
    np.testing.assert_array_equal(tensors["model.bias"], np.arange(7.0))
    columns = np.tile([1, 1, 2, 2], 3)
    np.testing.assert_array_equal(tensors["optimizer.momentum.weight"], np.broadcast_to(columns, (5, 12)))


def disagree(comm, path):
    messages = []
    writer = checkpoint.Writer(path, comm)
    lacking = Placement((4,), 0, ((0, 1 + comm.rank),))  # together 0 to 2, and 0 twice
    different = np.zeros(3 + comm.rank)
    for parts in ({"x": checkpoint.Part(np.zeros(1 + comm.rank), lacking)}, {"x": checkpoint.Part(different)}):
        try:
            writer.save(parts, {})
        except checkpoint.CheckpointError as error:
            messages.append(str(error))
    os.makedirs(path, exist_ok=True)  # a folder of that name: the rename must fail, in the background
    open(os.path.join(path, "inside"), "w").close()
    comm.barrier()
    writer.save({"x": checkpoint.Part(np.zeros(3))}, {})
    try:
        writer.wait()
    except checkpoint.CheckpointError as error:
        messages.append(str(error))
    writer.wait()  # said once
    return messages


def test_every_rank_hears_of_what_went_wrong(crew, tmp_path):
    first, second = crew(disagree, 2, (str(tmp_path / "c"),))
    assert first == second
    assert "3 elements of x, of shape (4,)" in first[0] and "(4,) on rank 1" in first[1]
    assert "was not written" in first[2]


WRITER = """
import itertools, os, sys
import numpy as np
import collectives
from mgpu_core import checkpoint
from mgpu_core.parallel import Placement

with collectives.init() as comm:
    writer = checkpoint.Writer(sys.argv[1], comm)
    half = Placement((2_000_000,), 0, ((1_000_000 * comm.rank, 1_000_000 * (comm.rank + 1)),))
    for n in itertools.count():
        writer.save({"x": checkpoint.Part(np.full(1_000_000, float(n)), half)}, {"n": n})
        if comm.rank == 0 and n:
            print(n - 1, os.getpid(), flush=True)
"""


@pytest.mark.parametrize("delay", [0.007, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.0, 0.021))])
def test_ranks_killed_while_it_is_written_leave_the_previous_one_whole(tmp_path, delay):
    path = tmp_path / "c"
    (tmp_path / "script.py").write_text(WRITER)
    command = [sys.executable, "-m", "mgpu_core", "run", "-n", "2", str(tmp_path / "script.py"), str(path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    written, writer = map(int, job.stdout.readline().split()[-2:])
    time.sleep(delay)
    os.kill(writer, signal.SIGKILL)
    job.wait()
    job.stdout.close()
    tensors, meta = checkpoint.load(path)
    assert meta["n"] >= written
    np.testing.assert_array_equal(tensors["x"], np.full(2_000_000, float(meta["n"])))
