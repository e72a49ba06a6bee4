"""What all ranks of a mesh hold of a tensor, as arithmetic that lists no ranks.

Where each mesh dim cuts a tensor dim in one piece, a rank holds one run of it, whose start and end
depend on its coordinates along the mesh dims that cut it. So they are arrays that numpy broadcasts
over the mesh, with a size of 1 along the others:

    shape (5, 4), mesh (2, 2), [Shard(0), Shard(1)]     dim 0: [[0], [3]] to [[3], [5]]
                                                        dim 1: [[0, 2]] to [[2, 4]]

Boxes of other kinds (`_StridedShard`, `with_boxes`, sizes that a graph leaves open) have none: None
stands for them, and ranks are looked at one by one.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.dtensor.layout.placements import is_shard, pieces_of, shard_dim
from weft.dtensor.layout.runs import Shape, is_open

if TYPE_CHECKING:
    from weft.dtensor.layout.boxes import Layout

Integers = npt.NDArray[np.int64]
# (pieces, mesh dim) of each shard that cuts a tensor dim, from left to right.
Cuts = tuple[tuple[int, int], ...]


class Extent(NamedTuple):
    """Of a tensor dim, the run [start, stop) of every rank."""

    start: Integers
    stop: Integers

    def shared(self, other: Extent) -> Integers:
        """How many indices both have, of every rank."""
        both = np.minimum(self.stop, other.stop) - np.maximum(self.start, other.start)
        found: Integers = np.maximum(both, 0)
        return found

    def at(self, coordinate: Shape) -> Extent:
        """That of one rank."""
        return Extent(*(np.broadcast_to(_element_at(each, coordinate), (1,)) for each in self))


def _element_at(array: Integers, coordinate: Shape) -> Integers:
    at = tuple(i if n > 1 else 0 for i, n in zip(coordinate, array.shape, strict=True))
    found: Integers = array[at]
    return found


@lru_cache(maxsize=1024)
def extent_of(length: int, sizes: Shape, cuts: Cuts) -> Extent | None:
    """Of a dim that mesh dims of a mesh of `sizes` cut; None if in several pieces."""
    if any(pieces != 1 for pieces, _ in cuts):
        return None
    start = np.zeros((1,) * len(sizes), np.int64)
    size = np.full_like(start, length)
    for _, dim in cuts:
        shape = [1] * len(sizes)
        shape[dim] = sizes[dim]
        full = -(-size // sizes[dim])  # as in torch.chunk
        skipped = np.minimum(size, full * np.arange(sizes[dim]).reshape(shape))
        start, size = start + skipped, np.minimum(size - skipped, full)
    return Extent(start, start + size)


def extents_of(layout: Layout) -> tuple[Extent, ...] | None:
    """Of all dims of a layout."""
    if layout.has_own_boxes or any(map(is_open, layout.shape)):
        return None
    cuts: list[Cuts] = [()] * len(layout.shape)
    for dim, placement in enumerate(layout.placements):
        if is_shard(placement):
            cuts[shard_dim(placement)] += ((pieces_of(placement), dim),)
    found = [
        extent_of(length, layout.place.sizes, cut)
        for length, cut in zip(layout.shape, cuts, strict=True)
    ]
    known = tuple(each for each in found if each is not None)
    return known if len(known) == len(found) else None


def over_the_mesh(arrays: list[Integers], sizes: Shape) -> Integers:
    """Of numbers of every rank, over a mesh of `sizes`."""
    one = np.ones((1,) * len(sizes), np.int64)
    return np.broadcast_to(reduce(np.multiply, arrays, one), sizes)
