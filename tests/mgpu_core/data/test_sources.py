"""Real images are found in the documented places, fetched once where they are not, and never taken damaged.

The files here are small ones of the same format; their checksums stand in for Fashion-MNIST's.
"""

import gzip
import hashlib
import http.server
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest

from mgpu_core import data
from mgpu_core.data import DatasetError, DatasetMissing, image_sets, sources

SHAPES = {
    "train-images-idx3-ubyte": (60, 28, 28),
    "train-labels-idx1-ubyte": (60,),
    "t10k-images-idx3-ubyte": (10, 28, 28),
    "t10k-labels-idx1-ubyte": (10,),
}


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def content(monkeypatch, tmp_path):
    """The files' content by name; and a machine that has no data, no apt and no network."""
    rng = np.random.default_rng(0)
    files = {name: idx(rng.integers(0, 10, shape, dtype=np.uint8)) for name, shape in SHAPES.items()}
    monkeypatch.setattr(
        image_sets, "FASHION_MNIST", {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    )
    monkeypatch.setattr(image_sets, "DEBIAN_FOLDER", tmp_path / "usr" / "share" / "datasets" / "fashion-mnist")
    monkeypatch.setattr(image_sets, "PUBLISHER", "http://127.0.0.1:9/")  # the discard port: nobody answers
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("MGPU_DATA", raising=False)
    return files


@pytest.fixture
def said():
    return []


def put(folder, files, *, packed):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def check(images, files):
    assert images.name == "Fashion-MNIST"
    assert len(images.classes) == 10
    for array, name in [
        (images.train_images, "train-images-idx3-ubyte"),
        (images.train_labels, "train-labels-idx1-ubyte"),
        (images.test_images, "t10k-images-idx3-ubyte"),
        (images.test_labels, "t10k-labels-idx1-ubyte"),
    ]:
        assert array.shape == SHAPES[name]
        assert idx(array.astype(np.uint8)) == files[name]
    assert images.train_images.dtype == np.uint8 and images.train_labels.dtype == np.int64


# Found


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("layout", image_sets.LAYOUTS)
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_found_where_the_user_says(content, tmp_path, monkeypatch, said, layout, packed, how):
    put(tmp_path / "mine" / layout, content, packed=packed)
    if how == "environment":
        monkeypatch.setenv("MGPU_DATA", str(tmp_path / "mine"))
    check(data.fashion_mnist(tmp_path / "mine" if how == "argument" else None, say=said.append), content)
    assert said == []


def test_found_where_debian_puts_it_then_in_the_cache(content, tmp_path, said):
    put(tmp_path / "cache" / "mgpu" / "fashion-mnist", content, packed=False)
    assert "cache" in data.fashion_mnist(say=said.append).origin
    put(image_sets.DEBIAN_FOLDER, content, packed=True)
    images = data.fashion_mnist(say=said.append)
    check(images, content)
    assert images.origin == str(image_sets.DEBIAN_FOLDER) and said == []


def test_a_folder_without_it_is_said_and_passed_over(content, tmp_path, said):
    put(image_sets.DEBIAN_FOLDER, content, packed=True)
    check(data.fashion_mnist(tmp_path / "nowhere", say=said.append), content)
    assert said == [f"No Fashion-MNIST in {tmp_path / 'nowhere'}; looking elsewhere."]


DAMAGE = {
    "a flipped bit": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "cut short": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "another file": lambda raw: b"<html>404 Not Found</html>",
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_of_the_users_are_an_error_that_names_the_file(content, tmp_path, said, packed, damage):
    mine = put(tmp_path / "mine", content, packed=packed)
    bad = mine / ("t10k-labels-idx1-ubyte" + ".gz" * packed)
    bad.write_bytes(damage(bad.read_bytes()))
    for find in (data.fashion_mnist, data.images):  # and digits do not take their place
        with pytest.raises(DatasetError, match=f"{bad} (cannot be read|is damaged)"):
            find(mine, say=said.append)


def test_another_layout_that_is_whole_excuses_a_damaged_one(content, tmp_path, said):
    mine = put(tmp_path / "mine", dict.fromkeys(content, b"MNIST's digits, say"), packed=False)
    put(mine / "fashion-mnist", content, packed=True)
    check(data.fashion_mnist(mine, say=said.append), content)


# Fetched


@pytest.fixture
def publisher(content, tmp_path, monkeypatch):
    """A web server with the files; its requests are counted."""
    site = put(tmp_path / "site", content, packed=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        requests: list[str] = []

        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(site))

        def log_request(self, *arguments):
            self.requests.append(self.path)

        def log_message(self, *arguments):
            pass

    Handler.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(image_sets, "PUBLISHER", f"http://127.0.0.1:{server.server_port}/")
        yield site, Handler.requests
        server.shutdown()
        thread.join()


def test_fetched_from_the_publisher_once(content, publisher, tmp_path, said):
    for _ in range(2):
        check(data.fashion_mnist(say=said.append), content)
    assert len(publisher[1]) == 4
    assert sorted(os.listdir(tmp_path / "cache" / "mgpu")) == ["fashion-mnist", "fetching.lock"]
    assert sorted(os.listdir(tmp_path / "cache" / "mgpu" / "fashion-mnist")) == sorted(content)
    assert "apt-get and dpkg-deb are not installed" in said[1]
    assert "fetched, checked and kept" in said[-1]


def test_a_damaged_cache_is_said_and_fetched_again(content, publisher, tmp_path, said):
    cache = put(tmp_path / "cache" / "mgpu" / "fashion-mnist", content, packed=False)
    (cache / "t10k-labels-idx1-ubyte").write_bytes(b"broken")
    check(data.fashion_mnist(say=said.append), content)
    assert "t10k-labels-idx1-ubyte is damaged" in said[0]


def test_what_a_killed_fetch_left_is_cleared(content, publisher, tmp_path, said):
    put(tmp_path / "cache" / "mgpu" / "fetching", {"half": b"x"}, packed=True)
    check(data.fashion_mnist(say=said.append), content)
    assert not (tmp_path / "cache" / "mgpu" / "fetching").exists()


def _find(results):
    images = data.fashion_mnist(say=lambda line: None)
    results.put(hashlib.sha256(images.train_images.tobytes()).hexdigest())


def test_of_many_processes_one_fetches(content, publisher, said):
    context = multiprocessing.get_context("fork")  # the children must see the monkeypatches
    results = context.Queue()
    processes = [context.Process(target=_find, args=(results,)) for _ in range(4)]
    for process in processes:
        process.start()
    assert len({results.get(timeout=30) for _ in processes}) == 1
    for process in processes:
        process.join()
    assert len(publisher[1]) == 4


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def busy(content, tmp_path):
    """Another process that holds the lock, as if it were fetching."""
    lock = tmp_path / "cache" / "mgpu" / "fetching.lock"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        yield holder
        holder.kill()


def test_a_process_killed_while_it_fetches_does_not_block_others(content, publisher, busy, said):
    threading.Timer(0.3, busy.kill).start()
    check(data.fashion_mnist(say=said.append), content)
    assert said[0].startswith("Another process is fetching")


def test_waiting_for_another_process_ends(content, publisher, busy, said, monkeypatch):
    monkeypatch.setattr(sources, "_PATIENCE", -29.9)  # of which twice and a minute is 0.2 s
    with pytest.raises(DatasetMissing, match="Another process has held .*fetching.lock"):
        data.fashion_mnist(say=said.append)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_downloads_are_refused_and_not_kept(content, publisher, tmp_path, said, damage):
    bad = publisher[0] / "t10k-labels-idx1-ubyte.gz"
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(DatasetMissing) as caught:
        data.fashion_mnist(say=said.append)
    for part in ("train-images-idx3-ubyte.gz", "MGPU_DATA", str(tmp_path / "cache" / "mgpu" / "fashion-mnist")):
        assert part in str(caught.value)  # which file to put where
    assert not (tmp_path / "cache" / "mgpu" / "fashion-mnist" / "t10k-labels-idx1-ubyte").exists()
    assert not (tmp_path / "cache" / "mgpu" / "fetching").exists()


def test_endless_answers_are_cut_off(content, publisher, said, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST", 100)
    with pytest.raises(DatasetMissing, match="larger than 100 bytes"):
        data.fashion_mnist(say=said.append)


def test_slow_answers_are_cut_off(content, publisher, said, monkeypatch):
    monkeypatch.setattr(sources, "_PATIENCE", 0.0)
    with pytest.raises(DatasetMissing, match="had not arrived"):
        data.fashion_mnist(say=said.append)


def test_without_a_writable_home_the_cache_is_in_tmp(content, publisher, tmp_path, said, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for _ in range(2):
        check(data.fashion_mnist(say=said.append), content)
    assert len(publisher[1]) == 4
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(DatasetMissing, match="None of .* can be written"):
        data.fashion_mnist(say=said.append)


# Fetched by apt: the real one, from a repository in a folder

needs_apt = pytest.mark.skipif(
    not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="apt-get and dpkg-deb are not installed"
)


@pytest.fixture
def debian(content, tmp_path, monkeypatch):
    """A repository with the package, and a configuration that makes apt use it and nothing else."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    tree = tmp_path / "tree"
    put(tree / image_sets.DEBIAN_FOLDER.relative_to("/"), content, packed=True)
    (tree / "DEBIAN").mkdir()
    control = (
        "Package: dataset-fashion-mnist\nVersion: 1.0\nArchitecture: all\nMaintainer: nobody\nDescription: images\n"
    )
    (tree / "DEBIAN" / "control").write_text(control)
    repository = tmp_path / "repository"
    repository.mkdir()
    package = repository / "dataset-fashion-mnist_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "-Znone", tree, package], check=True, stdout=subprocess.DEVNULL)
    raw = package.read_bytes()
    (repository / "Packages").write_text(
        f"{control}Filename: ./{package.name}\nSize: {len(raw)}\nSHA256: {hashlib.sha256(raw).hexdigest()}\n"
    )
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{repository} ./\n")
    lists = tmp_path / "var" / "lists" / "partial"
    lists.mkdir(parents=True)
    configuration = tmp_path / "apt.conf"
    configuration.write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\nDir::Etc::sourceparts "/dev/null";\n'
        f'Dir::Etc::main "/dev/null";\nDir::Etc::parts "/dev/null";\n'
        f'Dir::State "{tmp_path}/var";\nDir::Cache "{tmp_path}/var";\nAPT::Sandbox::User "root";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(configuration))
    return repository


@needs_apt
@pytest.mark.parametrize("lists", ["the machine's lists", "no lists"])
def test_debians_package_is_unpacked_without_installing_it(content, debian, tmp_path, said, lists):
    if lists == "the machine's lists":
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)
    check(data.fashion_mnist(say=said.append), content)
    assert len(said) == 2 and "Debian's package" in said[0] and "fetched, checked and kept" in said[1]
    assert not image_sets.DEBIAN_FOLDER.exists()
    assert sorted(os.listdir(tmp_path / "cache" / "mgpu")) == ["fashion-mnist", "fetching.lock"]


@needs_apt
def test_apt_without_the_package_says_why_and_the_publisher_is_next(content, debian, publisher, said):
    (debian / "Packages").write_text("")
    check(data.fashion_mnist(say=said.append), content)
    assert "Unable to locate package dataset-fashion-mnist" in said[1]


@needs_apt
def test_a_tampered_package_is_refused(content, debian, publisher, said):
    package = next(debian.glob("*.deb"))
    raw = package.read_bytes()
    package.write_bytes(raw.replace(b"t10k-labels", b"t10k-lapels"))
    check(data.fashion_mnist(say=said.append), content)
    assert "failed" in said[1] and len(publisher[1]) == 4


def test_an_apt_that_hangs_is_ended(content, publisher, tmp_path, said, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "dpkg-deb"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n/bin/sleep 30 &\n/bin/sleep 30\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sources, "_PATIENCE", 0.5)
    check(data.fashion_mnist(say=said.append), content)
    assert "apt-get had not finished" in said[1]


# Not to be had


def test_digits_stand_in_and_the_user_is_told_why(content, said):
    images = data.images(say=said.append)
    assert images.name == "handwritten digits"
    assert images.train_images.shape == (1437, 28, 28) and images.test_images.shape == (360, 28, 28)
    assert images.train_images.dtype == np.uint8 and images.train_images.max() == 255
    assert images.train_labels.dtype == np.int64 and set(images.test_labels) == set(range(10))
    assert "Fashion-MNIST is not on this machine and could not be fetched" in said[-1]
    assert "HANDWRITTEN DIGITS INSTEAD" in said[-1]


def test_with_neither_the_error_says_which_files_to_put_where(content, said, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DatasetMissing) as caught:
        data.images(say=said.append)
    for part in (*(f"{name}.gz" for name in SHAPES), "MGPU_DATA", str(tmp_path / "cache"), "scikit-learn"):
        assert part in str(caught.value)


def test_files_that_are_not_idx_are_refused():
    for content in (b"", b"\x00\x00\x0d\x01", b"\x1f\x8b\x08\x00"):
        with pytest.raises(DatasetError, match="not an IDX file"):
            image_sets.parse_idx(content)
