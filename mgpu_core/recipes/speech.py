"""A recurrent network reads connected spoken digits: `mgpu train speech -n 2`, then `mgpu transcribe file.wav`.

What this has beyond `image_classification`, which is the place to begin:

- The samples are made while training reads them: each is three to six recordings of the Free Spoken Digit Dataset
  joined with random gaps and loudness (`utterances`), as log-mel features (`mgpu_core.data.sound`).
- Nobody says which part of an utterance is which digit. Connectionist temporal classification (Graves et al. 2006)
  sums over all possibilities in training; to read, `mgpu_core.ctc` takes the likeliest class at each time (greedy), or
  adds up all the ways to say the same digits (beam search).
- The result is a digit error rate: digits that were wrong, missed or invented, by those that were said. It is measured
  with the recordings that the data set keeps for testing; or, with `--hold-out SPEAKER`, with a speaker whose voice the
  network has never heard. `--hold-out each` does so with each in turn, as many trainings as there are speakers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.wording import counted
from mgpu_core import Tensor, checkpoint, ctc, data, device, metrics, nn, optim, schedule
from mgpu_core.autograd import no_grad
from mgpu_core.data import Loader, Sampler
from mgpu_core.data.sound import BANDS
from mgpu_core.nn import functional as F
from mgpu_core.recipes import command, parallel
from mgpu_core.recipes.command import Say
from mgpu_core.recipes.pictures import draw_confusion, draw_utterance
from mgpu_core.recipes.utterances import STACKED, TrainingUtterances, Utterance, batch, features, split, test_utterances
from mgpu_core.trainer import CHECKPOINT, METRICS, Trainer

DEFAULTS = {
    "epochs": 24, "batch": 16, "lr": 3e-3, "seed": 0, "dtype": "float32", "hold_out": None, "size": 96, "layers": 2,
    "utterances": 2000,
}  # fmt: skip
TEST_UTTERANCES = 400
CLASSES = 11  # the blank, then digits 0 to 9
PICTURES = ("curves.png", "utterance.png", "confusion.png")


class Recogniser(nn.Module):
    """Features (N, T, D) with lengths (N,) to logits (N, T, 11): LSTM layers that read both ways, and a linear one."""

    def __init__(self, size: int, layers: int, *, rng: np.random.Generator, dtype: Any = np.float32) -> None:
        self.lstm = nn.LSTM(STACKED * BANDS, size, layers=layers, bidirectional=True, rng=rng, dtype=dtype)
        self.output = nn.Linear(2 * size, CLASSES, rng=rng, dtype=dtype)

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        return self.output(self.lstm(x, lengths))


def loss(model: Any, arrays: tuple[Any, ...]) -> Tensor:
    """The sum of the utterances' CTC losses."""
    steps, lengths, digits, counts = arrays
    return F.ctc_loss(
        model(Tensor(steps), lengths), digits + 1, lengths=lengths, target_lengths=counts, reduction="sum"
    )  # fmt: skip


