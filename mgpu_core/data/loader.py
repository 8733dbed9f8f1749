"""A reader that prepares the next batches on a background thread while the present one trains.

A rank's training loop reads

    loader = Loader((images, labels), Sampler(len(images), batch=128, seed=1), rank=comm.rank, size=comm.size)
    with loader.epoch(0) as batches:
        for batch in batches:
            images, labels = batch.arrays
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from mgpu_core import device as devices
from mgpu_core import random
from mgpu_core.data.sampler import Indices, Sampler, part

Arrays = tuple[Any, ...]  # NumPy's, or CuPy's where a loader puts them on a GPU
Transform = Callable[[Arrays], Arrays]


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        arrays: the rank's samples, one array for each of the data set's; the first axis may be 0.
        indices: the samples' numbers in the data set, (n,) int64.
        start: the place of the first of them in the global batch.
        epoch, step: the position; training goes on after it from (epoch, step + 1).
        global_count: samples that all ranks together hold in this step. A loss that is summed over
            `arrays` and divided by this averages right, however unequal the parts.
    """

    arrays: Arrays
    indices: Indices
    start: int
    epoch: int
    step: int
    global_count: int


class Loader:
    """Reads a rank's part of every batch, ahead of its use.

    Args:
        arrays: the data set; all arrays have the samples on their first axis.
        sampler: decides the batches.
        rank, size: this rank, of how many.
        shares: a weight a rank, for unequal parts; None cuts evenly. `reshare` changes them, and assigning them between
            epochs does.
        transform: makes training arrays of the raw ones, on the background thread. It runs inside `random.batch`, so
            that with `random.sample_words` it does the same to a sample on any number of ranks.
        depth: how many batches are held ready, at most.
        workers: how many batches are read at the same time, each on a thread. They come in order all the same.
        device: where the arrays are to be, "cpu" or "cuda". On their way to a GPU the reading thread puts them into
            pinned memory, and they are copied on a stream of their own while the batch before is in use.

    Attributes:
        waited: seconds that the consumer has waited for batches so far; near zero when reading keeps up.
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        sampler: Sampler,
        *,
        rank: int = 0,
        size: int = 1,
        shares: Sequence[float] | None = None,
        transform: Transform | None = None,
        depth: int = 2,
        workers: int = 1,
        device: str = "cpu",
    ) -> None:
        lengths = [len(array) for array in arrays]
        if lengths != [sampler.count] * len(arrays):
            raise ValueError(f"the sampler counts {sampler.count} samples, the arrays hold {lengths}")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        if min(depth, workers) < 1:
            raise ValueError(f"depth and workers must be at least 1, got {depth} and {workers}")
        self.shares = [1.0] * size if shares is None else shares
        if len(self.shares) != size:
            raise ValueError(f"{size} ranks need {size} shares, got {self.shares}")
        self.arrays = tuple(arrays)
        self.sampler = sampler
        self.rank = rank
        self.transform = transform
        self.depth = depth
        self.workers = workers
        self.device = devices.checked(device)
        self.waited = 0.0

    @property
    def shares(self) -> Sequence[float]:
        """The shares that hold from now on, or from where the last `reshare` says."""
        return self._shares[-1][1]

    @shares.setter
    def shares(self, shares: Sequence[float]) -> None:
        self._shares: list[tuple[int, Sequence[float]]] = [(0, list(shares))]

    def reshare(self, shares: Sequence[float], epoch: int, step: int) -> None:
        """Change the shares from the first batch on that cannot have been read while batch `step` of `epoch` is in use.

        When all ranks' loaders have the same depth and workers, and all ranks call this at the same step, they change
        together.
        """
        position = epoch * self.sampler.steps + step
        first = position + self.depth + self.workers + 1 + (self.device != "cpu")  # so many are ready, or on their way
        present = [entry for entry in self._shares if entry[0] <= position][-1:]
        coming = [entry for entry in self._shares if position < entry[0] < first]
        self._shares = [*present, *coming, (first, list(shares))]

    def shares_of(self, epoch: int, step: int) -> Sequence[float]:
        """The shares that hold in a batch."""
        position = epoch * self.sampler.steps + step
        return next((shares for start, shares in reversed(self._shares) if start <= position), self._shares[0][1])

    def read(self, epoch: int, step: int) -> Batch:
        """This rank's part of one batch, read here and now."""
        batch = self.read_here(epoch, step)
        return replace(batch, arrays=tuple(devices.move(array, self.device) for array in batch.arrays))

    def read_here(self, epoch: int, step: int) -> Batch:
        """The same, in NumPy's arrays."""
        whole = self.sampler.global_batch(epoch, step)
        start, stop = part(len(whole), self.rank, self.shares_of(epoch, step))
        indices = whole[start:stop]
        arrays: Arrays = tuple(array[indices] for array in self.arrays)
        if self.transform is not None:
            done = epoch * self.sampler.steps + step
            with random.batch(seed=self.sampler.seed, step=done, samples=range(start, stop)):
                arrays = self.transform(arrays)
        return Batch(arrays, indices, start, epoch, step, len(whole))

    def epoch(self, epoch: int, start: int = 0, *, steps: Iterable[int] | None = None) -> Prefetched:
        """The batches of `epoch` from step `start` on, read ahead by a thread until closed or used up.

        `steps` says which steps to read instead, in its order; that thread asks for each when it is about to read it.
        """
        wanted = range(start, self.sampler.steps) if steps is None else steps
        return Prefetched(self, epoch, wanted) if self.device == "cpu" else Uploaded(self, epoch, wanted)


