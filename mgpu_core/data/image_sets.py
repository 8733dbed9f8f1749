"""Pictures with labels: Fashion-MNIST, and scikit-learn's handwritten digits, which need no network.

Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv:1708.07747): 60,000 training and 10,000 test pictures of clothes, 28 x 28
grey values, ten classes. `fashion_mnist` finds or fetches its four files as `sources` says: below the user's folder in
fashion-mnist/ or FashionMNIST/raw/ (torchvision's), or there itself; in /usr/share/datasets/fashion-mnist, where
Debian's package `dataset-fashion-mnist` puts them; else that package through apt, without root, or the publisher.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_core.data.sources import LARGEST, DatasetError, DatasetMissing, Say, Source, download, obtain, unpack_debian

# SHA-256 of each file's decompressed content.
FASHION_MNIST = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
CLOTHES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
LAYOUTS = ("", "fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "fashion-mnist/FashionMNIST/raw")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
PUBLISHER = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


@dataclass(frozen=True)
class ImageSet:
    """Pictures with labels.

    Attributes:
        name: of the data set.
        origin: the folder, or the library, they came from.
        train_images, test_images: (n, 28, 28) uint8, 0 is background.
        train_labels, test_labels: (n,) int64, an index into `classes`.
    """

    name: str
    origin: str
    classes: tuple[str, ...]
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


def images(folder: str | Path | None = None, *, say: Say = print) -> ImageSet:
    """Fashion-MNIST if it can be had; else scikit-learn's handwritten digits, and `say` is told so and why."""
    try:
        return fashion_mnist(folder, say=say)
    except DatasetMissing as missing:
        try:
            digits = handwritten_digits()
        except ImportError:
            raise DatasetMissing(f"{missing} (Nor is scikit-learn installed, whose digits could stand in.)") from None
        say(f"{missing}\nUSING HANDWRITTEN DIGITS INSTEAD: {len(digits.train_images)} pictures for training.")
        return digits


def fashion_mnist(folder: str | Path | None = None, *, say: Say = print) -> ImageSet:
    """Fashion-MNIST, found or fetched; arguments and errors as for `sources.obtain`."""
    files = ", ".join(f"{name}.gz" for name in FASHION_MNIST)
    source = Source(
        name="Fashion-MNIST",
        size="31 MB",
        layouts=LAYOUTS,
        installed=[DEBIAN_FOLDER],
        cached="fashion-mnist",
        read=_read,
        addresses=[("Debian's package", _from_debian), ("the publisher", _from_publisher)],
        files=lambda place: ((name, _content(place, name)) for name in FASHION_MNIST),
        wanted=f"{files} (from {PUBLISHER}, or from Debian's package {DEBIAN_PACKAGE})",
    )
    return obtain(source, folder, say=say)


def handwritten_digits() -> ImageSet:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8, enlarged to 28 x 28.

    The last 360, which other people wrote, are the test set.

    Raises:
        ImportError: if scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ImportError("scikit-learn is not installed, with which the handwritten digits come")
    # Its file is read, and not by load_digits(): to import scikit-learn takes seconds on every rank.
    digits = np.loadtxt(Path(package.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=",")
    enlarged = np.kron(digits[:, :64].reshape(-1, 8, 8), np.ones((3, 3))) * (255 / 16)
    pictures = np.pad(enlarged, ((0, 0), (2, 2), (2, 2))).round().astype(np.uint8)
    labels = digits[:, 64].astype(np.int64)
    return ImageSet(
        name="handwritten digits",
        origin="scikit-learn",
        classes=tuple("0123456789"),
        train_images=pictures[:-360],
        train_labels=labels[:-360],
        test_images=pictures[-360:],
        test_labels=labels[-360:],
    )


# Reading


def _read(place: Path) -> ImageSet:
    """The set in one folder; FileNotFoundError if a file is not there, DatasetError if it is not what it should be."""
    arrays = {name: parse_idx(_content(place, name)) for name in FASHION_MNIST}
    return ImageSet(
        name="Fashion-MNIST",
        origin=str(place),
        classes=CLOTHES,
        train_images=arrays["train-images-idx3-ubyte"],
        train_labels=arrays["train-labels-idx1-ubyte"].astype(np.int64),
        test_images=arrays["t10k-images-idx3-ubyte"],
        test_labels=arrays["t10k-labels-idx1-ubyte"].astype(np.int64),
    )


def _content(place: Path, name: str) -> bytes:
    """The decompressed and checked content of one file, which may lie there compressed."""
    path = place / name
    try:
        if not path.exists():
            path = place / f"{name}.gz"
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read(LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read ({error}). Remove or replace it.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != FASHION_MNIST[name]:
        raise DatasetError(
            f"{path} is damaged, or is not Fashion-MNIST's: the SHA-256 of its content is {found}, "
            f"expected {FASHION_MNIST[name]}. Remove or replace it."
        )
    return content


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """An array from MNIST's IDX format: 0, 0, 8 for bytes, the number of dimensions, each size in 4 bytes, values."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DatasetError(f"not an IDX file of bytes: it starts with {content[:4]!r}")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4).tolist()
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


# Fetching


def _from_debian(scratch: Path, deadline: float) -> Path:
    return unpack_debian(DEBIAN_PACKAGE, scratch, deadline) / DEBIAN_FOLDER.relative_to("/")


def _from_publisher(scratch: Path, deadline: float) -> Path:
    for name in FASHION_MNIST:
        download(f"{PUBLISHER}{name}.gz", scratch / f"{name}.gz", deadline)
    return scratch
