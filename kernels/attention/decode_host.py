"""flash_decode without our kernels: attention to a rank's part of the cache, and merging."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import replace

import torch

from weft.collectives import Group, all_gather, exchange
from weft.collectives.profiled import profiled
from weft.kernels.attention.cache import Cache
from weft.kernels.engine.local_matmul import sum_dtype

# With fewer keys torch's CPU kernel does not propagate NaN.
_FEWEST_KEYS = 16


@profiled("flash_decode, own keys")
def attend_locally(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to this rank's part of the cache: out (B, H, T, D) and lse (B, H, T)."""
    B, T = q.shape[0], q.shape[2]
    if not q.numel():
        return _nothing(q)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return _attend_captured(q, cache, lengths, scale, window)
    tokens = lengths.tolist()
    reach = max(tokens) if window is None else window
    spans = [
        [(cache.seen(at - reach), cache.seen(at + 1)) for at in range(length - T, length)]
        for length in tokens
    ]
    # Neighbouring sequences of equal length share a call.
    parts = []
    for visible, run in itertools.groupby(range(B), spans.__getitem__):
        same = list(run)
        rows, first, end = slice(same[0], same[-1] + 1), visible[0][0], visible[-1][1]
        if first < end:
            k, v = (x.to(q.dtype) for x in cache.keys(rows, first, end))
            parts.append(_attend_run(q[rows], k, v, visible, scale))
        else:
            parts.append(_nothing(q[rows]))
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _nothing(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of queries that see no key."""
    lse = torch.full(q.shape[:3], -torch.inf, dtype=sum_dtype(q), device=q.device)
    return torch.zeros_like(q), lse


def _attend_run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: list[tuple[int, int]], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (n, H, T, D) to k, v (n, H_kv, S, D); query t sees visible[t]: (first, end).

    The keys begin with the first that query 0 sees and end with the last that query T - 1 sees.
    """
    n, H, T, D = q.shape
    mask = None
    whole = visible[0][0], visible[-1][1]
    if any(span != whole for span in visible):
        firsts, ends = torch.tensor(visible, device=q.device).t().unsqueeze(-1)
        at = torch.arange(*whole, device=q.device)
        hidden = (at < firsts) | (at >= ends)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
        mask = mask.masked_fill_(hidden, -torch.inf).repeat(H // k.shape[1], 1)
    # Query heads that share a key head become rows of one matmul, so that keys are read once.
    rows = q.reshape(n, k.shape[1], -1, D)
    out, lse = _softmax(rows, k, v, mask, scale)
    out, lse = out.reshape(q.shape), lse.reshape(n, H, T).to(sum_dtype(q))
    blind = [t for t, (first, end) in enumerate(visible) if first >= end]
    if blind:
        out[:, :, blind], lse[:, :, blind] = 0, -torch.inf
    return out, lse


def _softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q @ k^T + mask) @ v and the log-sum-exp, in q's dtype or wider."""
    if q.device.type == "cpu" and k.shape[2] >= _FEWEST_KEYS:
        if q.stride(3) != 1:
            q = q.contiguous()
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
        return out, lse
    wide = sum_dtype(q)
    scores = (q.to(wide) * scale) @ k.to(wide).mT
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return _weights(scores, lse.unsqueeze(-1)) @ v.to(wide), lse


def _attend_captured(
    q: torch.Tensor, cache: Cache, lengths: torch.Tensor, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_locally` inside a CUDA graph, whose replays find other values in lengths and table.

    The host therefore reads neither, and all that there is room for is read.
    """
    T, room = q.shape[2], cache.room
    limits = lengths.long().unsqueeze(1) + torch.arange(1 - T, 1, device=q.device)
    cycle = cache.block * cache.world_size

    def seen(limits: torch.Tensor) -> torch.Tensor:
        limits = limits.clamp(min=0)
        rest = (limits % cycle - cache.rank * cache.block).clamp(0, cache.block)
        return (limits // cycle * cache.block + rest).unsqueeze(-1)

    at = torch.arange(room, device=q.device)
    hidden = at >= seen(limits)  # (B, T, room)
    if window is not None:
        hidden = hidden | (at < seen(limits - 1 - window))
    table = None if cache.table is None else cache.table.clamp(0, cache.k.shape[0] - 1)
    held = replace(cache, table=table)
    parts = []
    for row in range(len(q)):
        # Keys that nobody sees may be anything, and 0 * NaN is NaN.
        unseen = hidden[row].all(0).unsqueeze(-1)
        k, v = (
            x.to(q.dtype).masked_fill(unseen, 0) for x in held.keys(slice(row, row + 1), 0, room)
        )
        mask = torch.zeros_like(hidden[row], dtype=torch.float32)
        mask = mask.masked_fill(hidden[row], -torch.inf).repeat(q.shape[1] // k.shape[1], 1)
        rows = q[row].reshape(1, k.shape[1], -1, q.shape[3])
        parts.append(_softmax(rows, k, v, mask, scale))
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), and 0 for a query that sees nothing, whose lse is -inf."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()


def with_lse(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """out and lse in one tensor (B, H, T, D + 1), of the dtype of lse."""
    return torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)


@profiled("flash_decode, merge")
def merge_ranks(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: Group,
    by_process_group: bool,
    told: tuple[Hashable, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' partial results, merged in rank order. `told`: as in `exchange`."""
    packed = with_lse(out, lse)
    if by_process_group:
        every = all_gather(packed.unsqueeze(0), group, sizes=[1] * group.world_size)
    else:
        nbytes = packed.numel() * packed.element_size()
        with exchange(
            group, nbytes, "flash_decode", packed.device, channel="decode", told=told
        ) as ex:  # fmt: skip
            ex.local(tuple(packed.shape), packed.dtype).copy_(packed)
            ex.signal_all()
            ex.wait_all()
            parts = [ex.peer(r, tuple(packed.shape), packed.dtype) for r in range(group.world_size)]
            every = ex.result(torch.stack(parts))
    lses = every[..., -1]
    lse = lses.logsumexp(0)
    weights = _weights(lses, lse)
    total = torch.zeros(out.shape, dtype=packed.dtype, device=out.device)
    for weight, part in zip(weights, every, strict=True):
        total += weight.unsqueeze(-1) * part[..., :-1]
    return total, lse
