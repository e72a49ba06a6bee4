"""The triton engine of dispatch and combine: the kernels of `expert_kernels` as calls of ops."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from weft import settings
from weft.collectives import workspace
from weft.collectives.device.launches import layouts_of
from weft.kernels.engine import epilogues
from weft.kernels.engine.chips import chip_of
from weft.kernels.engine.engines import hardware_of
from weft.kernels.engine.epilogues import Activation
from weft.kernels.engine.fp8 import FP8, Quantize
from weft.kernels.engine.local_matmul import on_cpu
from weft.kernels.expert_kernels.combine_launch import FEW, combine_bytes, launch_combine
from weft.kernels.expert_kernels.contract_grouped_kernel import launch_contract_grouped
from weft.kernels.expert_kernels.dispatch_launch import (
    Dispatched,
    dispatch_bytes,
    launch_dispatch,
    rows_come_first,
)
from weft.kernels.expert_kernels.expert_tiles import RowTable, aligned_sizes
from weft.kernels.expert_kernels.few_tokens_launch import few_bytes, launch_few_tokens
from weft.kernels.experts.calls import CombineCall, DispatchCall, DispatchMade
from weft.kernels.experts.grouped import grouped_matmul
from weft.kernels.experts.routing import Roster, Routing


def _table_of(routing: Routing) -> RowTable:
    return RowTable(routing.ends, routing.ranks, routing.rows, routing.slots)


def dispatched(
    op: str,
    told: tuple[Hashable, ...],
    routing: Routing,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor] = (),
    numbers: torch.Tensor | None = None,
    activation: Activation | None = None,
    keep_sums: bool = False,
    quantize: bool = False,
) -> Dispatched:
    """`launch_dispatch` as a call of `op`, or its launches of before.

    Args:
        told: as in `Workspace.call`.
    """
    table, tokens = _table_of(routing), routing.tokens
    wire, k = FP8 if quantize else x.dtype, int(quantize)
    nbytes = dispatch_bytes(
        max(tokens), x.shape[1], wire, k if numbers is None else numbers.shape[1]
    )
    ws = workspace(routing.group, nbytes, channel="gather", device=x.device)

    def launched() -> list[torch.Tensor]:
        made = launch_dispatch(
            x,
            weights,
            ws,
            table,
            tokens,
            numbers=numbers,
            activation=activation,
            keep_sums=keep_sums,
            rows_each=routing.rows_each,
            quantize=quantize,
        )
        assert made.rows is not None
        pulled = [] if made.numbers is None else [made.numbers]
        return [made.rows, *made.ys, *made.sums, *pulled]

    operands = [x, *weights, numbers, *table]
    each = routing.rows_each
    key = op, *tokens, each, activation, keep_sums, quantize, layouts_of(operands)
    with ws.call(op, told):
        rows, *made = ws.repeat(key, operands, launched)
    count = 1 if activation == "swiglu" else len(weights)
    sums = made[count : count + len(weights)] if keep_sums else []
    return Dispatched(rows, None if numbers is None else made[-1], made[:count], sums)


def dispatch_few(
    roster: Roster,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    activation: Activation | None,
    quantize: Quantize | None,
) -> tuple[Routing, DispatchMade] | None:
    """`launch_few_tokens` as a call, and the routing that it finds; None of more tokens."""
    group, tp, ids, tokens, experts = roster
    if max(tokens) > FEW:
        return None
    k, K, W, op = roster.top_k, x.shape[1], group.world_size, "dispatch_grouped_matmul"
    nbytes, _ = few_bytes(max(tokens), k, K, FP8 if quantize else x.dtype, W)
    ws = workspace(group, nbytes, channel="gather", device=x.device)
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    keep_sums = grads and epilogues.keeps_sums(activation)

    def launched() -> list[torch.Tensor]:
        made = launch_few_tokens(
            x,
            ids,
            weights,
            ws,
            tokens,
            experts,
            activation=activation,
            keep_sums=keep_sums,
            tensor_parallel_size=tp,
            quantize=quantize is not None,
        )
        return [made.counts, made.load, *made.table, *made.ys, *made.sums]

    operands = [x, ids, *weights]
    key = f"{op}, few", *tokens, *experts, tp, activation, keep_sums, quantize, layouts_of(operands)
    told = x.dtype, ("K", K), ("k", k), ("quantize", quantize), ("few", True)
    with torch.no_grad(), ws.call(op, told):
        counts, load, ends, *by_row = ws.repeat(key, operands, launched)
    if on_cpu(ids):  # where the host knows how many have come
        by_row = [each[: int(ends[-1]) if len(ends) else 0] for each in by_row]
    ranks, rows, slots, *made = by_row
    routing = Routing(group, tp, ids, tokens, experts, counts, ends, ranks, rows, slots, load)
    ys, sums = (made[: -len(weights)], made[-len(weights) :]) if keep_sums else (made, [])
    return routing, DispatchMade(ys, None, sums or (ys if activation else []))


def call_combine(
    op: str,
    told: tuple[Hashable, ...],
    routing: Routing,
    hs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    wire_dtype: torch.dtype,
    topk_weights: torch.Tensor | None = None,
    by_slot: bool = False,
    sum_as: torch.dtype | None = None,
) -> torch.Tensor:
    """`launch_combine` as a call of `op`, or its launches of before.

    Args:
        told: as in `Workspace.call`.
        by_slot: return what is in each slot, (T k, H), not the sums over those of a token.
        sum_as: dtype of the sums, if not that of `hs`.
    """
    table, tp, ids = _table_of(routing), routing.tensor_parallel_size, routing.topk_ids
    k, experts = (1 if by_slot else routing.top_k), sum(routing.experts[::tp])
    tokens = [t * routing.top_k for t in routing.tokens] if by_slot else routing.tokens
    H = weights[0].shape[2] if weights else hs[0].shape[1]
    nbytes = combine_bytes(max(tokens), k * tp, H, wire_dtype)
    ws = workspace(routing.group, nbytes, channel="scatter", device=ids.device)

    def launched() -> list[torch.Tensor]:
        return [
            launch_combine(
                hs,
                weights,
                ws,
                table,
                tokens,
                ids.view(-1, k),
                experts,
                topk_weights=topk_weights,
                tensor_parallel_size=tp,
                rows_each=routing.rows_each,
                wire_dtype=wire_dtype,
                out_dtype=sum_as,
            )
        ]

    operands = [*hs, *weights, topk_weights, ids, *table]
    # All ranks' experts, and how many rows come for each, are told by no layout of this rank's.
    told_by_all = *tokens, experts, tp, routing.rows_each
    key = op, *told_by_all, by_slot, wire_dtype, sum_as, layouts_of(operands)
    with ws.call(op, told):
        (y,) = ws.repeat(key, operands, launched)
    return y


def dispatch_forward(
    call: DispatchCall, x: torch.Tensor, weights: Sequence[torch.Tensor], keep: bool, grads: bool
) -> DispatchMade:
    activation, op = call.activation, "dispatch_grouped_matmul"
    if weights and activation is None and _rows_first(call.routing, x, weights):
        quantize = call.quantize is not None
        rows = dispatched(op, call.told(x), call.routing, x, quantize=quantize).rows
        assert rows is not None
        hs = [grouped_matmul(rows, w, call.routing.ends) for w in weights]
        return DispatchMade(hs, rows if keep else None, [])
    made = dispatched(
        op,
        call.told(x),
        call.routing,
        x,
        weights,
        activation=activation,
        keep_sums=grads and epilogues.keeps_sums(activation),
        quantize=call.quantize is not None,
    )
    if not weights and made.rows is not None:
        return DispatchMade([made.rows], None, [])
    return DispatchMade(
        made.ys, made.rows if keep else None, made.sums or (made.ys if activation else [])
    )


def _as_torch_takes(w: torch.Tensor) -> bool:
    """Whether torch's grouped matmul reads weights (E, K, N) as they lie."""
    inner, outer = sorted(w.stride()[1:])
    return inner == 1 and outer % 8 == 0 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0


