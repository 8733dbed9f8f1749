"""The recordings are found packed or loose, fetched once, and never taken damaged."""

import hashlib
import http.server
import io
import tarfile
import threading
import wave

import numpy as np
import pytest

from mgpu_core import data
from mgpu_core.data import DatasetError, DatasetMissing, recordings

NAMES = [f"{digit}_{speaker}_{take}.wav" for digit in (0, 7) for speaker in ("ada", "bob") for take in (0, 3, 12)]


def wav(samples):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(recordings.RATE)
        out.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def packed(files, top="recordings"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in [*files.items(), ("README.md", b"text")]:
            folder = top if name.endswith(".wav") else top.removesuffix("recordings")
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture
def content(monkeypatch, tmp_path):
    """A few recordings by name; and a machine that has no data and no network."""
    rng = np.random.default_rng(0)
    files = {name: wav(rng.integers(-9999, 9999, 5 + i)) for i, name in enumerate(NAMES)}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    monkeypatch.setattr(recordings, "SPOKEN_DIGITS", digest.hexdigest())
    monkeypatch.setattr(recordings, "REPOSITORY", "http://127.0.0.1:9/")  # the discard port: nobody answers
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MGPU_DATA", raising=False)
    return files


def put(folder, files, how):
    folder.mkdir(parents=True)
    if how == "loose":
        (folder / "recordings").mkdir()
        for name, raw in files.items():
            (folder / "recordings" / name).write_bytes(raw)
    else:
        (folder / "recordings.tgz").write_bytes(packed(files))
    return folder


def check(found):
    assert sorted(zip(found.digits.tolist(), found.speakers.tolist(), found.takes.tolist())) == sorted(
        (digit, speaker, take) for digit in (0, 7) for speaker in ("ada", "bob") for take in (0, 3, 12)
    )
    by_name = {f"{d}_{s}_{t}.wav": w for d, s, t, w in zip(found.digits, found.speakers, found.takes, found.waves)}
    for i, name in enumerate(NAMES):
        assert by_name[name].shape == (5 + i,) and by_name[name].dtype == np.int16


@pytest.mark.parametrize("how", ["packed", "loose"])
@pytest.mark.parametrize("layout", recordings.LAYOUTS)
def test_found_where_the_user_says(content, tmp_path, monkeypatch, how, layout):
    put(tmp_path / "mine" / layout, content, how)
    monkeypatch.setenv("MGPU_DATA", str(tmp_path / "mine"))
    said = []
    check(data.spoken_digits(say=said.append))
    check(data.spoken_digits(tmp_path / "mine", say=said.append))
    assert said == []


DAMAGE = {
    "one missing": lambda files: dict(list(files.items())[1:]),
    "one changed": lambda files: {**files, NAMES[0]: wav(np.zeros(5))},
    "renamed": lambda files: {name.replace("ada", "eve"): raw for name, raw in files.items()},
    "none": lambda files: {},
}


@pytest.mark.parametrize("how", ["packed", "loose"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_other_recordings_are_an_error_that_names_the_place(content, tmp_path, how, damage):
    mine = put(tmp_path / "mine", damage(content), how)
    with pytest.raises(DatasetError, match=f"{mine}.* is damaged, or is not the Free Spoken Digit"):
        data.spoken_digits(mine, say=lambda line: None)


def test_a_broken_archive_is_an_error_that_names_it(content, tmp_path):
    mine = put(tmp_path / "mine", content, "packed")
    archive = mine / "recordings.tgz"
    for raw in (b"", b"<html>", archive.read_bytes()[:-200]):
        archive.write_bytes(raw)
        with pytest.raises(DatasetError, match=f"{archive} (cannot be read|is damaged)"):
            data.spoken_digits(mine, say=lambda line: None)


def test_fetched_once_and_kept(content, tmp_path, monkeypatch):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(packed(content, "free-spoken-digit-dataset-26eb9aaf/recordings"))

        def log_message(self, *arguments):
            pass

    said = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(recordings, "REPOSITORY", f"http://127.0.0.1:{server.server_port}/")
        try:
            for _ in range(2):
                check(data.spoken_digits(say=said.append))
        finally:
            server.shutdown()
            thread.join()
    assert asked == [f"/{recordings.COMMIT}"]
    assert "GitHub" in said[0] and "fetched, checked and kept" in said[1] and len(said) == 2
    assert (tmp_path / "cache" / "mgpu" / "free-spoken-digits" / "recordings.tgz").exists()


def test_without_a_network_it_says_which_file_to_put_where(content, tmp_path):
    with pytest.raises(DatasetMissing) as caught:
        data.spoken_digits(say=lambda line: None)
    for part in ("recordings.tgz", "MGPU_DATA", str(tmp_path / "cache" / "mgpu" / "free-spoken-digits")):
        assert part in str(caught.value)
