"""Clipping gradients by their norm, where ranks hold different parts of the model as well as copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mgpu_core import device
from mgpu_core.autograd.tape import Array
from mgpu_core.parallel.mesh import Mesh
from mgpu_core.tensor import Tensor


def grad_norm(parameters: Iterable[Tensor], mesh: Mesh | None = None) -> float:
    """The Euclidean norm of the gradients of the whole model; the same on every rank of the mesh, which all call it.

    Every element counts once. What a parameter is `sharded_over`, its ranks hold different parts of; along the other
    axes they hold copies, of which the first rank's counts. Along "pipeline" each rank has layers of its own, and of
    what stages share the first one's copy counts.
    """
    replicated = [axis for axis in ("data", "tensor") if mesh is not None and mesh.index(axis) > 0]
    counted = []
    for parameter in parameters:
        over = getattr(parameter, "sharded_over", ())
        counts = getattr(parameter, "counts", True) and all(axis in over for axis in replicated)
        if parameter.grad is not None and counts:
            counted.append(parameter.grad)
    own = math.hypot(*_norms(counted))
    if mesh is None or mesh.comm is None:
        return own
    return math.hypot(*mesh.comm.all_gather(np.array([own])).tolist())


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, mesh: Mesh | None = None) -> float:
    """Scales all gradients, in place, so that their common norm is at most `max_norm`; returns what it was.

    Pascanu, Mikolov and Bengio 2013. To be called after gradients were summed over replicas, with this rank's
    parameters, by every rank of `mesh`; see `grad_norm` for what counts. Gradients that are not finite stay as they
    are, on every rank.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, mesh)
    if math.isfinite(norm) and norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= max_norm / norm
    return norm


def whole_norms(arrays: Sequence[Array], parameters: Sequence[Tensor], mesh: Mesh | None = None) -> list[float]:
    """The Euclidean norm of each whole array, of which this rank has what it has of the parameter beside it.

    All ranks of the mesh that hold parts of these parameters call it together.
    """
    squares = np.square(_norms(arrays))
    for axis in ("data", "tensor"):
        comm: Any = None if mesh is None else getattr(mesh, axis)
        parts = [i for i, parameter in enumerate(parameters) if axis in getattr(parameter, "sharded_over", ())]
        if parts and comm is None:
            raise ValueError(f"parameters are sharded over {axis!r}: give the mesh that they are sharded over")
        if parts:
            squares[parts] = comm.all_reduce(squares[parts])
    return np.sqrt(squares).tolist()


def _norms(arrays: Sequence[Array]) -> list[float]:
    """Their Euclidean norms; asks a GPU once."""
    if not arrays:
        return []
    xp = array_namespace(*arrays)
    norms = [xp.linalg.vector_norm(array) for array in arrays]
    return device.to_host(xp.stack(norms)).tolist() if device.of(arrays[0]) == "cuda" else [float(n) for n in norms]
