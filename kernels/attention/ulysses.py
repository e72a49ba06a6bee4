"""ulysses_attention: attention over a sharded sequence by exchanging heads for sequence.

W ranks; rank r holds n_r tokens of all H heads, and computes all S tokens of its own H / W heads:

    rank 0   (B, H, n_0, D)   heads  0 | 1 | 2 | 3          (B, h_0, S, D)   heads 0, 1
                                     swap  --->
    rank 1   (B, H, n_1, D)   heads  0 | 1 | 2 | 3          (B, h_1, S, D)   heads 2, 3

Protocol of a swap. Every rank copies its tensor into symmetric memory as it is and signals; once a
peer has signalled, each rank reads its own heads (or, on the way back, tokens) straight to their
place in the result. Nothing is permuted into send buffers or out of receive buffers.

Key heads go to every rank whose queries use them, so there may be fewer of them than ranks. Their
gradients come back from all of those ranks, and are added up in rank order.

Between the swaps runs `ring_attention`: on this rank alone or, in two dimensions, over the ranks of
another mesh dim, each of which then holds the part of the sequence of its own swap.

In one dimension the triton engine does all of it in one launch, without swaps: see `heads_kernel`
and `heads_grad_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from weft import settings
from weft.collectives import Group, all_gather, exchange, resolve
from weft.collectives.collective_ops import known_sizes
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.collectives.ranks.group import GroupLike, alone, group_name, is_call_traced
from weft.kernels.attention.ring import (
    Attention,
    AttentionPlan,
    Gradients,
    Saved,
    as_op_arguments,
    check_tensors,
    plan_attention,
    ring_attention,
)
from weft.kernels.engine.autocast import autocast
from weft.kernels.engine.engines import record_backward, refuse_second_order
from weft.kernels.flash.geometry import SequenceLayout

OP = "ulysses_attention"


@autocast
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
    if is_call_traced(q):  # see `custom_ops`
        op: Any = torch.ops.weft.ulysses_attention
        ring_name = "" if ring_group is None else group_name(ring_group)
        out, lse = op(
            q, k, v, group_name(group), ring_name, causal, scale, layout,
            *as_op_arguments(window, cu_seqlens), return_lse, sizes, key_sizes,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    inner = resolve(group)
    check_tensors(q, k, v, layout)
    H, engine = q.shape[1], settings.current_engine()
    if ring_group is None:
        if layout != "contiguous":
            raise ValueError(
                f"without ring_group a rank's tokens follow those of the rank before it: "
                f'layout must be "contiguous", got {layout!r}; ring_attention takes "zigzag"'
            )
        outer = alone()
        call = plan_attention(
            q, k, v, inner, causal, scale, "contiguous", window, cu_seqlens, sizes, key_sizes, OP
        )
        if in_one_launch(call):
            out, lse = Attention.apply(q, k, v, call, _head_forward, head_gradients)
            return (out, lse) if return_lse else out
        rows, key_rows, engine = call.geometry.q_sizes, call.geometry.k_sizes, call.engine
    else:
        outer = resolve(ring_group)
        rows = tuple(known_sizes(q, inner, 2, sizes, OP))
        key_rows = tuple(known_sizes(k, inner, 2, sizes if key_sizes is None else key_sizes, OP))
    mine, shared = split_heads(H, k.shape[1], inner.world_size)

    way = _way(inner, engine)
    q, k, v = _Swap.apply(q, k, v, inner, (mine, shared, shared), (rows, key_rows, key_rows), way)
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
    out = _SwapBack.apply(out, inner, mine, rows, way)
    if not return_lse:
        return out
    return out, _SwapBack.apply(lse.unsqueeze(-1), inner, mine, rows, way).squeeze(-1)


def _head_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    from weft.kernels.heads import heads_kernel as kernel

    ws = kernel.workspace_for(q, k, call.group, call.geometry)
    with ws.call(OP, call.told):
        return kernel.launch_head_attention(q, k, v, ws, call.geometry, call.scale)


def head_gradients(call: AttentionPlan, saved: Saved) -> Gradients:
    """dq, dk and dv on the triton engine, where `in_one_launch` is true of `call`."""
    from weft.kernels.heads import heads_grad_kernel as kernel

    ws = kernel.workspace_for(saved.q, saved.k, call.group, call.geometry)
    with ws.call(f"{OP} backward", call.told):
        return kernel.launch_head_attention_backward(saved, ws, call.geometry, call.scale)


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
    return out, out.sum(-1).to(torch.promote_types(q.dtype, torch.float32))


Heads = tuple[tuple[int, ...], ...]
Way = Literal["host", "generic"]


def split_heads(H: int, H_kv: int, world_size: int) -> tuple[Heads, Heads]:
    """Query heads of every rank, and the key heads that they use.

    Example: 4 heads on 2 key heads, 4 ranks: (0,) (1,) (2,) (3,) and (0,) (0,) (1,) (1,).
    """
    counts = chunk_sizes(H, world_size)
    mine = tuple(
        tuple(range(first, first + count))
        for first, count in zip(offsets(counts), counts, strict=True)
    )
    share = H // H_kv
    used = tuple(tuple(head // share for head in heads) for heads in mine)
    shared = tuple(tuple(dict.fromkeys(heads)) for heads in used)
    # Attention derives the key head from the query head, so each must serve equally many.
    fits = all(
        len(heads) == len(kv) * (len(heads) // max(1, len(kv)))
        and all(kv[i // (len(heads) // len(kv))] == head for i, head in enumerate(heads))
        for heads, kv in zip(used, shared, strict=True)
    )
    return mine, shared if fits else used


class _Swap(torch.autograd.Function):
    """q, k, v (B, H, n, D) -> (B, h, S, D): this rank's heads of all tokens. Gradients are summed.

    One function for the three: ranks without heads, which may have no gradient of one of them, must
    swap as often as the others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Group,
        heads: tuple[Heads, ...],
        sizes: tuple[tuple[int, ...], ...],
        way: Way,
    ) -> tuple[torch.Tensor, ...]:
        given = tuple(zip((q, k, v), heads, sizes, strict=True))
        ctx.args = [(group, held, rows, x.shape[1], way) for x, held, rows in given]
        return tuple(to_heads(x, group, held, rows, way) for x, held, rows in given)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_order(OP)
        group, way = ctx.args[0][0], ctx.args[0][-1]
        record_backward(OP, way, group, *["all_to_all"] * sum(ctx.needs_input_grad[:3]))
        pairs = zip(grads, ctx.args, ctx.needs_input_grad, strict=False)
        found = [to_tokens(grad, *args) if need else None for grad, args, need in pairs]
        return *found, None, None, None, None


