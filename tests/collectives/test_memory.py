"""Symmetric memory: what peers see, what memory it takes and gives back, and that all ranks decide alike."""

import gc
import mmap
import os
import random
import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import memory
from collectives.memory import LINE, PAGE, Heap, Segment

MIB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident(segment: Segment) -> int:
    """Bytes of memory behind the segment, as the kernel counts them."""
    return os.fstat(segment.fd).st_blocks * 512


@pytest.fixture
def segment():
    segment = Segment.create(100, 5 * PAGE - 3, 64 * MIB)
    yield segment
    segment.close()


def test_parts_follow_each_other_on_whole_pages(segment):
    assert (segment.scratch, segment.heap) == (PAGE, 6 * PAGE)
    assert segment.nbytes == segment.heap + 64 * MIB
    assert segment.address % PAGE == 0


def test_only_control_and_scratch_take_memory_at_first(segment):
    assert resident(segment) == segment.heap
    assert not segment.view(0, segment.heap).any()


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, MIB + 13])
def test_a_peer_sees_what_is_written(segment, nbytes):
    segment.commit(segment.heap, nbytes)
    peer = segment.attach(os.dup(segment.fd))
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    segment.view(segment.heap, nbytes)[:] = data
    assert peer.address != segment.address
    np.testing.assert_array_equal(peer.view(segment.heap, nbytes), data)
    peer.view(segment.heap, nbytes)[:] = data[::-1]
    np.testing.assert_array_equal(segment.view(segment.heap, nbytes), data[::-1])
    peer.close()


def test_memory_is_taken_by_commit_and_returned_by_release(segment):
    base = resident(segment)
    segment.commit(segment.heap, 3 * MIB)
    assert resident(segment) == base + 3 * MIB
    segment.view(segment.heap, 3 * MIB)[:] = 7
    segment.release(segment.heap + 1, 2 * MIB)  # the two pages at its ends are used by others too
    assert resident(segment) == base + MIB + PAGE
    left = segment.view(segment.heap, 3 * MIB)
    assert left[0] == 7 and left[PAGE - 1] == 7 and left[2 * MIB] == 7
    assert not left[PAGE : 2 * MIB].any()
    segment.release(segment.heap, 3 * MIB)
    assert resident(segment) == base


def test_too_little_memory_is_an_error_and_takes_nothing(segment, monkeypatch):
    base = resident(segment)
    left = [memory._MARGIN + 20 * MIB, 0]
    monkeypatch.setattr(memory, "_STEP", 4 * MIB)
    monkeypatch.setattr(memory, "available", lambda: left.pop(0))
    with pytest.raises(MemoryError, match=r"(?s)20,971,520 bytes.*smaller arrays"):
        segment.commit(segment.heap, 20 * MIB)  # the second look finds that somebody else has taken it
    assert left == []
    assert resident(segment) == base


def test_a_refusal_by_the_kernel_is_an_error_that_says_what_to_do(segment, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match="No space left"):
        segment.commit(segment.heap, 1)


def test_nobody_can_resize_a_segment(segment):
    for size in (0, segment.nbytes - PAGE, segment.nbytes + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)


def test_a_stranger_s_file_is_refused_and_closed(segment):
    before = descriptors()
    for size, flags in ((segment.nbytes, 0), (PAGE, os.MFD_ALLOW_SEALING)):
        fd = os.memfd_create("stranger", flags | os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match="same sizes"):
            segment.attach(fd)
    assert descriptors() == before


def test_views_outlive_close_and_nothing_is_left():
    gc.collect()
    before = descriptors()
    segment = Segment.create(PAGE, 0, MIB)
    peer = segment.attach(os.dup(segment.fd))
    view = peer.view(0, PAGE)[3:9].view(np.uint16)
    segment.close()
    peer.close()
    peer.close()
    view[:] = 5
    assert view.sum() == 15
    with pytest.raises(ValueError, match="closed"):
        peer.view(0, 1)
    del view
    assert descriptors() == before
    assert "memfd:mgpu" not in open("/proc/self/maps").read()


