"""Names of layouts, for the nodes of a traced graph.

There a layout is a shape, which may be symbolic, and a name for its mesh and placements. The names
are registered while the graph is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.dtensor.layout.boxes import Layout, contiguous_layout
from weft.dtensor.layout.placements import show

# (mesh, placements), or the layout itself if these do not determine it.
named: dict[str, tuple[Any, Any] | Layout] = {}


def layout_name(layout: Layout) -> str:
    """Register a name for the mesh and placements of `layout`; it is the same on every rank."""
    place = layout.place
    name = f"{show(layout.placements)} on {list(place.sizes)}, ranks {list(place.ranks)}"
    if layout.has_own_boxes:
        name = f"{layout!r}, ranks {list(place.ranks)}, boxes {layout.boxes}"
        named[name] = layout
    else:
        named[name] = layout.mesh, layout.placements
    return name


def layout_named(name: str, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """The layout of a name, of a tensor of this shape."""
    known = named[name]
    if isinstance(known, Layout):
        return known
    return contiguous_layout(*known, tuple(shape), dtype)
