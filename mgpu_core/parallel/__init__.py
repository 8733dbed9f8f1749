"""Strategies of parallel training. Each gives the loss curve of a single process, within float rounding, but for
`Asynchronous` and `LocalSGD`, which say what they give up.

A `Mesh` lays out the ranks; its axes' communicators go to the strategies, and any of them may be None. A trainer knows
them all by one interface, `Strategy`.
"""

from mgpu_core.parallel.asynchronous import Asynchronous, ParameterStore
from mgpu_core.parallel.balance import cut, measure
from mgpu_core.parallel.data import DataParallel
from mgpu_core.parallel.local import LocalSGD
from mgpu_core.parallel.mesh import Mesh
from mgpu_core.parallel.norm import clip_grad_norm, grad_norm
from mgpu_core.parallel.pipeline import Pipeline
from mgpu_core.parallel.pipeline_schedules import SCHEDULES
from mgpu_core.parallel.placement import Placement
from mgpu_core.parallel.recompute import recompute
from mgpu_core.parallel.sharded import Sharded
from mgpu_core.parallel.speeds import Balance
from mgpu_core.parallel.strategies import Pipelined, Rounds, Strategy, StrategyError, Synchronous, Workers
from mgpu_core.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    parallelize,
    vocabulary_parallel_cross_entropy,
)

__all__ = [
    "SCHEDULES",
    "Asynchronous",
    "Balance",
    "ColumnParallelLinear",
    "DataParallel",
    "LocalSGD",
    "Mesh",
    "ParameterStore",
    "Pipeline",
    "Pipelined",
    "Placement",
    "Rounds",
    "RowParallelLinear",
    "Sharded",
    "Strategy",
    "StrategyError",
    "Synchronous",
    "VocabularyParallelEmbedding",
    "Workers",
    "clip_grad_norm",
    "cut",
    "grad_norm",
    "measure",
    "parallelize",
    "recompute",
    "vocabulary_parallel_cross_entropy",
]