@pytest.mark.parametrize("offset,nbytes", [(-1, 1), (0, -1), (PAGE, 10**12), (10**12, 0)])
def test_ranges_outside_are_refused(segment, offset, nbytes):
    for method in (segment.view, segment.commit, segment.populate, segment.release):
        with pytest.raises(ValueError, match="not in a segment"):
            method(offset, nbytes)


def test_an_address_is_recognised_as_part_of_the_heap(segment):
    view = segment.view(segment.heap, MIB).view(np.float32)[5:25].reshape(4, 5)
    assert segment.owner(view.ctypes.data, view.nbytes) == segment.heap + 20
    assert segment.owner(segment.address + segment.heap, segment.nbytes - segment.heap) == segment.heap
    assert segment.owner(segment.address + segment.heap, segment.nbytes - segment.heap + 1) is None
    assert segment.owner(segment.address + segment.scratch, 8) is None
    ordinary = np.empty(8)
    assert segment.owner(ordinary.ctypes.data, ordinary.nbytes) is None


def test_a_limited_address_space_makes_a_smaller_heap_and_a_clear_error():
    script = f"""
import resource
from collectives.memory import Segment, heap_bytes
resource.setrlimit(resource.RLIMIT_AS, ({4 << 30}, {4 << 30}))
nbytes = heap_bytes(4)
assert {64 * MIB} < nbytes <= {(4 << 30) // 8}, nbytes
own = Segment.create(4096, 4096, nbytes)
peers = [own.attach(__import__("os").dup(own.fd)) for _ in range(3)]
try:
    Segment.create(0, 0, {8 << 30})
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "MGPU_HEAP" in done.stdout and "ulimit -v" in done.stdout


def test_the_heap_s_size_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("MGPU_HEAP", raising=False)
    assert memory.heap_bytes(2) == os.sysconf("SC_PHYS_PAGES") * PAGE
    monkeypatch.setenv("MGPU_HEAP", "100M")
    assert memory.heap_bytes(2) == 100 * MIB
    monkeypatch.setenv("MGPU_HEAP", "lots")
    with pytest.raises(ValueError, match="MGPU_HEAP='lots' is not a size"):
        memory.heap_bytes(2)


@pytest.mark.parametrize(
    "text,nbytes", [("0", 0), ("4096", 4096), ("1k", 1024), ("1.5GiB", 3 << 29), ("8 G", 8 << 30), ("2TB", 2 << 40)]
)
def test_sizes_are_read(text, nbytes):
    assert memory.parse_bytes(text, "X") == nbytes


def test_what_is_available_is_no_more_than_the_machine_has():
    assert 0 < memory.available() <= os.sysconf("SC_PHYS_PAGES") * PAGE


@pytest.mark.parametrize("nbytes", [0, 1, LINE, LINE + 1, PAGE - 1, PAGE, PAGE + 1, MIB])
def test_blocks_start_on_a_line_or_on_a_page(nbytes):
    heap = Heap(PAGE, 4 * MIB)
    heap.allocate(1)
    unit = PAGE if nbytes >= PAGE else LINE
    assert heap.allocate(nbytes) % unit == 0


def test_a_full_heap_says_how_full_and_what_to_do():
    heap = Heap(0, MIB)
    heap.allocate(MIB - PAGE)
    with pytest.raises(MemoryError, match=r"(?s)8,192 bytes.*1,044,480 of its 1,048,576.*MGPU_HEAP"):
        heap.allocate(2 * PAGE)
    assert heap.allocate(PAGE) == MIB - PAGE
    with pytest.raises(ValueError, match="no block"):
        heap.free(LINE)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_never_overlap_and_everything_comes_back(data):
    heap, start, size = Heap(PAGE, MIB), PAGE, MIB
    live: dict[int, int] = {}
    used = np.zeros(start + size, bool)
    for _ in range(data.draw(st.integers(1, 40))):
        if live and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(live)))
            heap.free(offset)
            used[offset : offset + live.pop(offset)] = False
        else:
            nbytes = data.draw(st.one_of(st.integers(0, 300), st.integers(0, MIB // 4)))
            try:
                offset = heap.allocate(nbytes)
            except MemoryError:
                continue
            assert start <= offset and offset + nbytes <= start + size
            assert not used[offset : offset + nbytes].any()
            used[offset : offset + nbytes] = True
            live[offset] = nbytes
        for first, nbytes in heap.holes():
            assert first % PAGE == 0 and nbytes % PAGE == 0 and nbytes > 0
            assert not used[first : first + nbytes].any()
    for offset in live:
        heap.free(offset)
    assert heap.used == 0
    assert heap.allocate(size) == start


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_ranks_that_drop_in_any_order_stay_alike(seed, ranks):
    """Each rank drops its arrays at its own time; the blocks are freed when all have, and offsets agree throughout."""
    draw = random.Random(seed)
    segments = [Segment.create(0, 0, 4 * MIB) for _ in range(ranks)]
    heaps = [Heap(segment.heap, 4 * MIB) for segment in segments]
    arrays: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for _ in range(30):
        nbytes = draw.choice([draw.randrange(200), draw.randrange(40 * PAGE)])
        pending = [set(heap.pending()) for heap in heaps]
        offsets, holes = set(), set()
        for heap, segment, mine in zip(heaps, segments, arrays):
            heap.settle(set.intersection(*pending))
            offset = heap.allocate(nbytes)
            segment.commit(offset, nbytes)
            root = segment.view(offset, nbytes)
            heap.follow(root, offset)
            mine.append(root[nbytes // 3 :])  # a view alone keeps the block
            offsets.add(offset)
            holes.add(tuple(heap.holes()))
            for hole in heap.holes():
                segment.release(*hole)
        assert len(offsets) == len(holes) == 1
        for mine in arrays:
            while mine and draw.random() < 0.5:
                mine.pop(draw.randrange(len(mine)))
    arrays.clear()
    del mine, root
    assert all(heap.pending() == heaps[0].pending() for heap in heaps)
    for heap, segment in zip(heaps, segments):
        heap.settle(heap.pending())
        assert heap.used == 0
        for hole in heap.holes():
            segment.release(*hole)
        segment.close()


def test_memory_of_dropped_arrays_comes_back():
    segment = Segment.create(0, 0, 8 * MIB)
    heap = Heap(segment.heap, 8 * MIB)
    for nbytes in (100, 3 * MIB, PAGE + 1, 70):
        offset = heap.allocate(nbytes)
        segment.commit(offset, nbytes)
        heap.follow(segment.view(offset, nbytes), offset)  # the view is gone at once
    assert resident(segment) > 3 * MIB
    heap.settle(heap.pending())
    for hole in heap.holes():
        segment.release(*hole)
    assert resident(segment) == 0
    segment.close()


def test_a_block_taken_again_at_once_keeps_its_pages():
    heap = Heap(0, MIB)
    offset = heap.allocate(8 * PAGE)
    heap.settle([0])
    assert heap.allocate(3 * PAGE) == offset
    assert heap.holes() == [(3 * PAGE, 5 * PAGE)]
    assert heap.holes() == []


def test_only_the_root_view_can_be_followed():
    segment = Segment.create(0, 0, MIB)
    heap = Heap(0, MIB)
    offset = heap.allocate(64)
    for nbytes in (0, 64):
        with pytest.raises(ValueError, match="Segment.view"):
            heap.follow(segment.view(offset, nbytes).view(np.int8), offset)
        heap.follow(segment.view(offset, nbytes), offset)
    segment.close()


def test_a_file_size_limit_is_respected():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, hard))
    try:
        assert memory.heap_bytes(1) == 32 * MIB
        with pytest.raises(MemoryError, match="MGPU_HEAP"):
            Segment.create(0, 0, 65 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert mmap.PAGESIZE == PAGE
