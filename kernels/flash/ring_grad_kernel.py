"""ring_attention, backward: dq stays on its rank, dk and dv go to their owners.

Legend as in `ring_keys` and `ring_kernel`, formulas as in `grad_tiles`.

Protocol
  1. Copy programs publish and fetch keys, as described in `ring_keys`.
  2. The other programs make parts of dk and dv and send them to their owners: see `ring_dkv`.
  3. They make tiles of dq, over all keys, which are here by now.
  4. They wait for all peers' parts of dk and dv of the rank's own keys and add them up: see
     `ring_dkv`.
  5. All programs take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: as in `ring_kernel`; and no program waits in step 4 before it
has signalled everything in step 2, where it waits only for copy programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace
from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, chip_of
from weft.kernels.flash import ring_call, ring_kernel, ring_keys
from weft.kernels.flash.attention_tiles import contiguous_rows
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.grad_tiles import (
    given_to_gradients,
    head_queries,
    spoil_gradients,
    sum_dq,
)
from weft.kernels.flash.ring_dkv import make_dkv, reduce_dkv, slots_bytes, slots_of
from weft.kernels.flash.ring_kernel import own_tile
from weft.kernels.flash.ring_tables import count_tiles

if TYPE_CHECKING:
    from weft.kernels.attention.ring import Saved


@dataclass(frozen=True)
class RingGradConfig(ring_call.RingOptions):
    """How the kernel is launched.

    Attributes:
        dkv_m, dkv_n: queries of a step and keys of a tile of dk and dv.
        dq_m, dq_n: queries of a tile of dq and keys of a step.
        reduce_n: rows of dk and dv that are added up at a time.
    """

    dkv_m: int
    dkv_n: int
    dq_m: int
    dq_n: int
    reduce_n: int


def ring_grad_config(
    heads: int, kv_heads: int, rows: int, D: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> RingGradConfig:
    """The launch for shards of at most `rows` queries, `heads` = B * H."""
    dkv_m, dkv_n, dq_m, dq_n, *launched = _grad_tiles(rows, D, dtype, chip)
    options = ring_call.ring_options(
        heads, kv_heads, rows, D, dtype, world_size, chip, None, *launched
    )
    reduce_n = 16 if chip is INTERPRETER else 8  # 16 rows spill, 8 bytes on sm_90
    return RingGradConfig(dkv_m, dkv_n, dq_m, dq_n, reduce_n, **options)


def _grad_tiles(
    rows: int, D: int, dtype: torch.dtype, chip: Chip
) -> tuple[int, int, int, int, int, int]:
    """dkv_m, dkv_n, dq_m, dq_n, warps and stages: of those tried, the largest that spill least."""
    if chip is INTERPRETER:
        block = 16 if rows <= 16 else 32
        return block, block, block, block, 8, 3
    if dtype == torch.float32:
        wide_warps = 4 if chip.is_amd else 8
        return (16, 32, 32, 16, 4, 1) if D <= 128 else (16, 16, 16, 16, wide_warps, 1)
    if chip.is_amd:
        return (32, 64, 64, 32, 4, 1) if D <= 128 else (16, 32, 32, 16, 4, 1)
    if chip.name.startswith("sm_10"):
        # By tcgen05, but for heads wider than 128.
        return (64, 64, 64, 64, 8, 1) if D <= 128 else (32, 32, 32, 32, 8, 1)
    if chip.family == "sm_80" and D <= 64:
        return 32, 32, 32, 32, 8, 2  # 64 keys spill 56 bytes
    if chip.name == "sm_90" and D <= 128:
        # With 128 keys each of two warp groups has rows of its own. Where D is above 64 it spills,
        # and yet was the quickest of 12 on an H200 (4,096 tokens, 32 heads of 128 on 8).
        return 64, 128, 128, 64 if D <= 64 else 32, 8, 3
    return (32, 64, 64, 32, 8, 2) if D <= 128 else (16, 32, 32, 32, 8, 2)


def workspace_for(k: torch.Tensor, group: Group, geometry: Geometry) -> Workspace:
    """The group's workspace with room for a shard of keys and W slots of their gradients."""
    return ring_kernel.workspace_for(k, group, geometry, slots_bytes(k, geometry))


