"""ulysses_attention, forward, in one launch: each rank computes its heads of all ranks' tokens.

Legend as in `ring_keys` and `head_units`. Data, for W = 2, on rank 0, which has heads 0 and 1 of 4
(capitals are symmetric memory, in the half of this generation g):

    rank 0                                                  rank 1
    k v q of heads 0 .. 3 -> K_0 V_0 Q_0 (peers read them)  k v q -> K_1 V_1 Q_1
    gathered [ (own) | k_1 v_1 of heads 0, 1 ] <------------ copied once
    a tile of q, own or read from Q_1 in place, over the keys of both ranks
        of tokens of rank 1: stored to OUT_1, LSE_1 of heads 0, 1 ---->
        of own tokens: stored to out, lse of heads 0, 1
    OUT_0, LSE_0 of heads 2, 3 -> out, lse                  <---- stored by rank 1

So every byte of q, k, v, out and lse that another rank needs crosses the link once, and nothing is
permuted on the way.

Protocol
  1. Copy programs publish keys and queries, signal, and fetch the keys of their rank's heads, as
     described in `ring_keys`. When a source's keys are here, its queries are too.
  2. The other programs make tiles of BLOCK_M queries of one head, as in `ring_kernel`, and send
     them to the tokens' owner, as described in `head_units`. The rank's own tokens come last, while
     the other results travel.
  3. They wait for what their namesakes on the peers have sent, and copy it to out and lse.
  4. The last program to finish sets GENERATION.

Why it neither races nor deadlocks: as in `ring_kernel`; and no program waits in step 3 before it
has signalled everything in step 2, where it waits only for copy programs of its own launch. An area
of results is written after its owner has published in this call, and hence (rule 1 of
`weft.collectives.device.signals`) after it has read what the call before the last had stored there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, workspace
from weft.collectives.device import signals
from weft.kernels.engine.chips import INTERPRETER, Chip, chip_of
from weft.kernels.flash import ring_call, ring_kernel, ring_keys
from weft.kernels.flash.attention_tiles import (
    contiguous_rows,
    head_ptr,
    heads_of,
    with_positive_scale,
)
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.ring_kernel import RingConfig, attend, store_attention
from weft.kernels.flash.ring_tables import count_rows, count_tiles
from weft.kernels.heads import head_units


def head_config(
    heads: int, kv_heads: int, rows: int, D: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> RingConfig:
    """The launch for shards of at most `rows` queries, `heads` = B * H."""
    config = ring_kernel.ring_config(heads, kv_heads, rows, D, dtype, world_size, chip)
    if chip is INTERPRETER:
        return config
    if 64 < D <= 128 and chip.family == "sm_80":
        # 128 rows fit in `ring_kernel`, but spill 144 and 184 bytes here.
        config = replace(config, block_m=min(config.block_m, 64))
    # Nothing can begin before queries and keys are published; as many as of `AllGatherConfig`.
    return replace(config, copy_programs=max(1, chip.cores // 8))


class Areas(NamedTuple):
    """Where queries and results begin in a half, in bytes; `stagger`: see `head_units`."""

    q: Any
    out: Any
    lse: Any
    stagger: Any


def _area_bytes(q: torch.Tensor, k: torch.Tensor, geometry: Geometry) -> list[int]:
    keys = ring_call.shard_bytes(
        k.shape[0] * k.shape[1], max(geometry.k_sizes), k.shape[3], k.dtype
    )
    rows = head_units.rows_bytes(q, geometry)
    return [keys, rows, rows, head_units.numbers_bytes(q, geometry)]


def workspace_for(q: torch.Tensor, k: torch.Tensor, group: Group, geometry: Geometry) -> Workspace:
    """The group's workspace with room for the largest shard of all."""
    nbytes = head_units.offsets_of(_area_bytes(q, k, geometry))[-1]
    return workspace(group, nbytes, channel="heads", device=q.device)


