"""ring_attention, forward, in one launch: softmax(q @ k^T * scale) @ v over all ranks' keys.

Legend as in `ring_keys`; rank r holds n_r rows of queries for each of B * H heads. bf16, fp16 or
fp32 in and out; scores, softmax and sums are fp32, probabilities are rounded to v's dtype.

Data, for W = 3, on rank 1 (capitals are symmetric memory, in the half of this generation g):

    rank 0             rank 1                                             rank 2
    k v -> K_0 V_0     k v -> K_1 V_1 (peers read them)                   k v -> K_2 V_2
             |         gathered [ k_0 v_0 | (own) | k_2 v_2 ]                      |
             +------ copied once --------^            ^------ copied once ---------+
                       a tile of q: own keys first, from k and v in place; then 2's, then 0's

Protocol: copy programs publish and fetch keys as described in `ring_keys`. Each other program makes
tiles of BLOCK_M queries of one head by online softmax over all keys that they see: the rank's own
keys first, then those of rank+1, rank+2, ... as they arrive. Sources that no query of the tile sees
are skipped; waits stand before the loop over a source's keys, never in it. The last program to
finish sets GENERATION.

Why it neither races nor deadlocks: copy program p waits for copy programs p of its peers, which
signal before they wait; the others wait for copy programs of their own launch, which have smaller
numbers. Every copy program waits for every peer, so that no call ends before all have published
(rule 2 of `weft.collectives.device.signals`), and publishes after this rank's previous launch
(rule 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, workspace
from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, chip_of
from weft.kernels.flash import ring_call, ring_keys
from weft.kernels.flash.attention_tiles import (
    LN_2,
    LOG2_E,
    contiguous_rows,
    empty_softmax,
    head_ptr,
    heads_of,
    load_rows,
    normalized,
    seen_pairs,
    softmax_step,
    with_positive_scale,
)
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.ring_tables import count_tiles, shard_tile


@dataclass(frozen=True)
class RingConfig(ring_call.RingOptions):
    """How the kernel is launched.

    Attributes:
        block_m, block_n: queries and keys a tile.
    """

    block_m: int
    block_n: int


def ring_config(
    heads: int, kv_heads: int, rows: int, D: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> RingConfig:
    """The launch for shards of at most `rows` queries, `heads` = B * H."""
    block_m, block_n, *launched = _tile(rows, D, dtype, chip)
    options = ring_call.ring_options(
        heads, kv_heads, rows, D, dtype, world_size, chip, block_m, *launched
    )
    return RingConfig(block_m, block_n, **options)


def _tile(rows: int, D: int, dtype: torch.dtype, chip: Chip) -> tuple[int, int, int, int]:
    """Rows of queries, rows of keys, warps and stages."""
    if chip is INTERPRETER:
        block = 16 if rows <= 16 else 32
        return block, block, 8, 3
    block_m, block_n, num_warps, num_stages = _large_tile(D, dtype, chip)
    if rows > 64:
        return block_m, block_n, num_warps, num_stages
    # Larger tiles, or more warps, spill 8 to 112 bytes here.
    most_m, most_n = (16, 32) if rows <= 16 else (64, 64 if D <= 128 else 16)
    num_warps = 4 if rows <= 16 or D <= 64 or chip.is_amd else 8
    return min(block_m, most_m), min(block_n, most_n), num_warps, num_stages


def _large_tile(D: int, dtype: torch.dtype, chip: Chip) -> tuple[int, int, int, int]:
    """The same for many rows: the largest tried without spills."""
    width = 64 if D <= 64 else 128 if D <= 128 else 256
    if dtype == torch.float32:
        return 32, 16, 4 if D <= 64 or chip.is_amd else 8, 1
    return {
        "sm_80": {64: (128, 64, 8, 3), 128: (128, 32, 8, 3), 256: (32, 32, 8, 2)},
        "sm_90": {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)},
        "sm_100": {64: (128, 64, 8, 2), 128: (64, 64, 8, 3), 256: (64, 32, 8, 1)},
        "gfx942": {64: (128, 64, 4, 1), 128: (128, 64, 4, 1), 256: (64, 32, 4, 1)},
    }[chip.family][width]


def workspace_for(
    k: torch.Tensor, group: Group, geometry: Geometry, extra_bytes: int = 0
) -> Workspace:
    """The group's workspace with room for the largest shard of keys and values, and more."""
    nbytes = ring_call.shard_bytes(
        k.shape[0] * k.shape[1], max(geometry.k_sizes), k.shape[3], k.dtype
    )
    return workspace(group, nbytes + extra_bytes, channel="ring", device=k.device)


