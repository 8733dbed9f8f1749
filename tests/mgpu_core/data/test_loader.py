"""The loader gives each rank its part of every batch, ahead of time, and leaves nothing behind."""

import gc
import threading
import time

import numpy as np
import pytest

from mgpu_core import random
from mgpu_core.data import Loader, Sampler

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 255, (100, 4, 4), dtype=np.uint8)
LABELS = np.arange(100)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert set(threading.enumerate()) <= before


def loader(batch=16, seed=1, count=100, **options):
    return Loader((IMAGES[:count], LABELS[:count]), Sampler(count, batch, seed=seed), **options)


def flip(arrays):
    """A random augmentation: turns some images over and adds noise."""
    images, labels = arrays
    words = random.sample_words(1, len(images), 17)
    turned = np.where(words[:, :1, None] < 2**31, images[:, :, ::-1], images)
    return turned + words[:, 1:].reshape(-1, 4, 4), labels


@pytest.mark.parametrize("shares", [[1], [1, 1, 1], [2, 5, 1], [1, 0]], ids=str)
@pytest.mark.parametrize(("depth", "workers"), [(1, 1), (1, 3), (20, 2)])
@pytest.mark.parametrize("count", [0, 2, 99])
def test_the_ranks_parts_are_the_batches_of_one_process(shares, depth, workers, count):
    alone = list(loader(count=count, transform=flip).epoch(3))
    assert len(alone) == -(-count // 16)
    size = len(shares)
    options = {"count": count, "transform": flip, "shares": shares, "depth": depth, "workers": workers}
    parts = [list(loader(rank=rank, size=size, **options).epoch(3)) for rank in range(size)]
    for step, whole in enumerate(alone):
        assert (whole.epoch, whole.step, whole.global_count) == (3, step, len(whole.indices))
        np.testing.assert_array_equal(whole.arrays[1], whole.indices)  # labels count the samples
        for array in range(2):
            joined = np.concatenate([part[step].arrays[array] for part in parts])
            np.testing.assert_array_equal(joined, whole.arrays[array])
        assert [part[step].start for part in parts] == [
            sum(len(earlier[step].indices) for earlier in parts[:rank]) for rank in range(size)
        ]
        assert {part[step].global_count for part in parts} == {whole.global_count}


def test_augmentation_is_new_in_every_epoch_and_batch():
    reader = Loader((np.zeros((32, 4, 4), np.uint8), np.arange(32)), Sampler(32, 16), transform=flip)
    seen = [image.tobytes() for epoch in range(3) for batch in reader.epoch(epoch) for image in batch.arrays[0]]
    assert len(set(seen)) == 96


def test_a_resumed_epoch_goes_on_where_it_stopped():
    whole = [batch.indices.tolist() for batch in loader().epoch(2)]
    for start in (0, 3, 7):
        assert [batch.indices.tolist() for batch in loader().epoch(2, start)] == whole[start:]


def test_reading_runs_ahead_but_not_too_far():
    read = []

    def count(arrays):
        read.append(len(read))
        return arrays

    with loader(transform=count, depth=3).epoch(0) as batches:
        deadline = time.monotonic() + 5
        while len(read) < 4 and time.monotonic() < deadline:  # three held ready, and one in the reader's hands
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(read) == 4
        next(batches)


@pytest.mark.parametrize("take", [0, 1, 3])
def test_leaving_early_ends_the_thread(take):
    with loader().epoch(0) as batches:
        for _ in range(take):
            next(batches)
    assert list(batches) == []  # closed is at an end


def test_an_iterator_that_is_merely_dropped_ends_its_thread():
    next(loader().epoch(0))


def test_closing_twice_and_reading_on_after_the_end():
    batches = loader().epoch(0)
    assert len(list(batches)) == 7
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()
    batches.close()


def test_the_readers_errors_reach_the_consumer_in_their_place():
    def fail(arrays):
        if 40 in arrays[1]:
            raise OSError("the disk is gone")
        return arrays

    sampler = Sampler(100, 16, shuffle=False)
    batches = Loader((IMAGES, LABELS), sampler, transform=fail).epoch(0)
    assert [next(batches).step for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)
    assert "fail" in [entry.name for entry in caught.traceback]
    with pytest.raises(StopIteration):
        next(batches)


def test_time_spent_waiting_is_measured():
    def slow(arrays):
        time.sleep(0.01)
        return arrays

    reader = loader(transform=slow)
    list(reader.epoch(0))
    assert 0.01 <= reader.waited


def test_wrong_arguments_are_refused():
    sampler = Sampler(100, 16)
    for arrays, options, message in [
        ((IMAGES[:50], LABELS), {}, "holds? .*50"),
        ((IMAGES,), {"rank": 2, "size": 2}, "rank 2 is not one of 2"),
        ((IMAGES,), {"size": 2, "shares": [1]}, "2 ranks need 2 shares"),
        ((IMAGES,), {"depth": 0}, "depth"),
    ]:
        with pytest.raises(ValueError, match=message):
            Loader(arrays, sampler, **options)


def test_shares_change_where_no_rank_has_read_yet():
    """A reader that is as far ahead as it can be and one that reads nothing ahead cut the same batches."""
    whole = [batch.indices.tolist() for epoch in range(2) for batch in loader(count=100).epoch(epoch)]
    by_rank = []
    for rank in range(2):
        reader, parts = loader(rank=rank, size=2, depth=2), []
        for epoch in range(2):
            with reader.epoch(epoch) as batches:
                for batch in batches:
                    if rank:
                        time.sleep(0.01)  # its reader runs ahead
                    if (epoch, batch.step) in [(0, 1), (0, 2), (1, 0)]:
                        reader.reshare([3, 1] if batch.step else [0, 1], epoch, batch.step)
                    parts.append(batch.indices.tolist())
        by_rank.append(parts)
    assert [one + two for one, two in zip(*by_rank)] == whole
    assert [len(part) for part in by_rank[0]] == [8] * 5 + [12, 3] + [12] * 4 + [0, 0, 0]


def test_the_steps_to_read_can_be_given_one_by_one():
    whole = [batch.indices.tolist() for batch in loader().epoch(2)]
    assert [batch.indices.tolist() for batch in loader().epoch(2, steps=iter([5, 0, 3]))] == [
        whole[i] for i in (5, 0, 3)
    ]
