"""ulysses_attention: attention over a sharded sequence by exchanging heads for sequence.

W ranks; rank r holds n_r tokens of all H heads, and computes all S tokens of its own H / W heads:

    rank 0   (B, H, n_0, D)   heads  0 | 1 | 2 | 3          (B, h_0, S, D)   heads 0, 1
                                     swap  --->
    rank 1   (B, H, n_1, D)   heads  0 | 1 | 2 | 3          (B, h_1, S, D)   heads 2, 3

How a swap is done is in `swaps`.

Key heads go to every rank whose queries use them, so there may be fewer of them than ranks. Their
gradients come back from all of those ranks, and are added up in rank order.

Between the swaps runs `ring_attention`: on this rank alone or, in two dimensions, over the ranks of
another mesh dim, each of which then holds the part of the sequence of its own swap.

In one dimension the triton engine does all of it in one launch, without swaps: see `heads_kernel`
and `heads_grad_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft import settings
from weft.collectives import resolve
from weft.collectives.memory.repeatable import repeatable
from weft.collectives.ranks.group import GroupLike, alone, group_name
from weft.collectives.ranks.traced import is_call_traced
from weft.collectives.sizes import known_sizes
from weft.kernels.attention.plan import (
    AttentionOptions,
    AttentionPlan,
    check_tensors,
    plan_attention,
)
from weft.kernels.attention.ring import Gradients, Saved, attended, ring_attention
from weft.kernels.attention.swaps import OP, Swap, SwapBack, split_heads, way_of
from weft.kernels.engine.autocast import autocast
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.flash.geometry import SequenceLayout


@autocast
@repeatable
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: GroupLike = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    sizes: Sequence[int] | None = None,
    key_sizes: Sequence[int] | None = None,
    ring_group: GroupLike = None,
    layout: SequenceLayout = "contiguous",
) -> Any:
    """What `ring_attention` computes, by exchanging heads for sequence.

    Args:
        q, k, v, group, causal, scale, window, cu_seqlens, return_lse, sizes, key_sizes: as in
            `ring_attention`. Heads are assigned to ranks by the rule of torch.chunk; ranks without
            heads only exchange.
        ring_group: a second mesh dim along which the sequence is sharded: typically that between
            hosts, with `group` inside a host. Rank i of it holds part i of the sequence, which is
            sharded over `group`.
        layout: of the parts of `ring_group`; "zigzag" balances causal work between them. The two
            chunks of a part, one after the other, are then sharded over `group`.

    Returns:
        out (B, H, n, D), or the pair (out, lse) with `return_lse`. Differentiable.

    Raises:
        ValueError, MismatchError, PeerTimeout, NotImplementedError: as `ring_attention`; ValueError
            also for a layout other than "contiguous" without `ring_group`.

    Example:
        2 ranks, 2 heads: rank 0 computes head 0 of all tokens, rank 1 head 1.
    """
    options = AttentionOptions(causal, scale, layout, window, cu_seqlens, sizes, key_sizes)
    if is_call_traced(q):  # see `custom_ops`
        op: Any = torch.ops.weft.ulysses_attention
        ring_name = "" if ring_group is None else group_name(ring_group)
        *given, lengths, key_lengths = options.of_op()
        out, lse = op(
            q, k, v, group_name(group), ring_name, *given, return_lse, lengths, key_lengths
        )
        return (out, lse) if return_lse else out
    inner = resolve(group)
    check_tensors(q, k, v, layout)
    H = q.shape[1]
    engine: str = settings.current_engine()
    if ring_group is None:
        if layout != "contiguous":
            raise ValueError(
                f"without ring_group a rank's tokens follow those of the rank before it: "
                f'layout must be "contiguous", got {layout!r}; ring_attention takes "zigzag"'
            )
        outer = alone()
        call = plan_attention(q, k, v, inner, options, OP)
        if in_one_launch(call):
            out, lse = attended(q, k, v, call, _head_forward, head_gradients)
            return (out, lse) if return_lse else out
        rows, key_rows, engine = call.geometry.q_sizes, call.geometry.k_sizes, call.engine
    else:
        outer = resolve(ring_group)
        rows = tuple(known_sizes(q, inner, 2, sizes, OP))
        key_rows = tuple(known_sizes(k, inner, 2, sizes if key_sizes is None else key_sizes, OP))
    mine, shared = split_heads(H, k.shape[1], inner.world_size)

    way = way_of(inner, q.device, engine)
    q, k, v = Swap.apply(q, k, v, inner, (mine, shared, shared), (rows, key_rows, key_rows), way)
    if ring_group is not None and settings.tracing():
        shapes = f"{list(q.shape)} of {H} heads, {inner.world_size} ranks"
        settings.record(OP, way, "heads exchanged", shapes, ranks=inner.world_size)
    if mine[inner.rank]:
        out, lse = ring_attention(
            q, k, v, outer, causal=causal, scale=scale, window=window, cu_seqlens=cu_seqlens,
            layout=layout, return_lse=True,
        )  # fmt: skip
    else:
        out, lse = no_heads(q, k, v)
    out = SwapBack.apply(out, inner, mine, rows, way)
    if not return_lse:
        return out
    return out, SwapBack.apply(lse.unsqueeze(-1), inner, mine, rows, way).squeeze(-1)


def _head_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    from weft.kernels.heads import heads_kernel as kernel

    ws = kernel.workspace_for(q, k, call.group, call.geometry)

    def launched() -> tuple[torch.Tensor, ...]:
        return kernel.launch_head_attention(q, k, v, ws, call.geometry, call.scale)

    with ws.call(OP, call.told):
        out, lse = ws.repeat(call.key(), (q, k, v), launched)
    return out, lse


def head_gradients(call: AttentionPlan, saved: Saved) -> Gradients:
    """dq, dk and dv on the triton engine, where `in_one_launch` is true of `call`."""
    from weft.kernels.heads import heads_grad_kernel as kernel

    ws = kernel.workspace_for(saved.q, saved.k, call.group, call.geometry)

    def launched() -> tuple[torch.Tensor, ...]:
        return kernel.launch_head_attention_backward(saved, ws, call.geometry, call.scale)

    with ws.call(f"{OP} backward", call.told):
        dq, dk, dv = ws.repeat(call.key(*saved[3:]), saved, launched)
    return dq, dk, dv


def in_one_launch(call: AttentionPlan) -> bool:
    """Whether `call` runs in one launch, rather than as swaps around local attention."""
    return call.engine == "triton" and call.group.world_size > 1


def no_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a rank that computes nothing, but must take part in the swaps of backward.

    The product saves its factors: else torch.utils.checkpoint would not recompute this rank's part.
    """
    out = q * (1 + 0 * (k.sum() + v.sum()))
    return out, out.sum(-1).to(sum_dtype(q))
