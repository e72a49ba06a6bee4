"""ring_attention: exact attention over a sequence sharded across ranks, differentiable.

W ranks; rank r holds n_r queries and m_r keys and values of the whole sequences:

                                    k_0, v_0 (B, H_kv, m_0, D)
    q_r (B, H, n_r, D)  attends to  k_1, v_1                      =   out_r (B, H, n_r, D)
                                    ...

Forward, host engine. Every rank copies its k and v into symmetric memory and signals; it attends to
its own keys, then to each peer's once that peer has signalled, rank + 1 first: on a CPU in place,
on a GPU in copies made meanwhile. Partial results are merged by log-sum-exp (`host`). Keys that no
query here sees are not read.

Backward. Keys are published again. In step t = 0, 1, .. W - 1, rank r takes the keys of rank r + t:
dq is added up here, and dk and dv are written to symmetric memory, where their owner reads them at
the end of the step. So an owner adds up its own part, then those of rank - 1, rank - 2, .., always
in that order, and gradients are bitwise the same from run to run. No rank ever holds more than two
shards besides its own, however many ranks there are.

The triton engine is in `ring_kernel` and `ring_grad_kernel`, the generic one, and that of several
hosts, in `generic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weft.collectives.memory.repeatable import repeatable, repeated_gradients
from weft.collectives.profiled import profiler_enabled
from weft.collectives.ranks.group import GroupLike, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.kernels.attention.generic import (
    gathered_attention,
    gathered_gradients,
    hosts_backward,
    hosts_forward,
)
from weft.kernels.attention.host import host_backward, host_forward
from weft.kernels.attention.plan import AttentionOptions, AttentionPlan, plan_attention
from weft.kernels.engine.autocast import autocast
from weft.kernels.engine.engines import record_backward, refuse_second_order
from weft.kernels.engine.local_matmul import needs_gradient
from weft.kernels.flash.geometry import SequenceLayout

Run = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan], tuple[torch.Tensor, torch.Tensor]
]


@autocast
@repeatable
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: GroupLike = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: SequenceLayout = "contiguous",
    window: int | tuple[int, int] | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    sizes: Sequence[int] | None = None,
    key_sizes: Sequence[int] | None = None,
) -> Any:
    """softmax(q @ cat(k over ranks)^T * scale) @ cat(v over ranks), for this rank's queries.

    Args:
        q: (B, H, n, D), this rank's shard of the queries along dim 2; any strides. Shards may
            differ in length and be empty; everything else is the same on every rank.
        k, v: (B, H_kv, m, D), this rank's shards of keys and values, dtype of q. H_kv divides H:
            query head h uses head h // (H / H_kv).
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        causal: the query at position i of the whole sequence sees the keys at positions <= i.
            Queries and keys both count from position 0, even if there are more of one than of the
            other: `is_causal` of torch's scaled_dot_product_attention.
        scale: of the scores; None: 1 / sqrt(D).
        layout: which tokens a rank holds. "contiguous": those after the lower ranks'. "zigzag":
            chunks r and 2 W - 1 - r of 2 W, which balances causal work; lengths are then those of
            `weft.kernels.zigzag_sizes`, and `to_zigzag` reorders a whole sequence.
        window: the query at position i sees no keys before i - window: flash-attention's
            `window_size` = (window, -1). A pair (left, right) limits both sides; -1 is no limit.
        cu_seqlens: where packed documents begin in the whole sequence, from 0 to its length, the
            same on every rank and for all of the batch; a query sees only its own document. Needs
            as many queries as keys, in either layout. A tensor on a GPU costs a sync.
        return_lse: also return the log-sum-exp of each query's scores.
        sizes, key_sizes: n and m of every rank, if known (`key_sizes` defaults to `sizes`);
            None: the ranks exchange them, which costs a few us.

    Returns:
        out (B, H, n, D), contiguous, dtype of q; with `return_lse` the pair (out, lse), lse
        (B, H, n) in fp32, natural logarithm. A query that sees no key gets 0, and lse -inf.

        Both are differentiable, in q, k and v; the gradients of k and v are summed over ranks.

    Raises:
        ValueError: shapes, dtypes, sizes or documents that do not fit.
        MismatchError: on every rank, if the ranks' calls do not fit together.
        PeerTimeout: a rank did not come.
        NotImplementedError: an engine was forced that cannot run the call.

    Example:
        2 ranks, one head of width 1, all q = 0: every score is 0. v = [[1.], [2.]] on rank 0 and
        [[3.], [6.]] on rank 1 give out = 3 for every query; causal, [1, 1.5] and [2, 3].
    """
    options = AttentionOptions(causal, scale, layout, window, cu_seqlens, sizes, key_sizes)
    if is_call_traced(q):  # see `custom_ops`
        op: Any = torch.ops.weft.ring_attention
        out, lse = op(q, k, v, group_name(group), *options.of_op())
        return (out, lse) if return_lse else out
    call = plan_attention(q, k, v, group, options)
    if call.engine == "generic":
        out, lse = gathered_attention(q, k, v, call.group, call.geometry, call.scale, return_lse)
    else:
        ways = {"host": host_forward, "hosts": hosts_forward, "triton": _triton_forward}
        run = ways[call.engine]
        out, lse = attended(q, k, v, call, run, ring_gradients)
    return (out, lse) if return_lse else out


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionPlan, run: Run, gradients: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by a fused engine; through autograd only where that matters, as it takes 8 us."""
    if profiler_enabled() or needs_gradient((q, k, v)):
        made: tuple[torch.Tensor, torch.Tensor] = Attention.apply(q, k, v, call, run, gradients)
        return made
    return run(q, k, v, call)


