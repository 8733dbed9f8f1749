"""The training loop: it measures what it does, stops when asked, and goes on as if it had never stopped."""

import functools
import os
import signal
import threading

import numpy as np
import pytest
import tqdm
from crew import crews

from mgpu_core import checkpoint, metrics, nn, optim, random, schedule
from mgpu_core.checkpoint import CheckpointError
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel import DataParallel, Synchronous
from mgpu_core.tensor import Tensor
from mgpu_core.trainer import Trainer, stop_request

COUNT, BATCH = 50, 8  # seven steps an epoch, the last with two samples
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, COUNT)
INPUTS = RNG.standard_normal((COUNT, 6)) + 2 * LABELS[:, None]


def jitter(arrays):
    """A random augmentation, so that resuming has to get that right too."""
    inputs, labels = arrays
    return inputs + random.sample_words(1, len(inputs), 6) / 2**35, labels


def loss(model, arrays):
    inputs, labels = arrays
    return F.cross_entropy(model(Tensor(inputs)), labels, reduction="sum")


def score(model, arrays):
    inputs, labels = arrays
    right = model(Tensor(inputs)).data.argmax(axis=1) == labels
    return {"accuracy": right, "ones": np.ones(len(labels))}


def trainer(comm=None, folder=None, *, batch=BATCH, seed=3, rate=0.1, transform=jitter, loss=loss):
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    rng = np.random.default_rng(5)
    layers = nn.Linear(6, 8, rng=rng, dtype=np.float64), nn.Dropout(0.2, rng=rng), nn.ReLU()
    model = DataParallel(nn.Sequential(*layers, nn.Linear(8, 3, rng=rng, dtype=np.float64)), comm)
    ours = {"rank": rank, "size": size}
    train = Loader((INPUTS, LABELS), Sampler(COUNT, batch, seed=seed), transform=transform, **ours)
    test = Loader((INPUTS, LABELS), Sampler(COUNT, 16, shuffle=False), **ours)
    optimizer = optim.AdamW(model.model.named_parameters(), 0.1)
    return Trainer(
        Synchronous(model, optimizer),
        schedule.cosine(rate, steps=21, warmup=3),
        train,
        test,
        loss=loss,
        score=score,
        folder=folder,
        settings={"rate": rate},
    )


def final(trainer):
    return {name: array.copy() for name, array in trainer.strategy.module.state_dict().items()} | {
        name: array.copy() for name, array in trainer.strategy.optimizer.state_dict().items()
    }


def assert_same(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


@functools.cache
def uninterrupted():
    whole = trainer()
    whole.fit(3)
    return final(whole), whole.scores


def test_it_learns_and_measures(tmp_path):
    run = trainer(folder=tmp_path)
    run.fit(3)
    assert run.scores["accuracy"] > 0.6 and run.scores["ones"] == 1
    assert (run.epoch, run.step, run.steps_done, run.samples_done) == (3, 0, 21, 150)
    assert not run.interrupted
    records = metrics.read(tmp_path / "metrics.jsonl")
    steps = [record for record in records if record["event"] == "step"]
    assert [record["samples"] for record in steps[:8]] == [8, 16, 24, 32, 40, 48, 50, 58]
    assert [(record["epoch"], record["step"]) for record in steps] == [divmod(i, 7) for i in range(21)]
    assert all(record["samples_per_second"] > 0 and 0 <= record["waiting"] <= 1 for record in steps)
    assert [record["accuracy"] for record in records if record["event"] == "epoch"][-1] == run.scores["accuracy"]
    assert records[0]["event"] == "run" and records[0]["settings"] == {"rate": 0.1}


def test_dropout_is_off_in_the_test():
    run = trainer()
    assert run.evaluate() == run.evaluate()
    assert run.strategy.module.training


@pytest.mark.parametrize("stops", [[1], [7], [3, 9], [20], [21], [22], list(range(1, 22))], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path, stops):
    for i, stop in enumerate(stops):
        run = trainer(folder=tmp_path)
        if i:
            run.resume(tmp_path / "checkpoint.safetensors")
        run.fit(3, steps=stop - run.steps_done)
        assert run.steps_done == min(stop, 21)
    run = trainer(folder=tmp_path)
    run.resume(tmp_path / "checkpoint.safetensors")
    run.fit(3)
    assert_same(final(run), uninterrupted()[0])
    assert run.scores == uninterrupted()[1]
    steps = [r for r in metrics.read(tmp_path / "metrics.jsonl") if r["event"] == "step"]
    assert [(r["epoch"], r["step"]) for r in steps] == [divmod(i, 7) for i in range(21)]


def test_a_run_killed_after_its_last_checkpoint_repeats_the_steps_since(tmp_path):
    run = trainer(folder=tmp_path)
    run.fit(3, steps=10)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    run.fit(3, steps=5)
    (tmp_path / "checkpoint.safetensors").write_bytes(before)  # as if step 15 had never been saved
    run = trainer(folder=tmp_path)
    run.resume(tmp_path / "checkpoint.safetensors")
    run.fit(3)
    assert_same(final(run), uninterrupted()[0])
    steps = [r for r in metrics.read(tmp_path / "metrics.jsonl") if r["event"] == "step"]
    assert [(r["epoch"], r["step"]) for r in steps] == [divmod(i, 7) for i in range(21)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, number):
    def interrupted(model, arrays):
        if run.steps_done == 9:
            os.kill(os.getpid(), number)
        return loss(model, arrays)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run = trainer(folder=tmp_path, loss=interrupted)
    run.fit(3)
    assert run.interrupted and run.steps_done == 10
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    run = trainer(folder=tmp_path)
    run.resume(tmp_path / "checkpoint.safetensors")
    run.fit(3)
    assert_same(final(run), uninterrupted()[0])


def test_a_second_signal_ends_at_once():
    with pytest.raises(KeyboardInterrupt), stop_request() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)


