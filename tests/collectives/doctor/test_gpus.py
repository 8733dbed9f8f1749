"""What the doctor says of GPUs, from a driver's answers that stand in for one."""

import pytest

from collectives.doctor import gpus
from collectives.doctor.gpus import Gpus

ALL_PAIRS = {(0, 1), (1, 0)}


def driver(peers):
    return lambda: Gpus(12040, ["H100", "H100"], [(9, 0)] * 2, [80 << 30] * 2, peers)


def refuses():
    raise RuntimeError("cuInit fails with error 100")


def test_no_gpu_is_no_trouble(tmp_path):
    found = gpus.devices(refuses, tmp_path)
    assert not found.advice and found.facts["count"] == 0


def test_two_gpus_that_reach_each_other():
    found = gpus.devices(driver(ALL_PAIRS))
    assert "each reads every other's memory" in found.what and "CUDA 12.4" in found.what and not found.advice


@pytest.mark.parametrize("peers", [set(), {(0, 1)}])
def test_missing_peer_access_is_named(peers):
    assert "0-1" in gpus.devices(driver(peers)).advice or "1-0" in gpus.devices(driver(peers)).advice


def test_a_gpu_that_nothing_drives_is_serious(tmp_path):
    (tmp_path / "nvidia0").touch()
    assert "nvidia-smi" in gpus.devices(refuses, tmp_path).advice

    def missing():
        raise ImportError("no cuda.bindings")

    found = gpus.devices(missing, tmp_path)
    assert found.serious and "mgpu-core[cuda12]" in found.advice


def test_nccl_is_found_with_its_path():
    found = gpus.nccl()
    assert "libnccl.so" in found.facts["path"] and not found.advice


def test_a_stray_nccl_is_noticed(monkeypatch):
    monkeypatch.setattr(gpus, "_run", lambda command: (True, "2.18.1\n11.8\n/usr/lib/libnccl.so.2\n"))
    assert "LD_LIBRARY_PATH" in gpus.nccl().advice


def test_an_nccl_that_does_not_load_is_serious(monkeypatch):
    monkeypatch.setattr(gpus, "_run", lambda command: (False, "OSError: libcudart.so.12 not found"))
    assert gpus.nccl().serious
