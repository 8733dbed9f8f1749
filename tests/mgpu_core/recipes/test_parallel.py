"""Every value of --parallel, through the trainer: against one process, from checkpoint to checkpoint, and refused."""

import argparse
import os
import re
import signal
import sys
from functools import cache, partial
from pathlib import Path

import fakecupy
import numpy as np
import pytest

from mgpu_core import Tensor, checkpoint, metrics, nn, optim, schedule
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel import Asynchronous, DataParallel, Sharded, StrategyError, Synchronous
from mgpu_core.parallel.hooks import BlockInt8, PowerSGD
from mgpu_core.recipes import command, language_model, parallel
from mgpu_core.trainer import Trainer

sys.path.append(str(Path(__file__).parents[2] / "collectives"))  # for `import fakegpu`; ranks inherit it

COUNT, BATCH, EPOCHS = 44, 8, 2  # six steps an epoch, the last of four samples
STEPS = -(-COUNT // BATCH)
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, COUNT)
IMAGES = RNG.standard_normal((COUNT, 1, 6, 6)) + LABELS[:, None, None, None]
TEXTS = RNG.integers(0, 11, (COUNT, 7))
LIKE_ONE_PROCESS = {  # on two ranks
    "dp": "--parallel dp",
    "speeds": "--parallel dp --speeds 3,1",
    "measured": "--parallel dp --speeds auto",
    "zero1": "--parallel zero1",
    "zero2": "--parallel zero2",
    "zero3": "--parallel zero3",
    "tp": "--parallel tp",
    "pp": "--parallel pp --microbatches 3",
    "gpipe": "--parallel pp --schedule gpipe",
    "hybrid": "--parallel hybrid --mesh data=-1",
}
ON_FOUR = {
    "hybrid": "--parallel hybrid",
    "tensor x pipeline": "--parallel hybrid --mesh tensor=2,pipeline=2",
    "data x pipeline": "--parallel hybrid --mesh data=2,pipeline=-1",
    "zero3 x tensor": "--parallel zero3 --mesh data=2,tensor=2",
}


def convolutional(rng):
    dtype = np.float64
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, rng=rng, dtype=dtype),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 9, rng=rng, dtype=dtype),
        nn.ReLU(),
        nn.Linear(9, 3, rng=rng, dtype=dtype),
    )


def transformer(rng):
    return language_model.network(length=6, size=8, layers=2, heads=2, rng=rng, dtype=np.float64)


def image_loss(model, arrays):
    images, labels = arrays
    return F.cross_entropy(model(Tensor(images)), labels, reduction="sum")


def image_score(model, arrays):
    images, labels = arrays
    return {"accuracy": model(Tensor(images)).data.argmax(axis=1) == labels, "ones": np.ones(len(labels))}


MODELS = {
    "image": (convolutional, (IMAGES, LABELS), image_loss, image_score),
    "text": (transformer, language_model.foresee((TEXTS,)), language_model.loss, language_model.score),
}


def options_of(text, batch=BATCH):
    defaults = {"epochs": EPOCHS, "batch": batch, "lr": 0.1, "seed": 3, "dtype": "float64"}
    options = command.parser("x", "", defaults, samples="samples", seed="order").parse_args(text.split())
    command.settle(options, defaults)
    return options


def trainer(comm, text, kind, folder=None, optimizer=None, loss=None):
    build, arrays, usual_loss, score = MODELS[kind]
    options = options_of(text)
    if optimizer is None:  # not Adam for attention: it would make steps of the keys' biases, whose gradients are zero
        optimizer = partial(optim.AdamW, lr=0.1) if kind == "image" else partial(optim.SGD, lr=0.1, momentum=0.9)
    sample = lambda count: arrays[0][:count]  # noqa: E731
    strategy = parallel.strategy(
        comm, options, build(np.random.default_rng(1)), optimizer, sample=sample, say=lambda line: None
    )
    training = Loader(arrays, Sampler(COUNT, BATCH, seed=3), **strategy.part)
    test = Loader(arrays, Sampler(COUNT, 5, shuffle=False), **strategy.test_part)
    rate = schedule.cosine(0.02 if kind == "image" else 0.1, steps=EPOCHS * STEPS, warmup=2)
    return Trainer(strategy, rate, training, test, loss=loss or usual_loss, score=score, folder=folder)


