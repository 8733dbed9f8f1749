"""Symmetric memory: one large sparse memfd a rank, mapped once by every rank of its host and never moved.

An array placed here is read and written by every peer directly. A memfd has no name, so nothing is left behind by a
rank that is killed, and the size of /dev/shm does not matter. The idea of one symmetric heap, in which all ranks'
allocations have the same offset, is SHMEM's.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import resource
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives import cgroup

PAGE = mmap.PAGESIZE
LINE = 64  # bytes in a cache line: small blocks start on one, so that no two arrays share a line
SLOTS = 4  # of scratch: as many slices may be under way
# Bytes of scratch that each rank of a communicator has for each rank, and at least. MGPU_SCRATCH of rank 0 sets the
# whole instead. Small, so that it stays in the cache that cores share: with 8 MB of that an all-reduce of 2 MB takes
# half the time that it takes through 16 MB of scratch. Not smaller than the caches that cores have of their own: to
# write a slot that the other core still holds takes up to four times as long.
SCRATCH_PER_RANK = 128 << 10
LEAST_SCRATCH = 1 << 20
_STEP = 64 << 20  # pages are taken this many bytes at a time, looking between steps at what others have left
_MARGIN = 64 << 20  # bytes of the machine's memory that are never taken
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a peer that shrank it would kill us by SIGBUS
_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python 3.10 does not name; the same on x86-64 and aarch64
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def scratch_setting() -> int:
    """MGPU_SCRATCH, in bytes; 0 where it is not set. Raises ValueError for what is no size."""
    return parse_bytes(os.environ.get("MGPU_SCRATCH") or "0", "MGPU_SCRATCH")


def scratch_bytes(size: int) -> int:
    """The usual bytes of scratch of each of `size` ranks of one host."""
    return max(LEAST_SCRATCH, SCRATCH_PER_RANK * size)


def slot_bytes(size: int, scratch: int = 0) -> int:
    """Bytes of a scratch slot of each of `size` ranks of one host, which have `scratch` bytes or (0) the usual."""
    return (scratch or scratch_bytes(size)) // SLOTS // LINE * LINE


class Segment:
    """One rank's memory as its peers see it: [control][scratch][heap], each a whole number of pages.

    Nothing but address space is taken until `commit`. `fd` is what peers map; `address`, `nbytes`, `scratch` and `heap`
    say where it lies in this process and where the parts begin, in bytes from the start (control begins at 0).
    """

    def __init__(self, fd: int, scratch: int, heap: int, nbytes: int) -> None:
        """Map the first `nbytes` of a memfd, and own its descriptor from here on."""
        self.fd = fd
        self.scratch = scratch
        self.heap = heap
        self.nbytes = nbytes
        try:
            pages = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        except OSError as error:
            self.fd = -1
            os.close(fd)
            raise MemoryError(
                f"{nbytes:,} bytes of address space could not be mapped ({error.strerror}); "
                f"set MGPU_HEAP to a smaller size, for example MGPU_HEAP=1G, or raise the limit (ulimit -v)"
            ) from error
        self._pages: mmap.mmap | None = pages
        self.address: int = np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
        _advise(pages, mmap.MADV_HUGEPAGE, 0, nbytes)

    @classmethod
    def create(cls, control_bytes: int, scratch_bytes: int, heap_bytes: int) -> Segment:
        """This rank's own segment, its control and scratch pages taken and zero, its heap empty.

        Raises MemoryError, saying what to do, where memory or address space does not suffice.
        """
        control, scratch, heap = (_up(nbytes, PAGE) for nbytes in (control_bytes, scratch_bytes, heap_bytes))
        total = control + scratch + heap
        fd = os.memfd_create("mgpu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, total)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(fd)
            raise MemoryError(
                f"a file of {total:,} bytes is refused ({error.strerror}); set MGPU_HEAP to a smaller size"
            ) from error
        segment = cls(fd, control, control + scratch, total)
        try:
            segment.commit(0, segment.heap)
        except MemoryError:
            segment.close()
            raise
        return segment

    def attach(self, fd: int) -> Segment:
        """Map a peer's segment, laid out like this one, given its descriptor, which now belongs to the new segment."""
        size = os.fstat(fd).st_size
        sealed = is_sealed(fd)
        if size != self.nbytes or not sealed:
            os.close(fd)
            raise ValueError(
                f"the peer's segment has {size:,} bytes and is {'' if sealed else 'not '}sealed; this rank's has "
                f"{self.nbytes:,} and is sealed. All ranks create theirs with the same sizes"
            )
        return Segment(fd, self.scratch, self.heap, self.nbytes)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes [offset, offset + nbytes), uint8. The array keeps the memory mapped, even after `close`."""
        self._check(offset, nbytes)
        return np.frombuffer(self._mapping(), np.uint8, nbytes, offset)

    def owner(self, address: int, nbytes: int) -> int | None:
        """Offset of an address range that lies wholly in this segment's heap, else None."""
        offset = address - self.address
        return offset if self.heap <= offset and offset + nbytes <= self.nbytes else None

    def commit(self, offset: int, nbytes: int) -> None:
        """Take memory for these bytes' pages, so that touching them cannot fail later. Zero if never used before.

        Raises MemoryError before the machine or the container runs out, and gives back what this call took: a page
        that does not exist when it is touched would end the process by SIGBUS, or wake the out-of-memory killer.
        """
        self._check(offset, nbytes)
        first, last = offset // PAGE * PAGE, _up(offset + nbytes, PAGE)
        for start in range(first, last, _STEP):
            step = min(_STEP, last - start)
            try:
                missing = last - start + _MARGIN - available()
                if missing > 0:
                    raise OSError(errno.ENOMEM, f"{missing:,} bytes too few")
                os.posix_fallocate(self.fd, start, step)
            except OSError as error:
                self.release(first, start - first)
                raise MemoryError(
                    f"no memory for {nbytes:,} bytes of symmetric memory ({error.strerror}); use smaller arrays, fewer "
                    f"ranks on this host, or raise the container's memory limit"
                ) from error
            self.populate(start, step)

    def populate(self, offset: int, nbytes: int) -> None:
        """Enter these bytes' pages into this process's page table, so that first use costs no faults. Best effort."""
        self._check(offset, nbytes)
        first, last = offset // PAGE * PAGE, _up(offset + nbytes, PAGE)
        for start in range(first, last, _STEP):  # in steps, since madvise holds the interpreter lock
            _advise(self._mapping(), _MADV_POPULATE_WRITE, start, min(_STEP, last - start))

    def release(self, offset: int, nbytes: int) -> None:
        """Give the memory of the pages that lie wholly in these bytes back to the system; they read as zero."""
        self._check(offset, nbytes)
        first, last = _up(offset, PAGE), (offset + nbytes) // PAGE * PAGE
        if first < last:
            self._mapping().madvise(mmap.MADV_REMOVE, first, last - first)

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped until the last view of it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._pages = None

    def _mapping(self) -> mmap.mmap:
        if self._pages is None:
            raise ValueError("this segment is closed")
        return self._pages

    def _check(self, offset: int, nbytes: int) -> None:
        if not (0 <= offset and 0 <= nbytes and offset + nbytes <= self.nbytes):
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) are not in a segment of {self.nbytes} bytes")


