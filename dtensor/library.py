"""What DTensor adds to torch.ops.weft: the redistribution of a local tensor, as one op.

Layouts go into a traced graph as a shape, which may be open, and the name of how that is placed.
Names are known from the time when the graph was traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.collectives.library import define
from weft.dtensor.layout import Layout, contiguous_stride, layout_of, show

# (mesh, placements); the layout itself where these do not say all of it.
_named: dict[str, tuple[Any, Any] | Layout] = {}


def name_of(layout: Layout) -> str:
    """A name for how `layout` is placed, the same on every rank."""
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
    return layout_of(*known, tuple(shape), contiguous_stride(shape), dtype)


def _redistribute(
    local: torch.Tensor, shape: Sequence[int], source: str, target: str
) -> torch.Tensor:
    from weft.dtensor.redistribute import move

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