class Score:
    """For each utterance its CTC loss, and its errors by the average number of digits: their mean is the error rate."""

    def __init__(self, utterances: Sequence[Utterance]) -> None:
        self.digits = np.mean([len(utterance.digits) for utterance in utterances])

    def __call__(self, model: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
        steps, lengths, digits, counts = arrays
        logits = model(Tensor(steps), lengths).to("cpu")
        lengths, digits, counts = map(device.to_host, (lengths, digits, counts))
        log_p = F.log_softmax(logits).data
        losses, wrong = np.zeros(len(lengths)), np.zeros(len(lengths))
        for i, (length, count) in enumerate(zip(lengths, counts)):
            label = digits[i : i + 1, :count] + 1
            losses[i] = F.ctc_loss(Tensor(logits.data[i : i + 1, :length]), label).item()
            wrong[i] = ctc.errors(label[0].tolist(), ctc.greedy(log_p[i, :length]))
        return {"test_loss": losses, "digit_error_rate": wrong / self.digits}


def train(comm: Any, options: argparse.Namespace, found: None) -> dict[str, Any]:
    """What every rank does; see `image_classification.train`."""
    rank, size, say = command.position(comm)
    began = time.perf_counter()
    settings = command.settle(options, DEFAULTS)
    dtype = np.dtype(options.dtype)

    recordings = data.spoken_digits(options.data, say=lambda line: None)
    for_training, for_test = split(recordings, options.hold_out)
    said = test_utterances(recordings, for_test, TEST_UTTERANCES)
    read = [(features(utterance.signal), utterance.digits) for utterance in said]
    whose = "the first takes" if options.hold_out is None else f"all of {options.hold_out}'s"
    say(f"{counted(len(for_training), 'recording')} to train on, from {recordings.origin}; {counted(size, 'rank')}")
    say(f"{len(for_test):,} to test with: {whose}")
    order = Sampler(options.utterances, options.batch, seed=options.seed)
    make = TrainingUtterances(recordings, for_training, dtype)
    unshuffled = Sampler(len(read), 50, shuffle=False)
    steps = options.epochs * order.steps
    rate = schedule.cosine(options.lr, steps=steps, warmup=steps // 10)

    build = partial(Recogniser, options.size, options.layers, rng=np.random.default_rng(options.seed), dtype=dtype)
    network = build()
    parameters = sum(parameter.size for parameter in network.parameters())
    say(f"{options.layers} LSTM layers of {options.size} units each way: {parameters:,} parameters")
    strategy = parallel.strategy(
        comm,
        options,
        network,
        partial(optim.AdamW, lr=options.lr, weight_decay=1e-2),
        sample=lambda count: make((np.arange(count),))[0],
        say=say,
    )
    training = Loader((np.arange(options.utterances),), order, transform=make, **strategy.part)
    test = Loader(
        (np.arange(len(read)),),
        unshuffled,
        transform=lambda numbers: batch([read[i] for i in numbers[0]], dtype),
        **strategy.test_part,
    )
    trainer = Trainer(
        strategy,
        rate,
        training,
        test,
        loss=command.slowed(loss, options, rank, build),
        score=Score(said),
        folder=options.out,
        settings=settings,
        unit="utterances",
        tests=options.tests,
    )
    if command.fit(trainer, options, say) and rank == 0:
        network = command.trained(build(), options).to("cpu")
        say(f"digit error rate {trainer.scores['digit_error_rate']:.2%} on {len(read)} utterances, reading greedily")
        heard = [listen(network, steps) for steps, _ in read]
        answers = [ctc.beam_search(log_p) for log_p in heard]
        wrong = sum(ctc.errors((digits + 1).tolist(), answer) for (_, digits), answer in zip(read, answers))
        say(f"{wrong / sum(len(digits) for _, digits in read):.2%} with beam search. For instance:")
        for utterance, answer in zip(said[:5], answers):
            say(f"  {spell(utterance.digits)} was read as {spell(np.array(answer) - 1)}")
        show(options, said, read, heard, answers, size)
        say(f"{time.perf_counter() - began:.0f} s in all. Look at:")
        for file in (*PICTURES, METRICS, CHECKPOINT):
            say(f"  {options.out / file}")
        say(f"mgpu transcribe FILE.wav --checkpoint {options.out / CHECKPOINT} reads a recording of yours")
    return command.outcome(trainer)


def listen(network: Recogniser, steps: NDArray[np.float32]) -> NDArray[Any]:
    """The classes' log probabilities at each step of one utterance's features, (T, 11)."""
    network.eval()
    dtype = network.output.weight.dtype
    with no_grad():
        return F.log_softmax(network(Tensor(steps[None].astype(dtype)), [len(steps)])).data[0]


def spell(digits: Any) -> str:
    """Digits with spaces between them."""
    return " ".join(map(str, digits)) or "(nothing)"


def show(
    options: argparse.Namespace,
    said: Sequence[Utterance],
    read: Sequence[tuple[NDArray[np.float32], NDArray[np.int64]]],
    heard: Sequence[NDArray[Any]],
    answers: Sequence[list[int]],
    size: int,
) -> None:
    """Draw the pictures that a finished run leaves."""
    title = f"Connected digits, {options.hold_out or 'held-out takes'}, {counted(size, 'rank')}"
    metrics.draw_curves(
        options.out / METRICS,
        options.out / "curves.png",
        title,
        loss_title="CTC loss, nats an utterance",
        score="digit_error_rate",
        unit="utterances",
    )
    pairs = [pair for (_, digits), answer in zip(read, answers) for pair in ctc.match((digits + 1).tolist(), answer)]
    labels, found = (np.array([10 if label is None else label - 1 for label in side]) for side in zip(*pairs))
    draw_confusion(labels, found, (*"0123456789", "–"), options.out / "confusion.png")
    draw_utterance(
        said[0].signal,
        read[0][0].reshape(-1, BANDS),
        np.exp(heard[0]),
        [(str(label - 1), *when) for label, when in zip(answers[0], ctc.align(heard[0], answers[0]))],
        options.out / "utterance.png",
        f"{said[0].speaker} says {spell(said[0].digits)}, read as {spell(np.array(answers[0]) - 1)}",
    )


def find(options: argparse.Namespace, say: Say) -> None:
    """Find or fetch the recordings, once for all ranks."""
    recordings = data.spoken_digits(options.data, say=say)
    speakers = np.unique(recordings.speakers).tolist()
    if options.hold_out not in (None, *speakers):
        raise data.DatasetError(f"nobody is called {options.hold_out}; the speakers are {', '.join(speakers)}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = command.parser("speech", __doc__, DEFAULTS, samples="utterances", seed="what they are made of")
    add = it.add_argument
    add("--utterances", type=command.positive, help="made in an epoch (2000)")
    add("--hold-out", metavar="SPEAKER", help="test with all of a speaker's recordings; each: with each in turn")
    add("--size", type=command.positive, help="units of a layer in each direction (96)")
    add("--layers", type=command.positive, help="LSTM layers (2)")
    add("--data", type=Path, help="folder in which to look for the recordings first ($MGPU_DATA)")
    return it


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code: 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(argv)
    if options.hold_out != "each":
        return command.run(parser(), argv, find, train)
    rates = {}
    for speaker in np.unique(data.spoken_digits(options.data).speakers).tolist():
        out = options.out / speaker
        if code := command.run(parser(), [*argv, "--hold-out", speaker, "--out", str(out)], find, train):
            return code
        rates[speaker] = checkpoint.read_meta(out / CHECKPOINT)["scores"].get("digit_error_rate", float("nan"))
    print("digit error rates of speakers whom the network has not heard before:")
    for speaker, rate in rates.items():
        print(f"  {speaker:10} {rate:7.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
