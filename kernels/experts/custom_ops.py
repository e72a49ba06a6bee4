"""Experts as custom ops, which graphs of torch.compile are made of.

    torch.ops.weft.route                     where tokens go, as tensors
    torch.ops.weft.dispatch_grouped_matmul   rows @ w_i, and the rows themselves if they are kept
    torch.ops.weft.grouped_matmul_combine    results, back at their tokens
    torch.ops.weft.grouped_matmul            local
    torch.ops.weft.*_backward                their gradients, by the engine of the call

How ops are registered, and what traced calls assume: `weft.collectives.custom_ops`. The number of
rows is a symbol of the graph, as only the ids tell it. Activations are left to the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.collectives.custom_ops import (
    define,
    differentiate,
    needed,
    needed_fake,
    spread,
    world_of,
)
from weft.kernels.engine.fp8 import Quantize
from weft.kernels.experts.calls import DispatchCall
from weft.kernels.experts.combine import (
    Combine,
    combine,
    combine_call,
    generic_combine,
    grouped_matmul_combine,
)
from weft.kernels.experts.dispatch import (
    Dispatch,
    check_routing,
    engine_of,
    generic_dispatch,
    gradients,
)
from weft.kernels.experts.grouped import contracted, grouped_matmul
from weft.kernels.experts.routing import Routing, rostered, routing_of, share

_ops: Any = torch.ops.weft


class _Saved:
    """What an autograd function keeps from its forward to its backward, in place of autograd."""

    def __init__(self, needs: Sequence[bool], *tensors: Any, **told: Any) -> None:
        self.needs_input_grad, self.saved_tensors = (False, *needs), tensors
        vars(self).update(told)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def _route(
    ids: torch.Tensor,
    own_experts: int,
    group_name: str,
    tensor_parallel_size: int = 1,
    capacity: int | None = None,
    sizes: list[int] | None = None,
    num_experts: int | None = None,
    received: int | None = None,
) -> list[torch.Tensor]:
    tp = tensor_parallel_size
    roster = rostered(ids, own_experts, group_name, tp, capacity, sizes, num_experts)
    return routing_of(roster, capacity, received).tensors[1:]


def _route_fake(
    ids: torch.Tensor,
    own_experts: int,
    group_name: str,
    tensor_parallel_size: int = 1,
    capacity: int | None = None,
    sizes: Any = None,
    num_experts: int | None = None,
    received: Any = None,
) -> list[torch.Tensor]:
    (rank, W), new_size = world_of(group_name), torch.library.get_ctx().new_dynamic_size
    if num_experts is None:
        load = ids.new_empty(new_size(), dtype=torch.int64)
    else:
        load = ids.new_empty(num_experts, dtype=torch.int64)
        own_experts = share(num_experts, rank, W, tensor_parallel_size)
    told = [torch.empty(W, dtype=torch.int64, device="cpu") for _ in range(2)]
    rows = (new_size() if received is None else received,)
    arrays = [
        ids.new_empty(shape) for shape in ((W, own_experts), (own_experts,), rows, rows, rows)
    ]
    return [*told, *arrays, load]


def _dispatch(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    routing: list[torch.Tensor],
    group_name: str,
    tensor_parallel_size: int = 1,
    keep: bool = False,
    quantize: Quantize | None = None,
) -> list[torch.Tensor]:
    call = _dispatch_call(x, weights, routing, group_name, tensor_parallel_size, keep, quantize)
    if call.engine == "generic":
        (rows,) = generic_dispatch(call, x, [])
        made = [grouped_matmul(rows, w, call.routing.ends) for w in weights] or [rows]
        return [*made, rows] if keep else made
    saved = _Saved([True] * (1 + len(weights)))
    made = list(Dispatch.forward(saved, call, x, *weights))
    return [*made, saved.saved_tensors[-1]] if keep else made


def _dispatch_call(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    tensors: list[torch.Tensor],
    group_name: str,
    tp: int,
    keep: bool,
    quantize: Quantize | None,
) -> DispatchCall:
    routing = check_routing(Routing.of_tensors(tensors, group_name, tp), x, *weights[:1])
    engine = engine_of("dispatch_grouped_matmul", x, weights, routing, quantize)
    return DispatchCall(routing, engine, None, keep, quantize)


def _dispatch_fake(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    routing: list[torch.Tensor],
    group_name: str,
    tensor_parallel_size: int = 1,
    keep: bool = False,
    quantize: Quantize | None = None,
) -> list[torch.Tensor]:
    rows = routing[_ROWS].shape[0]
    made = [x.new_empty(rows, w.shape[2]) for w in weights]
    return [*made, x.new_empty(rows, x.shape[1])] if keep or not weights else made


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, routing, *ctx.place, keep, ctx.quantize = inputs
    ctx.weights, ctx.keeps = len(weights), keep
    ctx.save_for_backward(*output[len(weights) :][:keep], x, *weights, *routing)


def _dispatch_grads(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    rows = saved.pop(0) if ctx.keeps else None
    x, weights, routing = saved[0], saved[1 : 1 + ctx.weights], saved[1 + ctx.weights :]
    needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1]]
    dys = grads[: max(1, len(weights))]
    op, told = _ops.dispatch_grouped_matmul_backward, (*ctx.place, ctx.quantize, needs)
    dx, *dws = spread(op(x, weights, rows, dys, routing, *told), needs)
    return dx, dws, [None] * len(routing), None, None, None, None


def _dispatch_backward(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    rows: torch.Tensor | None,
    dys: list[torch.Tensor],
    routing: list[torch.Tensor],
    group_name: str,
    tensor_parallel_size: int,
    quantize: Quantize | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    call = _dispatch_call(x, weights, routing, group_name, tensor_parallel_size, False, quantize)
    operands, grads = [x, *weights], list[torch.Tensor | None]()
    if call.engine == "generic":
        with torch.enable_grad():
            x, *weights = (t.detach().requires_grad_() for t in operands)
            made = generic_dispatch(call, x, weights)
        grads = gradients(made, [x, *weights], needs, dys)
    else:
        kept = [] if rows is None else [rows]
        saved = _Saved(needs, *operands, *kept, call=call, kept=bool(kept))
        grads = list(Dispatch.backward(saved, *dys)[1:])
    return needed(grads, operands, needs)


def _combine(
    h: torch.Tensor,
    w: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routing: list[torch.Tensor],
    group_name: str,
    tensor_parallel_size: int = 1,
    wire_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    found = Routing.of_tensors(routing, group_name, tensor_parallel_size)
    if w is None:
        return combine(h, topk_weights, found)
    return grouped_matmul_combine(h, w, topk_weights, found, wire_dtype=wire_dtype)


def _combine_fake(
    h: torch.Tensor, w: Any, topk_weights: Any, routing: list[torch.Tensor], *_: Any
) -> torch.Tensor:
    return h.new_empty(routing[0].shape[0], h.shape[1] if w is None else w.shape[2])


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    h, w, weights, routing, *ctx.rest = inputs
    ctx.save_for_backward(h, w, weights, *routing)


def _combine_grads(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    h, w, weights, *routing = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    made = _ops.grouped_matmul_combine_backward(h, w, weights, dy, routing, *ctx.rest, needs)
    return *spread(made, needs), [None] * len(routing), None, None, None


def _combine_backward(
    h: torch.Tensor,
    w: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    dy: torch.Tensor,
    routing: list[torch.Tensor],
    group_name: str,
    tensor_parallel_size: int,
    wire_dtype: torch.dtype | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    found = Routing.of_tensors(routing, group_name, tensor_parallel_size)
    call = combine_call(h, w, topk_weights, found, wire_dtype)
    operands = h, w, topk_weights
    if call.engine == "generic":
        with torch.enable_grad():
            leaves: Any = [t if t is None else t.detach().requires_grad_() for t in operands]
            made = generic_combine(call, *leaves)
        grads = gradients([made], leaves, needs, [dy])
    else:
        grads = list(Combine.backward(_Saved(needs, *operands, call=call), dy)[1:])
    return needed(grads, operands, needs)


def _grouped_grads(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, w, ends = ctx.saved_tensors
    dx = _ops.grouped_matmul(dy, w.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    dw = _ops.grouped_matmul_backward(x, dy, w, ends) if ctx.needs_input_grad[1] else None
    return dx, dw, None


_ROWS = 6  # among the tensors of a routing
_ROUTING = "Tensor[] routing, str group_name, int tensor_parallel_size"

define(
    "route(Tensor ids, int own_experts, str group_name, int tensor_parallel_size=1, "
    "int? capacity=None, SymInt[]? sizes=None, int? num_experts=None, "
    "SymInt? received=None) -> Tensor[]",
    _route, _route_fake,
)  # fmt: skip
define(
    f"dispatch_grouped_matmul(Tensor x, Tensor[] weights, {_ROUTING}=1, bool keep=False, "
    "str? quantize=None) -> Tensor[]",
    _dispatch, _dispatch_fake,
)  # fmt: skip
define(
    "dispatch_grouped_matmul_backward(Tensor x, Tensor[] weights, Tensor? rows, Tensor[] dys, "
    f"{_ROUTING}, str? quantize, bool[] needs) -> Tensor[]",
    _dispatch_backward,
    lambda x, weights, *rest: needed_fake([x, *weights], rest[-1]),
)  # fmt: skip
differentiate("dispatch_grouped_matmul", _dispatch_setup, _dispatch_grads)

define(
    f"grouped_matmul_combine(Tensor h, Tensor? w, Tensor? topk_weights, {_ROUTING}=1, "
    "ScalarType? wire_dtype=None) -> Tensor",
    _combine, _combine_fake,
)  # fmt: skip
define(
    "grouped_matmul_combine_backward(Tensor h, Tensor? w, Tensor? topk_weights, Tensor dy, "
    f"{_ROUTING}, ScalarType? wire_dtype, bool[] needs) -> Tensor[]",
    _combine_backward,
    lambda h, w, weights, *rest: needed_fake([h, w, weights], rest[-1]),
)  # fmt: skip
differentiate("grouped_matmul_combine", _combine_setup, _combine_grads)

define(
    "grouped_matmul(Tensor x, Tensor w, Tensor ends) -> Tensor", grouped_matmul,
    lambda x, w, ends: x.new_empty(x.shape[0], w.shape[2]), ordered=False,
)  # fmt: skip
define(
    "grouped_matmul_backward(Tensor x, Tensor dy, Tensor w, Tensor ends) -> Tensor", contracted,
    lambda x, dy, w, ends: torch.empty_like(w), ordered=False,
)  # fmt: skip
differentiate(
    "grouped_matmul", lambda ctx, inputs, output: ctx.save_for_backward(*inputs), _grouped_grads
)
