"""A checkpoint gives back exactly what it was given, and a writer that dies leaves the previous one whole."""

import json
import os
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from mgpu_core import checkpoint
from mgpu_core.checkpoint import CheckpointError

DTYPES = [
    "float64", "float32", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "complex64",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip


def bits(array):
    return array.dtype, array.shape, array.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 5)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    raw = np.random.default_rng(0).integers(0, 2, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    value = raw.view(dtype).reshape(shape)
    checkpoint.save(tmp_path / "c.safetensors", {"x": value}, {})
    tensors, meta = checkpoint.load(tmp_path / "c.safetensors")
    assert bits(tensors["x"]) == bits(value)
    assert tensors["x"].flags.writeable and tensors["x"].flags.c_contiguous
    assert meta == {}


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2, ::-1],
        lambda x: np.broadcast_to(x[:1], (4, 6)),
        lambda x: x.astype(">f8"),
    ],
    ids=["transposed", "strided", "broadcast", "big-endian"],
)
def test_the_layout_of_what_is_saved_does_not_matter(tmp_path, view):
    value = view(np.random.default_rng(1).standard_normal((4, 6)))
    checkpoint.save(tmp_path / "c", {"x": value}, {})
    loaded = checkpoint.load(tmp_path / "c")[0]["x"]
    np.testing.assert_array_equal(loaded, value)
    assert loaded.dtype == np.float64


def test_not_a_number_and_signed_zero_survive(tmp_path):
    value = np.array([np.nan, -0.0, np.inf, 5e-324])
    checkpoint.save(tmp_path / "c", {"x": value}, {})
    assert bits(checkpoint.load(tmp_path / "c")[0]["x"]) == bits(value)


def test_metadata_comes_back_as_it_was(tmp_path):
    meta = {"epoch": 3, "step": 120, "rate": 0.1, "text": "ü", "seed": 2**64 - 1, "nested": {"list": [1, None, True]}}
    checkpoint.save(tmp_path / "c", {}, meta)
    tensors, loaded = checkpoint.load(tmp_path / "c")
    assert tensors == {} and loaded == meta


def test_other_tools_can_read_it(tmp_path):
    from safetensors.numpy import load_file

    value = np.arange(6, dtype=np.float32)
    checkpoint.save(tmp_path / "c.safetensors", {"x": value}, {"epoch": 1})
    np.testing.assert_array_equal(load_file(tmp_path / "c.safetensors")["x"], value)


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.array(["a"]), np.ones(2, np.complex128)], ids=lambda value: value.dtype.name
)
def test_a_dtype_the_format_lacks_is_refused_by_name(tmp_path, value):
    with pytest.raises(CheckpointError, match="model.weight.*" + str(value.dtype)):
        checkpoint.save(tmp_path / "c", {"model.weight": value}, {})
    assert not list(tmp_path.iterdir())


def test_metadata_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON"):
        checkpoint.save(tmp_path / "c", {}, {"rng": np.random.default_rng()})


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_damaged_file_is_refused_by_name(tmp_path, keep):
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"x": np.ones(100)}, {"epoch": 1})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="c.safetensors is damaged"):
        checkpoint.load(path)


def test_files_of_others_are_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.ones(3)}, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="not a checkpoint of mgpu"):
        checkpoint.load(tmp_path / "theirs")
    save_file({"x": np.ones(3)}, tmp_path / "newer", metadata={"mgpu": json.dumps({"format": 99})})
    with pytest.raises(CheckpointError, match="another version"):
        checkpoint.load(tmp_path / "newer")
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "none")


def test_a_failed_write_says_so_and_leaves_the_old_file(tmp_path):
    (tmp_path / "c").mkdir()  # a folder of that name: the rename must fail
    (tmp_path / "c" / "inside").touch()
    with pytest.raises(CheckpointError, match="not written.*unchanged"):
        checkpoint.save(tmp_path / "c", {"x": np.ones(3)}, {})
    assert os.listdir(tmp_path) == ["c"]


def test_folders_are_made_and_the_umask_is_kept(tmp_path):
    path = tmp_path / "a" / "b" / "c"
    checkpoint.save(path, {}, {})
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


WRITER = """
import sys, itertools
import numpy as np
from mgpu_core import checkpoint
for n in itertools.count():
    checkpoint.save(sys.argv[1], {f"x{i}": np.full(500_000, n) for i in range(4)}, {"n": n})
    print(n, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "c"
    for delay in (0.0, 0.004, 0.011, 0.017):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        written = int(writer.stdout.readline())  # one whole checkpoint, then into the next ones
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        written = int((writer.stdout.read().split() or [written])[-1])
        writer.stdout.close()
        tensors, meta = checkpoint.load(path)
        assert meta["n"] >= written
        for value in tensors.values():
            np.testing.assert_array_equal(value, np.full(500_000, meta["n"]))


def test_a_writer_killed_half_way_leaves_nothing_that_stays(tmp_path):
    path = tmp_path / "c"
    checkpoint.save(path, {"x": np.zeros(3)}, {"n": 1})
    die = "import os, signal; os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"  # written, not yet renamed
    died = subprocess.run([sys.executable, "-c", die + WRITER, str(path)], stdout=subprocess.DEVNULL)
    assert died.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert checkpoint.load(path)[1] == {"n": 1}
    checkpoint.save(path, {"x": np.ones(3)}, {"n": 2})
    assert os.listdir(tmp_path) == ["c"]
