"""dk and dv of ring attention: every rank makes a part for all keys, and their owners add them up.

Legend as in `ring_keys`. What the queries of one rank contribute to the keys of another is a part;
dk and dv are sums of parts over the ranks. The half of this generation on every rank holds, behind
its published keys, W slots, one for each source rank, with that rank's part of dk and dv of the
keys that live here:

    slot of s      [dk | dv] x [heads] x [rows of the largest shard] x SLOT_PITCH     fp32

    rank 0 makes d(keys of 0) --> rank 0, slot 0       rank 1 makes d(keys of 1) --> rank 1, slot 1
           then  d(keys of 1) --> rank 1, slot 0              then  d(keys of 2) --> rank 2, slot 1
    rank 0: dk, dv = slot 0 + slot 1 + slot 2, in that order: bitwise the same in every run

Tiles of dkv_n keys of one head have the same numbers on all ranks: tile u of owner d is item
u + d * tiles a shard of those that are dealt to the programs that compute (`tiles.dealt`). So
program p adds up on the owner what program p has made on each peer. Tiles that no query of a rank
sees are left out, by that rank and by the sum.

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

from weft.kernels.device import tiles
from weft.kernels.flash.attention_tiles import bounds, interval
from weft.kernels.flash.geometry import Geometry
from weft.kernels.flash.grad_tiles import add_to_dkv, head_queries, load_keys
from weft.kernels.flash.ring_call import area_ptr, compute_program, shard_bytes
from weft.kernels.flash.ring_keys import announce_results, await_results, wait_for_source
from weft.kernels.flash.ring_tables import (
    count_tiles,
    is_needed,
    key_spans,
    keys_held,
    shard_tile,
    span_of,
)


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
def store_part(part_ptr, size, dk, dv, tile, ring, SHAPE: tl.constexpr):
    """Store a part of dk in a slot, where its head begins, and of dv `size` elements behind it."""
    D: tl.constexpr = SHAPE.head_dim
    PITCH: tl.constexpr = SHAPE.fp32_pitch
    stop = tile.row + tile.length
    tiles.store(part_ptr, dk * ring.scale, tile.row, 0, stop, D, PITCH, 1)
    tiles.store(part_ptr + size, dv, tile.row, 0, stop, D, PITCH, 1)


@triton.jit
def add_parts(dk_ptr, dv_ptr, parts_ptr, size, slots, head, tile, ring, SHAPE: tl.constexpr):
    """dk and dv of a tile of own keys: the sum of its parts, in the order of their slots.

    Args:
        dk_ptr, dv_ptr: (B, H_KV, m, D); `head` counts to B * H_KV.
        parts_ptr: where the head begins in the first of so many `slots`, each 2 * `size` long. The
            part in slot s was made, as a whole, if rank s attends to some of the tile: by heads
            every rank does if one does.
    """
    D: tl.constexpr = SHAPE.head_dim
    PITCH: tl.constexpr = SHAPE.fp32_pitch
    REDUCE_N: tl.constexpr = SHAPE.config.reduce_n
    row, length = tile.row, tile.length
    m = keys_held(ring.table, ring.rank, SHAPE)
    for start in range(0, length, REDUCE_N):
        rows, offs_d = row + start + tl.arange(0, REDUCE_N), tl.arange(0, SHAPE.block_d)
        inside = (rows < row + length)[:, None] & (offs_d < D)[None, :]
        offs = rows.to(tl.int64)[:, None] * PITCH + offs_d[None, :]
        dk = tiles.zeros(REDUCE_N, SHAPE.block_d)
        dv = tiles.zeros(REDUCE_N, SHAPE.block_d)
        for slot in range(slots):
            if is_needed(ring.table, slot, ring.rank, row, row + length, SHAPE):
                dk += tl.load(parts_ptr + slot * 2 * size + offs, mask=inside, other=0.0)
                dv += tl.load(parts_ptr + (slot * 2 + 1) * size + offs, mask=inside, other=0.0)
        at = (tl.cast(head, tl.int64) * m + row) * D
        tiles.store(dk_ptr + at, dk, start, 0, length, D, D, 1)
        tiles.store(dv_ptr + at, dv, start, 0, length, D, D, 1)


@triton.jit
def _slot_ptr(slots, ring, owner, source, SHAPE: tl.constexpr):
    """Where slot `source` of `owner` begins."""
    first = area_ptr(ring, owner, slots.offset, tl.float32)
    return first + source * 2 * _slot_size(slots, ring, SHAPE)


@triton.jit
def _slot_size(slots, ring, SHAPE: tl.constexpr):
    """Elements of dk, or of dv, in a slot."""
    return tl.cast(slots.rows, tl.int64) * ring.keys.heads * SHAPE.fp32_pitch


@triton.jit
def _part_of_tile(queries, ring, owner, head, tile, sharing, SHAPE: tl.constexpr):
    """What the own queries contribute to dk and dv of a tile of `owner`."""
    BLOCK_D: tl.constexpr = SHAPE.block_d
    SPANS: tl.constexpr = SHAPE.spans
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    batch = tl.cast(head // ring.keys.H_KV, tl.int64)
    kv_head = tl.cast(head % ring.keys.H_KV, tl.int64)
    held = load_keys(ring, owner, batch, kv_head, tile, SHAPE)
    ends = bounds(tile, ring.seen_by)
    dk, dv = tiles.zeros(BLOCK_N, BLOCK_D), tiles.zeros(BLOCK_N, BLOCK_D)
    shared = 0
    while shared < SPANS * sharing:
        start, q_row, q_length = span_of(ring.table, ring.rank, shared % SPANS, SPANS)
        within = interval(ends, start, start + q_length, SHAPE.config.dkv_m)
        q_head = kv_head * sharing + shared // SPANS
        head_q = head_queries(queries, batch, q_head, q_row - start)
        dk, dv = add_to_dkv(dk, dv, held, head_q, within, ring, SHAPE)
        shared += 1
    return dk, dv


@triton.jit
def make_dkv(
    arrivals,
    slots,
    queries,
    ring,
    SHAPE: tl.constexpr,
):
    """The parts that the own queries contribute, sent to all owners. Returns the new `arrivals`."""
    SPANS: tl.constexpr = SHAPE.spans
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    program, programs = compute_program(SHAPE)
    table, rank, spans_ptr = ring.table, ring.rank, key_spans(ring.table, SHAPE)
    keys = ring.keys
    sharing = queries.H // keys.H_KV  # heads of queries that read one of keys
    for step in range(SHAPE.world_size):
        owner = (rank + step) % SHAPE.world_size
        count = count_tiles(spans_ptr, owner, SPANS, BLOCK_N) * keys.heads
        if is_needed(table, rank, owner, 0, keys_held(table, owner, SHAPE), SHAPE):
            arrivals = wait_for_source(arrivals, step, ring, SHAPE)
        if (arrivals >> step & 1) == 0:
            count = 0  # its keys are not seen, or did not arrive in time
        before = owner * slots.stagger
        for turn in range(before // programs, tiles.cdiv(before + count, programs)):
            number = tiles.dealt(turn, program, programs) - before
            if (number >= 0) & (number < count):
                head = number % keys.heads
                tile = shard_tile(spans_ptr, owner, number // keys.heads, SPANS, BLOCK_N)
                if is_needed(table, rank, owner, tile.row, tile.row + tile.length, SHAPE):
                    dk, dv = _part_of_tile(queries, ring, owner, head, tile, sharing, SHAPE)
                    part_ptr = _slot_ptr(slots, ring, owner, rank, SHAPE)
                    part_ptr += tl.cast(head, tl.int64) * slots.rows * SHAPE.fp32_pitch
                    size = _slot_size(slots, ring, SHAPE)
                    store_part(part_ptr, size, dk, dv, tile, ring, SHAPE)
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
    SPANS: tl.constexpr = SHAPE.spans
    BLOCK_N: tl.constexpr = SHAPE.config.dkv_n
    program, programs = compute_program(SHAPE)
    rank, heads, spans_ptr = ring.rank, ring.keys.heads, key_spans(ring.table, SHAPE)
    # Other threads stored this rank's own tiles than will read them next.
    tl.debug_barrier()
    if await_results(ring, SHAPE):
        size = _slot_size(slots, ring, SHAPE)
        first_slot = _slot_ptr(slots, ring, rank, 0, SHAPE)
        count = count_tiles(spans_ptr, rank, SPANS, BLOCK_N) * heads
        before = rank * slots.stagger
        for turn in range(before // programs, tiles.cdiv(before + count, programs)):
            number = tiles.dealt(turn, program, programs) - before
            if (number >= 0) & (number < count):
                head = tl.cast(number % heads, tl.int64)
                tile = shard_tile(spans_ptr, rank, number // heads, SPANS, BLOCK_N)
                parts_ptr = first_slot + head * slots.rows * SHAPE.fp32_pitch
                add_parts(
                    dk_ptr, dv_ptr, parts_ptr, size, SHAPE.world_size, head, tile, ring, SHAPE
                )
