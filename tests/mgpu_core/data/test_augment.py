"""Augmentation moves and mirrors images, alike on any number of ranks, and differently in every step."""

import numpy as np
import pytest

from mgpu_core import random
from mgpu_core.data import augment

IMAGES = np.random.default_rng(0).integers(1, 255, (64, 6, 5), dtype=np.uint8)


def changed(function, samples, step=0, seed=0):
    with random.batch(seed=seed, step=step, samples=samples):
        return function(IMAGES[list(samples)])


CHANGES = {"crop": lambda images: augment.crop(images, 2), "mirror": augment.mirror}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_samples_change_does_not_depend_on_the_split(change):
    whole = changed(change, range(64))
    assert whole.shape == IMAGES.shape and whole.dtype == np.uint8
    for cut in (0, 1, 31, 64):
        parts = [changed(change, range(cut)), changed(change, range(cut, 64))]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert (changed(change, range(64), step=1) != whole).any()
    assert (changed(change, range(64), seed=1) != whole).any()


def test_a_crop_is_the_image_moved_by_at_most_the_padding():
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2)))
    seen = set()
    for image, moved in zip(padded, changed(CHANGES["crop"], range(64))):
        fits = [(r, c) for r in range(5) for c in range(5) if (image[r : r + 6, c : c + 5] == moved).all()]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) > 15  # of the 25 places


def test_about_half_of_the_images_are_mirrored():
    mirrored = changed(augment.mirror, range(64))
    same = (mirrored == IMAGES).all(axis=(1, 2))
    np.testing.assert_array_equal(mirrored[~same], IMAGES[~same][:, :, ::-1])
    assert 16 < same.sum() < 48
