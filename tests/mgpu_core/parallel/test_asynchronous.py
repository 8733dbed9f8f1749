"""Asynchronous workers: what they share is never torn, what mathematics fixes is exact, and nobody waits in vain."""

import functools
import math
import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from crew import crews
from hypothesis import given
from hypothesis import strategies as st

import collectives
from collectives import PeerLostError
from mgpu_core import nn, optim
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel.asynchronous import Asynchronous, ParameterStore, cut
from mgpu_core.tensor import Tensor

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 208)
IMAGES = RNG.standard_normal((208, 12)) + 4 * np.eye(12)[LABELS]
OPTIMIZERS = {
    "SGD": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": partial(optim.AdamW, lr=0.1),
}

SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]


def network(dtype="float64", seed=1):
    rng = np.random.default_rng(seed)
    return nn.Sequential(nn.Linear(12, 7, rng=rng, dtype=dtype), nn.ReLU(), nn.Linear(7, 4, rng=rng, dtype=dtype))


def loader(dtype="float64"):
    return Loader((IMAGES.astype(dtype), LABELS), Sampler(208, 16, seed=7), depth=1)


def rate(batch):
    return 0.2 / (1 + 0.01 * batch.step)


def work(model, batch):
    images, labels = batch.arrays
    (F.cross_entropy(model(Tensor(images)), labels, reduction="sum") / len(labels)).backward()


def asynchronous(comm, epochs=2, dtype="float64", optimizer="momentum", delay=0.0, **options):
    """The worker after some epochs, and the batches it had. `delay`: seconds that rank 0 takes for each besides."""
    model = Asynchronous(network(dtype, comm.rank), comm, OPTIMIZERS[optimizer], **options)
    taken = []
    for epoch in range(epochs):
        for batch in model.batches(loader(dtype), epoch):
            model.pull()
            work(model, batch)
            if comm.rank == 0:
                time.sleep(delay)
            model.push(lr=rate(batch))
            taken.append((epoch, batch.step))
    return model, taken


def plain(epochs=2, dtype="float64", optimizer="momentum"):
    model = network(dtype, seed=0)
    optimizer = OPTIMIZERS[optimizer](model.named_parameters())
    for epoch in range(epochs):
        for batch in loader(dtype).epoch(epoch):
            optimizer.zero_grad()
            work(model, batch)
            optimizer.lr = rate(batch)
            optimizer.step()
    return model, optimizer


def accuracy(model):
    return np.mean(model(Tensor(IMAGES)).data.argmax(axis=1) == LABELS)


# Cutting


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 9))
def test_shards_hold_every_element_once_and_are_equally_large(sizes, shards):
    named = {str(i): size for i, size in enumerate(sizes)}
    pieces = cut(named, shards)
    parts = [sum(piece.stop - piece.start for piece in shard) for shard in pieces]
    assert len(parts) == shards and max(parts) - min(parts) <= 1
    elements = [(p.name, i) for shard in pieces for p in shard for i in range(p.start, p.stop)]
    assert elements == [(name, i) for name, size in named.items() for i in range(size)]


# One worker


def alone(comm):
    cases = [("float64", name, {}) for name in OPTIMIZERS]
    cases += [("float32", "momentum", {"delay_compensation": 2.0, "staleness_aware": True, "bound": 0})]
    wrong = []
    for dtype, name, options in cases:
        model, taken = asynchronous(comm, dtype=dtype, optimizer=name, **options)
        wanted, optimizer = plain(dtype=dtype, optimizer=name)
        assert taken == [(epoch, step) for epoch in range(2) for step in range(13)]
        assert model.staleness.counts == {0: 26} and model.staleness.mean == model.staleness.max == 0
        state, same = optimizer.state_dict(), model.store.state_dict()
        pairs = [*((model.model.state_dict()[n], x) for n, x in wanted.state_dict().items())]
        pairs += [(same[n], x) for n, x in state.items()]
        assert same.keys() == state.keys()
        wrong += [(dtype, name) for got, want in pairs if not np.array_equal(got, want)]
        # and its state can be taken on again
        for tensor in model.model.parameters():
            tensor.data[...] += 1
        model.store.load_state_dict({n: x + 1 for n, x in state.items()})
        model.store.pull()
        again = model.store.state_dict()
        wrong += [(dtype, name, n) for n, x in state.items() if not np.array_equal(again[n], x + 1)]
        wrong += [p for n, p in model.model.state_dict().items() if not np.array_equal(p, wanted.state_dict()[n] + 1)]
    return wrong