def checked(tensors, reference):
    assert tensors.keys() == reference.keys()
    for name, array in reference.items():
        np.testing.assert_allclose(tensors[name], array, rtol=1e-10, atol=1e-12, err_msg=name)


def run(comm, text, kind, folder):
    trained = trainer(comm, text, kind, folder)
    trained.fit(EPOCHS)
    return trained.scores


def run_all(comm, ways, kind, folder):
    return {name: run(comm, text, kind, folder / name.replace(" ", "")) for name, text in ways.items()}


def relay(comm, kind, folder):
    """One run, which every way takes a step further, from the checkpoint that the one before has left."""
    for i, text in enumerate(LIKE_ONE_PROCESS.values()):
        stage = trainer(comm, text, kind, folder)
        if i:
            stage.resume(folder / "checkpoint.safetensors")
        assert stage.steps_done == i
        stage.fit(EPOCHS, steps=1)
    stage = trainer(comm, "--parallel zero1", kind, folder)
    stage.resume(folder / "checkpoint.safetensors")
    stage.fit(EPOCHS)


@pytest.fixture(scope="module")
def alone_with(tmp_path_factory):
    """What one process comes to, by the kind of model: the scores, and the checkpoint's tensors."""

    @cache
    def alone(kind):
        folder = tmp_path_factory.mktemp("alone")
        scores = run(None, "", kind, folder)
        return scores, checkpoint.load(folder / "checkpoint.safetensors")[0]

    return alone


@pytest.fixture(params=list(MODELS))
def alone(request, alone_with):
    """The kind of model, the scores, and the checkpoint's tensors."""
    return request.param, *alone_with(request.param)


def test_it_follows_one_process_and_saves_what_it_saves(crew, alone, tmp_path):
    kind, scores, tensors = alone
    for size, ways in ((2, LIKE_ONE_PROCESS), (4, ON_FOUR)):
        if kind == "text":  # a second network tells more only of ways that cut it
            ways = {name: way for name, way in ways.items() if re.search("tp|pp|hybrid|tensor", way)}
        for rank in crew(run_all, size, (ways, kind, tmp_path)):
            for name in ways:
                for score, value in scores.items():
                    assert rank[name][score] == pytest.approx(value, rel=1e-10), (name, score)
        for name in ways:
            checked(checkpoint.load(tmp_path / name.replace(" ", "") / "checkpoint.safetensors")[0], tensors)


def test_a_run_goes_from_way_to_way(crew, alone, tmp_path):
    kind, _, tensors = alone
    crew(relay, 2, (kind, tmp_path))
    checked(checkpoint.load(tmp_path / "checkpoint.safetensors")[0], tensors)
    steps = [record for record in metrics.read(tmp_path / "metrics.jsonl") if record["event"] == "step"]
    assert [record["samples"] for record in steps] == sorted({record["samples"] for record in steps})
    assert len(steps) == EPOCHS * STEPS


# On GPUs in memory


def run_on_gpus(comm, ways, kind, folder):
    """`run_all` on the device "cuda"; also whether all parameters were there."""
    from fakegpu import on_gpu

    found = {}
    for name, text in ways.items():
        gpu, driver = on_gpu(comm)
        with fakecupy.installed(), gpu:
            fakecupy.settle.append(lambda: driver.synchronize(0))
            try:
                trained = trainer(gpu, f"{text} --device cuda", kind, folder / name.replace(" ", ""))
                trained.fit(EPOCHS)
                there = all(parameter.device == "cuda" for parameter in trained.strategy.module.parameters())
                found[name] = trained.scores, there
            finally:
                fakecupy.settle.clear()
        assert not driver.errors, driver.errors
    return found


def some(name, size, kind, slow=True):
    return pytest.param(name, size, kind, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        some("dp", 2, "image"),
        some("speeds", 2, "image"),
        some("zero1", 2, "image", slow=False),
        some("zero2", 2, "image"),
        some("tp", 2, "image"),
        some("tp", 2, "text", slow=False),
        some("pp", 2, "image", slow=False),
        some("gpipe", 2, "text"),
        some("hybrid", 4, "text"),
        some("tensor x pipeline", 4, "image"),
        some("data x pipeline", 4, "image"),
    ],
)
def test_on_gpus_it_follows_one_process_of_the_cpu(crew, alone_with, tmp_path, name, size, kind):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    scores, tensors = alone_with(kind)
    way = {name: (LIKE_ONE_PROCESS if size == 2 else ON_FOUR)[name]}
    for rank in crew(run_on_gpus, size, (way, kind, tmp_path)):
        found, there = rank[name]
        assert there
        for score, value in scores.items():
            assert found[score] == pytest.approx(value, rel=1e-9), score
    checked(checkpoint.load(tmp_path / name.replace(" ", "") / "checkpoint.safetensors")[0], tensors)


