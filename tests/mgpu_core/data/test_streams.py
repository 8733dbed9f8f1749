"""A sample's random numbers depend on the sample, not on the batch, the rank or the number of ranks."""

import numpy as np
import pytest

from mgpu_core.data import SampleStreams
from mgpu_core.data.streams import philox


@pytest.mark.parametrize(
    ("counter", "key", "result"),
    [  # kat_vectors of Random123, the authors' own implementation
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_numbers(counter, key, result):
    assert philox(np.array(counter, np.uint64), key).tolist() == result


def draws(indices, seed=5, epoch=2):
    streams = SampleStreams(seed, epoch, np.array(indices))
    return np.concatenate(
        [streams.uniform((3,)), streams.uniform()[:, None], streams.uniform((2, 2)).reshape(-1, 4)], 1
    )


def test_numbers_follow_the_sample_wherever_it_is():
    whole = draws(range(20))
    for cut in (1, 7, 19):
        np.testing.assert_array_equal(np.concatenate([draws(range(cut)), draws(range(cut, 20))]), whole)
    np.testing.assert_array_equal(draws([13, 2]), whole[[13, 2]])


def test_all_that_should_differ_differs():
    values = [draws(range(50)), draws(range(50), seed=6), draws(range(50), epoch=3), draws(np.arange(50) + 2**32)]
    values.append(draws(range(50), seed=5 + 2**32))
    assert len(np.unique(values)) > 0.999 * np.size(values)


def test_uniform_is_uniform():
    values = SampleStreams(1, 0, np.arange(10_000)).uniform((10,))
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-squared, 99 degrees of freedom: p = 0.0001
    assert abs(np.corrcoef(values, rowvar=False) - np.eye(10)).max() < 0.05


def test_integers_cover_their_range_evenly():
    values = SampleStreams(1, 0, np.arange(10_000)).integers(-2, 3, (2,))
    assert values.shape == (10_000, 2) and values.dtype == np.int64
    assert np.unique(values).tolist() == [-2, -1, 0, 1, 2]
    assert abs(np.bincount(values.ravel() + 2) - 4000).max() < 300
    with pytest.raises(ValueError, match="no whole number"):
        SampleStreams(1, 0, np.arange(3)).integers(2, 2)


def test_no_samples_is_no_trouble():
    assert SampleStreams(0, 0, np.arange(0)).uniform((2, 3)).shape == (0, 2, 3)
