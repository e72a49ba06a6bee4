"""Layouts with symbolic ("open") sizes, in graphs that torch.compile traces for a dynamic batch.

    x: 8 rows, Shard(0) over 2 ranks     the compiler has s0 rows of the whole, s1 of this rank's
    relate                               condition of the graph: s0 == 2 * s1
    (x * 2).sum(0) @ w                   rows 2 * s1, then Partial sums: one graph for all even s0
    x: 7 rows                            the ranks hold 4 and 3: a graph for 7 rows, and no others

A size stays open if no mesh dim cuts it, or if plain shards cut it into equal parts. Otherwise, and
if a number is needed (for a halo, or a rule found by trying), the graph is specialized to the
present size, and others are compiled anew. All this depends on sizes alone, so that all ranks
arrive at the same graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from weft.collectives.ranks.group import forget_meshes
from weft.dtensor.layout.boxes import OpenLayout
from weft.dtensor.layout.placements import Placements
from weft.dtensor.layout.places import parts_of_dims, place_in_mesh
from weft.dtensor.layout.runs import is_open

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def relate(
    shape: Sequence[int], local_shape: Sequence[int], mesh: DeviceMesh, placements: Placements
) -> None:
    """Add a guard to the graph for each open size: whether all ranks hold as much as this one."""
    if any(map(is_open, shape)) and place_in_mesh(mesh).index is not None:
        parts = parts_of_dims(mesh, placements, len(shape))
        for n, own, count in zip(shape, local_shape, parts, strict=True):
            bool(n == own * count)  # asking for the value adds the guard, whichever it is


def present(number: float) -> float:
    """A number as it is at present, without a condition of the graph on it.

    For what a graph for other sizes may do in the same way: it is right, if not the cheapest.
    """
    is_symbol = isinstance(number, (torch.SymInt, torch.SymFloat))
    return float(cast(Any, number).node.hint) if is_symbol else number


_Cached = TypeVar("_Cached", bound=Callable[..., Any])


def cached(function: _Cached) -> _Cached:
    """`lru_cache` of a function of layouts; calls with open ones are not cached."""
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

    told: Any = call  # as of a function of `lru_cache`: see `caches`
    told.cache_info, told.cache_clear = kept.cache_info, kept.cache_clear
    return cast(_Cached, call)
