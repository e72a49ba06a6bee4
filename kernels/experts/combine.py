"""grouped_matmul_combine: experts' down projection, whose results go back weighted to the tokens.

    h (R, N)        w (E_r, N, H)                o (R, H)                     y (T, H)
    | expert 0 |  @  expert 0's     =   | to slots of rank 0, .. |   -->  y[t] = sum over j of
    | expert 1 |     expert 1's         | to slots of rank 0, .. |          weights[t, j] * o[t, j]

A token's results stand in its k slots (times the ranks that share an expert), on the token's rank,
and are added up there in fp32, in the order of j: so the sum does not depend on when they come.

Backward, with g the rows of dy as `dispatch` sends them and s the weight of each row: dh = s * (g @
w^T), dw[e] = h[e]^T @ (s * g)[e], and the gradient of a weight is h * (g @ w^T) summed over N, one
number that goes back to its slot. So results need not be kept.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.collectives.memory.checks import check_call
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.ranks.flight import call_of
from weft.collectives.ranks.traced import is_call_traced
from weft.kernels.engine.autocast import autocast, outside_autocast
from weft.kernels.engine.engines import record_backward
from weft.kernels.engine.local_matmul import check_wire, no_view
from weft.kernels.experts.by_engine import engine_module
from weft.kernels.experts.calls import CombineCall
from weft.kernels.experts.dispatch import engine_of, gradients
from weft.kernels.experts.grouped import grouped_matmul
from weft.kernels.experts.routing import Routing, check_weights, without_padding
from weft.kernels.experts.rows import to_tokens, weighted_sum


def grouped_matmul_combine(
    h: torch.Tensor,
    w: torch.Tensor,
    topk_weights: torch.Tensor | None,
    routing: Routing,
    *,
    wire_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y[t] = sum over j of topk_weights[t, j] * (row of slot (t, j) of h) @ w[its expert].

    Args:
        h: (R, N), in the order of `routing`, as `dispatch_grouped_matmul` returns it.
        w: (E_r, N, H), this rank's experts, any strides; with tensor parallelism inside experts the
            rows of the weight that go with this rank's part of N.
        topk_weights: (T, k) of any floating dtype, of this rank's tokens; None: 1.
        routing: of the dispatch.
        wire_dtype: in which results travel. None: h's, but fp32 where ranks share experts, as
            these are partial sums.

    Returns:
        y (T, H), of h's dtype: added up in fp32 in the order of j, and rounded once; over several
        hosts so inside each, rounded to `wire_dtype`, and then in the order of the hosts. A token
        without experts gets 0, whatever its weights are. Gradients of h, w and topk_weights, fused
        like the forward.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        MismatchError: on every rank, if ranks differ in H, k or dtype.
        PeerTimeout: a rank did not come.
        NotImplementedError: an engine was forced that cannot run the call.
    """
    h, w = _cast(h, w)
    return _combined(h, w, topk_weights, routing, wire_dtype)


@autocast
def _cast(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Under autocast topk_weights stay as they are: sums of k products round them once."""
    return h, w


def combine(
    rows: torch.Tensor, topk_weights: torch.Tensor | None, routing: Routing
) -> torch.Tensor:
    """y[t] = sum over j of topk_weights[t, j] * (row of slot (t, j)): the reverse of `dispatch`.

    Args:
        rows: (R, H), in the order of `routing`.
        topk_weights, routing: as in `grouped_matmul_combine`.
    """
    return _combined(rows, None, topk_weights, routing, None)


@repeatable
def _combined(
    h: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    routing: Routing,
    wire_dtype: torch.dtype | None,
) -> torch.Tensor:
    if w is not None and (
        h.ndim != 2 or w.ndim != 3 or (w.shape[1], w.dtype, w.device) != (
            h.shape[1], h.dtype, h.device,
        )
    ):  # fmt: skip
        raise ValueError(
            f"h must be (R, N) and w (experts, N, H), of one dtype and device, got "
            f"{tuple(h.shape)} {h.dtype} and {tuple(w.shape)} {w.dtype}; pass weights "
            f"(experts, H, N) as w.transpose(1, 2)"
        )
    if weights is not None:
        check_weights(weights, routing.topk_ids)
    y: torch.Tensor
    if is_call_traced(h):  # see `custom_ops`
        op, tp = torch.ops.weft.grouped_matmul_combine, routing.tensor_parallel_size
        weights = without_padding(weights, routing)
        y = op(h, w, weights, routing.tensors, routing.name, tp, wire_dtype)
        return y
    call = combine_call(h, w, weights, routing, wire_dtype)
    if call.engine != "triton":  # whose kernels do not look at those of padding
        weights = without_padding(weights, routing)
    with torch.autocast(h.device.type, enabled=False):
        if call.engine == "generic":
            return generic_combine(call, h, w, weights)
        y = Combine.apply(call, h, w, weights)
        return y


def combine_call(
    h: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    routing: Routing,
    wire_dtype: torch.dtype | None,
) -> CombineCall:
    """The call of checked operands."""
    routing = routing.outside_graphs()
    routing.check_ids()
    if w is not None:
        routing.check_experts(w)
    if len(h) != routing.count or not h.is_floating_point():
        raise ValueError(
            f"the routing is of {routing.count} rows, but there are {tuple(h.shape)} of {h.dtype}"
        )
    check_wire(wire_dtype, h.dtype)
    wire = wire_dtype or routing.wire(h)
    call = CombineCall(routing, "generic", wire)
    told = call.told(h.shape[1] if w is None else w.shape[2], h.dtype)
    check_call(routing.group, lambda: call_of("grouped_matmul_combine", told).text.decode())
    engine = engine_of("grouped_matmul_combine", h, [] if w is None else [w], routing)
    return call._replace(engine=engine)


def generic_combine(
    call: CombineCall, h: torch.Tensor, w: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """The same by collectives and matmuls, which are differentiable themselves."""
    routing = call.routing
    rows = h if w is None else grouped_matmul(h, w, routing.ends)
    told = call.told(rows.shape[1], h.dtype)
    with routing.group.calls.noting(call_of("grouped_matmul_combine", told)):
        parts = to_tokens(rows.to(call.wire), routing)
    return weighted_sum(parts, weights, routing.tensor_parallel_size, h.dtype)


class Combine(torch.autograd.Function):
    """h (R, N), w (E_r, N, H) or None, weights (T, k) or None -> y (T, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CombineCall,
        h: torch.Tensor,
        w: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(h, w, weights)
        ctx.call = call
        return no_view(engine_module(call.engine).combine_forward(call, h, w, weights))

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: CombineCall = ctx.call
        call.routing.check_ids()
        h, w, weights = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            made = generic_combine(call, h, w, without_padding(weights, call.routing))
            return None, *gradients([made], [h, w, weights], needs, [dy])
        record_backward("grouped_matmul_combine", call.engine, call.routing.group, "all_to_all")
        backward = engine_module(call.engine).combine_backward
        return None, *backward(call, h, w, weights, dy, needs)
