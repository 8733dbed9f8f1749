"""Advice follows from what is measured, and gives way to what is given."""

import itertools
from dataclasses import fields
from functools import partial

import numpy as np
import pytest

import collectives
from mgpu_core import hardware
from mgpu_core.hardware import Measured, advise

KNOWN = {"samples": 60_000, "epochs": 3, "base_lr": 0.1, "base_batch": 128}


class Machine:
    """A clock that steps and reads move on, and the memory that a step takes."""

    def __init__(self, monkeypatch, *, per_step=0.01, per_sample=0.0001, per_read=0.0, bytes_per_sample=1000):
        self.now = 0.0
        self.per_step, self.per_sample, self.per_read = per_step, per_sample, per_read
        monkeypatch.setattr(hardware.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(hardware, "_peak", lambda work, samples: bytes_per_sample * samples)

    def step(self, samples):
        self.now += self.per_step + samples * self.per_sample

    def read(self, samples):
        self.now += samples * self.per_read

    def advise(self, **options):
        return advise(self.step, self.read, **{"memory": 10**9, **KNOWN, **options})


def test_the_batch_is_the_smallest_that_is_nearly_as_fast_as_any(monkeypatch):
    batch = Machine(monkeypatch).advise().batch
    speed = {n: n / (0.01 + 0.0001 * n) for n in (2**i for i in range(20))}
    tried = [n for n in speed if n <= 4 * batch.value]
    assert speed[batch.value] >= 0.9 * max(speed[n] for n in tried) > 0
    assert batch.value >= 512 and "95% of the best speed" in batch.reason


def test_memory_and_the_data_set_limit_the_batch(monkeypatch):
    assert Machine(monkeypatch, bytes_per_sample=10_000).advise(memory=1_000_000).batch.value == 64
    assert Machine(monkeypatch).advise(samples=100).batch.value == 64
    assert Machine(monkeypatch, bytes_per_sample=10**9).advise(memory=10).batch.value == 1


def test_the_rate_is_linear_in_the_batch_and_warms_up(monkeypatch):
    advice = Machine(monkeypatch).advise(batch=256)
    assert advice.batch.value == 256 and advice.batch.reason == "as given"
    assert advice.learning_rate.value == 0.2 and "linear rule" in advice.learning_rate.reason
    assert advice.warmup.value == round(3 * 235 * 5 / 90)


@pytest.mark.parametrize(("per_read", "workers"), [(0.0, 1), (1e-5, 1), (3e-4, 2), (9e-4, 5), (1e-2, 8)])
def test_readers_keep_ahead_of_steps(monkeypatch, per_read, workers):
    advice = Machine(monkeypatch, per_read=per_read).advise(batch=100)  # a step takes 20 ms
    assert advice.workers.value == workers
    assert advice.prefetch.value == advice.workers.value + 1
    assert "a step 20.0 ms" in advice.workers.reason


def test_whatever_is_given_is_taken(monkeypatch):
    given = {"batch": 7, "learning_rate": 0.3, "warmup": 0, "workers": 3, "prefetch": 9}
    for some in itertools.chain([{}, given], ({name: value} for name, value in given.items())):
        advice = Machine(monkeypatch).advise(**some)
        for field in fields(advice):
            choice = getattr(advice, field.name)
            assert (choice.reason == "as given") == (field.name in some)
            if field.name in some:
                assert choice.value == some[field.name]
        lines = str(advice).splitlines()
        assert [line.partition(":")[0].rsplit(" ", 1)[0] for line in lines] == [
            "batch", "learning rate", "warmup", "workers", "prefetch"
        ]  # fmt: skip


def work(samples, state={}):  # noqa: B006
    x = np.ones((samples, 20_000))
    state["y"] = float((x * 2).sum())


def test_memory_is_what_a_step_has_beside_what_was_there():
    (row,) = hardware.measure_steps(work, float, 10**9, 8, 8, grow=False)
    assert isinstance(row, Measured) and row.samples == 8 and row.seconds > 0
    assert 2 * 8 * 160_000 <= row.nbytes < 3 * 8 * 160_000


def advised(comm):
    return str(advise(partial(work), work, comm=comm, memory=30_000_000, **KNOWN))


def test_all_ranks_come_to_the_same_advice():
    first, second = collectives.spawn(advised, 2)
    assert first == second and "for 2 ranks" in first