class Attention(torch.autograd.Function):
    """q, k, v -> out, lse = run(q, k, v, call), with gradients(call, saved) of a fused engine."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: AttentionPlan,
        run: Run,
        gradients: Callable[[AttentionPlan, Saved], Gradients],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.gradients = call, gradients
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: AttentionPlan = ctx.call
        refuse_second_order(call.op)
        saved, gradients = ctx.saved_tensors, ctx.gradients

        def made() -> Gradients:
            rings = call.op == "ring_attention"
            moved = ["all_gather", "reduce_scatter"] if rings else ["all_to_all"] * 4
            own = call.of_gradients != call.engine
            why = "quicker than torch's flash attention" if own else "as forward"
            record_backward(call.op, call.of_gradients, call.group, *moved, why=why)
            found: Gradients = gradients(call, saved_with(saved, grads))
            return found

        key, given = (call, gradients), (*saved, *grads)
        return *repeated_gradients(key, call.group, given, made), None, None, None


class Saved(NamedTuple):
    """What a backward is given: the forward's operands and results, and the results' gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None  # None is 0


def saved_with(tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> Saved:
    """q, k, v, out and lse with the gradients of the last two: None is 0."""
    q, k, v, out, lse = tensors
    grad_out, grad_lse = grads
    return Saved(
        q, k, v, out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse
    )


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ring_gradients(call: AttentionPlan, saved: Saved) -> Gradients:
    """dq, dk and dv."""
    if call.engine == "generic":
        return gathered_gradients(saved, call.group, call.geometry, call.scale)
    ways = {"host": host_backward, "hosts": hosts_backward, "triton": _triton_backward}
    return ways[call.of_gradients](call, saved)


def _triton_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    from weft.kernels.flash import ring_kernel as kernel

    ws = kernel.workspace_for(k, call.group, call.geometry)

    def launched() -> tuple[torch.Tensor, ...]:
        return kernel.launch_ring_attention(q, k, v, ws, call.geometry, call.scale)

    with ws.call("ring_attention", call.told):
        out, lse = ws.repeat(call.key(), (q, k, v), launched)
    return out, lse


def _triton_backward(call: AttentionPlan, saved: Saved) -> Gradients:
    from weft.kernels.flash import ring_grad_kernel as kernel

    ws = kernel.workspace_for(saved.k, call.group, call.geometry)

    def launched() -> tuple[torch.Tensor, ...]:
        return kernel.launch_ring_attention_backward(saved, ws, call.geometry, call.scale)

    with ws.call("ring_attention backward", call.told):
        dq, dk, dv = ws.repeat(call.key(*saved[3:]), saved, launched)
    return dq, dk, dv


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of whole sequences, in any dtype: the oracle of the tests."""
    left, right = window if isinstance(window, tuple) else (-1 if window is None else window, -1)
    i = torch.arange(q.shape[2], device=q.device).unsqueeze(1)
    j = torch.arange(k.shape[2], device=q.device)
    hidden = torch.zeros(len(i), len(j), dtype=torch.bool, device=q.device)
    if causal:
        hidden |= j > i
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    for boundary in cu_seqlens or ():
        hidden |= (i < boundary) != (j < boundary)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = scores.masked_fill(hidden, -torch.inf)
    blind = hidden.all(-1)
    weights = scores.masked_fill(blind.unsqueeze(-1), 0.0).softmax(-1)
    weights = weights.masked_fill(blind.unsqueeze(-1), 0.0)
    lse = scores.masked_fill(blind.unsqueeze(-1), 0.0).logsumexp(-1)
    return weights @ v, lse.masked_fill(blind, -torch.inf)
