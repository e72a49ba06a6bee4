"""What layout follows from others: weft's DTensors themselves tell, on tensors without data.

The mesh stands for so many ranks and has no process groups. What an op would have to move first is
no option: where a layout changes is for the plan to say.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from weft.dtensor.dispatch.call import Chosen, Meta
from weft.dtensor.layout.boxes import Layout, layout_of
from weft.dtensor.move.explicit import ExplicitRedistributionContext
from weft.dtensor.plans.graph import ModelNode, Ref
from weft.dtensor.rules.attention import attention_plan
from weft.dtensor.tensor import DTensor, wrap

_aten = torch.ops.aten
_STAND_INS = 1 << 24
_RANDOM = {_aten.dropout.default, _aten.alpha_dropout.default}


class Propagation:
    """Of one mesh dim with `ranks` ranks."""

    def __init__(self, ranks: int, device_type: str) -> None:
        # Without a GPU, layouts for GPUs would ask for its driver.
        there = device_type == "cpu" or torch.cuda.is_available()
        kind = device_type if there else "meta"
        # This process, as the first of ranks that no real mesh has: layouts on equal meshes are one
        # object, and their mesh would be this one.
        here = dist.get_rank() if dist.is_initialized() else 0
        stand_ins = torch.arange(ranks) + _STAND_INS
        stand_ins[0] = here
        self.mesh = pretended_mesh(kind, stand_ins, rank=here)
        self._known: dict[Any, tuple[Placement, ...] | None] = {}

    def layout(self, meta: Meta, placement: Placement) -> Layout:
        """Of a tensor on this mesh dim."""
        return layout_of(self.mesh, (placement,), meta.shape, meta.stride, meta.dtype)

    def results(
        self, node: ModelNode, values: Sequence[tuple[Meta, Placement]]
    ) -> tuple[Placement, ...] | None:
        """The placements of the results of an op; None if something would have to move.

        Args:
            values: of what the node reads, one for each `Ref`; of a list, its items in turn.
        """
        if node.target is operator.getitem:  # of a list of results
            return (values[node.args[1]][1],)
        literals = pytree.tree_leaves([node.args, node.kwargs])
        told = tuple("ref" if isinstance(a, Ref) else repr(a) for a in literals)
        key = str(node.target), told, tuple(values)
        if key not in self._known:
            self._known[key] = self._run(node, values)
        return self._known[key]

    def _run(
        self, node: ModelNode, values: Sequence[tuple[Meta, Placement]]
    ) -> tuple[Placement, ...] | None:
        if node.target in _RANDOM:
            placement = values[0][1]
            return None if placement.is_partial() else (placement,)
        each = iter(values)

        def tensor(leaf: Any) -> Any:
            return self._tensor(*next(each)) if isinstance(leaf, Ref) else leaf

        args, kwargs = pytree.tree_map(tensor, [node.args, node.kwargs])
        try:
            with torch.no_grad(), ExplicitRedistributionContext():
                result = node.target(*args, **kwargs)
        except (RuntimeError, ValueError):  # it moves something, or these parts do not fit it
            return None
        return tuple(
            leaf.placements[0] if isinstance(leaf, DTensor) else Replicate()
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        )

    def _tensor(self, meta: Meta, placement: Placement) -> DTensor:
        layout = self.layout(meta, placement)
        local = torch.empty(layout.local_shape, dtype=meta.dtype, device="meta")
        return wrap(local, layout)

    def attention(
        self,
        qkv: Sequence[tuple[Meta, Placement]],
        mask: tuple[Meta, Placement] | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> Chosen | None:
        """How attention of these runs; None if something would have to move."""
        q, k, v = (self.layout(*each) for each in qkv)
        masked = None if mask is None else self.layout(*mask)
        chosen = attention_plan(q, k, v, masked, is_causal, enable_gqa)
        given = [layout.placements for layout in (q, k, v, masked) if layout is not None]
        return chosen if list(map(tuple, chosen.inputs)) == given else None


def pretended_mesh(
    device_type: str, ranks: torch.Tensor, names: tuple[str, ...] | None = None, rank: int = 0
) -> DeviceMesh:
    """A mesh without process groups, of ranks that need not be there."""
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    # torch.compile reads it of every mesh that layouts are kept of.
    mesh._dim_group_names = []
    return mesh