class Heap:
    """Which bytes of the heap are in use: bookkeeping only, the same on every rank that makes the same calls.

    Allocation is first fit, by address. Arrays are dropped by each rank's garbage collector at its own time and in its
    own order, so a drop only notes the block; it is freed at the next collective allocation, when all ranks have
    dropped it:

        heap.settle(ids that are in every rank's heap.pending())
        offset = heap.allocate(nbytes);  segment.commit(offset, nbytes)
        array = segment.view(offset, nbytes);  heap.follow(array, offset)
        for hole in heap.holes(): segment.release(*hole)
    """

    def __init__(self, start: int, nbytes: int) -> None:
        """An empty heap over offsets [start, start + nbytes); start is a multiple of the page size."""
        self.nbytes = nbytes
        self._free = [(start, start + nbytes)]  # disjoint, not touching, sorted
        self._vacated: list[tuple[int, int]] = []  # freed since `holes` was last asked
        self._blocks: dict[int, tuple[int, int]] = {}  # id -> [start, end)
        self._ids: dict[int, int] = {}  # start -> id
        self._next = 0
        self._dropped: set[int] = set()

    def allocate(self, nbytes: int) -> int:
        """Offset of a new block: on a page where it fills one, on a cache line otherwise. Raises MemoryError."""
        unit = PAGE if nbytes >= PAGE else LINE
        size = _up(max(nbytes, 1), unit)
        for place, (first, last) in enumerate(self._free):
            start = _up(first, unit)
            if start + size <= last:
                self._free[place : place + 1] = [
                    piece for piece in ((first, start), (start + size, last)) if piece[0] < piece[1]
                ]
                break
        else:
            raise MemoryError(
                f"no room for {nbytes:,} bytes in the symmetric heap: {self.used:,} of its {self.nbytes:,} bytes are "
                f"in use; drop arrays, or set MGPU_HEAP to a larger size on every rank, for example MGPU_HEAP=64G "
                f"(and raise ulimit -v, if that is what made the heap small)"
            )
        self._blocks[self._next] = (start, start + size)
        self._ids[start] = self._next
        self._next += 1
        return start

    def free(self, offset: int) -> None:
        """Free a block at once; every rank must do it between the same two allocations."""
        identity = self._ids.pop(offset, None)
        if identity is None:
            raise ValueError(f"no block of the symmetric heap starts at {offset}")
        first, last = block = self._blocks.pop(identity)
        self._dropped.discard(identity)
        self._vacated.append(block)
        place = bisect_left(self._free, block)
        if place < len(self._free) and self._free[place][0] == last:
            last = self._free.pop(place)[1]
        if place > 0 and self._free[place - 1][1] == first:
            first = self._free.pop(place - 1)[0]
        insort(self._free, (first, last))

    def follow(self, array: npt.NDArray[Any], offset: int) -> None:
        """Drop the block at `offset` when `array` is gone. It must be what `Segment.view` gave, since every view of a
        view refers to that one and not to the views between."""
        if isinstance(array.base, np.ndarray):
            raise ValueError("follow takes the array that Segment.view returned, not a view or a reshape of it")
        # A finalizer may run at any moment, inside another method of this heap too: adding to a set is atomic.
        weakref.finalize(array, self._dropped.add, self._ids[offset]).atexit = False

    def pending(self) -> list[int]:
        """Ids of blocks dropped here and not yet freed, oldest first."""
        return sorted(self._dropped.copy())

    def settle(self, ids: Iterable[int]) -> None:
        """Free the blocks that every rank has dropped; the same ids on every rank."""
        for identity in sorted(ids):
            self.free(self._blocks[identity][0])

    def holes(self) -> list[tuple[int, int]]:
        """(offset, nbytes) of what was freed since the last call and not allocated again: memory to give back.

        Asked after an allocation, it leaves alone what that allocation took: a loop that replaces an array by another
        keeps its pages. Ranges are widened to the free pages around them.
        """
        vacated, self._vacated = self._vacated, []
        holes = set()
        for first, last in vacated:
            first, last = first // PAGE * PAGE, _up(last, PAGE)
            place = max(0, bisect_left(self._free, (first, first)) - 1)
            for free_first, free_last in self._free[place:]:
                if free_first >= last:
                    break
                start, end = max(first, _up(free_first, PAGE)), min(last, free_last // PAGE * PAGE)
                if start < end:
                    holes.add((start, end - start))
        return sorted(holes)

    @property
    def used(self) -> int:
        """Bytes in blocks, rounding included."""
        return sum(last - first for first, last in self._blocks.values())


def heap_bytes(ranks: int) -> int:
    """Bytes of address space for a heap of which `ranks` are mapped into every process of this host.

    MGPU_HEAP (bytes, or with K, M, G, T), else all of the machine's memory; halved until the maps of all ranks fit in
    half of the address space that is left to this process (RLIMIT_AS). Sparse: it costs nothing until used. Ranks may
    find different sizes; all must take the smallest.
    """
    text = os.environ.get("MGPU_HEAP", "").strip()
    wanted = parse_bytes(text, "MGPU_HEAP") if text else os.sysconf("SC_PHYS_PAGES") * PAGE
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY:
        wanted = min(wanted, largest // 2)
    nbytes = max(PAGE, _up(wanted, PAGE))
    while nbytes > (1 << 20) and not _fits(2 * ranks * nbytes):
        nbytes = _up(nbytes // 2, PAGE)
    return nbytes


def available() -> int:
    """Bytes that this process may still take without driving the machine or its container out of memory."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    left = cgroup.memory_left()
    return free if left is None else min(free, left)


def is_sealed(fd: int) -> bool:
    """Whether a memfd keeps its size, so that what is mapped of it stays there."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def parse_bytes(text: str, name: str = "") -> int:
    """Bytes of "4096", "512M" or "1.5GiB", in powers of 1024. Raises ValueError naming the setting `name`, if any."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        what = f"{name}={text!r}" if name else repr(text)
        raise ValueError(f"{what} is not a size; expected bytes, or a number with K, M, G or T, such as 8G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _fits(nbytes: int) -> bool:
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, prot=0).close()
    except (OSError, OverflowError):
        return False
    return True


def _advise(pages: mmap.mmap, advice: int, start: int, nbytes: int) -> None:
    try:
        pages.madvise(advice, start, nbytes)
    except OSError:  # an older kernel, or one built without it
        pass


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
