"""Matmuls of groups: rows sorted by expert, weights that are cut by expert.

rows whole, weights Shard(0)       each rank has a term of the result, and contracts the
                                   gradient of its own weights alone
rows Shard(0), weights Shard(0)    rows travel to their weights and results back, fused, if that
                                   is the cheapest: dispatch_grouped_matmul, combine; of fp8 rows
                                   and their scales dispatch, torch's kernel, combine
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate

from weft.dtensor.dispatch.dispatch import dispatch
from weft.dtensor.dispatch.planning import CallPlan, plan_of
from weft.dtensor.dispatch.pricing import tell_choice
from weft.dtensor.fused.linear import gradients_of
from weft.dtensor.move.explicit import check_explicit
from weft.dtensor.rules.matmul import grouped_weight_grad
from weft.dtensor.rules.products import grouped_rows_product, scaled_rows_product
from weft.dtensor.tensor import DTensor, as_global, local_part, outside_result
from weft.dtensor.tracing.grad_recording import apply, is_nothing, needs_grad
from weft.kernels import Routing, combine, dispatch_grouped_matmul, route
from weft.kernels import dispatch as dispatch_rows
from weft.kernels.experts.grouped import experts_of_rows


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
        tell_choice("_grouped_mm", plan.considered, plan.way, x._layout, w._layout)
        if plan.way is not None and plan.moves is None:
            return _travelling(plan, x, w, offs)
    return apply(_GroupedProduct, x, w, offs) if needs_grad(w) else NotImplemented


def scaled_grouped_matmul(
    input: Any,
    mat2: Any,
    scale_a: Any,
    scale_b: Any,
    offs: Any = None,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    """`torch._scaled_grouped_mm` of rows that are cheapest sent to weights cut by group, in fp8."""
    operands = input, mat2, scale_a, scale_b, offs
    if not all(isinstance(t, DTensor) for t in operands) or scale_a.ndim != 1:
        return NotImplemented
    others = bias is not None or scale_result is not None
    if others or out_dtype not in (None, torch.bfloat16) or mat2.ndim != 3:
        return NotImplemented
    if any(t._layout.mesh != input._layout.mesh for t in operands):
        return NotImplemented
    plan = plan_of(scaled_rows_product, *(t._layout for t in operands))
    layouts = input._layout, mat2._layout
    tell_choice("_scaled_grouped_mm", plan.considered, plan.way, *layouts)
    if plan.way is None or plan.moves is not None:
        return NotImplemented
    if input._layout.index is None:
        return outside_result(plan.result, input, mat2)
    # Rows travel as bits, each with its scale.
    rows, of_rows = input.to_local().contiguous(), scale_a.to_local().contiguous()
    bits = [t.view(torch.uint8).view(len(rows), -1) for t in (rows, of_rows)]
    routing = _routing(plan, input, mat2, offs)
    came = dispatch_rows(torch.cat(bits, 1).view(torch.bfloat16), routing).view(torch.uint8)
    width = rows.shape[1]
    parts = [came[:, :width].contiguous(), came[:, width:].contiguous()]
    made = torch._scaled_grouped_mm(
        parts[0].view(rows.dtype),
        mat2.to_local().mT.contiguous().mT,  # by columns, as its kernels want it
        parts[1].view(torch.float32).view(-1),
        scale_b.to_local().contiguous(),
        offs=routing.ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )
    return as_global(combine(made, None, routing), plan.result)


def _travelling(plan: CallPlan, x: DTensor, w: DTensor, offs: DTensor) -> DTensor:
    """Rows to the ranks of their weights, and results back."""
    layout, target = x._layout, plan.result
    if layout.index is None:
        return outside_result(target, x, w)
    of_x, of_w = gradients_of(target, layout, w._layout)
    rows = local_part(x, of_x)
    routing = _routing(plan, x, w, offs)
    made, _ = dispatch_grouped_matmul(rows, routing, local_part(w, of_w))
    return as_global(combine(made, None, routing), target)


def _routing(plan: CallPlan, x: DTensor, w: DTensor, offs: DTensor) -> Routing:
    """Of this rank's rows to the ranks that have their weights."""
    layout, dim = x._layout, plan.way_dim
    whole = [Replicate() if i == dim else p for i, p in enumerate(layout.placements)]
    named = f"{layout!r} @ {w._layout!r}"
    check_explicit(lambda: named, layout, layout.with_placements(whole))
    ends = offs.to_local()
    ids = experts_of_rows(ends, layout.local_shape[0], layout.offset[0])
    return route(ids, len(ends), layout.mesh.get_group(dim))


class _GroupedProduct(torch.autograd.Function):
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