def test_one_worker_is_the_plain_optimiser_bit_for_bit():
    assert collectives.spawn(alone, 1) == [[]]


# Several


SCENARIOS = []


def scenario(function):
    """What all ranks do once, for as many tests as look at the results."""
    SCENARIOS.append(function)
    return function


def every_scenario(comm):
    return {function.__name__: function(comm) for function in SCENARIOS}


@functools.cache
def results(size):
    by_rank = crews(every_scenario, size)
    return {name: [result[name] for result in by_rank] for name in by_rank[0]}


@scenario
def nothing_is_torn(comm):
    """All push ones to parameters that start at zero: after n pushes every element of a shard is -n."""
    names = {"a": 1001, "b": 64, "c": 1}
    tensors = {name: nn.Parameter(np.zeros(size, np.float64)) for name, size in names.items()}
    store = ParameterStore(comm, tensors, partial(optim.SGD, lr=1.0))
    shards = cut(names, comm.size)
    torn, seen = 0, []
    for _ in range(300):
        store.pull()
        values = [np.concatenate([tensors[p.name].data[p.start : p.stop] for p in shard]) for shard in shards]
        torn += sum(len(set(value.tolist())) > 1 for value in values)
        seen.append([value[0] for value in values])
        for tensor in tensors.values():
            tensor.grad = np.ones_like(tensor.data)
        store.push(1.0)
    comm.barrier()
    store.pull()
    end = {name: np.unique(tensor.data).tolist() for name, tensor in tensors.items()}
    return torn, bool((np.diff(seen, axis=0) <= -1).all()), end


@pytest.mark.parametrize("size", SIZES)
def test_a_pull_sees_every_shard_after_a_whole_number_of_pushes_and_none_is_lost(size):
    for torn, falling, end in results(size)["nothing_is_torn"]:
        assert torn == 0 and falling  # a worker sees at least its own pushes
        assert end == {name: [-300.0 * size] for name in "abc"}


@scenario
def trained(comm):
    found = {}
    for name, options in {
        "asynchronous": {},
        "compensated": {"delay_compensation": 2.0},
        "aware": {"staleness_aware": True},
        "bounded": {"bound": 1},
    }.items():
        model, taken = asynchronous(comm, epochs=6, optimizer="SGD", delay=0.002, **options)
        state = {n: x.copy() for n, x in model.model.state_dict().items()}
        found[name] = taken, accuracy(model), model.staleness, model.ahead, state
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["asynchronous", "compensated", "aware", "bounded"])
def test_every_batch_is_used_once_and_all_end_with_the_same_parameters_that_have_learned(size, name):
    by_rank = [result[name] for result in results(size)["trained"]]
    taken = [step for result in by_rank for step in result[0]]
    assert sorted(taken) == [(epoch, step) for epoch in range(6) for step in range(13)]
    for _, correct, staleness, _, state in by_rank:
        assert correct > 0.9
        assert sum(staleness.counts.values()) <= len(taken)
        for parameter, array in by_rank[0][4].items():
            np.testing.assert_array_equal(state[parameter], array)


@pytest.mark.parametrize("size", SIZES)
def test_staleness_counts_the_pushes_of_others(size):
    by_rank = [result["asynchronous"] for result in results(size)["trained"]]
    assert sum(result[2].counts.total() for result in by_rank) == 6 * 13
    assert all(0 <= result[2].mean <= result[2].max <= 6 * 13 for result in by_rank if result[2].counts)
    assert any(result[2].max for result in by_rank)


@pytest.mark.parametrize("size", SIZES)
def test_a_bound_holds_back_those_who_are_too_fast(size):
    assert all(result["bounded"][3] <= 1 for result in results(size)["trained"])


