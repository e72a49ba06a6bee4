"""The engines of `ring_attention` that gather keys and values.

Generic. Gather all, then torch's attention. If queries do not see all keys there is an explicit
mask, (n, M) on each rank. Where autograd does not see the call (in custom ops), backward gathers
the keys again and recomputes the attention.

Hosts. A ring of hosts around gathers inside each: the ranks of a host attend to its keys, then to
those of each other host, whose ranks' shards cross once, one host ahead of what is attended to. The
parts merge as those of the host engine do (`host`). In backward each host's sum of the gradients of
another's keys goes back. Keys that no query of a host sees do not cross to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from weft.collectives import Group, all_gather, reduce_scatter
from weft.collectives.hosts import Crossing, HostRows, Pairs
from weft.collectives.memory.backends import persistent
from weft.kernels.attention.host import AttentionGrad, PartialAttention, Total
from weft.kernels.attention.library import library_layout
from weft.kernels.engine.local_matmul import sum_dtype
from weft.kernels.flash.geometry import UNBOUNDED, Geometry, Span, rectangles_between

if TYPE_CHECKING:
    from weft.kernels.attention.plan import AttentionPlan
    from weft.kernels.attention.ring import Gradients, Saved

# Rows of queries whose scores are in memory at a time.
_ROWS = 1024


def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Group,
    geometry: Geometry,
    scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out and, if asked for, lse, as `ring_attention` returns them; differentiable."""
    k, v = (all_gather(x, group, dim=2, sizes=geometry.k_sizes) for x in (k, v))
    return _attend(q, k, v, _whole_mask(geometry, group.rank, q.device), scale, return_lse)


