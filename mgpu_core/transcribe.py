"""`mgpu transcribe file.wav`: the digits said in recordings, by the network that `mgpu train speech` has trained."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mgpu_core import checkpoint, ctc
from mgpu_core.checkpoint import CheckpointError
from mgpu_core.data.recordings import RATE
from mgpu_core.data.sound import read_wave
from mgpu_core.recipes.command import positive
from mgpu_core.recipes.speech import Recogniser, listen, spell
from mgpu_core.recipes.utterances import features
from mgpu_core.trainer import CHECKPOINT

DEFAULT = Path("runs/speech") / CHECKPOINT


def load(path: Path) -> Recogniser:
    """The network of a checkpoint.

    Raises:
        FileNotFoundError: if there is none, and says how to get one.
        CheckpointError: if it is damaged, or another recipe's.
    """
    try:
        tensors, meta = checkpoint.load(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}; `mgpu train speech` makes one, in some minutes") from None
    state = {name.removeprefix("model."): array for name, array in tensors.items() if name.startswith("model.")}
    settings = meta["settings"]
    try:
        rng = np.random.default_rng(0)
        network = Recogniser(settings["size"], settings["layers"], rng=rng, dtype=settings["dtype"])
        network.load_state_dict(state)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of `mgpu train speech`: {error.args[0]}") from error
    return network


def main(argv: list[str] | None = None) -> int:
    """Print a line for each file; the exit code."""
    it = argparse.ArgumentParser("mgpu transcribe", description=(__doc__ or "").split("\n")[0])
    it.add_argument("files", type=Path, nargs="+", metavar="FILE.wav", help="recordings of English digits")
    it.add_argument("--checkpoint", type=Path, default=DEFAULT, help="the trained network (%(default)s)")
    it.add_argument("--beam", type=positive, default=16, help="readings to keep in the search; 1: greedy (%(default)s)")
    options = it.parse_args(argv)
    network = load(options.checkpoint)
    for file in options.files:
        log_p = listen(network, features(read_wave(file, RATE)))
        labels = ctc.greedy(log_p) if options.beam == 1 else ctc.beam_search(log_p, width=options.beam)
        name = f"{file}: " if len(options.files) > 1 else ""
        print(name + spell(np.array(labels, np.int64) - 1))
    return 0
