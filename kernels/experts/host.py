"""The host engine of dispatch and combine: expert by expert, by rows in each other's memory.

So what is made of an expert's rows is still in the caches. How rows move: `rows`. `sum_as`, as in
`launched`: in which dtype sums are returned, if not in that of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import zip_longest

import torch

from weft.collectives import exchange
from weft.kernels.engine import epilogues
from weft.kernels.engine.local_matmul import mm, partial_mm, sum_dtype
from weft.kernels.experts.calls import CombineCall, DispatchCall, DispatchMade
from weft.kernels.experts.grouped import contract
from weft.kernels.experts.rows import Pull, Push, weighted_sum


def dispatch_forward(
    call: DispatchCall, x: torch.Tensor, weights: Sequence[torch.Tensor], keep: bool, grads: bool
) -> DispatchMade:
    routing, activation = call.routing, call.activation
    R, op = routing.count, "dispatch_grouped_matmul"
    rows = x.new_empty(R, x.shape[1]) if keep or not weights else None
    if grads and epilogues.keeps_sums(activation):
        zs = [x.new_empty(R, w.shape[2]) for w in weights]
    else:
        zs = []
    outputs = weights[:1] if activation == "swiglu" else weights
    hs = [x.new_empty(R, w.shape[2]) for w in outputs]
    quantize, told = call.quantize is not None, call.told(x)
    nbytes = Pull.nbytes(routing, x, quantize=quantize)
    with exchange(routing.group, nbytes, op, x.device, channel="host gather", told=told) as ex:
        pull = Pull(ex, routing, x, quantize=quantize)
        for e, part in enumerate(routing.rows_of_expert):
            if part.stop == part.start:
                continue
            mine = pull.rows(e, None if rows is None else rows[part])
            into = [z[part] for z in zs] or ([h[part] for h in hs] if activation is None else [])
            made = [
                mm(mine, w[e], out=out) for w, out in zip_longest(weights, into[: len(weights)])
            ]
            if activation is not None:
                for h, each in zip(hs, epilogues.activate(made, activation), strict=True):
                    h[part] = each
        for result in [*hs, *zs] if rows is None else [*hs, *zs, rows]:
            ex.result(result)
    if rows is not None and not weights:
        return DispatchMade([rows], None, [])
    return DispatchMade(hs, rows, zs or (hs if activation else []))


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
    routing, group = call.routing, call.routing.group
    op, told = "dispatch_grouped_matmul backward", call.told(x)
    wire, quantize = routing.wire(x), call.quantize is not None
    dws = [torch.empty_like(w) if need else None for w, need in zip(weights, needs_w, strict=True)]
    dx = None
    with ExitStack() as stack:
        if any(needs_w) and rows is None:
            nbytes = Pull.nbytes(routing, x, quantize=quantize)
            ex = exchange(group, nbytes, op, x.device, channel="host gather", told=told)
            pull = Pull(stack.enter_context(ex), routing, x, quantize=quantize)
        if needs_x:
            nbytes = Push.nbytes(routing, x.shape[1], wire)
            ex = exchange(group, nbytes, op, x.device, channel="host scatter", told=told)
            push = Push(stack.enter_context(ex), routing, x.shape[1], wire)
        for e, part in enumerate(routing.rows_of_expert):
            dh = [each[part] for each in dhs]
            dzs = epilogues.activation_gradients(dh, [each[part] for each in kept], call.activation)
            if any(needs_w):
                mine = rows[part] if rows is not None else pull.rows(e)
                for dw, dz in zip(dws, dzs, strict=True):
                    if dw is not None:
                        contract(dw[e], mine, dz)
            if needs_x and part.stop > part.start:
                push.rows(e, _back(dzs, [w[e] for w in weights], wire))
        if needs_x:
            tp = routing.tensor_parallel_size
            dx = weighted_sum(push.collected(), None, tp, sum_as or x.dtype)
    return [dx, *dws]


def _back(
    dzs: list[torch.Tensor], weights: Sequence[torch.Tensor], wire: torch.dtype
) -> torch.Tensor:
    """The gradient of an expert's rows: sum over i of dz_i @ w_i^T, as it travels."""
    if not weights:
        return dzs[0].to(wire)
    if len(weights) == 1 and wire == dzs[0].dtype:
        return mm(dzs[0], weights[0].t())
    total = None
    for dz, w in zip(dzs, weights, strict=True):
        total = partial_mm(dz, w.t(), plus=total, out=total)
    assert total is not None
    return total.to(wire)


def combine_forward(
    call: CombineCall,
    h: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    sum_as: torch.dtype | None = None,
) -> torch.Tensor:
    routing, wire, op = call.routing, call.wire, "grouped_matmul_combine"
    H = h.shape[1] if w is None else w.shape[2]
    nbytes, told = Push.nbytes(routing, H, wire), call.told(H, h.dtype)
    with exchange(routing.group, nbytes, op, h.device, channel="host scatter", told=told) as ex:
        push = Push(ex, routing, H, wire)
        for e, part in enumerate(routing.rows_of_expert):
            if part.stop > part.start:
                push.rows(e, _on_the_wire(h[part], None if w is None else w[e], wire))
        tp = routing.tensor_parallel_size
        y = weighted_sum(push.collected(), weights, tp, sum_as or h.dtype)
        return ex.result(y)


def _on_the_wire(h: torch.Tensor, w: torch.Tensor | None, wire: torch.dtype) -> torch.Tensor:
    """An expert's results as they travel."""
    if w is None:
        return h.to(wire)
    return mm(h, w) if wire == h.dtype else partial_mm(h, w).to(wire)


def combine_backward(
    call: CombineCall,
    h: torch.Tensor,
    w: torch.Tensor | None,
    weights: torch.Tensor | None,
    dy: torch.Tensor,
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    routing, group = call.routing, call.routing.group
    needs_h, needs_w, needs_weights = needs
    op, told = "grouped_matmul_combine backward", call.told(dy.shape[1], dy.dtype)
    dh = torch.empty_like(h) if needs_h else None
    dw = torch.empty_like(w) if needs_w and w is not None else None
    dweights, wide = None, sum_dtype(dy)
    with ExitStack() as stack:
        nbytes = Pull.nbytes(routing, dy, weights is not None)
        ex = exchange(group, nbytes, op, dy.device, channel="host gather", told=told)
        pull = Pull(stack.enter_context(ex), routing, dy, weights)
        if needs_weights:
            nbytes = Push.nbytes(routing, 1, wide)
            ex = exchange(group, nbytes, op, dy.device, channel="host scatter", told=told)
            push = Push(stack.enter_context(ex), routing, 1, wide)
        for e, part in enumerate(routing.rows_of_expert):
            if part.stop == part.start:
                if dw is not None:
                    dw[e].zero_()
                continue
            g = pull.rows(e)
            scale = None if weights is None else pull.numbers(e)
            if needs_h or needs_weights:
                back = g if w is None else partial_mm(g, w[e].t())
                if needs_weights:
                    push.rows(e, (back.to(wide) * h[part]).sum(1, keepdim=True))
                if dh is not None:
                    dh[part] = back if scale is None else back * scale
            if dw is not None:
                contract(dw[e], h[part], g if scale is None else g.mul_(scale))
        if needs_weights and weights is not None:
            parts = push.collected().view(*weights.shape, routing.tensor_parallel_size)
            dweights = parts.sum(2).to(weights.dtype)
    return [dh, dw, dweights]
