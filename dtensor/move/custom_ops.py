"""What DTensor adds to torch.ops.weft, each as one op of a traced graph.

redistribute    the local tensor of one layout into that of another
check_even      what a traced `from_local` assumes, checked each time the graph runs
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.collectives import Group, agree, spanning_group
from weft.collectives.custom_ops import define
from weft.collectives.ranks.group import moves_gpu_tensors
from weft.dtensor.layout.boxes import Layout
from weft.dtensor.move.graph_names import layout_named, named
from weft.dtensor.move.redistribute import move


def _redistribute(
    local: torch.Tensor, shape: Sequence[int], source: str, target: str
) -> torch.Tensor:
    before, after = (layout_named(name, shape, local.dtype) for name in (source, target))
    moved = move(local, before, after).contiguous()
    return moved.clone() if moved.data_ptr() == local.data_ptr() else moved


def _redistribute_fake(
    local: torch.Tensor, shape: Sequence[int], source: str, target: str
) -> torch.Tensor:
    return local.new_empty(layout_named(target, shape, local.dtype).local_shape)


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
    known = named[name]
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
