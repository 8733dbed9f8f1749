"""CTC's decoders against all paths there are, alignment against the best of them, edit distance against its rules."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core import ctc


def collapse(path, blank):
    return tuple(int(c) for c, before in zip(path, (None, *path)) if c != before and c != blank)


def all_paths(log_p):
    times, classes = log_p.shape
    for path in itertools.product(range(classes), repeat=times):
        yield path, log_p[np.arange(times), path].sum()


def random_log_p(seed, times, classes, sharpness=1.0):
    return np.log(np.random.default_rng(seed).dirichlet(np.full(classes, sharpness), size=times))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blank", [0, 2])
def test_a_wide_beam_finds_the_likeliest_labels_of_all(seed, blank):
    log_p = random_log_p(seed, 6, 3)
    totals = {}
    for path, log_probability in all_paths(log_p):
        labels = collapse(path, blank)
        totals[labels] = np.logaddexp(totals.get(labels, -np.inf), log_probability)
    assert tuple(ctc.beam_search(log_p, width=1000, blank=blank)) == max(totals, key=totals.get)
    best_path = max(all_paths(log_p), key=lambda item: item[1])[0]
    assert tuple(ctc.greedy(log_p, blank=blank)) == collapse(best_path, blank)


def test_the_beam_adds_up_what_the_greedy_path_does_not_see():
    log_p = np.log([[0.6, 0.4], [0.6, 0.4]])  # blank twice: 0.36; label 1 in three ways: 0.64
    assert ctc.greedy(log_p) == [] and ctc.beam_search(log_p, width=4) == [1]


@pytest.mark.parametrize("times", [0, 1])
def test_short_sequences_are_read(times):
    log_p = random_log_p(0, times, 3) if times else np.zeros((0, 3))
    assert len(ctc.greedy(log_p)) <= times and len(ctc.beam_search(log_p)) <= times
    assert ctc.align(log_p, []) == []


def test_impossible_classes_are_no_trouble():
    with np.errstate(divide="ignore"):
        log_p = np.log(np.eye(3)[[0, 1, 1, 0, 1, 2]])
    assert ctc.greedy(log_p) == ctc.beam_search(log_p) == [1, 1, 2]
    assert ctc.align(log_p, [1, 1, 2]) == [(1, 3), (4, 5), (5, 6)]


@pytest.mark.parametrize("labels", [(1,), (1, 2), (2, 2), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_alignment_is_the_likeliest_path_of_these_labels(labels, seed):
    log_p = random_log_p(seed, 6, 3)
    best = max((value, path) for path, value in all_paths(log_p) if collapse(path, 0) == labels)
    spans = ctc.align(log_p, labels)
    path = np.zeros(6, int)
    for label, (first, last) in zip(labels, spans):
        assert first < last
        path[first:last] = label
    assert collapse(path, 0) == labels
    assert log_p[np.arange(6), path].sum() == pytest.approx(best[0], rel=1e-12)


def test_labels_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 labels do not fit into 4 times"):
        ctc.align(random_log_p(0, 4, 3), [1, 1, 1])  # two blanks are needed between them


labels = st.lists(st.integers(0, 3), max_size=7)


@given(labels, labels)
def test_matching_is_a_shortest_edit(one, other):
    pairs = ctc.match(one, other)
    assert [a for a, _ in pairs if a is not None] == one and [b for _, b in pairs if b is not None] == other
    assert (None, None) not in pairs
    count = ctc.errors(one, other)
    assert abs(len(one) - len(other)) <= count <= max(len(one), len(other))
    assert count == ctc.errors(other, one) and (count == 0) == (one == other)


@given(labels, labels, labels)
def test_errors_are_a_distance(one, other, third):
    assert ctc.errors(one, third) <= ctc.errors(one, other) + ctc.errors(other, third)


@pytest.mark.parametrize(("one", "other", "count"), [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "abc", 0)])
def test_known_distances(one, other, count):
    assert ctc.errors(list(map(ord, one)), list(map(ord, other))) == count
