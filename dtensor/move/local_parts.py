"""The global layout that the ranks' local tensors make up, for `DTensor.from_local`.

    lengths 3, 3      shards of 6 rows
    lengths 3, 2      shards of 5 rows, as torch.chunk cuts them
    lengths 2, 3      not what torch.chunk gives: an error on every rank

The ranks exchange the lengths of their shards. While a graph is traced they cannot: shards are then
assumed to be even, which is checked when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from weft.collectives import Group, agree, spanning_group
from weft.collectives.process_groups import by_group
from weft.collectives.ranks.group import forget_meshes, resolve
from weft.collectives.ranks.traced import is_traced
from weft.dtensor.layout.boxes import Layout, contiguous_layout, layout_of
from weft.dtensor.layout.placements import Placements, is_shard, shard_dim, show
from weft.dtensor.move.custom_ops import tell_lengths
from weft.dtensor.move.graph_names import layout_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def layout_of_parts(local: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Layout:
    """The layout that the ranks' local tensors make up; shards may differ in length. Collective.

    Raises:
        ValueError: on every rank, if the lengths are not those of torch.chunk.
    """
    traced = is_traced(local)  # sizes may be symbols, which no cache takes
    evenly = _even_layout.__wrapped__ if traced else _even_layout
    even = evenly(local.shape, local.stride(), local.dtype, mesh, placements)
    if local.is_meta:
        return even
    if traced:
        if even.cut_dims and even.index is not None:
            torch.ops.weft.check_even(local.detach(), list(even.cut_dims), layout_name(even))
        return even
    group, call = _who_agrees(even)
    if group is None:
        return even
    cut, given = even.cut_dims, local.shape
    exchanged = [agree(group, call, given[dim]) for dim in cut]
    if exchanged == [[given[dim]] * group.world_size for dim in cut]:
        return even
    place, shape = even.place, list(given)
    parts: list[list[int]] = []
    for dim, values in zip(cut, exchanged, strict=True):
        lengths = dict(zip(group.ranks, values, strict=True))
        parts.append([lengths[rank] for rank in place.ranks])
        shape[dim] = sum(
            length
            for length, coordinate in zip(parts[-1], place.coordinates, strict=True)
            if not any(
                i and shard_dim(p) != dim for i, p in zip(coordinate, placements, strict=True)
            )
        )
    layout = contiguous_layout(mesh, placements, tuple(shape), local.dtype)
    right = [[layout.shape_at(i)[dim] for i in range(len(place.ranks))] for dim in cut]
    if parts != right:
        raise ValueError(
            f"from_local: along dims {list(cut)} the ranks' shards have lengths {parts}, but "
            f"shards of {shape} placed {show(placements)} must be those of torch.chunk, {right}"
        )
    return layout


@lru_cache(maxsize=4096)
def _even_layout(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placements: Placements,
) -> Layout:
    whole, steps = list(shape), list(stride)
    for placement, parts in zip(placements, mesh.shape, strict=True):
        if is_shard(placement):
            dim = shard_dim(placement)
            for other in range(len(steps)):
                # Strides of dims outside of the sharded one in memory grow with it.
                if other != dim and stride[other] >= stride[dim] * shape[dim]:
                    steps[other] *= parts
            whole[dim] *= parts
    return layout_of(mesh, placements, tuple(whole), tuple(steps), dtype)


@lru_cache(maxsize=4096)
def _who_agrees(even: Layout) -> tuple[Group | None, str]:
    """The group that exchanges the lengths of shards (or None), and a name of the call."""
    if not even.cut_dims or even.index is None:
        return None, ""
    group = spanning_group(even.mesh)
    if group.world_size == 1 or not tell_lengths(group):
        return None, ""
    fixed = [size for dim, size in enumerate(even.shape) if dim not in even.cut_dims]
    return group, f"from_local({even.dtype}, other dims {fixed}, {show(even.placements)})"


forget_meshes += [_even_layout.cache_clear, _who_agrees.cache_clear]


def check_parts(local: torch.Tensor, layout: Layout, requires_grad: bool) -> torch.Tensor:
    """Compare what the ranks passed; make replicas equal to the first one's."""
    group = spanning_group(layout.mesh)
    mine = (layout.shape, layout.stride, layout.dtype, requires_grad)
    everyones = group.gather_objects(mine, "from_local(run_check=True)")
    if any(theirs != mine for theirs in everyones):
        raise ValueError(
            f"from_local: the ranks' local tensors make up different global tensors (shape, "
            f"stride, dtype, requires_grad): {dict(zip(group.ranks, everyones, strict=True))}. "
            f"Pass shape and stride where the shards are uneven."
        )
    agreed = local.clone(memory_format=torch.contiguous_format)
    for dim, placement in enumerate(layout.placements):
        if isinstance(placement, Replicate):
            pg = layout.mesh.get_group(dim)
            first = dist.get_global_rank(pg, 0)
            by_group(dist.broadcast, resolve(pg), agreed.is_cuda, agreed, first)
    return agreed
