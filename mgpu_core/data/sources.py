"""Where real images come from: Fashion-MNIST, found on this machine or fetched once.

Fashion-MNIST (Xiao, Rasul, Vollgraf, arXiv:1708.07747): 60,000 training and 10,000 test pictures of clothes, 28 x 28
grey values, ten classes. `fashion_mnist` looks for its four files, in this order:

1. in the folder given, or $MGPU_DATA: there, or in fashion-mnist/ or FashionMNIST/raw/ (torchvision's) below it;
2. in /usr/share/datasets/fashion-mnist, where Debian's package `dataset-fashion-mnist` puts them;
3. in the cache, $XDG_CACHE_HOME/mgpu or ~/.cache/mgpu;
4. fetched into the cache: Debian's package through apt, without root, else from the publisher's address.

Whatever the source, the files' content must match the published SHA-256. Every step of a fetch is bounded
in time, only one process of a host fetches at a time, and files enter the cache whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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

_STALL = 15.0  # seconds without a byte after which a download has failed
_PATIENCE = 120.0  # seconds for each source, stalled or not
_LARGEST = 100_000_000  # bytes; no file is nearly as large, compressed or not


class DatasetError(RuntimeError):
    """No usable data; the message says what is wrong with which file, or which file to put where."""


class DatasetMissing(DatasetError):
    """The data is nowhere on this machine and cannot be fetched."""


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


Say = Callable[[str], object]


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
    """Fashion-MNIST, found or fetched as this module's docstring says.

    Args:
        folder: where to look first, instead of $MGPU_DATA.
        say: is told, line by line, what takes time or goes wrong.

    Raises:
        DatasetMissing: if it is nowhere and cannot be fetched.
        DatasetError: if the folder given holds other or damaged files of these names.
    """
    given = folder or os.environ.get("MGPU_DATA")
    if given:
        found = _first_whole([Path(given).expanduser() / layout for layout in LAYOUTS])
        if isinstance(found, DatasetError):
            raise found
        if found:
            return found
        say(f"No Fashion-MNIST in {given}; looking elsewhere.")
    found = _first_whole([DEBIAN_FOLDER, *(cache / "fashion-mnist" for cache in _caches())])
    if isinstance(found, DatasetError):
        say(str(found))
    return found if isinstance(found, ImageSet) else _fetch_once(say)


def _first_whole(places: list[Path]) -> ImageSet | DatasetError | None:
    """The set in the first place that holds it, else what is wrong with the last that nearly does, else None."""
    wrong = None
    for place in places:
        try:
            return _read(place)
        except FileNotFoundError:
            continue
        except DatasetError as error:
            wrong = error
    return wrong


def handwritten_digits() -> ImageSet:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8, enlarged to 28 x 28.

    The last 360, which other people wrote, are the test set.

    Raises:
        ImportError: if scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    enlarged = np.kron(digits.images, np.ones((3, 3))) * (255 / 16)
    pictures = np.pad(enlarged, ((0, 0), (2, 2), (2, 2))).round().astype(np.uint8)
    labels = digits.target.astype(np.int64)
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
            content = file.read(_LARGEST)
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


def _caches() -> list[Path]:
    """$XDG_CACHE_HOME/mgpu or ~/.cache/mgpu; and a folder of one's own in /tmp, where there is no writable home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(base) / "mgpu", Path(tempfile.gettempdir()) / f"mgpu-{os.getuid()}"]


def _writable_cache() -> Path:
    for cache in _caches():
        with contextlib.suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(cache, os.W_OK) and cache.stat().st_uid == os.getuid():
                return cache
    raise DatasetMissing(f"None of {', '.join(map(str, _caches()))} can be written, so Fashion-MNIST is not fetched.")


