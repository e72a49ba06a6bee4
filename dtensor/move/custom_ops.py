"""What DTensor adds to torch.ops.weft, each as one op of a traced graph.

    redistribute    the local tensor of one layout into that of another
    check_even      what a traced `from_local` assumes, checked each time the graph runs

In a traced graph a layout is a shape, which may be symbolic, and a name for its mesh and
placements. The names are registered while the graph is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.collectives import Group, agree, spanning_group
from weft.collectives.custom_ops import define
from weft.collectives.ranks.group import moves_gpu_tensors
from weft.dtensor.layout.boxes import Layout, contiguous_layout
from weft.dtensor.layout.placements import show

# (mesh, placements), or the layout itself if these do not determine it.
_named: dict[str, tuple[Any, Any] | Layout] = {}


def layout_name(layout: Layout) -> str:
    """Register a name for the mesh and placements of `layout`; it is the same on every rank."""
    place = layout.place
    name = f"{show(layout.placements)} on {list(place.sizes)}, ranks {list(place.ranks)}"
    if layout.has_own_boxes:
        name = f"{layout!r}, ranks {list(place.ranks)}, boxes {layout.boxes}"
        _named[name] = layout
    else:
        _named[name] = layout.mesh, layout.placements
    return name


def _layout(name: str, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    known = _named[name]
    if isinstance(known, Layout):
        return known
    return contiguous_layout(*known, tuple(shape), dtype)


def _redistribute(
    local: torch.Tensor, shape: Sequence[int], source: str, target: str
) -> torch.Tensor:
    from weft.dtensor.move.redistribute import move

    before, after = (_layout(name, shape, local.dtype) for name in (source, target))
    moved = move(local, before, after).contiguous()
    return moved.clone() if moved.data_ptr() == local.data_ptr() else moved


def _redistribute_fake(
    local: torch.Tensor, shape: Sequence[int], source: str, target: str
) -> torch.Tensor:
    return local.new_empty(_layout(target, shape, local.dtype).local_shape)


define(
    "redistribute(Tensor local, SymInt[] shape, str source, str target) -> Tensor",
    _redistribute,
    _redistribute_fake,
)


def tell_lengths(group: Group) -> bool:
    """Whether ranks exchange the lengths of shards: 3 us through memory, a small collective between
    hosts, which would keep those of GPUs from running ahead.
    """
    return not group.unreached(torch.device("cpu")) or (
        bool(group.hosts) and not moves_gpu_tensors(group.pg)
    )


def _check_even(local: torch.Tensor, dims: list[int], name: str) -> torch.Tensor:
    known = _named[name]
    group = spanning_group(known.mesh if isinstance(known, Layout) else known[0])
    if tell_lengths(group):
        lengths = [agree(group, f"from_local({name})", local.shape[dim]) for dim in dims]
        if any(len(set(along_dim)) > 1 for along_dim in lengths):
            raise ValueError(
                f"a traced from_local assumes shards of equal length: {name}, they have lengths "
                f"{lengths} along dims {dims}. Pass shape= and stride= of the whole tensor, or "
                f"DTensors to a module that makes them of plain inputs"
            )
    return local.new_empty(0)


# It returns something, as Inductor cannot keep a call that returns nothing in its place.
define(
    "check_even(Tensor local, int[] dims, str name) -> Tensor",
    _check_even,
    lambda local, dims, name: local.new_empty(0),
)
