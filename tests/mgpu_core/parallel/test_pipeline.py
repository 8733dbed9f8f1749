"""A pipeline's training is that of one process: every schedule, several kinds of models, with and without replicas."""

import functools
import re
import weakref

import numpy as np
import pytest
from crew import crews

import collectives
from mgpu_core import nn, optim, random
from mgpu_core.autograd import no_grad
from mgpu_core.data.sampler import part
from mgpu_core.nn import functional as F
from mgpu_core.parallel import Mesh, grad_norm
from mgpu_core.parallel.pipeline import Pipeline
from mgpu_core.parallel.pipeline_schedules import SCHEDULES, Interleaved, ScheduleError
from mgpu_core.tensor import Tensor, record

STEPS, BATCH, MICROBATCHES = 50, 10, 4  # micro-batches of 3, 3, 2 and 2
FIGURES = np.random.default_rng(0)
LABELS = FIGURES.integers(0, 4, 60)
IMAGES = 0.5 * FIGURES.standard_normal((60, 1, 6, 6)) + LABELS[:, None, None, None]
SERIES = 0.5 * FIGURES.standard_normal((60, 5, 3)) + LABELS[:, None, None]
WORDS = (FIGURES.integers(0, 3, (60, 6)) + 3 * LABELS[:, None]).astype(np.int64)


# Models of at least eight layers, so that each of four ranks has two stages


class Mean(nn.Module):
    """(N, T, D) to (N, D)."""

    def forward(self, x):
        return x.mean(1)


class Masked(nn.Module):
    """Words (N, T) to their embeddings, and which of them count: a tuple of reals and integers."""

    def __init__(self, count, size, *, rng, dtype):
        self.embedding = nn.Embedding(count, size, rng=rng, dtype=dtype)

    def forward(self, words):
        return self.embedding(words), Tensor((words.data > 0).astype(np.int64))


class OnFirst(nn.Module):
    """Applies a layer to the first of a tuple and hands the others on."""

    def __init__(self, layer):
        self.layer = layer

    def forward(self, value):
        first, *others = value
        return self.layer(first), *others


class MaskedMean(nn.Module):
    def forward(self, value):
        x, mask = value
        weights = mask.data[:, :, None].astype(x.dtype)
        return (x * weights).sum(1) / (1 + weights.sum(1))


def convolutional(rng, dtype, *, norm=False, dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, rng=rng, dtype=dtype),
        nn.BatchNorm2d(4, dtype=dtype) if norm else nn.Tanh(),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, rng=rng, dtype=dtype),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout, rng=rng),
        nn.Linear(12, 8, rng=rng, dtype=dtype),
        nn.Dropout(dropout, rng=rng),
        nn.Linear(8, 4, rng=rng, dtype=dtype),
    )


def recurrent(rng, dtype):
    return nn.Sequential(
        nn.LSTM(3, 6, rng=rng, dtype=dtype),
        nn.Dropout(0.2, rng=rng),
        nn.LSTM(6, 3, bidirectional=True, rng=rng, dtype=dtype),
        nn.GRU(6, 5, layers=2, rng=rng, dtype=dtype),
        nn.Tanh(),
        nn.GRU(5, 6, rng=rng, dtype=dtype),
        Mean(),
        nn.LayerNorm(6, dtype=dtype),
        nn.Linear(6, 4, rng=rng, dtype=dtype),
    )


def attention(rng, dtype):
    blocks = [nn.TransformerBlock(6, 2, causal=i > 1, dropout=0.1, rng=rng, dtype=dtype) for i in range(4)]
    return nn.Sequential(
        nn.Embedding(12, 6, rng=rng, dtype=dtype), *blocks, Mean(), nn.GELU(), nn.Linear(6, 4, rng=rng, dtype=dtype)
    )


def tied(rng, dtype):
    """The matrix of the embedding is also that of a linear layer near the other end."""
    embedding, linear = nn.Embedding(12, 6, rng=rng, dtype=dtype), nn.Linear(6, 12, rng=rng, dtype=dtype)
    linear.weight = embedding.weight
    blocks = [nn.TransformerBlock(6, 2, rng=rng, dtype=dtype) for _ in range(2)]
    ends = Mean(), nn.LayerNorm(6, dtype=dtype), linear, nn.Tanh(), nn.Linear(12, 4, rng=rng, dtype=dtype)
    return nn.Sequential(embedding, *blocks, *ends)


