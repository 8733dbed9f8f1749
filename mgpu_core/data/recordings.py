"""Spoken digits: the Free Spoken Digit Dataset (Jackson et al., github.com/Jakobovski/free-spoken-digit-dataset).

3,000 recordings, 8 kHz, of six speakers who say each digit 50 times; by the data set's own rule takes 0 to 4 are for
testing. `spoken_digits` finds or fetches them as `sources` says: a folder `recordings`, as in a clone of the data set's
repository, or an archive recordings.tgz that holds one.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import wave
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mgpu_core.data.sources import DatasetError, Say, Source, download, obtain

RATE = 8000  # samples a second
TEST_TAKES = 5  # the first takes of each speaker and digit
# SHA-256 of "NAME LENGTH\n" and the content of each recording, in the order of the names.
SPOKEN_DIGITS = "8fed8b0b058a7efa7544bbb3e8e98607ecdcbd47a2f0ea31139cab18a6b679c9"
LAYOUTS = ("", "free-spoken-digits", "free-spoken-digit-dataset")
REPOSITORY = "https://codeload.github.com/Jakobovski/free-spoken-digit-dataset/tar.gz/"
COMMIT = "26eb9aaf76e81b692f806f9140c2d2777410d7a1"
ARCHIVE = "recordings.tgz"


@dataclass(frozen=True)
class Recordings:
    """Recordings of single digits.

    Attributes:
        origin: the folder or archive they came from.
        waves: each recording, (samples,) int16.
        digits, takes: (n,) int64, what is said in each, and the how manieth time this is.
        speakers: (n,) str, who says it.
    """

    origin: str
    waves: tuple[NDArray[np.int16], ...]
    digits: NDArray[np.int64]
    speakers: NDArray[np.str_]
    takes: NDArray[np.int64]


def spoken_digits(folder: str | Path | None = None, *, say: Say = print) -> Recordings:
    """The Free Spoken Digit Dataset, found or fetched; arguments and errors as for `sources.obtain`."""
    source = Source(
        name="Free Spoken Digit Dataset",
        size="16 MB",
        layouts=LAYOUTS,
        installed=(),
        cached="free-spoken-digits",
        read=_read,
        addresses=[("GitHub", _from_github)],
        files=_files,
        wanted=f"the folder recordings of {REPOSITORY}{COMMIT}, or that archive under the name {ARCHIVE},",
    )
    return obtain(source, folder, say=say)


def _read(place: Path) -> Recordings:
    """The set in one folder; FileNotFoundError if it is not there, DatasetError if it is not what it should be."""
    loose = place / "recordings"
    origin = loose if loose.is_dir() else place / ARCHIVE
    try:
        contents = dict(sorted(_loose(loose) if loose.is_dir() else _packed(origin)))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(origin) from None
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DatasetError(f"{origin} cannot be read ({error}). Remove or replace it.") from error
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    if digest.hexdigest() != SPOKEN_DIGITS:
        raise DatasetError(
            f"{origin} is damaged, or is not the Free Spoken Digit Dataset's of commit {COMMIT[:8]}: the SHA-256 of "
            f"its {len(contents)} recordings is {digest.hexdigest()}, expected {SPOKEN_DIGITS}. Remove or replace it."
        )
    digits, speakers, takes = zip(*(name.removesuffix(".wav").split("_") for name in contents))
    return Recordings(
        origin=str(origin),
        waves=tuple(map(_samples, contents.values())),
        digits=np.array(digits, np.int64),
        speakers=np.array(speakers),
        takes=np.array(takes, np.int64),
    )


def _loose(folder: Path) -> Iterator[tuple[str, bytes]]:
    return ((path.name, path.read_bytes()) for path in folder.glob("*.wav"))


def _packed(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and parts[-2:-1] == ("recordings",) and parts[-1].endswith(".wav"):
                file = tar.extractfile(member)
                assert file is not None
                yield parts[-1], file.read()


def _samples(content: bytes) -> NDArray[np.int16]:
    with wave.open(io.BytesIO(content)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.int16)


def _from_github(scratch: Path, deadline: float) -> Path:
    download(f"{REPOSITORY}{COMMIT}", scratch / ARCHIVE, deadline)
    return scratch


def _files(place: Path) -> Iterator[tuple[str, bytes]]:
    _read(place)
    yield ARCHIVE, (place / ARCHIVE).read_bytes()