@scenario
def too_fast(comm):
    """Rank 0 takes long for its batches; with bound 0 nobody begins another before all have done as many."""
    model, _ = asynchronous(comm, epochs=1, delay=0.03, bound=0)
    return model.ahead, model.staleness.max


@pytest.mark.parametrize("size", SIZES)
def test_a_bound_of_zero_keeps_workers_in_step(size):
    for ahead, stalest in results(size)["too_fast"]:
        assert ahead <= 0
        assert stalest <= 2 * (size - 1)  # between two pushes of one worker each other pushes at most twice


@scenario
def compensated(comm):
    """Rank 1 pulls, rank 0 pushes, rank 1 pushes: what DC-ASGD adds can be computed by hand."""
    tensor = nn.Parameter(np.array([1.0, 2.0, -3.0]))
    store = ParameterStore(comm, {"w": tensor}, partial(optim.SGD, lr=0.1), delay_compensation=2.0)
    first, second = np.array([0.5, -1.0, 2.0]), np.array([-1.0, 0.25, 0.5])
    store.pull()
    comm.barrier()
    for rank, gradient in enumerate((first, second)):
        if comm.rank == rank:
            tensor.grad = gradient
            store.push(0.1)
        comm.barrier()
    store.pull()
    moved = np.array([1.0, 2.0, -3.0]) - 0.1 * first
    mean = 0.95 * 0.05 * first**2 + 0.05 * second**2
    drift = moved - np.array([1.0, 2.0, -3.0])
    wanted = moved - 0.1 * (second + 2.0 / np.sqrt(mean + 1e-7) * second**2 * drift)
    return np.max(abs(tensor.data - wanted))


@pytest.mark.parametrize("size", SIZES)
def test_delay_compensation_is_the_papers(size):
    assert max(results(size)["compensated"]) < 1e-14


@scenario
def momenta(comm):
    """Ranks push in turn, twice: what Nesterov momentum does if each has its own. And their mean."""
    start = np.array([1.0, 2.0, -3.0, 0.5])
    tensor = nn.Parameter(start.copy())
    store = ParameterStore(comm, {"w": tensor}, partial(optim.SGD, lr=0.1, momentum=0.5, nesterov=True))
    gradients = np.random.default_rng(3).standard_normal((2, comm.size, 4))
    wanted, velocity = start.copy(), np.zeros((comm.size, 4))
    for turn in gradients:
        for rank, gradient in enumerate(turn):
            comm.barrier()
            if comm.rank == rank:
                store.pull()
                tensor.grad = gradient
                store.push(0.1)
            velocity[rank] = 0.5 * velocity[rank] + gradient
            wanted -= 0.1 * (gradient + 0.5 * velocity[rank])
    comm.barrier()
    store.pull()
    own = store.state_dict()["momentum.w"]
    store.average_state()
    mean = store.state_dict()
    pairs = [(tensor.data, wanted), (own, velocity[comm.rank]), (mean["momentum.w"], velocity.mean(axis=0))]
    return max(np.max(abs(got - want)) for got, want in pairs), int(mean["steps"]) / comm.size


@pytest.mark.parametrize("size", SIZES)
def test_every_worker_has_a_momentum_of_its_own(size):
    for difference, steps in results(size)["momenta"]:
        assert difference < 1e-14 and steps == 2


@scenario
def aware(comm):
    """All pull, rank 0 pushes nothing three times, rank 1 pushes ones: how stale that is, and what it changes."""
    model = Asynchronous(network(), comm, OPTIMIZERS["SGD"], staleness_aware=True)
    model.pull()
    before = model.model[0].weight.data.copy()
    comm.barrier()
    if comm.rank == 0:
        for _ in range(3):
            model.push(lr=0.3)
    comm.barrier()
    stale = 3
    if comm.rank == 1:
        for parameter in model.model.parameters():
            parameter.grad = np.ones_like(parameter.data)
        stale = model.push(lr=0.3)
    model.meet()
    return stale, np.max(abs(before - model.model[0].weight.data - 0.1))


@pytest.mark.parametrize("size", SIZES)
def test_a_push_that_is_three_updates_late_counts_a_third(size):
    for stale, difference in results(size)["aware"]:
        assert stale == 3 and difference < 1e-15