@triton.jit(do_not_specialize=["rank"])
def _head_attention_kernel(
    out_ptr,  # (B, H, n, D)
    lse_ptr,  # (B, H, n) fp32
    q,  # Heads, (B, H, n, D)
    H,
    areas,  # Areas
    keys,  # Keys
    tables,  # Tables
    link,
    B,
    scale,
    rank,
    SHAPE: tl.constexpr,
) -> None:
    """out and lse of the own tokens. Grid: copy programs and at least one more.

    Example: 2 ranks with 48 tokens each, 2 heads, BLOCK_M=32, 3 programs of which 1 copies. Rank 0
    has head 0: of the tokens of rank 1, program 1 makes 80 .. 95 and program 2 makes 48 .. 79; then
    of its own, 32 .. 47 and 0 .. 31. Programs 1 and 2 of rank 1 bring it the same of head 1.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
    words, sees, seen_by = tables.words, tables.sees, tables.seen_by
    ring = ring_call.Ring(link, rank, generation, keys, words, sees, seen_by, scale)
    D: tl.constexpr = SHAPE.head_dim
    PITCH: tl.constexpr = SHAPE.pitch
    SPANS: tl.constexpr = SHAPE.spans
    WORLD_SIZE: tl.constexpr = SHAPE.world_size
    BLOCK_M: tl.constexpr = SHAPE.config.block_m
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if tl.program_id(0) < SHAPE.config.copy_programs:
        ring_keys.publish_keys(ring, SHAPE)
        shown = ring_call.area_ptr(ring, rank, areas.q, dtype)
        ring_keys.publish_rows(shown, q, H, B * H, count_rows(ring.table, rank, SPANS), SHAPE)
        ring_keys.signal_published(ring, SHAPE)
        ring_keys.fetch_keys(ring, SHAPE)
    else:
        first, last = head_units.own_heads(rank, H, SHAPE)
        programs = ring_call.compute_program(SHAPE)[1]
        arrivals = ring_keys.no_arrivals(SHAPE) | 1  # the rank's own keys and queries are here
        for step in range(1, WORLD_SIZE + 1):
            owner = (rank + step) % WORLD_SIZE
            n = count_rows(ring.table, owner, SPANS)
            count = count_tiles(ring.table, owner, SPANS, BLOCK_M)
            begin = head_units.first_unit(first * B * count, owner * areas.stagger, SHAPE)
            for unit in range(begin, last * B * count, programs):
                arrivals = ring_keys.wait_for_source(arrivals, step % WORLD_SIZE, ring, SHAPE)
                head, tile, at = head_units.query_tile(
                    unit, owner, B, H, n, count, ring, SHAPE, BLOCK_M
                )
                if owner == rank:
                    q_ptr = head_ptr(q, head.batch, head.q)
                    stride = tl.cast(q.stride_m, tl.int32)
                else:
                    q_ptr = ring_call.area_ptr(ring, owner, areas.q, dtype) + at * PITCH
                    stride = tl.cast(PITCH, tl.int32)
                arrivals, out, lse = attend(arrivals, q_ptr, stride, tile, head, ring, SHAPE)
                rows, pitch = head_units.place_of_results(
                    out_ptr, areas.out, owner, at, D, PITCH, ring
                )
                numbers, _ = head_units.place_of_results(lse_ptr, areas.lse, owner, at, 1, 1, ring)
                store_attention(rows, pitch, numbers, out, lse, tile, SHAPE)
            if step < WORLD_SIZE:
                ring_keys.announce_results(arrivals, ring, owner, SHAPE)
        if ring_keys.await_results(ring, SHAPE):
            brought = ring_call.area_ptr(ring, rank, areas.out, dtype)
            numbers = ring_call.area_ptr(ring, rank, areas.lse, tl.float32)
            head_units.collect_rows(
                out_ptr, brought, lse_ptr, numbers, ring, B, H, areas.stagger, SHAPE, BLOCK_M
            )
    if signals.end_call(link.signal_ptrs, rank, ring.generation):
        n = tl.cast(count_rows(ring.table, rank, SPANS), tl.int64)
        signals.spoil(out_ptr, B * H * n * D)
        signals.spoil(lse_ptr, B * H * n)


def launch_head_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ws: Workspace,
    geometry: Geometry,
    scale: float,
    *,
    config: RingConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue this rank's part of the attention.

    Args:
        q: (B, H, n, D), any strides; k, v: (B, H_kv, m, D): shards along dim 2.
        ws: `workspace_for` them.
        config: the same on all ranks; default `head_config`.

    Returns:
        out (B, H, n, D), contiguous, dtype of q, and lse (B, H, n), fp32.
    """
    B, H, n, D = q.shape
    W = ws.world_size
    config = config or head_config(
        B * H, B * k.shape[1], max(geometry.q_sizes), D, q.dtype, W, chip_of(q.device)
    )
    k, v = contiguous_rows(k, v)
    q, scale = with_positive_scale(q, scale)
    _, at_q, at_out, at_lse, _ = head_units.offsets_of(_area_bytes(q, k, geometry))
    stagger = head_units.stagger_of(geometry.q_spans, B * -(-H // W), config.block_m)
    out = torch.empty((B, H, n, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, n), dtype=torch.float32, device=q.device)
    given = out, lse, heads_of(contiguous_rows(q)), H, Areas(at_q, at_out, at_lse, stagger)
    of_keys = head_units.kv_range(head_units.heads_at(ws.rank, H, W), H, k.shape[1])
    ring_call.launch_ring(_head_attention_kernel, config, given, k, v, ws, geometry, scale, of_keys)
    return out, lse