@triton.jit
def _make_dq(
    dq_ptr,
    arrivals,
    queries,
    ring,
    B,
    SHAPE: tl.constexpr,
):
    """Step 3 of the protocol."""
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_M: tl.constexpr = SHAPE.config.dq_m
    program, programs = ring_call.compute_program(SHAPE)
    H = queries.H
    count = count_tiles(ring.table, ring.rank, SHAPE.spans, BLOCK_M)
    for turn in range(tiles.cdiv(count * B * H, programs)):
        number = tiles.dealt(turn, program, programs)
        if number < count * B * H:
            place, tile, head = own_tile(number, count, B, H, ring, SHAPE, BLOCK_M)
            head_q = head_queries(queries, head.batch, head.q, 0)
            arrivals, dq = sum_dq(arrivals, head_q, tile, head, ring, SHAPE)
            dq_head = dq_ptr + tl.cast(place, tl.int64) * queries.n * D
            tiles.store(dq_head, dq, tile.row, 0, tile.row + tile.length, D, D, 1)


@triton.jit(do_not_specialize=["rank"])
def _ring_attention_backward_kernel(
    slots,  # Slots
    dq_ptr,  # (B, H, n, D)
    dk_ptr,  # (B, H_kv, m, D)
    dv_ptr,
    queries,  # Queries
    keys,  # Keys
    tables,  # Tables
    link,
    B,
    scale,
    rank,
    SHAPE: tl.constexpr,
) -> None:
    """dq, dk and dv of the own shards. Grid: copy programs and at least one more.

    Example: 2 ranks with 48 keys each, one head, dkv_n=32, 3 programs of which 1 copies, stagger 2:
    programs 1 and 2 make keys 0 .. 31 and 32 .. 47 of either owner, on both ranks; then dq.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
    words, sees, seen_by = tables.words, tables.sees, tables.seen_by
    ring = ring_call.Ring(link, rank, generation, keys, words, sees, seen_by, scale)
    if tl.program_id(0) < SHAPE.config.copy_programs:
        ring_keys.publish_keys(ring, SHAPE)
        ring_keys.signal_published(ring, SHAPE)
        ring_keys.fetch_keys(ring, SHAPE)
    else:
        arrivals = ring_keys.no_arrivals(SHAPE) | 1  # the rank's own keys are here
        arrivals = make_dkv(arrivals, slots, queries, ring, SHAPE)
        _make_dq(dq_ptr, arrivals, queries, ring, B, SHAPE)
        reduce_dkv(dk_ptr, dv_ptr, slots, ring, SHAPE)
    if signals.end_call(link.signal_ptrs, rank, ring.generation):
        spoil_gradients(dq_ptr, dk_ptr, dv_ptr, queries, B, ring, SHAPE)


def launch_ring_attention_backward(
    saved: Saved, ws: Workspace, geometry: Geometry, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enqueue the gradients of `ring_flash.launch_ring_attention`.

    Args:
        saved: operands and results of the forward, and gradients of the results; grad_out may have
            any strides.
        ws: `workspace_for` the keys.

    Returns:
        dq (B, H, n, D), dk and dv (B, H_kv, m, D), contiguous, dtype of q.
    """
    q, k = saved.q, saved.k
    B, H, _, D = q.shape
    config = ring_grad_config(
        B * H, B * k.shape[1], max(geometry.q_sizes), D, q.dtype, ws.world_size, chip_of(q.device)
    )
    given = given_to_gradients(saved)
    k, v = contiguous_rows(k, saved.v)
    own = slots_of(k, geometry, config.dkv_n), *given
    ring_call.launch_ring(_ring_attention_backward_kernel, config, own, k, v, ws, geometry, scale)
    return given[:3]
