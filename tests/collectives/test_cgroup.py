"""Limits of containers, read from made-up hierarchies of both versions and from this machine."""

from pathlib import Path

import pytest

from collectives import cgroup


def machine(folder: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A /proc/self and the hierarchy it points to."""
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts.format(top=folder))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


V2 = "30 23 0:27 / {top}/fs rw - cgroup2 cgroup2 rw\n"
V1 = (
    "32 31 0:29 / {top}/cpu rw - cgroup cgroup rw,cpuacct,cpu\n33 31 0:30 / {top}/memory rw - cgroup cgroup rw,memory\n"
)


def test_version_2_takes_the_narrowest_of_the_group_and_its_parents(tmp_path):
    files = {
        "fs/memory.stat": "ignored 1\n",  # the root group has no limits
        "fs/pod/cpu.max": "150000 100000\n",
        "fs/pod/memory.max": "1000\n",
        "fs/pod/memory.current": "600\n",
        "fs/pod/memory.stat": "anon 300\ninactive_file 200\n",
        "fs/pod/job/cpu.max": "max 100000\n",
        "fs/pod/job/memory.max": "max\n",
        "fs/pod/job/memory.current": "5\n",
    }
    proc = machine(tmp_path, "0::/pod/job\n", V2, files)
    assert cgroup.cpu_quota(proc) == 1.5
    assert cgroup.memory_left(proc) == 600


def test_version_1_as_well(tmp_path):
    files = {
        "cpu/box/cpu.cfs_quota_us": "50000\n",
        "cpu/box/cpu.cfs_period_us": "100000\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/box/memory.limit_in_bytes": "1000\n",
        "memory/box/memory.usage_in_bytes": "1200\n",
    }
    proc = machine(tmp_path, "4:memory:/box\n3:cpu,cpuacct:/box\n", V1, files)
    assert cgroup.cpu_quota(proc) == 0.5
    assert cgroup.memory_left(proc) == 0


@pytest.mark.parametrize("root,path", [("/docker/abc", "/docker/abc"), ("/docker/abc", "/elsewhere"), ("/", "/")])
def test_a_container_that_shows_only_its_own_group(tmp_path, root, path):
    mounts = f"30 23 0:27 {root} {{top}}/fs rw - cgroup2 cgroup2 rw\n"
    proc = machine(tmp_path, f"0::{path}\n", mounts, {"fs/cpu.max": "200000 100000\n"})
    assert cgroup.cpu_quota(proc) == 2.0


def test_no_limits_no_files_no_proc(tmp_path):
    assert cgroup.cpu_quota(tmp_path) is None
    assert cgroup.memory_left(tmp_path) is None
    proc = machine(tmp_path, "0::/\n", V2, {"fs/cpu.max": "max 100000\n"})
    assert cgroup.cpu_quota(proc) is None


def test_this_machine_answers():
    quota, left = cgroup.cpu_quota(), cgroup.memory_left()
    assert quota is None or quota > 0
    assert left is None or left >= 0
