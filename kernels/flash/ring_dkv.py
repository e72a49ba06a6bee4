"""dk and dv of ring attention: every rank makes a part for all keys, and their owners add them up.

Legend as in `ring_keys`. What the queries of one rank contribute to the keys of another is a part;
dk and dv are sums of parts over the ranks. The half of this generation on every rank holds, behind
its published keys, W slots, one for each source rank, with that rank's part of dk and dv of the
keys that live here:

    slot of s      [dk | dv] x [heads] x [rows of the largest shard] x SLOT_PITCH     fp32

    rank 0 makes d(keys of 0) --> rank 0, slot 0       rank 1 makes d(keys of 1) --> rank 1, slot 1
           then  d(keys of 1) --> rank 1, slot 0              then  d(keys of 2) --> rank 2, slot 1
    rank 0: dk, dv = slot 0 + slot 1 + slot 2, in that order: bitwise the same in every run

Tiles of dkv_n keys of one head have the same numbers on all ranks: tile u of owner d is made by
number (u + d * tiles a shard) % P of the P programs that compute. So program p adds up on the
owner what program p has made on each peer. Tiles that no query of a rank sees are left out, by that
rank and by the sum.

Protocol, steps 2 and 4 of `ring_grad_kernel`
  `make_dkv`: for the owners rank, rank+1, ...: wait for the owner's keys, make the tiles, store
  them in the owner's slot `rank`, and signal the word (0, rank, program) of its pad, even if there
  was nothing to make: release at system scope.
  `reduce_dkv`: wait for the words (0, r, program) of all peers r (acquire, system scope); add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.flash.attention_tiles import (
    LOG2_E,
    interval,
    load_rows,
    visible,
)
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.grad_tiles import add_to_dkv, head_queries
from weft.kernels.flash.ring_call import (
    compute_program,
    count_tiles,
    is_needed,
    key_spans,
    rows_of,
    shard_bytes,
    shard_tile,
    span_of,
)
from weft.kernels.flash.ring_keys import announce_results, await_results, head_keys, wait_for_source


class Slots(NamedTuple):
    """Where parts lie: `offset` bytes into a half, for shards of at most `rows` keys.

    `stagger` is the number of tiles of a shard, by which the owners' tiles are dealt to programs.
    """

    offset: Any
    rows: Any
    stagger: Any


def slots_of(k: torch.Tensor, geometry: Geometry, dkv_n: int) -> Slots:
    """The slots for keys like `k` (B, H_kv, m, D), aligned behind the published ones."""
    heads, rows = k.shape[0] * k.shape[1], max(geometry.k_sizes)
    offset = -(-shard_bytes(heads, rows, k.shape[3], k.dtype) // 128) * 128
    tiles_most = max(sum(-(-span.length // dkv_n) for span in held) for held in geometry.k_spans)
    return Slots(offset, rows, tiles_most * heads)


def slots_bytes(k: torch.Tensor, geometry: Geometry) -> int:
    """Size of the slots in a half, alignment included."""
    heads, rows = k.shape[0] * k.shape[1], max(geometry.k_sizes)
    return 128 + len(geometry.k_sizes) * shard_bytes(heads, rows, k.shape[3], torch.float32)


@triton.jit
def _slot_ptr(slots, ring, owner, source, SHAPE: tl.constexpr):
    """Where slot `source` of `owner` begins."""
    link = ring.link
    half = signals.half_ptr(link.buffer_ptrs, owner, ring.generation, link.half_bytes, tl.float32)
    return half + slots.offset // 4 + source * 2 * _slot_size(slots, ring, SHAPE)


@triton.jit
def _slot_size(slots, ring, SHAPE: tl.constexpr):
    """Elements of dk, or of dv, in a slot."""
    return tl.cast(slots.rows, tl.int64) * ring.keys.heads * SHAPE.fp32_pitch


@triton.jit
def make_dkv(
    arrivals,
    slots,
    queries,
    seen_by,  # Sight of the keys
    ring,
    SHAPE: tl.constexpr,
):
    """The parts that the own queries contribute, sent to all owners. Returns the new `arrivals`."""
    D: tl.constexpr = SHAPE.head_dim
    BLOCK_D: tl.constexpr = SHAPE.block_d
    SPANS: tl.constexpr = SHAPE.spans
    PITCH: tl.constexpr = SHAPE.fp32_pitch
    BLOCK_M: tl.constexpr = SHAPE.config.dkv_m
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    program, programs = compute_program(SHAPE)
    table, rank, spans_ptr = ring.table, ring.rank, key_spans(ring.table, SHAPE)
    keys, scale = ring.keys, ring.scale
    sharing = queries.H // keys.H_KV  # heads of queries that read one of keys
    for step in range(SHAPE.world_size):
        owner = (rank + step) % SHAPE.world_size
        count = count_tiles(spans_ptr, owner, SPANS, BLOCK_N) * keys.heads
        if is_needed(table, rank, owner, 0, rows_of(table, owner, SHAPE), SHAPE):
            arrivals = wait_for_source(arrivals, step, ring, SHAPE)
        if (arrivals >> step & 1) == 0:
            count = 0  # its keys are not seen, or did not arrive in time
        first = tiles.first_of(owner * slots.stagger, program, programs)
        for tile in range(first, count, programs):
            head = tile % keys.heads
            position, row, length = shard_tile(spans_ptr, owner, tile // keys.heads, SPANS, BLOCK_N)
            stop = row + length
            if is_needed(table, rank, owner, row, stop, SHAPE):
                batch = tl.cast(head // keys.H_KV, tl.int64)
                kv_head = tl.cast(head % keys.H_KV, tl.int64)
                kv = head_keys(ring, owner, batch, kv_head, 0, SHAPE)
                k = load_rows(kv.k, row, stop, kv.stride, BLOCK_N, D, BLOCK_D)
                v = load_rows(kv.v, row, stop, kv.stride, BLOCK_N, D, BLOCK_D)
                lowest, highest = (
                    visible(position, seen_by),
                    visible(position + length - 1, seen_by),
                )
                dk, dv = tiles.zeros(BLOCK_N, BLOCK_D), tiles.zeros(BLOCK_N, BLOCK_D)
                for shared in range(SPANS * sharing):
                    start, q_row, q_length = span_of(table, rank, shared % SPANS, SPANS)
                    begin, full, full_end, end = interval(
                        lowest, highest, start, start + q_length, BLOCK_M
                    )
                    q_head = kv_head * sharing + shared // SPANS
                    dk, dv = add_to_dkv(
                        dk, dv, k, v, position, head_queries(queries, batch, q_head, q_row - start),
                        begin, full, full_end, end, ring.sees, scale * LOG2_E, SHAPE, BLOCK_M,
                    )  # fmt: skip
                at = _slot_ptr(slots, ring, owner, rank, SHAPE)
                at += tl.cast(head, tl.int64) * slots.rows * PITCH
                tiles.store(at, dk * scale, row, 0, stop, D, PITCH, 1)
                at += _slot_size(slots, ring, SHAPE)
                tiles.store(at, dv, row, 0, stop, D, PITCH, 1)
        if step > 0:
            announce_results(arrivals, ring, owner, SHAPE)
    return arrivals


@triton.jit
def reduce_dkv(
    dk_ptr,  # (B, H_KV, m, D)
    dv_ptr,
    slots,
    ring,
    SHAPE: tl.constexpr,
):
    """dk and dv of the rank's own keys, once the parts of all ranks have arrived."""
    D: tl.constexpr = SHAPE.head_dim
    SPANS: tl.constexpr = SHAPE.spans
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    REDUCE_N: tl.constexpr = SHAPE.config.reduce_n
    program, programs = compute_program(SHAPE)
    table, rank, spans_ptr = ring.table, ring.rank, key_spans(ring.table, SHAPE)
    # Other threads stored this rank's own tiles than will read them next.
    tl.debug_barrier()
    if await_results(ring, SHAPE):
        m = rows_of(table, rank, SHAPE)
        size = _slot_size(slots, ring, SHAPE)
        first_slot = _slot_ptr(slots, ring, rank, 0, SHAPE)
        count = count_tiles(spans_ptr, rank, SPANS, BLOCK_N) * ring.keys.heads
        first = tiles.first_of(rank * slots.stagger, program, programs)
        for tile in range(first, count, programs):
            head = tl.cast(tile % ring.keys.heads, tl.int64)
            _, row, length = shard_tile(spans_ptr, rank, tile // ring.keys.heads, SPANS, BLOCK_N)
            for part in range(0, length, REDUCE_N):
                rows, offs_d = row + part + tl.arange(0, REDUCE_N), tl.arange(0, SHAPE.block_d)
                inside = (rows < row + length)[:, None] & (offs_d < D)[None, :]
                offs = (head * slots.rows + rows)[:, None] * SHAPE.fp32_pitch + offs_d[None, :]
                dk = tiles.zeros(REDUCE_N, SHAPE.block_d)
                dv = tiles.zeros(REDUCE_N, SHAPE.block_d)
                for source in range(SHAPE.world_size):
                    # The tile, not the part: what was stored is a whole tile or nothing.
                    if is_needed(table, source, rank, row, row + length, SHAPE):
                        slot = first_slot + source * 2 * size
                        dk += tl.load(slot + offs, mask=inside, other=0.0)
                        dv += tl.load(slot + size + offs, mask=inside, other=0.0)
                at = (head * m + row) * D
                tiles.store(dk_ptr + at, dk, part, 0, length, D, D, 1)
                tiles.store(dv_ptr + at, dv, part, 0, length, D, D, 1)