class Prefetched(Iterator[Batch]):
    """Batches on their way from the reading thread. Close it, or use it in `with`, when leaving early."""

    def __init__(
        self, loader: Loader, epoch: int, steps: Iterable[int], ready: Callable[[Batch], Batch] = lambda batch: batch
    ) -> None:
        self._loader = loader
        self._queue = _Queue(loader.depth)
        # The thread knows the queue and not this object, so an iterator that is merely dropped also ends it.
        self._thread = threading.Thread(
            target=_read_ahead,
            args=(loader, epoch, steps, self._queue, ready),
            name=f"reader of epoch {epoch}",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self._queue.close)
        self._thread.start()

    def __next__(self) -> Batch:
        began = time.perf_counter()
        item = self._queue.get()
        self._loader.waited += time.perf_counter() - began
        if isinstance(item, Batch):
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop reading ahead and end the thread; batches not yet taken are dropped."""
        self._finalizer()
        self._thread.join()

    def __enter__(self) -> Prefetched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Uploaded(Prefetched):
    """Batches whose arrays are in GPU memory. While one is in use the next is copied there, if it has been read.

    Memory is taken by the thread that uses it, after the copying stream has been told to wait for the stream in use. So
    what that frees is never overwritten before it has been read.
    """

    def __init__(self, loader: Loader, epoch: int, steps: Iterable[int]) -> None:
        cupy = devices.cuda()
        gpu = cupy.cuda.Device()  # this thread's; a new thread's would be the first one
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._coming: tuple[Batch, Any] | None = None
        super().__init__(loader, epoch, steps, lambda batch: _pinned(batch, gpu))

    def __next__(self) -> Batch:
        batch, arrived = self._coming or self._upload(super().__next__())
        self._coming = None
        devices.cuda().cuda.get_current_stream().wait_event(arrived)
        if (following := self._queue.poll()) is not None:
            self._coming = self._upload(following)
        return batch

    def _upload(self, batch: Batch) -> tuple[Batch, Any]:
        """The batch in GPU memory, and the event that says when it is there."""
        cupy = devices.cuda()
        self._stream.wait_event(cupy.cuda.get_current_stream().record())
        with self._stream:
            arrays = tuple(cupy.array(array) for array in batch.arrays)
        return replace(batch, arrays=arrays), self._stream.record()


def _pinned(batch: Batch, gpu: Any) -> Batch:
    """The batch in memory from which a GPU copies by itself."""
    import cupyx

    def pinned(array: NDArray[Any]) -> NDArray[Any]:
        copy: NDArray[Any] = cupyx.empty_pinned(array.shape, array.dtype)
        copy[...] = array
        return copy

    with gpu:
        return replace(batch, arrays=tuple(map(pinned, batch.arrays)))


class _Queue:
    """A bounded queue that either end may be let go from: closing it wakes and frees both."""

    def __init__(self, depth: int) -> None:
        self._items: deque[Batch | BaseException | None] = deque()
        self._depth = depth
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: Batch | BaseException | None) -> bool:
        """Wait for room and append; False if the queue was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def poll(self) -> Batch | None:
        """The next item, if it is there already and is a batch."""
        with self._changed:
            if self._closed or not self._items or not isinstance(self._items[0], Batch):
                return None
            self._changed.notify_all()
            return self._items.popleft()  # type: ignore[return-value]

    def get(self) -> Batch | BaseException | None:
        """Wait for an item; None at the end of the data, and ever after."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if self._closed:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _read_ahead(
    loader: Loader, epoch: int, steps: Iterable[int], queue: _Queue, ready: Callable[[Batch], Batch]
) -> None:
    reading: deque[Future[Batch]] = deque()
    try:
        with ThreadPoolExecutor(loader.workers) as pool:
            for step in steps:
                reading.append(pool.submit(lambda step: ready(loader.read_here(epoch, step)), step))
                if len(reading) == loader.workers and not queue.put(reading.popleft().result()):
                    return
            while reading:
                if not queue.put(reading.popleft().result()):
                    return
        queue.put(None)
    except BaseException as error:  # whatever it is, the consumer is the one who can act on it
        queue.put(error)
