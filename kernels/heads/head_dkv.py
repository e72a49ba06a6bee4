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
from weft.kernels.flash.attention_tiles import bounds, interval
from weft.kernels.flash.grad_tiles import add_to_dkv, load_keys
from weft.kernels.flash.ring_call import area_ptr, compute_program
from weft.kernels.flash.ring_dkv import add_parts, store_part
from weft.kernels.flash.ring_keys import wait_for_source
from weft.kernels.flash.ring_tables import (
    count_tiles,
    is_needed,
    key_spans,
    shard_tile,
    span_of,
)
from weft.kernels.heads.head_queries import held_queries
from weft.kernels.heads.head_units import first_unit, heads_at, kv_range, unit_of


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
def make_head_dkv(arrivals, owner, call, ring, SHAPE: tl.constexpr):
    """Parts of dk and dv of the keys of `owner`. Returns the new `arrivals`."""
    BLOCK_D: tl.constexpr = SHAPE.block_d
    SPANS: tl.constexpr = SHAPE.spans
    WORLD_SIZE: tl.constexpr = SHAPE.world_size
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    rank, table, spans_ptr = ring.rank, ring.table, key_spans(ring.table, SHAPE)
    fetched, areas, B, H = call.fetched, call.areas, call.B, call.queries.H
    keys, sharing = ring.keys, H // ring.keys.H_KV
    each = B * count_tiles(spans_ptr, owner, SPANS, BLOCK_N)
    begin = first_unit(keys.first * each, owner * areas.kv_stagger, SHAPE)
    for unit in range(begin, (keys.first + keys.fetched) * each, compute_program(SHAPE)[1]):
        kv_head, batch, number = unit_of(unit, B, each // B)
        first = tl.maximum(kv_head * sharing, fetched.first)
        last = tl.minimum((kv_head + 1) * sharing, fetched.first + fetched.count)
        tile = shard_tile(spans_ptr, owner, number, SPANS, BLOCK_N)
        if is_needed(table, rank, owner, tile.row, tile.row + tile.length, SHAPE):
            distance = (owner - rank + WORLD_SIZE) % WORLD_SIZE
            arrivals = wait_for_source(arrivals, distance, ring, SHAPE)
            held = load_keys(
                ring, owner, tl.cast(batch, tl.int64), tl.cast(kv_head, tl.int64), tile, SHAPE
            )
            ends = bounds(tile, ring.seen_by)
            dk, dv = tiles.zeros(BLOCK_N, BLOCK_D), tiles.zeros(BLOCK_N, BLOCK_D)
            for part in range(WORLD_SIZE * SPANS):
                step = part // SPANS
                source = (rank + step) % WORLD_SIZE
                start, q_row, q_length = span_of(table, source, part % SPANS, SPANS)
                within = interval(ends, start, start + q_length, SHAPE.config.dkv_m)
                if within.begin < within.end:
                    arrivals = wait_for_source(arrivals, step, ring, SHAPE)
                    for head in range(first, last):
                        head_q = held_queries(
                            call, ring, source, tl.cast(batch, tl.int64), head, q_row - start, SHAPE
                        )
                        dk, dv = add_to_dkv(dk, dv, held, head_q, within, ring, SHAPE)
            part_ptr, size = _part_ptr(areas, ring, owner, rank, batch, kv_head, H, SHAPE)
            store_part(part_ptr, size, dk, dv, tile, ring, SHAPE)
    return arrivals


@triton.jit
def add_up_dkv(dk_ptr, dv_ptr, call, ring, SHAPE: tl.constexpr):
    """dk and dv of the rank's own keys, from the parts that this program and its namesakes made."""
    SPANS: tl.constexpr = SHAPE.spans
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    rank, keys, spans_ptr = ring.rank, ring.keys, key_spans(ring.table, SHAPE)
    areas, B, H = call.areas, call.B, call.queries.H
    heads, sharing = tiles.cdiv(H, SHAPE.world_size), H // keys.H_KV
    count = count_tiles(spans_ptr, rank, SPANS, BLOCK_N)
    begin = first_unit(0, rank * areas.kv_stagger, SHAPE)
    for unit in range(begin, keys.heads * count, compute_program(SHAPE)[1]):
        kv_head, batch, number = unit_of(unit, B, count)
        tile = shard_tile(spans_ptr, rank, number, SPANS, BLOCK_N)
        user = _first_user(kv_head, sharing, H, SHAPE)
        users = ((kv_head + 1) * sharing - 1) // heads - user + 1
        parts_ptr, size = _part_ptr(areas, ring, rank, user, batch, kv_head, H, SHAPE)
        head = batch * keys.H_KV + kv_head
        add_parts(dk_ptr, dv_ptr, parts_ptr, size, users, head, tile, ring, SHAPE)
