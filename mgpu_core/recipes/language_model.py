"""A small transformer learns to write Python, byte by byte: `mgpu train language-model -n 2`.

The text is the source of Python's standard library, which every machine has; every tenth of its files is kept for
the test. What this has beyond `image_classification`, which is the place to begin:

- A sample is a piece of text, and its loss the mean over its bytes of what the network failed to foresee of the next
  one. The test says it in bits per byte, which is also the size to which the network would compress the files.
- AdamW (Loshchilov and Hutter 2019), and gradients are never divided unevenly: all pieces are of one length.
- At the end the network writes: byte after byte is drawn from what it holds likely after those before.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from collectives.wording import counted
from mgpu_core import Tensor, metrics, nn, optim, random, schedule
from mgpu_core.autograd import no_grad
from mgpu_core.data import Loader, Sampler, text
from mgpu_core.nn import functional as F
from mgpu_core.recipes import command, parallel
from mgpu_core.recipes.command import Say
from mgpu_core.trainer import CHECKPOINT, METRICS, Trainer

DEFAULTS = {
    "epochs": 1, "batch": 16, "lr": 2e-3, "seed": 0, "dtype": "float32",
    "length": 128, "size": 128, "layers": 4, "heads": 4,
}  # fmt: skip
BYTES = 256
TEST_PIECES = 1000  # at most, spread over the held-out files
PROMPT = b"def read(self, size):\n"
_SAMPLE = 4  # the random stream's number


def network(
    *, length: int, size: int, layers: int, heads: int, rng: np.random.Generator, dtype: Any = np.float32
) -> nn.Sequential:
    """(n, up to `length`) bytes to (n, length, 256) logits of the byte after each."""
    embedding = (
        nn.Embedding(BYTES, size, rng=rng, dtype=dtype),
        nn.PositionalEmbedding(length, size, rng=rng, dtype=dtype),
    )
    blocks = [nn.TransformerBlock(size, heads, causal=True, rng=rng, dtype=dtype) for _ in range(layers)]
    ends = nn.LayerNorm(size, dtype=dtype), nn.Linear(size, BYTES, rng=rng, dtype=dtype)
    for part in embedding:
        part.weight.data *= 0.02  # small beginnings, as GPT-2's (Radford et al. 2019): the first loss is near log 256
    return nn.Sequential(*embedding, *blocks, *ends)


def loss(model: Any, arrays: tuple[Any, ...]) -> Tensor:
    """The sum over the pieces of their mean cross-entropy per byte."""
    before, after = arrays
    return F.cross_entropy(model(before), after, reduction="sum") / after.shape[1]


def score(model: Any, arrays: tuple[Any, ...]) -> dict[str, Any]:
    """For each piece its mean cross-entropy per byte, in nats and in bits."""
    before, after = arrays
    log_p = F.log_softmax(model(before)).data
    nats = -array_namespace(log_p).take_along_axis(log_p, after[:, :, None], axis=2).mean(axis=(1, 2))
    return {"test_loss": nats, "bits_per_byte": nats / math.log(2)}


def train(comm: Any, options: argparse.Namespace, found: None) -> dict[str, Any]:
    """What every rank does; see `image_classification.train`."""
    rank, size, say = command.position(comm)
    began = time.perf_counter()
    settings = command.settle(options, DEFAULTS)
    dtype = np.dtype(options.dtype)

    source = text.standard_library(options.data)
    pieces, held_out = text.windows(source.train, options.length), text.windows(source.test, options.length)
    held_out = held_out[:: -(-len(held_out) // TEST_PIECES)]
    say(
        f"{counted(source.files[0], 'file')}, {len(source.train):,} bytes, from {source.origin}; "
        f"{counted(size, 'rank')}"
    )
    say(f"{counted(source.files[1], 'file')} to test with, {held_out[:, 1:].size:,} bytes of them")
    order = Sampler(len(pieces), options.batch, seed=options.seed)
    unshuffled = Sampler(len(held_out), 32, shuffle=False)
    steps = options.epochs * order.steps
    rate = schedule.cosine(options.lr, steps=steps, warmup=steps // 20, final=options.lr / 10)

    build = partial(
        network,
        length=options.length,
        size=options.size,
        layers=options.layers,
        heads=options.heads,
        rng=np.random.default_rng(options.seed),
        dtype=dtype,
    )
    writer = build()
    parameters = sum(parameter.size for parameter in writer.parameters())
    say(f"{options.layers} transformer blocks {options.size} wide: {parameters:,} parameters; {counted(steps, 'step')}")
    strategy = parallel.strategy(
        comm,
        options,
        writer,
        partial(optim.AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1),
        sample=lambda count: foresee((pieces[:count],))[0],
        say=say,
        recomputed=(nn.TransformerBlock,) if options.recompute else (),
    )
    training = Loader((pieces,), order, transform=foresee, **strategy.part)
    test = Loader((held_out,), unshuffled, transform=foresee, **strategy.test_part)
    trainer = Trainer(
        strategy,
        rate,
        training,
        test,
        loss=command.slowed(loss, options, rank, build),
        score=score,
        folder=options.out,
        settings=settings,
        unit="pieces",
        tests=options.tests,
    )
    if command.fit(trainer, options, say) and rank == 0:
        metrics.draw_curves(
            options.out / METRICS,
            options.out / "curves.png",
            f"The standard library's source, {counted(size, 'rank')}",
            loss_title="cross-entropy, nats a byte",
            score="bits_per_byte",
            percent=False,
            unit=f"pieces of {options.length} bytes",
        )
        written = write(command.trained(build(), options).to("cpu"), PROMPT, options.length, 400, seed=options.seed)
        (options.out / "sample.txt").write_bytes(written)
        say(f"{trainer.scores['bits_per_byte']:.3f} bits per byte on held-out files. It writes:\n")
        say(written.decode("utf-8", errors="replace") + "\n")
        say(f"{time.perf_counter() - began:.0f} s in all. Look at:")
        for file in ("curves.png", "sample.txt", METRICS, CHECKPOINT):
            say(f"  {options.out / file}")
    return command.outcome(trainer)


def foresee(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pieces (n, length + 1) of bytes to all but their last ones, and the ones that follow those: (n, length) int64."""
    pieces = arrays[0].astype(np.int64)
    return np.ascontiguousarray(pieces[:, :-1]), np.ascontiguousarray(pieces[:, 1:])


