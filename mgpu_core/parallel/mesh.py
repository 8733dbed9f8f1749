"""A mesh: the ranks laid out along named axes, one for each way to share the work, so that the ways combine.

    with Mesh(comm, data=-1, tensor=2, pipeline=2) as mesh:
        model = parallelize(transformer(rng), mesh.tensor)
        pipeline = Pipeline(model, mesh.pipeline, data=mesh.data, ...)

Ranks that differ only in their place along an axis form a communicator of that axis. As in Megatron-LM (Narayanan et
al., SC 2021), the axis that talks most has neighbouring ranks: tensor varies fastest, then data, then pipeline.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

AXES = ("tensor", "data", "pipeline")  # the fastest first


class Mesh:
    """The ranks of `comm` in a grid of `data` x `tensor` x `pipeline`.

    All ranks make it together. One size may be -1 (or None): as many ranks as are left.

    Args:
        comm: all the ranks; None for this process alone.

    Attributes:
        comm: all the ranks; None if there is one.
        data, tensor, pipeline: this rank's communicator along each axis; None where the size is 1.
        shape: the axes' sizes, by name.

    Raises:
        ValueError: if the sizes do not multiply to the number of ranks; says which would.
    """

    def __init__(
        self, comm: Any = None, *, data: int | None = 1, tensor: int | None = 1, pipeline: int | None = 1
    ) -> None:
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        self.comm: Any = comm if size > 1 else None
        self.shape = _fitted({"tensor": tensor, "data": data, "pipeline": pipeline}, size)
        self._index: dict[str, int] = {}
        along: dict[str, Any] = {}
        stride = 1
        for axis in AXES:
            length = self.shape[axis]
            self._index[axis] = place = rank // stride % length
            along[axis] = comm.split(rank - place * stride, place) if length > 1 else None
            stride *= length
        self.tensor, self.data, self.pipeline = along["tensor"], along["data"], along["pipeline"]
        self._along = [comm for comm in along.values() if comm is not None]

    def index(self, axis: str) -> int:
        """This rank's place along an axis: "data", "tensor" or "pipeline"."""
        return self._index[axis]

    def close(self) -> None:
        """Close the axes' communicators, not `comm`. Closing twice is fine."""
        for along in self._along:
            along.close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for along in self._along:  # after an error the peers that wait there hear of it
            along.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        places = ", ".join(f"{axis} {self._index[axis]} of {self.shape[axis]}" for axis in AXES)
        return f"<Mesh {places}>"


def _fitted(sizes: dict[str, int | None], ranks: int) -> dict[str, int]:
    """The sizes with the open one filled in. Raises ValueError for those that do not fit."""
    given = {axis: length for axis, length in sizes.items() if length not in (None, -1)}
    wanted = " x ".join(f"{axis}={length}" for axis, length in sizes.items())
    if any(not isinstance(length, int) or length < 1 for length in given.values()) or len(given) < len(sizes) - 1:
        raise ValueError(f"a mesh of {wanted}: sizes are whole numbers from 1, and one of them may be -1 for the rest")
    fixed = {axis: int(length) for axis, length in given.items() if length is not None}
    product = math.prod(fixed.values())
    if len(fixed) < len(sizes) and ranks % product == 0:
        return {axis: fixed.get(axis, ranks // product) for axis in sizes}
    if product == ranks:
        return fixed
    others = {axis: product // length for axis, length in fixed.items()}
    complete = len(fixed) == len(sizes)
    fits = [f"{axis}={ranks // rest}" for axis, rest in others.items() if complete and ranks % rest == 0]
    advice = f"{' or '.join(fits)} would fit" if fits else f"every size has to divide {ranks}"
    raise ValueError(f"a mesh of {wanted} does not have as many places as there are ranks, {ranks}: {advice}")
