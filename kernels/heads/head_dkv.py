"""dk and dv of attention by heads: parts from the ranks that use a key head, and their sum.

Legend as in `ring_keys` and `head_units`. If there are fewer key heads than ranks, several ranks
use the same one: what each contributes to dk and dv is a part with a slot of its own on the owner
of the tokens, which adds up the slots in rank order.

    half of s       slots x [dk | dv] x [key heads] x [rows of the largest shard] x fp32
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.device import tiles
from weft.kernels.flash.attention_tiles import LOG2_E, interval, load_rows, visible
from weft.kernels.flash.grad_tiles import add_to_dkv
from weft.kernels.flash.ring_call import (
    compute_program,
    count_tiles,
    is_needed,
    key_spans,
    rows_of,
    shard_tile,
    span_of,
)
from weft.kernels.flash.ring_keys import head_keys, wait_for_source
from weft.kernels.heads.head_queries import held_queries
from weft.kernels.heads.head_units import area_ptr, first_unit, heads_at, kv_range, unit_of


def slots_for(H: int, H_kv: int, world_size: int) -> int:
    """The largest number of ranks that use one key head.

    Example: 4 heads on 2 key heads: 1 on 2 ranks, 2 on 4 ranks.
    """
    used = [kv_range(heads_at(rank, H, world_size), H, H_kv) for rank in range(world_size)]
    return max(sum(head in heads for heads in used) for head in range(H_kv))


@triton.jit
def _part_ptr(areas, ring, owner, user, batch, kv_head, H, SHAPE: tl.constexpr):
    """Address on `owner` of rank `user`'s dk of a key head, and the offset from dk to dv."""
    keys, sharing = ring.keys, H // ring.keys.H_KV
    slot = user - _first_user(kv_head, sharing, H, SHAPE)
    size = tl.cast(keys.heads, tl.int64) * areas.rows * SHAPE.fp32_pitch
    at = tl.cast(batch * keys.H_KV + kv_head, tl.int64) * areas.rows * SHAPE.fp32_pitch
    return area_ptr(ring, owner, areas.parts, tl.float32) + slot * 2 * size + at, size


@triton.jit
def _first_user(kv_head, sharing, H, SHAPE: tl.constexpr):
    """The first rank that uses a key head."""
    return kv_head * sharing // tiles.cdiv(H, SHAPE.world_size)