class _SwapBack(torch.autograd.Function):
    """(B, h, S, D) -> (B, H, n, D): this rank's tokens of all heads. Backward: `to_heads`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, heads: Heads, sizes: tuple[int, ...], way: Way
    ) -> torch.Tensor:
        ctx.args = group, heads, sizes, way
        return to_tokens(x, group, heads, sizes, sum(map(len, heads)), way)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_order(OP)
        record_backward(OP, ctx.args[-1], ctx.args[0], "all_to_all")
        return to_heads(grad, *ctx.args), None, None, None, None


def _way(group: Group, engine: str) -> Way:
    """How swaps run; the same on every rank."""
    return "generic" if group.world_size == 1 or group.why or engine == "generic" else "host"


def to_heads(
    x: torch.Tensor,
    group: Group,
    heads: Heads,
    sizes: tuple[int, ...],
    way: Way | None = None,
) -> torch.Tensor:
    """This rank's heads of all tokens; a `way` of None follows the engine in force."""
    B, H, _, D = x.shape
    mine = list(heads[group.rank])
    starts = offsets(sizes)
    out = x.new_empty(B, len(mine), sum(sizes), D)
    if (way or _way(group, settings.current_engine())) == "generic":
        whole = all_gather(x, group, dim=2, sizes=list(sizes)) if group.world_size > 1 else x
        _pick(out, whole, mine)
        return out
    nbytes = B * H * max(sizes) * D * x.element_size()
    told = x.dtype, (B, H, "*", D), ("sizes", sizes)
    with exchange(group, nbytes, OP, x.device, channel="swap", told=told) as ex:
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        ex.signal_all()
        for source in (group.rank, *ex.peers()):
            ex.wait(source)
            rows = slice(starts[source], starts[source] + sizes[source])
            shown = (
                x if source == group.rank else ex.peer(source, (B, H, sizes[source], D), x.dtype)
            )
            _pick(out[:, :, rows], shown, mine)
        return ex.result(out)


def to_tokens(
    x: torch.Tensor,
    group: Group,
    heads: Heads,
    sizes: tuple[int, ...],
    H: int,
    way: Way | None = None,
) -> torch.Tensor:
    """This rank's tokens of all `H` heads; a head that several ranks have is added up."""
    B, _, S, D = x.shape
    start = offsets(sizes)[group.rank]
    rows = slice(start, start + sizes[group.rank])
    added = len({head for each in heads for head in each}) < sum(map(len, heads))
    wide = torch.promote_types(x.dtype, torch.float32) if added else x.dtype
    out = x.new_zeros(B, H, sizes[group.rank], D, dtype=wide)

    def take(source: int, part: torch.Tensor) -> None:
        if not heads[source]:
            return
        if added:
            for i, head in enumerate(heads[source]):
                out[:, head] += part[:, i]
        else:
            out[:, heads[source][0] : heads[source][-1] + 1] = part

    if (way or _way(group, settings.current_engine())) == "generic":
        counts = [len(each) for each in heads]
        whole = all_gather(x, group, dim=1, sizes=counts) if group.world_size > 1 else x
        for source, part in enumerate(whole.split(counts, 1)):
            take(source, part[:, :, rows])
        return out.to(x.dtype)
    nbytes = B * max(map(len, heads)) * S * D * x.element_size()
    told = x.dtype, (B, H, S, D), ("sizes", sizes)
    with exchange(group, nbytes, OP, x.device, channel="swap", told=told) as ex:
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        ex.signal_all()
        # Sums are in rank order; otherwise each rank starts with another peer.
        for source in range(group.world_size) if added else (group.rank, *ex.peers()):
            ex.wait(source)
            shape = (B, len(heads[source]), S, D)
            take(
                source, (x if source == group.rank else ex.peer(source, shape, x.dtype))[:, :, rows]
            )
        ex.result(out)
    return out.to(x.dtype)


def _pick(out: torch.Tensor, x: torch.Tensor, heads: list[int]) -> None:
    """out = x[:, heads], by slices, as a CUDA graph cannot capture the copy of a list."""
    if heads and heads == list(range(heads[0], heads[-1] + 1)):
        out.copy_(x[:, heads[0] : heads[-1] + 1])
    else:
        for i, head in enumerate(heads):
            out[:, i] = x[:, head]