def masked(rng, dtype):
    linear = [OnFirst(nn.Linear(6, 6, rng=rng, dtype=dtype)) for _ in range(3)]
    return nn.Sequential(
        Masked(12, 6, rng=rng, dtype=dtype),
        *(layer for pair in zip(linear, [OnFirst(nn.Tanh()) for _ in linear]) for layer in pair),
        MaskedMean(),
        nn.Linear(6, 4, rng=rng, dtype=dtype),
    )


MODELS = {
    "convolutional": (convolutional, {}, IMAGES),
    "batch norm": (convolutional, {"norm": True}, IMAGES),
    "dropout": (convolutional, {"dropout": 0.3}, IMAGES),
    "recurrent": (recurrent, {}, SERIES),
    "attention": (attention, {}, WORDS),
    "tied": (tied, {}, WORDS),
    "masked": (masked, {}, WORDS),
}


def build(name, dtype):
    network, options, inputs = MODELS[name]
    return network(np.random.default_rng(1), dtype, **options), inputs.astype(dtype) if inputs.dtype != int else inputs


def loss(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="sum")


def rows(step):
    return np.arange(step * BATCH, step * BATCH + BATCH) % len(LABELS)


def optimizer_of(module):
    return optim.SGD(module.named_parameters(), lr=0.05, momentum=0.9)


@functools.cache
def alone(name, dtype=np.float64, *, microbatches=1, order=None, steps=STEPS):
    """One process: losses, and the model's state in the end. With `microbatches`, gradients add up over them."""
    model, inputs = build(name, dtype)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        batch = rows(step)
        if order is not None:  # another order of the samples: the same sums, rounded otherwise
            batch = np.random.default_rng(order + step).permutation(batch)
        for m in range(microbatches):
            places = range(*part(BATCH, m, [1] * microbatches))
            with random.batch(seed=7, step=step, samples=places):
                share = loss(model(Tensor(inputs[batch[places]])), LABELS[batch[places]]) / BATCH
            share.backward()
            losses[-1] += float(share)
        optimizer.step()
    return np.array(losses), {name: array.copy() for name, array in model.state_dict().items()}


def train(comm, name, schedule, dtype=np.float64, *, data=None, shares=(1,), steps=STEPS):
    """One rank of a pipeline: its share of the losses, and the state of its layers."""
    model, inputs = build(name, dtype)
    pipeline = Pipeline(
        model, comm, loss=loss, schedule=SCHEDULES[schedule], microbatches=MICROBATCHES, data=data, bucket_bytes=300
    )
    optimizer = optimizer_of(pipeline.module)
    start, stop = part(BATCH, 0 if data is None else data.rank, shares)
    losses = []
    for step in range(steps):
        batch = rows(step)[start:stop]
        optimizer.zero_grad()
        with random.batch(seed=7, step=step, samples=range(start, stop)):
            losses.append(pipeline.forward_backward(inputs[batch], LABELS[batch], count=BATCH))
        optimizer.step()
        assert pipeline.waited >= 0
    return np.array(losses), {name: array.copy() for name, array in pipeline.module.state_dict().items()}


def distance(one, other):
    """The largest difference of losses and of parameters, relative to the largest value of each."""
    assert one[1].keys() == other[1].keys()
    pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in one[1])]
    return max(float(np.max(abs(a.astype(float) - b)) / np.max(abs(b.astype(float)))) for a, b in pairs)


def joined(results):
    """The ranks' losses added up, and their states together."""
    return sum(losses for losses, _ in results), {name: array for _, state in results for name, array in state.items()}


def run_cases(comm, cases):
    return [train(comm, name, schedule, dtype, steps=steps) for name, schedule, dtype, steps in cases]