def _fetch_once(say: Say) -> ImageSet:
    """Fetch into the cache, or wait for the process of this host that is doing so."""
    cache = _writable_cache()
    kept = cache / "fashion-mnist"
    sources = (("Debian's package", _from_debian), ("the publisher", _from_publisher))
    failures = []
    with _only_one(cache / "fetching.lock", len(sources) * _PATIENCE + 60, say):
        with contextlib.suppress(FileNotFoundError, DatasetError):
            return _read(kept)  # another process was faster
        scratch = cache / "fetching"  # on the cache's file system, so that a rename puts a file in place
        for source, fetch in sources:
            began = time.monotonic()
            say(f"Fetching Fashion-MNIST (31 MB) from {source} ...")
            try:
                shutil.rmtree(scratch, ignore_errors=True)  # a killed process may have left it
                scratch.mkdir()
                place = fetch(scratch, began + _PATIENCE)
                kept.mkdir(exist_ok=True)
                for name in FASHION_MNIST:
                    (scratch / name).write_bytes(_content(place, name))
                    (scratch / name).replace(kept / name)
            except (OSError, http.client.HTTPException, DatasetError) as error:
                failures.append(f"from {source}: {error}")
                say(f"  failed: {error}")
                continue
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            say(f"  fetched, checked and kept in {kept}, in {time.monotonic() - began:.1f} s.")
            return _read(kept)
    wanted = ", ".join(f"{name}.gz" for name in FASHION_MNIST)
    raise DatasetMissing(
        f"Fashion-MNIST is not on this machine and could not be fetched ({'; '.join(failures)}). "
        f"Put {wanted} (from {PUBLISHER}, or from Debian's package {DEBIAN_PACKAGE}) into {kept}, "
        "or into a folder that MGPU_DATA names."
    )


@contextlib.contextmanager
def _only_one(lock: Path, patience: float, say: Say) -> Iterator[None]:
    """Keep other processes out. The kernel frees the lock of a process that dies."""
    deadline = time.monotonic() + patience
    with open(lock, "a") as file:

        def taken() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not taken():
            say("Another process is fetching Fashion-MNIST; waiting for it ...")
            while not taken():
                if time.monotonic() > deadline:
                    raise DatasetMissing(f"Another process has held {lock} for {patience:.0f} s.")
                time.sleep(0.1)
        yield


def _from_debian(scratch: Path, deadline: float) -> Path:
    """Debian's package, by apt and its signatures, unpacked beside the system and not into it: no root needed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("apt-get and dpkg-deb are not installed")
    patience = (f"Acquire::{scheme}::Timeout={_STALL:.0f}" for scheme in ("http", "https"))
    # apt started by root otherwise changes to a user who may not write into our folder.
    apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=0"]
    for option in patience:
        apt += ["-o", option]
    try:
        _run([*apt, "download", DEBIAN_PACKAGE], scratch, deadline)
    except DatasetError:
        # The system's package lists are missing or old: make fresh ones of our own.
        own = scratch / "apt"
        for folder in ("lists/partial", "archives/partial"):
            (own / folder).mkdir(parents=True)
        apt += ["-o", f"Dir::State={own}", "-o", f"Dir::Cache={own}"]
        _run([*apt, "update"], scratch, deadline)
        _run([*apt, "download", DEBIAN_PACKAGE], scratch, deadline)
    package = next(scratch.glob("*.deb"))
    _run(["dpkg-deb", "-x", str(package), str(scratch / "unpacked")], scratch, deadline)
    return scratch / "unpacked" / DEBIAN_FOLDER.relative_to("/")


def _run(command: list[str], folder: Path, deadline: float) -> None:
    """Run a command to its end or the deadline; an error says what the command printed last."""
    log = folder / "log"
    with open(log, "wb") as output:  # a file, and not a pipe that a grandchild could keep open
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=max(0.0, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{command[0]} had not finished after {_PATIENCE:.0f} s") from None
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise DatasetError(f"{command[0]} failed: {last[0] if last else f'exit code {done.returncode}'}")


def _from_publisher(scratch: Path, deadline: float) -> Path:
    for name in FASHION_MNIST:
        url = f"{PUBLISHER}{name}.gz"
        received = 0
        with urllib.request.urlopen(url, timeout=_STALL) as answer, open(scratch / f"{name}.gz", "wb") as file:
            while piece := answer.read1(1 << 16):
                received += len(piece)
                if received > _LARGEST:
                    raise DatasetError(f"{url} is larger than {_LARGEST} bytes, so it is not what it should be")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{url} had not arrived after {_PATIENCE:.0f} s")
                file.write(piece)
    return scratch
