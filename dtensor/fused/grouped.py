"""Matmuls of groups: rows sorted by expert, weights that are cut by expert.

rows whole, weights Shard(0)       each rank has a term of the result, and contracts the
                                   gradient of its own weights alone
rows Shard(0), weights Shard(0)    rows travel to their weights and results back, fused, if that
                                   is the cheapest: dispatch_grouped_matmul, combine
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate

from weft import settings
from weft.dtensor.dispatch.dispatch import dispatch
from weft.dtensor.dispatch.planning import CallPlan, plan_of
from weft.dtensor.dispatch.pricing import candidate_lines
from weft.dtensor.fused.linear import gradients_of
from weft.dtensor.move.explicit import check_explicit
from weft.dtensor.rules.matmul import grouped_weight_grad
from weft.dtensor.rules.products import grouped_rows_product
from weft.dtensor.tensor import DTensor, as_global, local_part, outside_result
from weft.dtensor.tracing.grad_recording import apply, is_nothing, needs_grad
from weft.kernels import combine, dispatch_grouped_matmul, route


def grouped_matmul(
    input: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """`torch._grouped_mm` of rows and stacked weights that are cut by group."""
    x, w = input, mat2
    if not all(isinstance(t, DTensor) for t in (x, w, offs)) or bias is not None:
        return NotImplemented
    if (x.ndim, w.ndim) != (2, 3) or 0 not in w._layout.cut_dims or out_dtype is not None:
        return NotImplemented
    if torch.is_autocast_enabled(w._layout.mesh.device_type) or x._layout.mesh != w._layout.mesh:
        return NotImplemented
    if offs._layout.mesh == x._layout.mesh:
        plan = plan_of(grouped_rows_product, x._layout, w._layout, offs._layout)
        if settings.tracing() and plan.considered:
            lines = candidate_lines(plan.considered)
            why = "the cheapest" if plan.way is None else f"{plan.way.name} is the cheapest"
            shapes = f"{x._layout!r}, {w._layout!r}"
            settings.record("_grouped_mm", "shards", why, shapes, candidates=lines)
        if plan.way is not None and plan.moves is None:
            return _travelling(plan, x, w, offs)
    return apply(_GroupedMatmul, x, w, offs) if needs_grad(w) else NotImplemented


def _travelling(plan: CallPlan, x: DTensor, w: DTensor, offs: DTensor) -> DTensor:
    """Rows to the ranks of their weights, and results back."""
    layout, target, dim = x._layout, plan.result, plan.way_dim
    if layout.index is None:
        return outside_result(target, x, w)
    whole = [Replicate() if i == dim else p for i, p in enumerate(layout.placements)]
    named = f"{layout!r} @ {w._layout!r}"
    check_explicit(lambda: named, layout, layout.with_placements(whole))
    of_x, of_w = gradients_of(target, layout, w._layout)
    rows, ends = local_part(x, of_x), offs.to_local()
    at = torch.arange(len(rows), dtype=ends.dtype, device=ends.device) + layout.offset[0]
    group = torch.searchsorted(ends, at, right=True)
    ids = group.masked_fill(group == len(ends), -1).unsqueeze(1)  # rows that no group has
    routing = route(ids, len(ends), layout.mesh.get_group(dim))
    made, _ = dispatch_grouped_matmul(rows, routing, local_part(w, of_w))
    return as_global(combine(made, None, routing), target)


class _GroupedMatmul(torch.autograd.Function):
    """Rows by the weights of their groups; the gradient of these is placed as they are."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, w: DTensor, offs: DTensor) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, offs)
        return cast(DTensor, dispatch(torch.ops.aten._grouped_mm.default, (x, w, offs)))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        if is_nothing(grad):
            return None, None, None
        x, w, offs = ctx.saved_tensors
        needs_x, needs_w, _ = ctx.needs_input_grad
        dx = torch._grouped_mm(grad, w.mT, offs=offs) if needs_x else None
        if not needs_w:
            return dx, None, None
        if torch.is_grad_enabled():
            return dx, torch._grouped_mm(x.mT, grad, offs=offs), None
        return dx, dispatch(grouped_weight_grad, (x, grad, w, offs)), None