def follows_one_process(cases, by_rank):
    """Within 1e-10 of the whole batch at once, and to the last bit like any other schedule."""
    states = {}
    for (name, schedule, dtype, steps), *results in zip(cases, *by_rank, strict=True):
        if dtype != np.float64:
            continue
        result = joined(results)
        in_pieces = alone(name, microbatches=MICROBATCHES, steps=steps)
        assert distance(result, in_pieces) < 1e-10, (name, schedule)
        if name != "batch norm":
            assert distance(in_pieces, alone(name, steps=steps)) < 1e-10
        if name == "convolutional" and steps == STEPS:
            assert in_pieces[0][-5:].mean() < 0.7 * in_pieces[0][0]  # it learns
        if name == "tied":  # where the uses meet, and so the order of their sum, is the schedule's
            continue
        before = states.setdefault((name, steps), result[1])
        for key, array in result[1].items():
            np.testing.assert_array_equal(array, before[key], err_msg=f"{name}, {schedule}, {key}")


ROUGH = ("convolutional", "1f1b", np.float32, 8)
SHORT = [("convolutional", schedule, np.float64, 3) for schedule in SCHEDULES] + [
    (name, list(SCHEDULES)[i % len(SCHEDULES)], np.float64, 2) for i, name in enumerate(MODELS)
]  # every schedule, and every kind of model


def work_of_two(comm):
    return run_cases(comm, [ROUGH, *SHORT]), large(comm), outputs(comm), tied_norm(comm), run_chosen(comm)


@functools.cache
def two_ranks():
    """What several tests look at: training, large messages, outputs without training, and an error."""
    return crews(work_of_two, 2)


def test_training_on_two_ranks_follows_one_process():
    follows_one_process([ROUGH, *SHORT], [results for results, *_ in two_ranks()])


