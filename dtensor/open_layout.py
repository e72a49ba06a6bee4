"""Layouts of a graph that is traced for more than one size: torch.compile with a dynamic batch.

    x: 8 rows, Shard(0) over 2 ranks     the compiler has s0 rows of the whole, s1 of this rank's
    relate                               condition of the graph: s0 == 2 * s1
    (x * 2).sum(0) @ w                   rows 2 * s1, then Partial sums: one graph for all even s0
    x: 7 rows                            the ranks hold 4 and 3: a graph for 7 rows, and no others

A size stays open if no mesh dim cuts it, or if plain shards cut it into equal parts. Else, and
where something needs a number (a halo, a rule that is found by trying), the compiler settles on the
size that it has, and compiles others anew. Conditions follow from sizes: all ranks meet the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from weft.collectives.group import forget_meshes
from weft.dtensor.layout import (
    Layout,
    Placements,
    Shape,
    is_open,
    is_shard,
    layout_of,
    pieces_of,
    place_of,
    shard_dim,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OpenLayout(Layout):
    """A layout with open sizes, made only while a graph is traced.

    It is no key: what is known of its sizes may change, and a cache would keep the graph alive.
    Equal ones are `==`, not one object.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, OpenLayout)
            and (self.mesh, self.placements, self.dtype)
            == (other.mesh, other.placements, other.dtype)
            and (self.shape, self.stride) == (other.shape, other.stride)
        )

    def closed(self) -> Layout:
        shape, stride = tuple(map(int, self.shape)), tuple(map(int, self.stride))
        return layout_of(self.mesh, self.placements, shape, stride, self.dtype)


def layout_in_graph(
    mesh: DeviceMesh, placements: Placements, shape: Shape, stride: Shape, dtype: torch.dtype
) -> Layout:
    """`layout_of` sizes that torch.compile has left open; those that cannot be are settled."""
    strided = {shard_dim(p) for p in placements if is_shard(p) and pieces_of(p) > 1}
    for dim, (n, parts) in enumerate(zip(shape, _parts(mesh, placements, len(shape)), strict=True)):
        if is_open(n) and (dim in strided or n % parts != 0):
            int(n)
    sizes, strides = tuple(map(_settled, shape)), tuple(map(_settled, stride))
    make = OpenLayout if any(map(is_open, (*sizes, *strides))) else layout_of
    return make(mesh, placements, sizes, strides, dtype)


def _settled(n: int) -> int:
    """`n`, as a number if the graph holds only for that one."""
    known = cast(Any, n).node.maybe_as_int() if is_open(n) else None
    return n if known is None else known


def _parts(mesh: DeviceMesh, placements: Placements, ndim: int) -> list[int]:
    """Into how many parts each tensor dim is cut."""
    parts = [1] * ndim
    for placement, size in zip(placements, place_of(mesh).sizes, strict=True):
        if is_shard(placement):
            parts[shard_dim(placement)] *= size
    return parts


def relate(
    shape: Sequence[int], local_shape: Sequence[int], mesh: DeviceMesh, placements: Placements
) -> None:
    """Make it a condition of the graph, for open sizes, that all ranks hold as much as this one.

    Where shards are uneven it becomes a condition that they are.
    """
    if any(map(is_open, shape)) and place_of(mesh).index is not None:
        parts = _parts(mesh, placements, len(shape))
        for n, own, count in zip(shape, local_shape, parts, strict=True):
            bool(n == own * count)  # to be asked is what makes it one


_Cached = TypeVar("_Cached", bound=Callable[..., Any])


def cached(function: _Cached) -> _Cached:
    """`lru_cache` of a function of layouts, past which open ones go."""
    kept = lru_cache(maxsize=1024)(function)
    forget_meshes.append(kept.cache_clear)

    @wraps(function)
    def call(*args: Any) -> Any:
        try:
            return kept(*args)
        except TypeError:
            if OpenLayout not in map(type, args):
                raise
        return function(*args)

    return cast(_Cached, call)
