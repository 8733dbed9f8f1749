"""What the doctor says of machines with little: one processor, a small container, few descriptors."""

import os
import resource
import subprocess
import sys

import pytest

from collectives.doctor import machine
from collectives.doctor.finding import size


@pytest.mark.parametrize(
    "nbytes, text",
    [(0, "0 bytes"), (1023, "1023 bytes"), (64 << 20, "64 MB"), (1.5 * 2**30, "1.5 GB"), (2**52, "4096 TB")],
)
def test_sizes_are_written_for_people(nbytes, text):
    assert size(nbytes) == text


def test_this_machine_can_run_ranks():
    assert not machine.system().advice


def test_one_processor_is_serious_and_two_are_not():
    alone = machine.cores(allowed=1)
    assert alone.serious and "docker --cpus" in alone.advice
    assert not machine.cores(allowed=2).advice


def test_half_a_processor_s_quota_is_serious_and_a_small_one_is_remarked():
    assert machine.cores(allowed=8, quota=0.5).serious
    some = machine.cores(allowed=8, quota=3.5)
    assert not some.serious and "no more than 3 ranks" in some.advice


def test_little_memory_is_remarked_and_next_to_none_is_serious():
    assert not machine.room(8 << 30).advice
    assert machine.room(512 << 20).mark == "!"
    tight = machine.room(20 << 20)
    assert tight.serious and "MGPU_SCRATCH" in tight.advice


def test_the_usual_small_dev_shm_is_no_trouble_for_us(monkeypatch):
    docker_default = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))  # 64 MB
    monkeypatch.setattr(os, "statvfs", lambda path: docker_default)
    found = machine.shared_memory_file_system()
    assert "64 MB" in found.what and "does not use it" in found.what and not found.serious
    assert "--shm-size" in found.advice


def test_no_dev_shm_at_all():
    assert not machine.shared_memory_file_system("/no/such/folder").advice


def test_few_descriptors():
    assert machine.descriptors(64).serious
    assert machine.descriptors(100).mark == "!"
    assert not machine.descriptors(1024).advice


def test_limits_of_the_shell_are_noticed():
    code = "from collectives.doctor import machine; print([f.topic for f in machine.shell_limits()])"

    def tighten():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=tighten, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['address space', 'file size']"
