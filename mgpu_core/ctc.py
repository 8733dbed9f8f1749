"""Reading what a network trained with CTC says: decoding, alignment, and how many labels are wrong.

`functional.ctc_loss` trains it. Everything here is for one sequence: `log_probabilities` (times, classes), normalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def greedy(log_probabilities: NDArray[Any], *, blank: int = 0) -> list[int]:
    """The labels on the likeliest path: the likeliest class at each time, repetitions merged and blanks left out."""
    path = log_probabilities.argmax(axis=1)
    changes = np.flatnonzero(np.diff(path, prepend=-1))
    return [int(label) for label in path[changes] if label != blank]


def beam_search(log_probabilities: NDArray[Any], *, width: int = 16, blank: int = 0) -> list[int]:
    """The likeliest labels, nearly: the probabilities of all paths to the same labels are added up.

    Prefix beam search (Graves 2006; Hannun et al., arXiv:1408.2873): at each time the `width` likeliest beginnings are
    kept, each with the probability of having just ended in a blank, and of not. With `width` large enough it is exact.
    """
    beams: _Beams = {(): (0.0, _NEVER)}
    for step in log_probabilities.tolist():
        extended: _Beams = {}
        for prefix, (in_blank, in_label) in beams.items():
            total = _log_add(in_blank, in_label)
            _add(extended, prefix, total + step[blank], _NEVER)
            for label, log_p in enumerate(step):
                if label == blank:
                    continue
                if prefix and prefix[-1] == label:  # again with a blank in between, or the same one for longer
                    _add(extended, (*prefix, label), _NEVER, in_blank + log_p)
                    _add(extended, prefix, _NEVER, in_label + log_p)
                else:
                    _add(extended, (*prefix, label), _NEVER, total + log_p)
        ranked = sorted(extended.items(), key=lambda beam: -_log_add(*beam[1]))
        beams = dict(ranked[:width])
    return list(next(iter(beams)))


_Beams = dict[tuple[int, ...], tuple[float, float]]  # log probabilities: ended in a blank, and not
_NEVER = -math.inf


def _add(beams: _Beams, prefix: tuple[int, ...], in_blank: float, in_label: float) -> None:
    before = beams.get(prefix, (_NEVER, _NEVER))
    beams[prefix] = _log_add(before[0], in_blank), _log_add(before[1], in_label)


def _log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    if a < b:
        a, b = b, a
    return a if b == _NEVER else a + math.log1p(math.exp(b - a))


def align(log_probabilities: NDArray[Any], labels: Sequence[int], *, blank: int = 0) -> list[tuple[int, int]]:
    """When each label is said: its first time and the one after its last, on the likeliest path that reads `labels`.

    Raises ValueError where the labels do not fit into the times.
    """
    states = np.full(2 * len(labels) + 1, blank)
    states[1::2] = labels
    skips = np.zeros(len(states), bool)  # from the label before, past a blank
    skips[2:] = (states[2:] != blank) & (states[2:] != states[:-2])
    times = len(log_probabilities)
    score = np.full(len(states), -np.inf)
    score[:1] = 0.0  # as if in the first blank before the first time
    came_by = np.zeros((times, len(states)), np.int8)
    for t in range(times):
        choices = np.full((3, len(states)), -np.inf)
        choices[0] = score
        choices[1, 1:] = score[:-1]
        choices[2, 2:] = np.where(skips[2:], score[:-2], -np.inf) if t else -np.inf
        came_by[t] = choices.argmax(axis=0)
        score = choices.max(axis=0) + log_probabilities[t, states]
    ends = range(max(0, len(states) - 2), len(states))
    state = max(ends, key=lambda s: score[s])
    if not np.isfinite(score[state]):
        raise ValueError(f"{len(labels)} labels do not fit into {times} times")
    path = np.empty(times, np.int64)
    for t in reversed(range(times)):
        path[t] = state
        state -= int(came_by[t, state])
    return [
        (int(at[0]), int(at[-1]) + 1)
        for at in (np.flatnonzero(path == s) for s in range(1, len(states), 2))
    ]  # fmt: skip


def match(labels: Sequence[int], found: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """`labels` beside `found` with as few differences as can be (Levenshtein 1966).

    Pairs; None stands where one of them has nothing: a label that was missed, or one that was never said.
    """
    costs = np.zeros((len(labels) + 1, len(found) + 1), np.int64)
    costs[:, 0], costs[0, :] = range(len(labels) + 1), range(len(found) + 1)
    for i, label in enumerate(labels):
        for j, other in enumerate(found):
            costs[i + 1, j + 1] = min(costs[i, j] + (label != other), costs[i, j + 1] + 1, costs[i + 1, j] + 1)
    pairs: list[tuple[int | None, int | None]] = []
    i, j = len(labels), len(found)
    while i or j:
        if i and j and costs[i, j] == costs[i - 1, j - 1] + (labels[i - 1] != found[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((labels[i], found[j]))
        elif i and costs[i, j] == costs[i - 1, j] + 1:
            i -= 1
            pairs.append((labels[i], None))
        else:
            j -= 1
            pairs.append((None, found[j]))
    return pairs[::-1]


def errors(labels: Sequence[int], found: Sequence[int]) -> int:
    """Labels to change, add or leave out to make `found` of `labels`: the edit distance."""
    return sum(label != other for label, other in match(labels, found))
