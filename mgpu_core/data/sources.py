"""Where a data set comes from: found on this machine, or fetched once. `obtain` looks, in this order,

1. in the folder that the user names, or $MGPU_DATA: there, or in the set's usual folders below it;
2. where a system's package would have put it;
3. in the cache, $XDG_CACHE_HOME/mgpu or ~/.cache/mgpu;
4. and fetches it into the cache, from the first of its addresses that answers.

Whatever the source, the content must match the published SHA-256. Every step of a fetch is bounded in time, only one
process of a host fetches at a time, and a data set enters the cache whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
Say = Callable[[str], object]
Fetch = Callable[[Path, float], Path]

LARGEST = 100_000_000  # bytes; no file of a data set is nearly as large, compressed or not

_STALL = 15.0  # seconds without a byte after which a download has failed
_PATIENCE = 120.0  # seconds for each source, stalled or not


class DatasetError(RuntimeError):
    """No usable data; the message says what is wrong with which file, or which file to put where."""


class DatasetMissing(DatasetError):
    """The data is nowhere on this machine and cannot be fetched."""


@dataclass(frozen=True)
class Source(Generic[T]):
    """A data set, and how to come by it.

    Attributes:
        name: of the data set.
        size: of what is fetched, in words.
        layouts: its folders below the one that the user names, "" for that one itself.
        installed: where systems' packages put it.
        cached: its folder in the cache.
        read: the set from one folder; FileNotFoundError if it is not there, DatasetError if it is not as it should be.
        addresses: for each, what it is called and a function that fetches the set into a folder, before a deadline of
            `time.monotonic`, and returns the folder to read.
        files: what `read` needs from one folder, by name, checked: what goes into the cache.
        wanted: which files, from where, a user can provide.
    """

    name: str
    size: str
    layouts: Sequence[str]
    installed: Sequence[Path]
    cached: str
    read: Callable[[Path], T]
    addresses: Sequence[tuple[str, Fetch]]
    files: Callable[[Path], Iterable[tuple[str, bytes]]]
    wanted: str


def obtain(source: Source[T], folder: str | Path | None = None, *, say: Say = print) -> T:
    """A data set, found or fetched as this module's docstring says.

    Args:
        folder: where to look first, instead of $MGPU_DATA.
        say: is told, line by line, what takes time or goes wrong.

    Raises:
        DatasetMissing: if it is nowhere and cannot be fetched.
        DatasetError: if the folder given holds other or damaged files of the set's names.
    """
    given = folder or os.environ.get("MGPU_DATA")
    if given:
        found, wrong = _first_whole(source.read, [Path(given).expanduser() / layout for layout in source.layouts])
        if found is not None:
            return found
        if wrong is not None:
            raise wrong
        say(f"No {source.name} in {given}; looking elsewhere.")
    found, wrong = _first_whole(source.read, [*source.installed, *(cache / source.cached for cache in _caches())])
    if wrong is not None and found is None:
        say(str(wrong))
    return _fetch_once(source, say) if found is None else found


def _first_whole(read: Callable[[Path], T], places: list[Path]) -> tuple[T | None, DatasetError | None]:
    """The set in the first place that holds it, and what is wrong with the last that nearly does."""
    wrong = None
    for place in places:
        try:
            return read(place), wrong
        except FileNotFoundError:
            continue
        except DatasetError as error:
            wrong = error
    return None, wrong


def _caches() -> list[Path]:
    """$XDG_CACHE_HOME/mgpu or ~/.cache/mgpu; and a folder of one's own in /tmp, where there is no writable home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(base) / "mgpu", Path(tempfile.gettempdir()) / f"mgpu-{os.getuid()}"]


def _writable_cache(name: str) -> Path:
    for cache in _caches():
        with contextlib.suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(cache, os.W_OK) and cache.stat().st_uid == os.getuid():
                return cache
    raise DatasetMissing(f"None of {', '.join(map(str, _caches()))} can be written, so {name} is not fetched.")


def _fetch_once(source: Source[T], say: Say) -> T:
    """Fetch into the cache, or wait for the process of this host that is doing so."""
    cache = _writable_cache(source.name)
    kept = cache / source.cached
    failures = []
    with _only_one(cache / "fetching.lock", len(source.addresses) * _PATIENCE + 60, say):
        with contextlib.suppress(FileNotFoundError, DatasetError):
            return source.read(kept)  # another process was faster
        scratch = cache / "fetching"  # on the cache's file system, so that a rename puts a file in place
        for address, fetch in source.addresses:
            began = time.monotonic()
            say(f"Fetching {source.name} ({source.size}) from {address} ...")
            try:
                shutil.rmtree(scratch, ignore_errors=True)  # a killed process may have left it
                scratch.mkdir()
                place = fetch(scratch, began + _PATIENCE)
                kept.mkdir(exist_ok=True)
                for name, content in source.files(place):
                    (scratch / name).write_bytes(content)
                    (scratch / name).replace(kept / name)
            except (OSError, http.client.HTTPException, DatasetError) as error:
                failures.append(f"from {address}: {error}")
                say(f"  failed: {error}")
                continue
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            say(f"  fetched, checked and kept in {kept}, in {time.monotonic() - began:.1f} s.")
            return source.read(kept)
    raise DatasetMissing(
        f"{source.name} is not on this machine and could not be fetched ({'; '.join(failures)}). "
        f"Put {source.wanted} into {kept}, or into a folder that MGPU_DATA names."
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
            say("Another process is fetching a data set; waiting for it ...")
            while not taken():
                if time.monotonic() > deadline:
                    raise DatasetMissing(f"Another process has held {lock} for {patience:.0f} s.")
                time.sleep(0.1)
        yield


def download(url: str, path: Path, deadline: float) -> None:
    """Fetch one file. Raises an OSError or DatasetError where it does not come, is too large, or takes too long."""
    received = 0
    with urllib.request.urlopen(url, timeout=_STALL) as answer, open(path, "wb") as file:
        while piece := answer.read1(1 << 16):
            received += len(piece)
            if received > LARGEST:
                raise DatasetError(f"{url} is larger than {LARGEST} bytes, so it is not what it should be")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} had not arrived after {_PATIENCE:.0f} s")
            file.write(piece)


def unpack_debian(package: str, scratch: Path, deadline: float) -> Path:
    """A Debian package's files, by apt and its signatures, unpacked below `scratch` and not installed: no root needed.

    Returns the folder that stands for the system's root.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("apt-get and dpkg-deb are not installed")
    patience = (f"Acquire::{scheme}::Timeout={_STALL:.0f}" for scheme in ("http", "https"))
    # apt started by root otherwise changes to a user who may not write into our folder.
    apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=0"]
    for option in patience:
        apt += ["-o", option]
    try:
        _run([*apt, "download", package], scratch, deadline)
    except DatasetError:
        # The system's package lists are missing or old: make fresh ones of our own.
        own = scratch / "apt"
        for folder in ("lists/partial", "archives/partial"):
            (own / folder).mkdir(parents=True)
        apt += ["-o", f"Dir::State={own}", "-o", f"Dir::Cache={own}"]
        _run([*apt, "update"], scratch, deadline)
        _run([*apt, "download", package], scratch, deadline)
    archive = next(scratch.glob("*.deb"))
    _run(["dpkg-deb", "-x", str(archive), str(scratch / "unpacked")], scratch, deadline)
    return scratch / "unpacked"


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
