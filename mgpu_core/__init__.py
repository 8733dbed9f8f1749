"""Autograd, layers, optimisers, data and the strategies of parallel training, on `collectives`.

Names load when they are first used, so that `import mgpu_core` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels import __version__ as __version__
    from mgpu_core import checkpoint as checkpoint
    from mgpu_core import data as data
    from mgpu_core import device as device
    from mgpu_core import nn as nn
    from mgpu_core import optim as optim
    from mgpu_core import parallel as parallel
    from mgpu_core import precision as precision
    from mgpu_core.tensor import Tensor as Tensor

__all__ = ["Tensor", "checkpoint", "data", "device", "nn", "optim", "parallel", "precision"]


def __getattr__(name: str) -> Any:
    if name == "Tensor":
        return import_module("mgpu_core.tensor").Tensor
    if name == "__version__":
        return import_module("kernels").__version__
    if name in __all__:
        return import_module(f"mgpu_core.{name}")
    raise AttributeError(f"module 'mgpu_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