@triton.jit
def _add_keys(
    softmax,  # (top, total, acc)
    q,
    position,
    keys,
    within,
    ring,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take keys into the softmax: see `over_keys`.

    One loop with a branch: three loops, each with its addresses in registers, would spill.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_D: tl.constexpr = SHAPE.block_d
    top, total, acc = softmax
    for start in range(within.begin, within.end, BLOCK_N):
        k = load_rows(keys.k, start, within.end, keys.stride, BLOCK_N, D, BLOCK_D)
        products = tiles.dot(q, k.T, tiles.zeros(BLOCK_M, BLOCK_N))
        if (start < within.full) | (start >= within.full_end):
            seen = seen_pairs(position, start, within.end, ring.sees, BLOCK_M, BLOCK_N)
            products = tl.where(seen, products, float("-inf"))
        top, total, weights, rescale = softmax_step(top, total, products, ring.scale * LOG2_E)
        v = load_rows(keys.v, start, within.end, keys.stride, BLOCK_N, D, BLOCK_D)
        acc = tiles.dot(tiles.rounded(weights, v.dtype), v, acc * rescale[:, None])
    return top, total, acc


@triton.jit
def attend(
    arrivals,
    q_ptr,  # row 0 of a head
    stride_q,
    tile,  # TokenTile
    head,  # Head
    ring,
    SHAPE: tl.constexpr,
):
    """Attention of one tile of queries to all keys that it sees.

    Returns `arrivals` as `wait_for_source` leaves it, and what `normalized` returns.
    """
    BLOCK_M: tl.constexpr = SHAPE.config.block_m
    stop = tile.row + tile.length
    q = load_rows(q_ptr, tile.row, stop, stride_q, BLOCK_M, SHAPE.head_dim, SHAPE.block_d)
    softmax = empty_softmax(BLOCK_M, SHAPE.block_d)
    arrivals, softmax = ring_keys.over_keys(
        arrivals, softmax, _add_keys, q, tile, head, ring, SHAPE, SHAPE.config.block_n
    )
    top, total, acc = softmax
    out, lse = normalized(top, total, acc)
    return arrivals, out, lse


@triton.jit
def store_attention(out_ptr, stride, lse_ptr, out, lse, tile, SHAPE: tl.constexpr):
    """Store what `attend` returns: `out_ptr` and `lse_ptr` are of row 0 of the head."""
    rows, stop = tile.row + tl.arange(0, SHAPE.config.block_m), tile.row + tile.length
    tiles.store(out_ptr, out, tile.row, 0, stop, SHAPE.head_dim, stride, 1)
    tl.store(lse_ptr + rows, lse * LN_2, mask=rows < stop)


@triton.jit
def own_tile(number, count, B, H, ring, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of the own queries, of which a head has `count`: number of its head, TokenTile, Head.

    In causal attention the last queries see the most: longest tiles first.
    """
    place, tile = tiles.grouped_tile(number, B * H, count, SHAPE.config.group_heads)
    head = ring_call.head_of(place // H, place % H, H, ring)
    return place, shard_tile(ring.table, ring.rank, count - 1 - tile, SHAPE.spans, BLOCK), head


@triton.jit(do_not_specialize=["rank"])
def _ring_attention_kernel(
    out_ptr,  # (B, H, n, D)
    lse_ptr,  # (B, H, n) fp32
    q,  # Heads, (B, H, n, D)
    H,
    n,
    keys,  # Keys
    tables,  # Tables
    link,
    B,
    scale,
    rank,
    SHAPE: tl.constexpr,
) -> None:
    """out and lse of the own queries. Grid: copy programs and at least one more.

    Example: 2 ranks with 48 queries each and 48 keys, causal, BLOCK_M=32, one head, 3 programs of
    which 1 copies. On rank 0, program 1 makes queries 32 .. 47 and program 2 queries 0 .. 31, from
    own keys; on rank 1 both then wait for rank 0's.
    """
    generation = signals.begin_call(link.signal_ptrs, rank)
    words, sees, seen_by = tables.words, tables.sees, tables.seen_by
    ring = ring_call.Ring(link, rank, generation, keys, words, sees, seen_by, scale)
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_M: tl.constexpr = SHAPE.config.block_m
    if tl.program_id(0) < SHAPE.config.copy_programs:
        ring_keys.publish_keys(ring, SHAPE)
        ring_keys.signal_published(ring, SHAPE)
        ring_keys.fetch_keys(ring, SHAPE)
    else:
        arrivals = ring_keys.no_arrivals(SHAPE) | 1  # the rank's own keys are here
        count = count_tiles(ring.table, rank, SHAPE.spans, BLOCK_M)
        program, programs = ring_call.compute_program(SHAPE)
        for turn in range(tiles.cdiv(count * B * H, programs)):
            number = tiles.dealt(turn, program, programs)
            if number < count * B * H:
                place, tile, head = own_tile(number, count, B, H, ring, SHAPE, BLOCK_M)
                q_ptr = head_ptr(q, head.batch, head.q)
                arrivals, out, lse = attend(arrivals, q_ptr, q.stride_m, tile, head, ring, SHAPE)
                # Addressed from row 0 of the head: offsets that all tiles share would stay in
                # registers throughout.
                at = tl.cast(place, tl.int64) * n
                store_attention(out_ptr + at * D, D, lse_ptr + at, out, lse, tile, SHAPE)
    if signals.end_call(link.signal_ptrs, rank, ring.generation):
        signals.spoil(out_ptr, tl.cast(B, tl.int64) * H * n * D)
        signals.spoil(lse_ptr, tl.cast(B, tl.int64) * H * n)


def launch_ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ws: Workspace,
    geometry: Geometry,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue this rank's part of the attention.

    Args:
        q: (B, H, n, D), any strides; k, v: (B, H_kv, m, D).
        ws: `workspace_for` the keys.

    Returns:
        out (B, H, n, D), contiguous, dtype of q, and lse (B, H, n), fp32.
    """
    B, H, n, D = q.shape
    config = ring_config(
        B * H, B * k.shape[1], max(geometry.q_sizes), D, q.dtype, ws.world_size, chip_of(q.device)
    )
    k, v = contiguous_rows(k, v)
    q, scale = with_positive_scale(q, scale)
    out = torch.empty((B, H, n, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, n), dtype=torch.float32, device=q.device)
    given = out, lse, heads_of(contiguous_rows(q)), H, n
    ring_call.launch_ring(_ring_attention_kernel, config, given, k, v, ws, geometry, scale)
    return out, lse
