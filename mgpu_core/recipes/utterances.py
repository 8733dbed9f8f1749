"""Connected digits, made of recordings of single ones: what the speech recipe trains on and is tested with.

An utterance is three to six digits by one speaker, one recording after another, with gaps of random lengths between
them, each digit and the whole as loud as chance has it, and a little noise over everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_core import random
from mgpu_core.data.recordings import RATE, TEST_TAKES, Recordings
from mgpu_core.data.sound import BANDS, log_mel, normalise, stack

SHORTEST, LONGEST = 3, 6  # digits
GAPS = 0.0, 0.4  # seconds, at either end as well
SPEEDS = 0.88, 1.12  # in training: more voices than there are (Ko et al., "Audio augmentation", 2015)
STACKED = 4  # frames in one step of the network
_UTTERANCE = 3  # the random stream's number

Batch = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Utterance:
    """A signal (samples,) at RATE in -1 to 1, what is said, and by whom."""

    signal: NDArray[np.float32]
    digits: NDArray[np.int64]
    speaker: str


def features(signal: NDArray[Any]) -> NDArray[np.float32]:
    """What the network is given: (steps, STACKED * bands), of a signal at RATE."""
    return stack(normalise(log_mel(signal, RATE)), STACKED)


def split(recordings: Recordings, held_out: str | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of the recordings to train on, and to test with: the first takes, or all of one speaker's."""
    testing = recordings.takes < TEST_TAKES if held_out is None else recordings.speakers == held_out
    return np.flatnonzero(~testing), np.flatnonzero(testing)


def join(recordings: Recordings, chosen: NDArray[np.int64], rng: np.random.Generator, speed: float = 1.0) -> Utterance:
    """One utterance of the chosen recordings, which are one speaker's, played at another speed, and so pitch."""
    pieces = [_gap(rng)]
    for i in chosen:
        loudness = 10 ** rng.uniform(-0.3, 0.3)  # within 6 dB
        wave = recordings.waves[i]
        played = np.interp(np.arange(0, len(wave), speed), np.arange(len(wave)), wave)
        pieces += [loudness * played / 2**15, _gap(rng)]
    signal = np.concatenate(pieces) * 10 ** rng.uniform(-0.5, 0.5)
    noise = 10 ** rng.uniform(-4, -2.5)
    signal += noise * rng.standard_normal(len(signal))
    return Utterance(signal.astype(np.float32), recordings.digits[chosen], str(recordings.speakers[chosen[0]]))


def _gap(rng: np.random.Generator) -> NDArray[np.float64]:
    return np.zeros(int(rng.uniform(*GAPS) * RATE))


class TrainingUtterances:
    """Makes a new utterance for every sample of every step, the same on any number of ranks: a `Loader`'s transform.

    The loader's arrays count the samples of an epoch, and nothing else. What comes out is a `batch`. Some utterances
    are shorter than any that is tested: on those CTC finds out soonest what a digit sounds like (as with "SortaGrad",
    Amodei et al., "Deep Speech 2", 2015).
    """

    def __init__(self, recordings: Recordings, numbers: NDArray[np.int64], dtype: Any = np.float32) -> None:
        self.recordings, self.dtype = recordings, dtype
        speakers = recordings.speakers[numbers]
        self.by_speaker = [numbers[speakers == speaker] for speaker in np.unique(speakers)]

    def __call__(self, arrays: Batch) -> Batch:
        words = random.sample_words(_UTTERANCE, len(arrays[0]), 4)
        return batch([self.make(np.random.default_rng(key)) for key in words], self.dtype)

    def make(self, rng: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        own = self.by_speaker[rng.integers(len(self.by_speaker))]
        chosen = own[rng.integers(len(own), size=rng.integers(1, LONGEST + 1))]
        said = join(self.recordings, chosen, rng, speed=rng.uniform(*SPEEDS))
        return mask(features(said.signal), rng), said.digits


def mask(steps: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Features with one band of frequencies left out (SpecAugment: Park et al., arXiv:1904.08779)."""
    frames = steps.reshape(len(steps), STACKED, -1).copy()
    width = rng.integers(0, 9)
    first = rng.integers(0, frames.shape[2] - width + 1)
    frames[:, :, first : first + width] = 0
    return frames.reshape(steps.shape)


def test_utterances(recordings: Recordings, numbers: NDArray[np.int64], count: int) -> list[Utterance]:
    """At least `count` utterances of the given recordings, each of which is used about as often; always the same."""
    rng = random.generator(0, _UTTERANCE)
    made: list[Utterance] = []
    while len(made) < count:
        for speaker in np.unique(recordings.speakers[numbers]):
            own = rng.permutation(numbers[recordings.speakers[numbers] == speaker])
            while len(own):
                length = int(rng.integers(SHORTEST, LONGEST + 1))
                if len(own) >= SHORTEST:
                    made.append(join(recordings, own[:length], rng))
                own = own[length:]
    return made


def batch(samples: Sequence[tuple[NDArray[np.float32], NDArray[np.int64]]], dtype: Any) -> Batch:
    """Features (N, T, D) padded with zeros, their lengths (N,), digits (N, S) padded, and theirs (N,)."""
    lengths = np.array([len(steps) for steps, _ in samples], np.int64)
    counts = np.array([len(digits) for _, digits in samples], np.int64)
    padded = np.zeros((len(samples), max(lengths, default=1), STACKED * BANDS), dtype)
    labels = np.zeros((len(samples), max(counts, default=1)), np.int64)
    for i, (steps, digits) in enumerate(samples):
        padded[i, : len(steps)] = steps
        labels[i, : len(digits)] = digits
    return padded, lengths, labels, counts
