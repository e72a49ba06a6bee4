"""Swaps of heads for tokens, and back: what `ulysses_attention` is made of on the host.

Every rank copies its tensor into symmetric memory as it is and signals; once a peer has signalled,
each rank reads its own heads (or, on the way back, tokens) straight to their place in the result.
Nothing is permuted into send buffers or out of receive buffers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from weft import settings
from weft.collectives import Group, all_gather, exchange
from weft.collectives.ranks.chunks import chunk_sizes, offsets
from weft.kernels.engine.engines import record_backward, refuse_second_order
from weft.kernels.engine.local_matmul import sum_dtype

OP = "ulysses_attention"
HeadsByRank = tuple[tuple[int, ...], ...]
Way = Literal["host", "generic"]


def split_heads(H: int, H_kv: int, world_size: int) -> tuple[HeadsByRank, HeadsByRank]:
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


class Swap(torch.autograd.Function):
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
        heads: tuple[HeadsByRank, ...],
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
        found = [heads_to_tokens(grad, *args) if need else None for grad, args, need in pairs]
        return *found, None, None, None, None


class SwapBack(torch.autograd.Function):
    """(B, h, S, D) -> (B, H, n, D): this rank's tokens of all heads. Backward: `to_heads`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        heads: HeadsByRank,
        sizes: tuple[int, ...],
        way: Way,
    ) -> torch.Tensor:
        ctx.args = group, heads, sizes, way
        return heads_to_tokens(x, group, heads, sizes, sum(map(len, heads)), way)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_second_order(OP)
        record_backward(OP, ctx.args[-1], ctx.args[0], "all_to_all")
        return to_heads(grad, *ctx.args), None, None, None, None


def way_of(group: Group, device: torch.device, engine: str) -> Way:
    """How swaps of tensors on `device` run; the same on every rank."""
    alone = group.world_size == 1 or group.unreached(device)
    return "generic" if alone or engine == "generic" else "host"


def to_heads(
    x: torch.Tensor,
    group: Group,
    heads: HeadsByRank,
    sizes: tuple[int, ...],
    way: Way | None = None,
) -> torch.Tensor:
    """This rank's heads of all tokens; a `way` of None follows the engine in force."""
    B, H, _, D = x.shape
    mine = list(heads[group.rank])
    starts = offsets(sizes)
    out = x.new_empty(B, len(mine), sum(sizes), D)
    if (way or way_of(group, x.device, settings.current_engine())) == "generic":
        whole = all_gather(x, group, dim=2, sizes=list(sizes)) if group.world_size > 1 else x
        _pick_heads(out, whole, mine)
        return out
    nbytes = B * H * max(sizes) * D * x.element_size()
    with exchange(group, nbytes, OP, x.device, channel="swap") as ex:
        ex.local(tuple(x.shape), x.dtype).copy_(x)
        ex.signal_all()
        for source in (group.rank, *ex.peers()):
            ex.wait(source)
            rows = slice(starts[source], starts[source] + sizes[source])
            shown = (
                x if source == group.rank else ex.peer(source, (B, H, sizes[source], D), x.dtype)
            )
            _pick_heads(out[:, :, rows], shown, mine)
        return ex.result(out)


def heads_to_tokens(
    x: torch.Tensor,
    group: Group,
    heads: HeadsByRank,
    sizes: tuple[int, ...],
    H: int,
    way: Way | None = None,
) -> torch.Tensor:
    """This rank's tokens of all `H` heads; a head that several ranks have is added up."""
    B, _, S, D = x.shape
    start = offsets(sizes)[group.rank]
    rows = slice(start, start + sizes[group.rank])
    added = len({head for each in heads for head in each}) < sum(map(len, heads))
    wide = sum_dtype(x) if added else x.dtype
    out = x.new_zeros(B, H, sizes[group.rank], D, dtype=wide)

    def take(source: int, part: torch.Tensor) -> None:
        if not heads[source]:
            return
        if added:
            for i, head in enumerate(heads[source]):
                out[:, head] += part[:, i]
        else:
            out[:, heads[source][0] : heads[source][-1] + 1] = part

    if (way or way_of(group, x.device, settings.current_engine())) == "generic":
        counts = [len(each) for each in heads]
        whole = all_gather(x, group, dim=1, sizes=counts) if group.world_size > 1 else x
        for source, part in enumerate(whole.split(counts, 1)):
            take(source, part[:, :, rows])
        return out.to(x.dtype)
    nbytes = B * max(map(len, heads)) * S * D * x.element_size()
    with exchange(group, nbytes, OP, x.device, channel="swap") as ex:
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


def _pick_heads(out: torch.Tensor, x: torch.Tensor, heads: list[int]) -> None:
    """out = x[:, heads], by slices, as a CUDA graph cannot capture the copy of a list."""
    if heads and heads == list(range(heads[0], heads[-1] + 1)):
        out.copy_(x[:, heads[0] : heads[-1] + 1])
    else:
        for i, head in enumerate(heads):
            out[:, i] = x[:, head]
