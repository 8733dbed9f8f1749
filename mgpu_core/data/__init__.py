"""Data sets, the order in which they are read, and the reader that keeps ahead of training.

Read in this order: `sources` finds or fetches real data (of `image_sets` and `recordings`), `sampler` decides which
sample belongs to which batch and which rank, `loader` reads batches on a background thread, and `augment` changes
samples at random. None of them knows how many ranks there are, save for the function that cuts a batch.
"""

from mgpu_core.data.image_sets import ImageSet, fashion_mnist, handwritten_digits, images
from mgpu_core.data.loader import Batch, Loader, Transform
from mgpu_core.data.recordings import Recordings, spoken_digits
from mgpu_core.data.sampler import Sampler, split
from mgpu_core.data.sources import DatasetError, DatasetMissing

__all__ = [
    "Batch",
    "DatasetError",
    "DatasetMissing",
    "ImageSet",
    "Loader",
    "Recordings",
    "Sampler",
    "Transform",
    "fashion_mnist",
    "handwritten_digits",
    "images",
    "split",
    "spoken_digits",
]