def test_other_threads_train_without_touching_signals():
    run = trainer()
    thread = threading.Thread(target=run.fit, args=(3,))
    thread.start()
    thread.join()
    assert_same(final(run), uninterrupted()[0])


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(tmp_path):
    def bursting(model, arrays):
        return loss(model, arrays) * (np.nan if run.steps_done == 9 else 1.0)

    run = trainer(folder=tmp_path, loss=bursting)
    with pytest.raises(FloatingPointError, match=r"nan at step 2 of epoch 1, with a learning rate of 0.075"):
        run.fit(3)
    assert checkpoint.load(tmp_path / "checkpoint.safetensors")[1]["epoch"] == 1


def test_a_new_run_leaves_no_checkpoint_of_an_earlier_one_to_go_on_from(tmp_path):
    trainer(folder=tmp_path).fit(1)

    def dying(model, arrays):
        assert run.steps_done < 3
        return loss(model, arrays)

    run = trainer(folder=tmp_path, loss=dying)
    with pytest.raises(AssertionError):
        run.fit(1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    checkpoint.save(tmp_path / "x.safetensors", {"model.weight": np.zeros(3)}, {"epoch": 3})
    with pytest.raises(CheckpointError, match="is from a run with None, but this one has"):
        trainer().resume(tmp_path / "x.safetensors")


@pytest.mark.parametrize("other", [{"batch": 9}, {"seed": 4}], ids=str)
def test_a_position_in_other_data_is_refused(tmp_path, other):
    trainer(folder=tmp_path).fit(1)
    with pytest.raises(CheckpointError, match=f"{next(iter(other))}.*{next(iter(other.values()))}"):
        trainer(**other).resume(tmp_path / "checkpoint.safetensors")


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run = trainer(folder=tmp_path)
    run.fit(1)
    run.strategy.module.layers.pop()
    with pytest.raises(CheckpointError, match=r"does not fit.*layers\.3\.weight"):
        run.resume(tmp_path / "checkpoint.safetensors")


# With ranks


def on_ranks(comm, folder):
    """Runs: whole; stopped by a signal to the last rank and resumed; resumed from what one process has saved."""
    whole = trainer(comm, folder / "whole")
    whole.fit(3)

    def interrupted(model, arrays):
        if stopped.steps_done == 9 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(model, arrays)

    stopped = trainer(comm, folder / "stopped", loss=interrupted)
    stopped.fit(3)
    comm.barrier()
    again = trainer(comm, folder / "stopped")
    again.resume(folder / "stopped" / "checkpoint.safetensors")
    again.fit(3)

    moved = trainer(comm)
    moved.resume(folder / "alone" / "checkpoint.safetensors")
    moved.fit(3)
    return [(final(run), run.scores) for run in (whole, again, moved)], (stopped.interrupted, stopped.steps_done)


@pytest.mark.parametrize("size", [3])
def test_ranks_stop_together_resume_exactly_and_follow_one_process(tmp_path, size):
    trainer(folder=tmp_path / "alone").fit(3, steps=10)
    results = crews(on_ranks, size, (tmp_path,))
    parameters, scores = uninterrupted()
    for (whole, again, moved), stopped in results:
        assert stopped == (True, 10)
        assert_same(again[0], whole[0])
        assert_same(whole[0], results[0][0][0][0])
        assert_same(whole[0], parameters, tolerance=1e-10)
        assert_same(moved[0], parameters, tolerance=1e-10)
        assert whole[1] == again[1] == moved[1] == pytest.approx(scores, rel=1e-12)
    written = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert written == ["checkpoint.safetensors", "metrics.jsonl"]
    alone = trainer()  # and one process goes on from what ranks have saved
    alone.resume(tmp_path / "whole" / "checkpoint.safetensors")
    assert_same(final(alone), parameters, tolerance=1e-10)


def test_a_run_makes_no_semaphore_that_a_kill_could_leave_in_shared_memory(monkeypatch):
    monkeypatch.delattr(tqdm.std.tqdm, "_lock", raising=False)
    monkeypatch.setattr(tqdm.std, "TqdmDefaultWriteLock", lambda: pytest.fail("a lock among processes"))
    run = trainer()
    run.fit(1)
    assert run.epoch == 1