@pytest.mark.parametrize("way", ["--parallel local --every 3", "--hook bf16"])
def test_on_gpus_it_loses_what_it_loses_on_the_cpu(crew, tmp_path, way):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    crew(run_all, 2, ({"cpu": way}, "image", tmp_path))
    crew(run_on_gpus, 2, ({"cuda": way}, "image", tmp_path))
    here, there = (checkpoint.load(tmp_path / name / "checkpoint.safetensors")[0] for name in ("cpu", "cuda"))
    checked(there, here)


def refused_on_gpus(comm):
    from fakegpu import on_gpu

    gpu, driver = on_gpu(comm)
    said = []
    with fakecupy.installed(), gpu:
        here, there = (nn.Linear(2, 2, rng=np.random.default_rng(0)).to(where) for where in ("cpu", "cuda"))
        sgd = partial(optim.SGD, lr=0.1)
        fakecupy.settle.append(lambda: driver.synchronize(0))
        try:
            for make in (
                lambda: DataParallel(there, gpu, hook=BlockInt8()),
                lambda: DataParallel(there, gpu, hook=PowerSGD()),
                lambda: Sharded(there, gpu, stage=3),
                lambda: Asynchronous(there, comm, sgd),
                lambda: Asynchronous(here, gpu, sgd),
                lambda: Synchronous(DataParallel(there, gpu), sgd(there.named_parameters()), speeds="auto"),
                lambda: DataParallel(there, comm),
            ):
                with pytest.raises((ValueError, TypeError)) as caught:
                    make()
                said.append(str(caught.value))
        finally:
            fakecupy.settle.clear()
    return said


def test_what_is_for_the_host_alone_says_what_to_take_on_gpus(crew):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    wanted = ("BlockInt8.*Bfloat16", "PowerSGD.*Bfloat16", "stage 1 or 2", "DataParallel, Sharded", 'init."shm"')
    for said in crew(refused_on_gpus, 2):
        for text, expected in zip(said, (*wanted, r"give numbers, as \[3, 1\]", "use backend='cuda'"), strict=True):
            assert re.search(expected, text)


# Asynchronous and local training promise less


def apart(comm, text, kind, folder):
    """Trained in two parts, of which the second resumes the first; and what this rank ends with."""
    first = trainer(comm, text, kind, folder)
    first.fit(EPOCHS, steps=4)
    assert first.steps_done == 4
    second = trainer(comm, text, kind, folder)
    second.resume(folder / "checkpoint.safetensors")
    assert {n: a.tolist() for n, a in first.strategy.module.state_dict().items()} == {
        n: a.tolist() for n, a in second.strategy.module.state_dict().items()
    }
    second.fit(8)
    return second.scores, second.strategy.module.state_dict()


@pytest.mark.parametrize(
    "text", ["--parallel async", "--parallel ssp --bound 1 --staleness-aware", "--parallel local --every 3"]
)
def test_apart_they_learn_agree_and_resume(crew, tmp_path, text):
    results = crew(apart, 2, (text, "image", tmp_path))
    for scores, state in results:
        assert scores == results[0][0] and scores["ones"] == 1 and scores["accuracy"] > 0.6
        for name, array in results[0][1].items():
            np.testing.assert_array_equal(state[name], array)
    saved = checkpoint.load(tmp_path / "checkpoint.safetensors")[0]
    for name, array in results[0][1].items():
        np.testing.assert_array_equal(saved[f"model.{name}"], array)
    assert saved["optimizer.steps"] == 8 * STEPS
    assert "staleness" in results[0][0] or "local" in text
    trainer(None, "", "image").resume(tmp_path / "checkpoint.safetensors")  # one process can go on with it


