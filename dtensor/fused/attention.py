"""Attention of DTensors as `rules.attention` has placed it: ring or Ulysses or neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.nn import functional

from weft.collectives import chunk_sizes
from weft.dtensor.dispatch.call import Chosen
from weft.dtensor.dispatch.pricing import tell_choice
from weft.dtensor.fused.linear import placed_for
from weft.dtensor.fused.products import is_dtensor
from weft.dtensor.layout.boxes import Layout, contiguous_layout, layout_of
from weft.dtensor.layout.placements import Placements, is_shard
from weft.dtensor.move.explicit import check_explicit
from weft.dtensor.rules.attention import RING, attention_plan
from weft.dtensor.tensor import DTensor, as_global, local_part, outside_result
from weft.kernels import ring_attention, ulysses_attention


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention`: batch, heads, and (not causal) rows of q may be sharded."""
    if not all(map(is_dtensor, (query, key, value))):
        return NotImplemented
    if attn_mask is not None and not is_dtensor(attn_mask):
        return NotImplemented
    q, k, v = query._layout, key._layout, value._layout
    if not len(q.shape) == len(k.shape) == len(v.shape) or not q.mesh == k.mesh == v.mesh:
        return NotImplemented
    if dropout_p > 0:
        return _attention_step_by_step(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    mask = None if attn_mask is None else attn_mask._layout
    plan = attention_plan(q, k, v, mask, is_causal, enable_gqa)
    tell_choice("attention", plan.considered, plan.way, q, k, v)
    rows = plan.outputs[0]
    if q.index is None:
        return outside_result(_layout_of_result(rows, q, v), query, key, value, attn_mask)
    if plan.way is not None:
        return _attention_around(plan, query, key, value, is_causal, scale)
    # The rows of q on this rank give one term of the gradients of k, v and the mask.
    given = [t for t in (query, key, value, attn_mask) if t is not None]
    q_local, k_local, v_local, *masks = (
        local_part(_placed(t, placed), _grad_placements(rows, placed))
        for t, placed in zip(given, plan.inputs, strict=True)
    )
    mask_local = masks[0] if masks else None
    if q_local.numel():
        y = functional.scaled_dot_product_attention(
            q_local,
            k_local,
            v_local,
            mask_local,
            0.0,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    else:
        # A rank without heads or rows still takes part in the backward, whose gradients are summed.
        used = [t.sum() for t in (q_local, k_local, v_local, mask_local) if t is not None]
        y = q_local.new_zeros(*q_local.shape[:-1], v.shape[-1]) + 0 * sum(used)
    return _as_result(y, rows, q, v)


def _grad_placements(rows: Placements, shared: Placements) -> Placements:
    """How the ranks' gradients of a tensor placed as `shared` make up its gradient.

    Where queries are sharded and it is not, each rank has the term of its own rows.
    """
    pairs = zip(rows, shared, strict=True)
    return tuple(Partial("sum") if is_shard(a) and not is_shard(b) else b for a, b in pairs)


def _layout_of_result(rows: Placements, q: Layout, v: Layout) -> Layout:
    shape = (*q.shape[:-1], v.shape[-1])
    return contiguous_layout(q.mesh, rows, shape, q.dtype)


def _as_result(y: torch.Tensor, rows: Placements, q: Layout, v: Layout) -> DTensor:
    shape = (*q.shape[:-1], v.shape[-1])
    return as_global(y, layout_of(q.mesh, rows, shape, stride_like(y, shape), y.dtype))


def _placed(tensor: DTensor, placements: Placements) -> DTensor:
    target = tensor._layout.with_placements(placements)
    return placed_for("scaled_dot_product_attention", tensor, target)


def _attention_around(
    plan: Chosen, query: DTensor, key: DTensor, value: DTensor, is_causal: bool, scale: float | None
) -> Any:
    """Attention to keys that are sharded along a mesh dim, by the fused op of the plan."""
    assert plan.way is not None
    q, k, v, dim = query._layout, key._layout, value._layout, plan.way_dim
    rows = plan.outputs[0]
    parts = [local_part(_placed(t, rows), rows) for t in (query, key, value)]
    world_size = q.place.sizes[dim]
    whole = tuple(Replicate() if d == dim else p for d, p in enumerate(rows))
    name = plan.way.name
    check_explicit(lambda: name, k.with_placements(rows), k.with_placements(whole))
    attend = ring_attention if name == RING else ulysses_attention
    y = attend(
        parts[0],
        parts[1],
        parts[2],
        q.mesh.get_group(dim),
        causal=is_causal,
        scale=scale,
        sizes=chunk_sizes(q.shape[2], world_size),
        key_sizes=chunk_sizes(k.shape[2], world_size),
    )
    return _as_result(y, rows, q, v)


def _attention_step_by_step(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: DTensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """Attention whose weights are a DTensor, so that dropout is that of a single device."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key = cast(DTensor, key.repeat_interleave(times, -3))
        value = cast(DTensor, value.repeat_interleave(times, -3))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    root = math.sqrt(abs(scale))
    weights: Any = (query * math.copysign(root, scale)) @ (key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = weights.new_ones(weights.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        weights = weights + attn_mask
    # A row that sees nothing is one of zeros.
    shares = weights.softmax(-1) if attn_mask is None else torch._safe_softmax(weights, -1)
    return functional.dropout(shares, dropout_p) @ value


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of `shape` whose dims lie in memory in the order of `local`'s."""
    order = sorted(range(len(shape)), key=lambda d: (local.stride(d), -d))
    stride, step = [0] * len(shape), 1
    for d in order:
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)