def test_training_on_four_ranks_follows_one_process():
    follows_one_process(SHORT, [results for results, _ in four_ranks()])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_every_schedule_follows_one_process_for_50_steps(name, size):
    cases = [(name, schedule, np.float64, STEPS) for schedule in SCHEDULES]
    follows_one_process(cases, collectives.spawn(run_cases, size, (cases,)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_single_rank_needs_no_communicator(schedule):
    for comm in (None, type("Alone", (), {"size": 1})()):
        result = train(comm, "dropout", schedule, steps=3)
        assert distance(result, alone("dropout", microbatches=MICROBATCHES, steps=3)) == 0


def test_float32_drifts_no_more_than_another_order_of_summation():
    name, _, dtype, steps = ROUGH
    reference = alone(name, dtype, steps=steps)
    permuted = max(distance(alone(name, dtype, order=order, steps=steps), reference) for order in (100, 200, 300))
    assert distance(joined([results[0] for results, *_ in two_ranks()]), reference) <= 3 * permuted


# Replicas


SHARES = [(1, 1), (5, 1), (1, 0)]
REPLICATED = [
    (name, schedule, shares)
    for shares in SHARES
    for name, schedule in zip(["tied", "attention", "dropout", "recurrent"], SCHEDULES)
]


def work_of_four(comm):
    return run_cases(comm, SHORT), run_replicas(comm, REPLICATED)


@functools.cache
def four_ranks():
    return crews(work_of_four, 4)


def run_replicas(comm, cases):
    """Two pipelines of two ranks each, with unequal parts of the batch."""
    with comm.split(comm.rank // 2) as along, comm.split(comm.rank % 2) as across:
        return [train(along, name, schedule, data=across, shares=shares, steps=2) for name, schedule, shares in cases]


def test_replicas_of_a_pipeline_follow_one_process():
    """Where a replica has fewer samples than micro-batches, or none, some of its micro-batches are empty."""
    by_rank = [results for _, results in four_ranks()]
    for (name, schedule, shares), *results in zip(REPLICATED, *by_rank, strict=True):
        assert distance(joined(results), alone(name, steps=2)) < 1e-10, (name, schedule, shares)
        for one, other in ((0, 2), (1, 3)):  # replicas stay alike to the last bit
            for key, array in results[one][1].items():
                np.testing.assert_array_equal(array, results[other][1][key])


# Shared parameters


def tied_norm(comm):
    """The norm of the gradients of a batch."""
    model, inputs = build("tied", np.float64)
    with Mesh(comm, pipeline=1 if comm is None else comm.size) as mesh:
        options = {"loss": loss, "schedule": SCHEDULES["1f1b"], "microbatches": MICROBATCHES}
        pipeline = Pipeline(model, mesh.pipeline, **options)
        pipeline.forward_backward(inputs[:BATCH], LABELS[:BATCH], count=BATCH)
        return grad_norm(pipeline.module.parameters(), mesh)


def test_what_stages_share_counts_once_in_the_norm_of_gradients():
    expected = tied_norm(None)
    for *_, norm, _ in two_ranks():
        assert norm == pytest.approx(expected, rel=1e-12)


# Outputs without training


def outputs(comm):
    found = {}
    for name in ("dropout", "masked"):
        for schedule in SCHEDULES:
            model, inputs = build(name, np.float64)
            pipeline = Pipeline(model, comm, loss=loss, schedule=SCHEDULES[schedule], microbatches=MICROBATCHES)
            pipeline.module.eval()
            for n in (10, 9, 1):
                value = pipeline(inputs[:n])
                found[name, schedule, n] = None if value is None else value.data
    return found


def test_the_last_rank_gets_the_models_outputs():
    first, second = (found for _, _, found, *_ in two_ranks())
    assert set(first.values()) == {None}
    for (name, schedule, n), found in second.items():
        model, inputs = build(name, np.float64)
        with no_grad():
            expected = model.eval()(Tensor(inputs[:n])).data
        np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=f"{name}, {schedule}, {n}")


# What is kept, and for how long


class Lives:
    """How many things are alive, and the most that ever were."""

    def __init__(self):
        self.now = self.most = 0

    def begin(self, thing):
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(thing, self.end)
        return thing

    def end(self):
        self.now -= 1


class Token:
    """Something that lives as long as the tape holds it."""


class Witness(nn.Module):
    """A layer with a weight that counts for how many micro-batches the tape and the output are alive."""

    def __init__(self, tapes, outputs):
        self.scale = nn.Parameter(np.ones(4, np.float32))
        self.tapes, self.outputs = tapes, outputs

    def forward(self, x):
        token, data = self.tapes.begin(Token()), x.data
        return record(
            self.outputs.begin(data * self.scale.data),
            (x, lambda g: g * self.scale.data),
            (self.scale, lambda g: g * data if token else None),
        )


def peaks(comm):
    """For each schedule: how many tapes and outputs this rank has alive at most, and afterwards."""
    found = {}
    for name, schedule in SCHEDULES.items():
        tapes, outputs = Lives(), Lives()
        layers = [Witness(tapes, outputs) for _ in range(schedule.chunks * comm.size)]
        pipeline = Pipeline(nn.Sequential(*layers), comm, loss=loss, schedule=schedule, microbatches=4 * comm.size)
        xs, ys = np.ones((4 * comm.size, 4), np.float32), np.zeros(4 * comm.size, np.int64)
        for _ in range(2):
            pipeline.forward_backward(xs, ys, count=len(xs))
        found[name] = tapes.most, outputs.most, tapes.now, outputs.now
    return found


def work_of_three(comm):
    return peaks(comm), large(comm)


@functools.cache
def three_ranks():
    return crews(work_of_three, 3)


def test_activations_are_kept_for_as_many_micro_batches_as_the_formula_says():
    ranks = 3
    for rank, (found, _) in enumerate(three_ranks()):
        for name, (tapes, outputs, *left) in found.items():
            assert tapes == SCHEDULES[name].peak(rank, ranks, 4 * ranks), name
            if rank < ranks - 1:  # what was sent is let go of: its shape is all that backward needs
                assert outputs <= 2
            assert left == [0, 0]


# Messages of any size


class Scale(nn.Module):
    """A layer that costs little."""

    def __init__(self, rng):
        self.weight = nn.Parameter(rng.standard_normal(128), dtype=np.float32)

    def forward(self, x):
        return x * self.weight


def large(comm):
    """For each schedule, loss and gradients. Messages are of 512 KB: more than is sent before it is asked for."""
    rng = np.random.default_rng(0)
    layers = [Scale(rng) for _ in range(9)]
    xs, ys = rng.standard_normal((6 * 1024, 128), np.float32), rng.integers(0, 128, 6 * 1024)
    found = []
    for schedule in [*SCHEDULES.values(), Interleaved(3)]:
        for layer in layers:
            layer.zero_grad()
        pipeline = Pipeline(nn.Sequential(*layers), comm, loss=loss, schedule=schedule, microbatches=6)
        value = pipeline.forward_backward(xs, ys, count=len(xs))
        found.append((value, {name: p.grad.copy() for name, p in pipeline.module.named_parameters()}))
    return found


@pytest.mark.parametrize("ranks", [two_ranks, three_ranks])
def test_messages_too_large_to_be_sent_before_they_are_asked_for_do_not_block(ranks):
    (expected, gradients), *_ = large(None)
    for results in zip(*(found for _, found, *_ in ranks()), strict=True):
        value, found = joined(results)
        assert value == expected
        for name, array in found.items():
            np.testing.assert_array_equal(array, gradients[name])
        assert found.keys() == gradients.keys()


# Mistakes


def test_a_schedule_that_does_not_fit_is_refused_before_anything_runs():
    comm = type("Two", (), {"size": 2, "rank": 0})()
    with pytest.raises(ScheduleError, match="a multiple of 2 micro-batches"):
        Pipeline(build("recurrent", np.float64)[0], comm, loss=loss, schedule=Interleaved(2), microbatches=3)


class Told:
    """A communicator that only agrees with itself."""

    size, rank = 2, 0

    def broadcast_object(self, value):
        return value


def test_fewer_layers_than_stages_are_refused():
    model = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        Pipeline(model, Told(), loss=loss, schedule=Interleaved(2), microbatches=2)


def test_replicas_refuse_a_parameter_that_stages_of_one_rank_share_unless_cut_elsewhere():
    rng = np.random.default_rng(0)
    first, second = nn.Linear(2, 2, rng=rng), nn.Linear(2, 2, rng=rng)
    second.weight = first.weight
    model = nn.Sequential(first, nn.ReLU(), second, nn.Linear(2, 2, rng=rng))
    options = {"loss": loss, "schedule": Interleaved(2), "microbatches": 2}
    with pytest.raises(ValueError, match=r"stages of rank 0 share a parameter, layers\.0\.weight of stage 2"):
        Pipeline(model, Told(), data=Told(), **options)
    pipeline = Pipeline(model, Told(), **options)  # no replicas: the rank adds both uses up before anybody looks
    assert [name for name, _ in pipeline.module.named_parameters()] == [
        "layers.0.weight", "layers.0.bias", "layers.2.bias",
    ]  # fmt: skip


def test_costs_decide_the_cut_and_layers_keep_their_names():
    rng = np.random.default_rng(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False, rng=rng) for _ in range(6)))
    comm = Told()
    for comm.rank, own in enumerate([[0, 4], [1, 2, 3, 5]]):
        pipeline = Pipeline(model, comm, loss=loss, schedule=Interleaved(2), microbatches=2, costs=[3, 1, 1, 1, 3, 3])
        assert list(pipeline.module.state_dict()) == [f"layers.{i}.weight" for i in own]


