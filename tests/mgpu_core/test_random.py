"""Streams of random numbers: addressed by what they are for, and the same however they are cut."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core import random


def words(samples, *, seed=1, step=2, layer=3, width=13):
    with random.batch(seed=seed, step=step, samples=samples):
        return random.sample_words(layer, len(samples), width)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(0, 40))
def test_a_sample_has_its_words_whatever_comes_with_it(samples, width):
    whole = words(range(31), width=width)
    np.testing.assert_array_equal(words(samples, width=width), whole[samples])


@given(st.lists(st.integers(0, 30), max_size=5), st.integers(0, 40), st.data())
def test_a_part_of_the_columns_is_that_of_the_whole(samples, width, data):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width))))
    with random.batch(seed=1, step=2, samples=samples):
        part = random.sample_words(3, len(samples), width, (start, stop))
    np.testing.assert_array_equal(part, words(samples, width=width)[:, start:stop])


def test_rows_of_a_batch():
    with random.batch(seed=1, step=2, samples=range(10, 20)), random.batch_rows(slice(3, 5)):
        np.testing.assert_array_equal(random.sample_words(3, 2, 13), words([13, 14]))
    with random.batch_rows(slice(3, 5)), pytest.raises(RuntimeError, match="step and the samples"):
        random.sample_words(3, 2, 13)


def test_seed_step_layer_and_sample_all_matter():
    base = words([0])
    for other in (words([0], seed=2), words([0], step=3), words([0], layer=4), words([1])):
        assert not np.array_equal(base, other)
    np.testing.assert_array_equal(words([0]), base)


def test_words_are_uniform():
    bits = np.unpackbits(words(range(64), width=1000).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(bits.size)


def test_it_is_numpys_philox():
    expected = np.random.Philox(key=random.key(1, 2, 3), counter=5 * 2).random_raw(8).view(np.uint32)
    np.testing.assert_array_equal(words([5])[0], expected[:13])


def test_generators():
    assert random.generator(1, 2).random() == random.generator(1, 2).random()
    assert random.generator(1, 2).random() != random.generator(2, 1).random()
    paths = [(), (0,), (1,), (1, 0), (0, 1), (2**32,), (2**64 - 1,), (1, 0, 0)]
    assert len({random.generator(*path).random() for path in paths}) == len(paths)
    with pytest.raises(OverflowError):
        random.generator(-1)


def test_a_batch_is_for_one_thread_and_ends_with_its_block():
    errors = []

    def elsewhere():
        try:
            random.sample_words(0, 1, 1)
        except RuntimeError as error:
            errors.append(str(error))

    with random.batch(seed=0, step=0, samples=[0]):
        with random.batch(seed=0, step=1, samples=[0, 1]):
            random.sample_words(0, 2, 1)
        random.sample_words(0, 1, 1)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    elsewhere()
    assert len(errors) == 2
    with random.batch(seed=0, step=0, samples=[0]), pytest.raises(ValueError, match="1 samples.*2 rows"):
        random.sample_words(0, 2, 1)