def gathered_gradients(
    saved: Saved, group: Group, geometry: Geometry, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv where autograd has not seen the call: attention is recomputed."""
    q, k, v, _, _, grad_out, grad_lse = saved
    k, v = (all_gather(x, group, dim=2, sizes=geometry.k_sizes) for x in (k, v))
    mask = _whole_mask(geometry, group.rank, q.device)

    def results(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return _attend(q, k, v, mask, scale, grad_lse is not None)[: 1 if grad_lse is None else 2]

    pull: Any = torch.func.vjp(results, q, k, v)[1]
    dq, dk, dv = pull((grad_out,) if grad_lse is None else (grad_out, grad_lse))
    dk, dv = (reduce_scatter(x, group, dim=2, sizes=geometry.k_sizes) for x in (dk, dv))
    return dq, dk, dv


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    blind = None
    if mask is not None:
        # Softmax over nothing is NaN, also in gradients: such queries see all keys and are zeroed.
        blind = ~mask.any(-1)
        mask = mask | blind.unsqueeze(-1)
    lse = None
    if return_lse or not (q.numel() and k.numel()):
        out, lse = _plain_attention(q, k, v, mask, scale)
    else:
        gqa, q = q.shape[1] != k.shape[1], library_layout(q)
        out = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)
    if blind is not None:
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
        lse = None if lse is None else lse.masked_fill(blind, -torch.inf)
    return out.contiguous(), lse


def _plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q @ k^T * scale) @ v and the log-sum-exp, step by step, in fp32 or wider."""
    wide = sum_dtype(q)
    k, v = (x.to(wide).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    blocks = []
    for start in range(0, max(1, q.shape[2]), _ROWS):
        rows = slice(start, start + _ROWS)
        scores = (q[:, :, rows].to(wide) * scale) @ k.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[rows], -torch.inf)
        blocks.append(((scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1)))
    outs, lses = zip(*blocks, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


@lru_cache(maxsize=64)
def _starts(documents: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Kept, as a CUDA graph cannot capture the copy of a list."""
    with torch.inference_mode(False):
        return persistent(torch.tensor(documents, device="cpu"), device)


def _whole_mask(geometry: Geometry, rank: int, device: torch.device) -> torch.Tensor | None:
    """Which gathered keys each query of `rank` sees, (n, M); None: all of them."""
    sees = geometry.sees
    if sees.before == sees.after == UNBOUNDED and sees.documents is None:
        return None

    def positions(spans: Sequence[Span]) -> torch.Tensor:
        parts = [torch.arange(span.start, span.stop, device=device) for span in spans]
        return torch.cat(parts)

    mine = positions(geometry.q_spans[rank]).unsqueeze(1)
    theirs = positions([span for spans in geometry.k_spans for span in spans])
    mask = (theirs >= mine - sees.before) & (theirs <= mine + sees.after)
    if sees.documents is not None:
        starts = _starts(sees.documents, device)
        document = [torch.bucketize(x, starts, right=True) for x in (mine, theirs)]
        mask &= document[0] == document[1]
    return mask


def hosts_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse: over the keys of this host, then over each other's as they come."""
    geometry = call.geometry
    partial = PartialAttention(q, geometry.sees, call.scale)
    for block, whole in _keys_by_host(_crossing(call, call.op), k, v):
        for rank, (keys, values) in _by_rank(whole, block, geometry):
            partial.add(keys, values, rectangles_between(geometry, call.group.rank, rank))
    return partial.result()


def hosts_backward(call: AttentionPlan, saved: Saved) -> Gradients:
    """dq, dk and dv: the keys come again, and sums of the gradients go back."""
    geometry, (q, k, v, *_), wide = call.geometry, saved, saved.lse.dtype
    grad = AttentionGrad(saved, geometry.sees, call.scale)
    crossing = _crossing(call, f"{call.op} backward")
    own = k.new_empty(0)
    for block, whole in _keys_by_host(crossing, k, v):
        made = torch.empty(whole.shape, dtype=wide, device=k.device)
        pairs = zip(_by_rank(whole, block, geometry), _by_rank(made, block, geometry), strict=True)
        for (rank, (keys, values)), (_, into) in pairs:
            totals = [Total(each) for each in into]
            grad.add(keys, values, rectangles_between(geometry, call.group.rank, rank), *totals)
            for total in totals:
                total.result()  # in place, also where there was nothing to add
        with crossing.naming():
            terms = reduce_scatter(made, crossing.inside, sizes=block.sizes)
        if block is crossing.own:
            own = terms
        else:
            crossing.give_back(block, terms.to(k.dtype))
    dk, dv = crossing.summed(own, wide).to(k.dtype).permute(1, 2, 3, 0, 4).contiguous()
    return grad.dq.result().to(q.dtype), dk, dv


def _crossing(call: AttentionPlan, op: str) -> Crossing:
    geometry, hosts = call.geometry, call.group.hosts
    return Crossing(call.group, geometry.k_sizes, 0, op, _hosts_seen(geometry, hosts))


@lru_cache(maxsize=256)
def _hosts_seen(geometry: Geometry, hosts: tuple[tuple[int, ...], ...]) -> Pairs:
    """Pairs of hosts of which queries on the second see keys of the first."""
    return frozenset(
        (source, target)
        for source, theirs in enumerate(hosts)
        for target, ours in enumerate(hosts)
        if any(rectangles_between(geometry, q, k) for q in ours for k in theirs)
    )


def _keys_by_host(
    crossing: Crossing, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[HostRows, torch.Tensor]]:
    """Keys and values of all ranks of each host, (rows, 2, B, H_kv, D), this one's first."""
    rows_first = torch.stack([k, v]).permute(3, 0, 1, 2, 4).contiguous()
    for block, shard in crossing.fetched(rows_first, ahead=2):
        with crossing.naming():
            whole = all_gather(shard, crossing.inside, sizes=block.sizes)
        yield block, whole


def _by_rank(
    whole: torch.Tensor, block: HostRows, geometry: Geometry
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each rank's part of what a host has, as (2, B, H_kv, m, D); nothing of what did not cross."""
    if not len(whole):
        return
    parts = whole.split([geometry.k_sizes[rank] for rank in block.ranks])
    for rank, part in zip(block.ranks, parts, strict=True):
        yield rank, part.permute(1, 2, 3, 0, 4)