@triton.jit
def make_head_dkv(
    arrivals,
    owner,
    queries,
    fetched,
    areas,
    seen_by,  # Sight of the keys
    ring,
    B,
    SHAPE: tl.constexpr,
):
    """Parts of dk and dv of the keys of `owner`. Returns the new `arrivals`."""
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_D: tl.constexpr = SHAPE.block_d
    SPANS: tl.constexpr = SHAPE.spans
    WORLD_SIZE: tl.constexpr = SHAPE.world_size
    BLOCK_M: tl.constexpr = SHAPE.config.dkv_m
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    rank, table, spans_ptr = ring.rank, ring.table, key_spans(ring.table, SHAPE)
    keys, sharing = ring.keys, queries.H // ring.keys.H_KV
    each = B * count_tiles(spans_ptr, owner, SPANS, BLOCK_N)
    begin = first_unit(keys.first * each, owner * areas.kv_stagger, SHAPE)
    for unit in range(begin, (keys.first + keys.fetched) * each, compute_program(SHAPE)[1]):
        kv_head, batch, tile = unit_of(unit, B, each // B)
        first = tl.maximum(kv_head * sharing, fetched.first)
        last = tl.minimum((kv_head + 1) * sharing, fetched.first + fetched.count)
        position, row, length = shard_tile(spans_ptr, owner, tile, SPANS, BLOCK_N)
        stop = row + length
        if is_needed(table, rank, owner, row, stop, SHAPE):
            distance = (owner - rank + WORLD_SIZE) % WORLD_SIZE
            arrivals = wait_for_source(arrivals, distance, ring, SHAPE)
            kv = head_keys(
                ring, owner, tl.cast(batch, tl.int64), tl.cast(kv_head, tl.int64), 0, SHAPE
            )
            k = load_rows(kv.k, row, stop, kv.stride, BLOCK_N, D, BLOCK_D)
            v = load_rows(kv.v, row, stop, kv.stride, BLOCK_N, D, BLOCK_D)
            lowest, highest = visible(position, seen_by), visible(position + length - 1, seen_by)
            dk, dv = tiles.zeros(BLOCK_N, BLOCK_D), tiles.zeros(BLOCK_N, BLOCK_D)
            for part in range(WORLD_SIZE * SPANS):
                step = part // SPANS
                source = (rank + step) % WORLD_SIZE
                start, q_row, q_length = span_of(table, source, part % SPANS, SPANS)
                begin, full, full_end, end = interval(
                    lowest, highest, start, start + q_length, BLOCK_M
                )
                if begin < end:
                    arrivals = wait_for_source(arrivals, step, ring, SHAPE)
                    for head in range(first, last):
                        head_q = held_queries(
                            queries, fetched, areas, ring, source, tl.cast(batch, tl.int64), head,
                            B, q_row - start, SHAPE,
                        )  # fmt: skip
                        dk, dv = add_to_dkv(
                            dk, dv, k, v, position, head_q, begin, full, full_end, end, ring.sees,
                            ring.scale * LOG2_E, SHAPE, BLOCK_M,
                        )  # fmt: skip
            part_ptr, size = _part_ptr(areas, ring, owner, rank, batch, kv_head, queries.H, SHAPE)
            tiles.store(part_ptr, dk * ring.scale, row, 0, stop, D, SHAPE.fp32_pitch, 1)
            tiles.store(part_ptr + size, dv, row, 0, stop, D, SHAPE.fp32_pitch, 1)
    return arrivals


@triton.jit
def add_parts(
    dk_ptr,  # (B, H_KV, m, D)
    dv_ptr,
    areas,
    ring,
    B,
    H,
    SHAPE: tl.constexpr,
):
    """dk and dv of the rank's own keys, from the parts that this program and its namesakes made."""
    D: tl.constexpr = SHAPE.head_dim
    SPANS: tl.constexpr = SHAPE.spans
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    REDUCE_N: tl.constexpr = SHAPE.config.reduce_n
    rank, table, spans_ptr = ring.rank, ring.table, key_spans(ring.table, SHAPE)
    keys, heads = ring.keys, tiles.cdiv(H, SHAPE.world_size)
    sharing = H // keys.H_KV
    m, count = rows_of(table, rank, SHAPE), count_tiles(spans_ptr, rank, SPANS, BLOCK_N)
    begin = first_unit(0, rank * areas.kv_stagger, SHAPE)
    for unit in range(begin, keys.heads * count, compute_program(SHAPE)[1]):
        kv_head, batch, tile = unit_of(unit, B, count)
        _, row, length = shard_tile(spans_ptr, rank, tile, SPANS, BLOCK_N)
        # There are no parts of a tile that no query sees.
        users = ((kv_head + 1) * sharing - 1) // heads - _first_user(kv_head, sharing, H, SHAPE) + 1
        users = tl.where(is_needed(table, rank, rank, row, row + length, SHAPE), users, 0)
        user = _first_user(kv_head, sharing, H, SHAPE)
        parts, size = _part_ptr(areas, ring, rank, user, batch, kv_head, H, SHAPE)
        for part in range(0, length, REDUCE_N):
            rows, offs_d = row + part + tl.arange(0, REDUCE_N), tl.arange(0, SHAPE.block_d)
            inside = (rows < row + length)[:, None] & (offs_d < D)[None, :]
            offs = rows.to(tl.int64)[:, None] * SHAPE.fp32_pitch + offs_d[None, :]
            dk = tiles.zeros(REDUCE_N, SHAPE.block_d)
            dv = tiles.zeros(REDUCE_N, SHAPE.block_d)
            for slot in range(users):
                dk += tl.load(parts + slot * 2 * size + offs, mask=inside, other=0.0)
                dv += tl.load(parts + (slot * 2 + 1) * size + offs, mask=inside, other=0.0)
            at = (tl.cast(batch * keys.H_KV + kv_head, tl.int64) * m + row) * D
            tiles.store(dk_ptr + at, dk, part, 0, length, D, D, 1)
            tiles.store(dv_ptr + at, dv, part, 0, length, D, D, 1)