def test_inputs_and_targets_must_have_as_many_samples():
    pipeline = Pipeline(build("recurrent", np.float64)[0], loss=loss, schedule=SCHEDULES["1f1b"], microbatches=2)
    with pytest.raises(ValueError, match=r"samples on their first axis; they have \[4, 3\]"):
        pipeline.forward_backward(SERIES[:4], LABELS[:3], count=4)


class Chosen(nn.Module):
    """Rows with a positive sum only: the shape depends on the values."""

    def forward(self, x):
        return x[x.data.sum(1) > 0]


def run_chosen(comm):
    """What the first rank, whose stage it is, says against it."""
    model = nn.Sequential(Chosen(), nn.ReLU())
    with comm.split(0) as alike:  # of no further use after the error
        pipeline = Pipeline(model, alike, loss=loss, schedule=SCHEDULES["1f1b"], microbatches=1)
        try:
            pipeline.forward_backward(np.ones((4, 4), np.float32), np.zeros(4, np.int64), count=4)
        except ValueError as error:
            alike.abort()
            return str(error)
        except collectives.CollectiveError:
            return None


def test_outputs_whose_shapes_depend_on_values_are_refused():
    (*_, said), (*_, other) = two_ranks()
    assert re.search(r"stage 0 made .*\(4, 4\).*but for zeros of the same shape .*\(0, 4\)", said)
    assert other is None  # it hears that its peer gave up
