"""Each rank's share of the processors."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import cgroup, threads


@pytest.mark.parametrize(
    "processors,ranks,quota,expected",
    [
        (8, 1, None, 8),
        (8, 2, None, 4),
        (8, 3, None, 2),
        (2, 4, None, 1),  # more ranks than processors
        (8, 2, 4.0, 2),  # a container's quota
        (8, 2, 1.5, 1),
        (8, 4, 100.0, 2),  # a quota of more than there are
    ],
)
def test_a_common_mask_is_divided(processors, ranks, quota, expected):
    masks = [range(processors)] * ranks
    assert [threads.share(masks, rank, quota) for rank in range(ranks)] == [expected] * ranks


def test_masks_that_a_launcher_made_disjoint_count_in_full():
    masks = [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert [threads.share(masks, rank) for rank in range(2)] == [4, 4]
    assert [threads.share(masks, rank, quota=4.0) for rank in range(2)] == [2, 2]


def test_masks_that_overlap_in_part():
    assert [threads.share([{0, 1, 2}, {2, 3}, {2}], rank) for rank in range(3)] == [2, 1, 1]


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_shares_are_at_least_one_and_otherwise_fit(masks):
    shares = [threads.share(masks, rank) for rank in range(len(masks))]
    assert min(shares) >= 1
    assert sum(share for share in shares if share > 1) <= len(set().union(*masks))


def test_this_host(monkeypatch):
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    assert threads.here(1) == len(os.sched_getaffinity(0))
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 0.5)
    assert threads.here(1) == 1


def test_the_user_s_own_settings_stay():
    assert threads.variables(3, {}) == dict.fromkeys(threads.VARIABLES, "3")
    mine = {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "2"}
    assert threads.variables(3, mine) == {
        "OPENBLAS_NUM_THREADS": "7", "BLIS_NUM_THREADS": "7", "NUMBA_NUM_THREADS": "7",
    }  # fmt: skip


@pytest.mark.parametrize("ranks", range(1, 9))
def test_pins_are_disjoint_neighbours_that_cover_what_is_allowed(ranks, tmp_path):
    # Two packages of two cores with two threads each, numbered as many machines do: siblings are 4 apart.
    for processor in range(8):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{processor % 4 // 2}\n")
        (folder / "core_id").write_text(f"{processor % 2}\n")
    pins = threads.pins(ranks, range(8), tmp_path)
    assert sum(map(len, pins)) == 8 and set().union(*pins) == set(range(8))
    if ranks == 2:
        assert pins == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    if ranks == 4:
        assert pins == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


def test_more_ranks_than_processors_take_turns(tmp_path):
    assert threads.pins(5, {3, 9}, tmp_path) == [{3}, {9}, {3}, {9}, {3}]
    assert set().union(*threads.pins(1)) == os.sched_getaffinity(0)


def test_pools_of_libraries_already_loaded_are_limited():
    script = """
import ctypes, os, numpy, numba
from collectives import threads
numpy.ones((300, 300)) @ numpy.ones((300, 300))
numba.get_num_threads()
threads.limit(1)
assert numba.get_num_threads() == 1
assert os.environ["OMP_NUM_THREADS"] == "1"
for path in threads._loaded():
    library = ctypes.CDLL(str(path)) if "openblas" in path.name else None
    for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
        if hasattr(library, name):
            print("threads", getattr(library, name)())
"""
    environ = {name: value for name, value in os.environ.items() if name not in threads.VARIABLES}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("\n")) <= {"threads 1", ""}


def test_limit_leaves_the_user_s_choice_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "_loaded", lambda: pytest.fail("looked at libraries"))
    threads.limit(1)
