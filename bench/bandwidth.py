"""Algorithm and bus bandwidth, as nccl-tests defines them (doc/PERFORMANCE.md there).

Algorithm bandwidth is size over time. Bus bandwidth multiplies it by what each link must carry at least, so that it
can be held against the hardware's, whatever the number of ranks: an all-reduce sends each of the p ranks' bytes at
least 2(p - 1)/p times.
"""

from __future__ import annotations


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth; 0 for a barrier, and 1 for the packing of a bucket, which nccl-tests does
    not have. KeyError for anything else."""
    per_rank = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * per_rank,
        "all_gather": per_rank,
        "reduce_scatter": per_rank,
        "all_to_all": per_rank,
        "gather": per_rank,
        "scatter": per_rank,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send_recv": 1.0,
        "barrier": 0.0,
        "pack": 1.0,
    }[collective]


def algorithm_bandwidth(nbytes: int, microseconds: float) -> float:
    """GB/s (10**9 bytes a second). For all-gather, reduce-scatter and their like `nbytes` is all ranks' together."""
    return nbytes / microseconds / 1e3


def bus_bandwidth(collective: str, ranks: int, nbytes: int, microseconds: float) -> float:
    """GB/s that each link carries at least."""
    return algorithm_bandwidth(nbytes, microseconds) * bus_factor(collective, ranks)


def memory_traffic(collective: str, ranks: int) -> float:
    """Bytes that go through one shared memory at least for each byte of size, all ranks together; in place where that
    is possible.

    What is reduced is read once from every rank and written wherever it is wanted; what is copied is read and written
    once for each rank that does not have it.
    """
    return {
        "all_reduce": 2.0 * ranks,
        "reduce": ranks + 1.0,
        "reduce_scatter": ranks + 1.0,
        "broadcast": 2.0 * (ranks - 1),
        "all_gather": 2.0 * (ranks - 1),
        "gather": 2.0 * (ranks - 1) / ranks,
        "scatter": 2.0 * (ranks - 1) / ranks,
        "all_to_all": 2.0 * ranks,
        "send_recv": 2.0 * ranks,
        "barrier": 0.0,
    }[collective]


def memory_limit(collective: str, ranks: int, addition_microseconds: float) -> float:
    """Microseconds that a collective of N bytes in one shared memory takes at least, at the speed of `a += b`.

    The yardstick is an addition that all ranks run at the same time, each on the two halves of its own N bytes: it
    reads and writes 3N/2 bytes a rank, and its data are about as large, and as near in the caches, as the collective's.
    """
    return addition_microseconds * memory_traffic(collective, ranks) / (1.5 * ranks)
