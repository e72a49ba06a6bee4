"""What DTensor adds to torch.ops.weft: the redistribution of a local tensor, as one op.

Layouts go into a traced graph by name. A name says all of the layout, and is known from the time
it was made, which is when the graph was traced.
"""

from __future__ import annotations

import torch

from weft.collectives.library import define
from weft.dtensor.layout import Layout

_layouts: dict[str, Layout] = {}


def name_of(layout: Layout) -> str:
    """A name for `layout`, the same on every rank."""
    name = f"{layout!r} of ranks {layout.place.ranks}, stride {layout.stride}"
    _layouts[name] = layout
    return name


def _redistribute(local: torch.Tensor, source: str, target: str) -> torch.Tensor:
    from weft.dtensor.redistribute import move

    moved = move(local, _layouts[source], _layouts[target])
    moved = moved.contiguous()
    return moved.clone() if moved.data_ptr() == local.data_ptr() else moved


def _redistribute_fake(local: torch.Tensor, source: str, target: str) -> torch.Tensor:
    return local.new_empty(_layouts[target].local_shape)


define(
    "redistribute(Tensor local, str source, str target) -> Tensor",
    _redistribute,
    _redistribute_fake,
)