def write(model: nn.Module, prompt: bytes, length: int, count: int, *, seed: int, temperature: float = 0.7) -> bytes:
    """`prompt` and `count` bytes more, each drawn with the probabilities, raised to 1 / temperature, that the model
    gives it after the last `length` bytes."""
    model.eval()
    rng = random.generator(seed, _SAMPLE)
    written = list(prompt)
    with no_grad():
        for _ in range(count):
            logits = model(np.array([written[-length:]])).data[0, -1].astype(np.float64) / temperature
            # The largest of logits plus Gumbel noise is a draw from their softmax (Gumbel 1954).
            written.append(int(np.argmax(logits + rng.gumbel(size=BYTES))))
    return bytes(written)


def find(options: argparse.Namespace, say: Say) -> None:
    """See that there is text, before ranks are started."""
    text.standard_library(options.data)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = command.parser("language-model", __doc__, DEFAULTS, samples="pieces of text", seed="their order")
    add = it.add_argument
    add("--length", type=command.positive, help="bytes of a piece (128)")
    add("--size", type=command.positive, help="width of the network (128)")
    add("--layers", type=command.positive, help="transformer blocks (4)")
    add("--heads", type=command.positive, help="of attention (4)")
    add("--recompute", action="store_true", help="keep less for backward: run the transformer blocks once more there")
    add("--data", type=Path, help="folder of Python files to learn instead of the standard library")
    return it


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code: 130 after Ctrl-C."""
    return command.run(parser(), argv, find, train)


if __name__ == "__main__":
    sys.exit(main())
