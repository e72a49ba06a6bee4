"""ring_attention, backward, in one launch: dq stays on its rank, dk and dv go to their owners.

Legend as in `ring_keys` and `ring_kernel`, formulas as in `grad_tiles`.

Protocol
  1. Copy programs publish keys, make delta and announce it in the rank's own words (1, rank, p),
     then fetch keys, as described in `ring_keys`.
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
from weft.collectives.device.launches import launching, temporary
from weft.collectives.memory.workspace import link_of
from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, chip_of
from weft.kernels.flash import ring_kernel
from weft.kernels.flash.attention_tiles import contiguous_rows, heads_of
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.grad_tiles import Queries, head_queries, make_delta, sum_dq
from weft.kernels.flash.ring_call import (
    Ring,
    RingOptions,
    compute_program,
    copy_programs,
    count_tiles,
    keys_of,
    rows_of,
    shape_for,
    tables,
    tile_of,
)
from weft.kernels.flash.ring_dkv import make_dkv, reduce_dkv, slots_bytes, slots_of
from weft.kernels.flash.ring_keys import (
    announce,
    fetch_keys,
    no_arrivals,
    publish_keys,
    signal_published,
    wait_for_source,
)

if TYPE_CHECKING:
    from weft.kernels.attention.ring import Saved


@dataclass(frozen=True)
class RingGradConfig(RingOptions):
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
    copies = copy_programs(chip, heads, kv_heads, rows, dtype, world_size)
    if chip is INTERPRETER:
        block = 16 if rows <= 16 else 32
        return RingGradConfig(
            block, block, block, block, 16,
            group_heads=2, programs=chip.programs, copy_programs=copies, copy_m=16,
        )  # fmt: skip
    dkv_m, dkv_n, dq_m, dq_n, num_warps, num_stages = _tiles(D, dtype, chip)
    return RingGradConfig(
        dkv_m,
        dkv_n,
        dq_m,
        dq_n,
        reduce_n=8,  # 16 rows spill, 8 bytes on sm_90
        group_heads=max(1, heads // max(kv_heads, 1)),
        programs=chip.programs,
        copy_programs=copies,
        copy_m=32 if D <= 128 or dtype.itemsize == 2 else 16,
        num_warps=num_warps,
        num_stages=num_stages,
        all_registers=not chip.is_amd,
    )


def _tiles(D: int, dtype: torch.dtype, chip: Chip) -> tuple[int, int, int, int, int, int]:
    """dkv_m, dkv_n, dq_m, dq_n, warps and stages: of those tried, the largest that spill least."""
    width = 64 if D <= 64 else 128 if D <= 128 else 256
    if dtype == torch.float32:
        wide_warps = 4 if chip.is_amd else 8
        return (16, 32, 32, 16, 4, 1) if D <= 128 else (16, 16, 16, 16, wide_warps, 1)
    if chip.is_amd:
        return (32, 64, 64, 32, 4, 1) if D <= 128 else (16, 32, 32, 16, 4, 1)
    if chip.name.startswith("sm_10"):
        return {
            64: (64, 64, 64, 64, 8, 1),  # all products by tcgen05
            128: (16, 64, 64, 32, 8, 1),
            256: (32, 32, 32, 32, 8, 1),
        }[width]
    if chip.family == "sm_80" and D <= 128:
        # 32 x 64 spill 168 and 8 bytes here.
        return (32, 32, 32, 32, 8, 2) if D <= 64 else (16, 64, 64, 32, 8, 2)
    return (32, 64, 64, 32, 8, 2) if D <= 128 else (16, 32, 32, 16, 8, 2)


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
    SPANS: tl.constexpr = SHAPE.spans
    BLOCK_M: tl.constexpr = SHAPE.config.dq_m
    program, programs = compute_program(SHAPE)
    table, rank, H = ring.table, ring.rank, queries.H
    tiles_m = count_tiles(table, rank, SPANS, BLOCK_M)
    for tile in range(program, tiles_m * B * H, programs):
        head, tile_m = tiles.grouped_tile(tile, B * H, tiles_m, SHAPE.config.group_heads)
        position, row, length = tile_of(table, rank, tiles_m - 1 - tile_m, SPANS, BLOCK_M)
        batch, q_head = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
        kv_head = tl.cast(head % H // (H // ring.keys.H_KV), tl.int64)
        arrivals, dq = sum_dq(
            arrivals, head_queries(queries, batch, q_head, 0), position, row, length, batch,
            kv_head, ring, SHAPE,
        )  # fmt: skip
        dq_head = dq_ptr + tl.cast(head, tl.int64) * queries.n * D
        tiles.store(dq_head, dq, row, 0, row + length, D, D, 1)


@triton.jit(do_not_specialize=["rank"])
def _ring_attention_backward_kernel(
    dq_ptr,  # (B, H, n, D)
    dk_ptr,  # (B, H_kv, m, D)
    dv_ptr,
    out_ptr,  # (B, H, n, D)
    dlse_ptr,  # (B, H, n) or None
    queries,  # Queries, of which delta is an output
    keys,  # Keys
    sees,  # Sight of the queries
    seen_by,  # Sight of the keys
    slots,  # Slots
    table_ptr,
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
    ring = Ring(link, table_ptr, rank, generation, keys, sees, scale)
    if tl.program_id(0) < SHAPE.config.copy_programs:
        publish_keys(ring, SHAPE)
        signal_published(ring, SHAPE)
        make_delta(out_ptr, dlse_ptr, queries, B, SHAPE)
        announce(ring, rank, SHAPE)
        fetch_keys(ring, SHAPE)
    else:
        # Bit 0 stands for delta; the rank's own keys need no wait.
        arrivals = wait_for_source(no_arrivals(SHAPE), 0, ring, SHAPE)
        arrivals = make_dkv(arrivals, slots, queries, seen_by, ring, SHAPE)
        _make_dq(dq_ptr, arrivals, queries, ring, B, SHAPE)
        reduce_dkv(dk_ptr, dv_ptr, slots, ring, SHAPE)
    if signals.end_call(link.signal_ptrs, rank, generation):
        size = tl.cast(B, tl.int64) * SHAPE.head_dim
        signals.spoil(dq_ptr, size * queries.H * queries.n)
        m = rows_of(table_ptr, rank, SHAPE)
        signals.spoil(dk_ptr, size * keys.H_KV * m)
        signals.spoil(dv_ptr, size * keys.H_KV * m)


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
    q, k, v, out, lse, grad_out, grad_lse = saved
    B, H, n, D = q.shape
    config = ring_grad_config(
        B * H, B * k.shape[1], max(geometry.q_sizes), D, q.dtype, ws.world_size, chip_of(q.device)
    )
    k, v = contiguous_rows(k, v)
    table, sees, seen_by = tables(geometry, ws.rank, q.device)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    launching(_ring_attention_backward_kernel, config.programs)(
        dq,
        dk,
        dv,
        out,
        None if grad_lse is None else grad_lse.contiguous(),
        Queries(
            heads_of(contiguous_rows(q)),
            heads_of(contiguous_rows(grad_out)),
            lse,
            temporary(torch.empty_like(lse)),
            H,
            n,
        ),
        keys_of(k, v, geometry),
        sees,
        seen_by,
        slots_of(k, geometry, config.dkv_n),
        table,
        link_of(ws),
        B,
        scale,
        ws.rank,
        SHAPE=shape_for(k, geometry, config),
        **config.options,
    )
    return dq, dk, dv