@scenario
def refused(comm):
    told = []
    for attempt in (
        lambda: Asynchronous(network(), comm, OPTIMIZERS["SGD"], bound=-1),
        lambda: Asynchronous(network(), comm, OPTIMIZERS["SGD"], delay_compensation=math.nan),
        lambda: Asynchronous(network(), comm, partial(optim.LARS, lr=1.0)),
        lambda: next(Asynchronous(network(), comm, OPTIMIZERS["SGD"]).batches(
            Loader((IMAGES,), Sampler(208, 16), rank=comm.rank, size=comm.size), 0)),
        lambda: ParameterStore(comm, {"w": Tensor(np.ones((2, 3)).T, requires_grad=True)}, OPTIMIZERS["SGD"]),
    ):  # fmt: skip
        try:
            attempt()
            told.append("no error")
        except ValueError as error:
            told.append(str(error))
    return told


def test_misuse_is_refused_on_every_rank():
    for told in results(2)["refused"]:
        assert told[0].startswith("a staleness bound is a whole number from 0")
        assert told[1].startswith("delay_compensation is a finite number from 0")
        assert "needs the norms of whole parameters" in told[2]
        assert told[3].startswith("workers take whole batches: make the loader for 1 rank, not for 2")
        assert told[4].startswith("w must be C-contiguous")


# Why it has


def largest_stable_rate(workers, *, own, nesterov, momentum=0.9):
    """Of workers that push in turn, on a parabola of curvature 1; each has pulled just after its push before."""

    def grows(rate):
        now, pulled, velocity = 1.0, np.ones(workers), np.zeros(workers)
        for push in range(2000):
            worker = push % workers
            slot = worker if own else 0
            velocity[slot] = momentum * velocity[slot] + pulled[worker]
            now -= rate * (pulled[worker] + momentum * velocity[slot] if nesterov else velocity[slot])
            pulled[worker] = now
            if abs(now) > 100:
                return True
        return False

    low, high = 0.0, 4.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) else (middle, high)
    return low


def test_the_rates_that_the_docstring_calls_stable():
    cases = {
        (1, False, False): 3.8,
        (2, False, False): 0.10,
        (2, True, False): 0.19,
        (2, True, True): 0.56,
        (4, True, True): 0.22,
        (4, False, False): 0.035,
    }
    for (workers, own, nesterov), rate in cases.items():
        found = largest_stable_rate(workers, own=own, nesterov=nesterov)
        assert found == pytest.approx(rate, rel=0.1), (workers, own, nesterov)


# Workers that end early


def one_dies(comm, bound):
    model = Asynchronous(network(), comm, OPTIMIZERS["SGD"], bound=bound)
    try:
        for epoch in range(1000):
            for batch in model.batches(loader(), epoch):
                model.pull()
                work(model, batch)
                if comm.rank == 1 and epoch:  # the first in which it is given a batch
                    os.kill(os.getpid(), signal.SIGKILL)
                model.push(0.01)
    except PeerLostError as error:
        assert "rank 1" in str(error)
        with open(os.environ["DIED"] + str(comm.rank), "w") as file:
            file.write(str(error))
        raise


@pytest.mark.parametrize("bound", [pytest.param(None, marks=pytest.mark.slow), 0])
def test_a_worker_that_dies_raises_on_the_others(bound, tmp_path, monkeypatch):
    monkeypatch.setenv("DIED", str(tmp_path / "rank"))
    with pytest.raises(collectives.CollectiveError):
        collectives.spawn(one_dies, 3, (bound,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank2"]


def leaves(comm):
    """Rank 1 leaves after its second batch and says so by closing the generator; nobody waits for it any more."""
    model = Asynchronous(network(), comm, OPTIMIZERS["SGD"], bound=0)
    count = 0
    for batch in model.batches(loader(), 0):
        model.pull()
        work(model, batch)
        model.push(0.01)
        count += 1
        if comm.rank == 1 and count == 2:
            break
    else:
        return count
    model.meet()
    return count


def test_nobody_waits_for_a_worker_that_has_ended():
    first, second = collectives.spawn(leaves, 2)
    assert second == 2 and first >= 13 - 2 - 2  # the other's reader may have taken two more