def meeting_always(comm, folder):
    plain = partial(optim.SGD, lr=0.1)
    for name, text in (("dp", "--parallel dp"), ("local", "--parallel local --every 1")):
        trainer(comm, text, "image", folder / name, optimizer=plain).fit(1)


def test_meeting_after_every_step_is_synchronous_training(crew, tmp_path):
    crew(meeting_always, 2, (tmp_path,))
    dp, local = (checkpoint.load(tmp_path / name / "checkpoint.safetensors")[0] for name in ("dp", "local"))
    checked(local, dp)


def interrupted(comm, ways):
    """By way, whether it stopped, and after how many steps, where the last rank is signalled in its second."""
    ended = []
    for text in ways:
        signalled = []

        def loss(model, arrays, signalled=signalled):
            if comm.rank == comm.size - 1 and not signalled and run.steps_done:
                signalled.append(True)
                os.kill(os.getpid(), signal.SIGINT)
            return image_loss(model, arrays)

        run = trainer(comm, text, "image", loss=loss)
        run.fit(20)
        ended.append((run.interrupted, run.steps_done))
    return ended


def test_a_signal_to_one_rank_stops_all_after_the_same_step(crew):
    ways = [f"--parallel {way}" for way in ("dp", "zero2", "pp", "async", "ssp", "local")]
    one, other = crew(interrupted, 2, (ways,))
    assert one == other
    for way, (stopped, steps) in zip(ways, one):
        assert stopped and 2 <= steps < 20, way
    assert [steps for _, steps in one[:3]] == [2, 2, 2]


# Refused


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        ("--parallel pp", 1, "at least 2"),
        ("--parallel tp", 1, "at least 2"),
        ("--parallel hybrid", 2, "4, 6"),
        ("--parallel hybrid --mesh data=2,tensor=2", 2, "4 places.*2 ranks"),
        ("--parallel hybrid --mesh depth=2", 2, "tensor, data, pipeline, not depth"),
        ("--parallel hybrid --mesh 2x2", 4, "data=2,tensor=2, not '2x2'"),
        ("--parallel hybrid --mesh data=0", 2, "from 1"),
        ("--parallel dp --mesh data=2", 2, "--mesh is for --parallel hybrid"),
        ("--parallel zero1 --mesh pipeline=2", 2, "not pipeline"),
        ("--parallel zero1 --hook bf16", 2, "--hook is for --parallel dp, hybrid; this is zero1"),
        ("--parallel tp --speeds auto", 2, "--speeds is for"),
        ("--speeds 1,2,3", 2, "2 ranks need 2 speeds"),
        ("--bound 3", 2, "--bound is for --parallel ssp"),
        ("--parallel ssp --bound -1", 2, "from 0"),
        ("--parallel async --delay-compensation nan", 2, "a finite number from 0"),
        ("--staleness-aware", 2, "--staleness-aware is for --parallel async, ssp"),
        ("--parallel pp --slow-rank 1", 2, "--slow-rank is for"),
        ("--slow-rank 2", 2, "none of the ranks 0 to 1"),
    ],
)
def test_what_cannot_work_is_refused_before_ranks_start(text, ranks, said):
    with pytest.raises(StrategyError, match=said):
        parallel.check(options_of(text), ranks)


def refused(comm, text):
    build = lambda rng: nn.Sequential(nn.Linear(2, 2, rng=rng), nn.Dropout(0.1, rng=rng))  # noqa: E731
    with pytest.raises(ValueError) as caught:
        parallel.strategy(
            comm,
            options_of(text),
            build(np.random.default_rng(0)) if "tp" in text else nn.Linear(2, 2, rng=np.random.default_rng(0)),
            partial(optim.SGD, lr=0.1),
            sample=lambda count: np.zeros((count, 2), np.float32),
            say=lambda line: None,
        )
    return str(caught.value)


def test_a_model_that_cannot_be_cut_is_refused_on_every_rank(crew):
    for text, said in (("--parallel tp", "cut no layer of Sequential"), ("--parallel pp", "layers of a Sequential")):
        assert all(said in message for message in crew(refused, 2, (text,)))


def test_the_checkpoints_settings_name_the_way():
    options = argparse.Namespace(**vars(options_of("--parallel ssp --bound 2")))
    assert command.settle(options, {}) == {"precision": "float32", "parallel": "ssp", "bound": 2}
    assert Path(command.__file__).exists()