def _rows_first(routing: Routing, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """See `rows_come_first`; `weft.explain` is told."""
    W, E, rows = routing.group.world_size, len(weights[0]), routing.rows_each
    Ns = [w.shape[2] for w in weights]
    chip = chip_of(x.device)
    first = (
        (x.dtype == torch.bfloat16 and chip.descriptors and W > 1 and E > 0 and rows > 64)
        and aligned_sizes(x.shape[1], *Ns)
        and all(_as_torch_takes(w) for w in weights)
        and rows_come_first(rows, Ns, x.shape[1], W, E, hardware_of(routing.group, x.device))
    )
    if first and settings.tracing():
        why = "rows first, then torch's grouped matmul, which is predicted to be quicker than both"
        shapes = f"{E} experts of about {rows} rows"
        settings.record(
            "dispatch_grouped_matmul", "triton", f"{why} in one launch", shapes, ranks=W
        )
    return first


def dispatch_backward(
    call: DispatchCall,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    dhs: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    needs_x: bool,
    needs_w: Sequence[bool],
    sum_as: torch.dtype | None = None,
) -> list[torch.Tensor | None]:
    routing, op, told = call.routing, "dispatch_grouped_matmul backward", call.told(x)
    dzs = epilogues.activation_gradients(list(dhs), list(kept), call.activation)
    dx = None
    if any(needs_w) and rows is None:
        rows = dispatched(op, told, routing, x, quantize=call.quantize is not None).rows
    if needs_x:
        backs = [w.transpose(1, 2) for w in weights]
        dx = call_combine(op, told, routing, dzs, backs, routing.wire(x), sum_as=sum_as)
    dws: list[torch.Tensor | None] = [None] * len(weights)
    for i, (w, dz, need) in enumerate(zip(weights, dzs, needs_w, strict=False)):
        if need and rows is not None:
            out = torch.empty_like(w)  # in w's own layout
            dws[i] = launch_contract_grouped(rows, dz, routing.ends, out=out)
    return [dx, *dws]


def combine_forward(
    call: CombineCall,
    h: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    sum_as: torch.dtype | None = None,
) -> torch.Tensor:
    op, ws = "grouped_matmul_combine", [] if w is None else [w]
    told = call.told(h.shape[1] if w is None else w.shape[2], h.dtype)
    return call_combine(op, told, call.routing, [h], ws, call.wire, weights, sum_as=sum_as)


def combine_backward(
    call: CombineCall,
    h: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    dy: torch.Tensor,
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Rows beyond the last expert's are undefined, and stay so."""
    routing, (needs_h, needs_w, needs_weights) = call.routing, needs
    op, told = "grouped_matmul_combine backward", call.told(dy.shape[1], dy.dtype)
    back_needed = (needs_h or needs_weights) and w is not None
    made = dispatched(
        op,
        told,
        routing,
        dy,
        [w.transpose(1, 2)] if back_needed and w is not None else [],
        None if weights is None else weights.float().contiguous(),
    )
    assert made.rows is not None
    back = made.ys[0] if made.ys else made.rows
    scale = None if made.numbers is None else made.numbers.unsqueeze(1)
    dh = dw = dweights = None
    if needs_weights and weights is not None:
        parts = (back.float() * h).sum(1, keepdim=True)
        dweights = call_combine(op, told, routing, [parts], [], torch.float32, by_slot=True)
        dweights = dweights.view(weights.shape).to(weights.dtype)
    if needs_h:
        dh = back if scale is None else (back * scale).to(h.dtype)
    if needs_w and w is not None:
        g = made.rows if scale is None else (made.rows * scale).to(h.dtype)
        dw = launch_contract_grouped(h, g, routing.ends, out=torch.empty_like(w))
    return [dh, dw, dweights]
