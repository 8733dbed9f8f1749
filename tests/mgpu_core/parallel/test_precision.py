"""Mixed precision with every way to share the work: one scale on all ranks, and about the loss of float32."""

import numpy as np
import pytest

from mgpu_core import nn, optim, schedule
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel import Asynchronous, LocalSGD, Rounds, StrategyError, Workers
from mgpu_core.precision import Precision
from mgpu_core.recipes import command, parallel
from mgpu_core.tensor import Tensor
from mgpu_core.trainer import Trainer

COUNT, BATCH, EPOCHS = 60, 12, 3
STEPS = EPOCHS * COUNT // BATCH
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, COUNT)
INPUTS = (RNG.standard_normal((COUNT, 6)) + LABELS[:, None]).astype(np.float32)
WAYS = ["dp", "zero3", "pp --schedule zero-bubble --microbatches 2"]
MORE = ["zero1", "zero2", "pp --microbatches 2", "tp"]
OVERFLOW = 4  # the step in which a gradient of one rank is made to overflow


def network():
    rng = np.random.default_rng(1)
    return nn.Sequential(
        nn.Linear(6, 16, rng=rng), nn.ReLU(), nn.Linear(16, 16, rng=rng), nn.ReLU(), nn.Linear(16, 3, rng=rng)
    )


def trainer(comm, text, folder=None, overflow=None, interval=2000):
    defaults = {"epochs": EPOCHS, "batch": BATCH, "lr": 0.1, "seed": 3, "dtype": "float32"}
    options = command.parser("x", "", defaults, samples="samples", seed="order").parse_args(text.split())
    command.settle(options, defaults)
    make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    strategy = parallel.strategy(
        comm, options, network(), make, sample=lambda count: INPUTS[:count], say=lambda line: None
    )
    strategy.precision = Precision(options.precision, interval=interval)

    def loss(model, arrays):
        inputs, labels = arrays
        total = F.cross_entropy(model(Tensor(inputs)), labels, reduction="sum")
        hit = overflow is not None and run.steps_done == OVERFLOW and overflow == comm.rank
        return total + (total - total.detach()) * 2.0**16 if hit else total  # the same loss, of a large gradient

    def score(model, arrays):
        inputs, labels = arrays
        return {"accuracy": model(Tensor(inputs)).data.argmax(axis=1) == labels}

    training = Loader((INPUTS, LABELS), Sampler(COUNT, BATCH, seed=3), **strategy.part)
    test = Loader((INPUTS, LABELS), Sampler(COUNT, 20, shuffle=False), **strategy.test_part)
    run = Trainer(strategy, schedule.cosine(0.1, steps=STEPS), training, test, loss=loss, score=score, folder=folder)
    return run


def losses(run):
    found = []
    step = run.strategy.step
    run.strategy.step = lambda *arguments, **options: found.append(step(*arguments, **options)) or found[-1]
    run.fit(EPOCHS)
    return [done.loss for done in found]


def train(comm, way):
    """Losses by precision, and what the ranks agree in after an overflow in one of them."""
    curves = {name: losses(trainer(comm, f"--parallel {way} --precision {name}")) for name in ("bfloat16", "float16")}
    if way == "tp":  # where both ranks have all of the loss
        return curves, None
    run = trainer(comm, f"--parallel {way} --precision float16", overflow=comm.size - 1)  # that has a pipeline's loss
    losses(run)
    return curves, (run.strategy.precision.state(), run.strategy.optimizer.steps, run.scores["loss_scale"])


@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_every_way_to_share_the_work(crew, ways):
    alone = {name: losses(trainer(None, f"--precision {name}")) for name in ("float32", "bfloat16", "float16")}
    assert alone["float32"][-1] < 0.9 * alone["float32"][0]
    for way in ways:
        results = crew(train, 2, args=(way,))
        for name, curve in results[0][0].items():
            np.testing.assert_allclose(curve, alone[name], rtol=0.03, atol=0.01, err_msg=f"{way} {name}")
            np.testing.assert_allclose(curve, alone["float32"], rtol=0.05, atol=0.02, err_msg=f"{way} {name}")
            assert curve != alone["float32"], "nothing was rounded"
        for _, after in results:
            state = {"scale": 2.0**15, "steps": STEPS - OVERFLOW - 1, "skipped": 1}
            assert after in (None, (state, STEPS - 1, 2.0**15)), way


@pytest.mark.parametrize("stop", [4, 7])
def test_the_scale_goes_on_from_a_checkpoint(tmp_path, stop):
    text = "--precision float16"
    whole = trainer(None, text, interval=3)
    whole.fit(EPOCHS)
    for steps in (stop, None):
        run = trainer(None, text, tmp_path, interval=3)
        if steps is None:
            run.resume(tmp_path / "checkpoint.safetensors")
        run.fit(EPOCHS, steps=steps)
    assert run.strategy.precision.state() == whole.strategy.precision.state()
    assert run.strategy.precision.scale > 2.0**16
    for name, array in whole.strategy.module.state_dict().items():
        np.testing.assert_array_equal(run.strategy.module.state_dict()[name], array)
    other = trainer(None, "--precision float32", tmp_path)  # in another precision it goes on as well
    other.resume(tmp_path / "checkpoint.safetensors")
    assert other.strategy.precision.scale == 1


def refuse(comm):
    make = lambda p: optim.SGD(p, lr=0.1)  # noqa: E731
    model = network()
    local = LocalSGD(model, comm, make(model.parameters()), every=2)
    for strategy in (Workers(Asynchronous(network(), comm, make)), Rounds(local)):
        strategy.precision = Precision("bfloat16")
        with pytest.raises(StrategyError, match="use bfloat16"):
            strategy.precision = Precision("float16")
    return True


def test_ranks_that_take_no_steps_together_scale_nothing(crew):
    assert crew(refuse, 2) == [True, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--precision float16 --parallel async", "--parallel async cannot"),
        ("--precision float16 --parallel local", "--parallel local cannot"),
        ("--precision float16 --hook int8", "--hook int8 would go on adding up"),
        ("--precision bfloat16 --dtype float64", "leave --dtype out"),
    ],
)
def test_the_command_line_refuses_what_does_not_go_together(text, words):
    defaults = {"epochs": 1, "batch": 1, "lr": 0.1, "seed": 3, "dtype": "float32"}
    options = command.parser("x", "", defaults, samples="samples", seed="order").parse_args(text.split())
    with pytest.raises(StrategyError, match=words):
        parallel.check(options, 2)


@pytest.mark.parametrize("text", ["--precision bfloat16 --parallel async", "--precision float16 --hook bf16"])
def test_and_takes_what_does(text):
    defaults = {"epochs": 1, "batch": 1, "lr": 0.1, "seed": 3, "dtype": "float32"}
    options = command.parser("x", "", defaults, samples="samples", seed="order").parse_args(text.split())
    assert parallel.check(options, 2) == {"data": 2}
