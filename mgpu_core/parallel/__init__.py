"""Strategies of parallel training. Each gives the loss curve of a single process, within float rounding."""

from mgpu_core.parallel.data import DataParallel

__all__ = ["DataParallel"]
