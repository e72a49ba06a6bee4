"""Exchange of keys and values: what the attention kernels over sharded sequences share.

Legend: W ranks; rank s holds m_s rows of keys and of values for each of B * H_kv heads, D wide, in
one or two spans (see `geometry`). PITCH is D rounded up to 16 bytes' worth of elements.

    shard of s     [k | v] x [heads] x [rows] x PITCH     published: first in s's half
                                                          fetched: in `gathered`, at row base[s]

`ring_kernel` fetches all heads, `heads_kernel` those that its rank computes.

Protocol, shared by forward and backward; programs 0 .. C-1 copy, the others compute
  1. Copy program p publishes every C-th chunk of rows of the rank's own shard and signals the word
     (0, rank, p) of every peer's pad: release at system scope.
  2. Copy program p, for the peers rank+1, rank+2, ...: waits for the peer's word (0, peer, p)
     (acquire, after which chunks p, p+C, .. may be read), copies those that some query here sees to
     `gathered`, and signals the rank's own word (1, peer, p): release at device scope. Peers of
     whose keys nothing is seen come last, and nothing is copied from them.
  3. A compute program waits for the words (1, source, 0 .. C-1) before it first uses a source, once
     in a launch: a bit mask, `arrivals`, remembers which sources are here.

A remote row crosses the link once. Read in place, it would cross once for each tile of queries that
sees it: a 128-row tile makes 128 flops of each byte, where a chip of 600 TFLOP/s needs 1,300 to
keep up with a link of 450 GB/s. So `gathered` holds the keys and values of all ranks, while q, out
and their gradients are never more than a shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.device.copies import copy_one_block
from weft.kernels.flash.attention_tiles import Heads, bounds, head_ptr, interval
from weft.kernels.flash.ring_call import area_ptr, copies_came
from weft.kernels.flash.ring_tables import (
    base_of,
    is_needed,
    key_spans,
    keys_held,
    meets,
    rows_needed,
    span_of,
)


class HeadKeys(NamedTuple):
    """Pointers to a row of the keys and of the values of one head, and the stride of their rows."""

    k: Any
    v: Any
    stride: Any


@triton.jit
def _shard_ptr(ring, source, SHAPE: tl.constexpr):
    """Where the keys of `source` begin in `gathered`."""
    base = base_of(ring.table, source, 0, SHAPE)
    return ring.keys.gathered + base * 2 * _fetched_heads(ring.keys) * SHAPE.pitch


@triton.jit
def _fetched_heads(keys):
    """Heads that are fetched, over all batches."""
    return keys.heads // keys.H_KV * keys.fetched


@triton.jit
def head_keys(ring, source, batch, kv_head, shift, SHAPE: tl.constexpr):
    """The keys and values of one head of `source`, once they have arrived, from row `shift` on.

    To address rows by position in the sequence, pass the row less the position of some token.
    """
    keys, shift = ring.keys, tl.cast(shift, tl.int64)
    if source == ring.rank:
        at = batch * keys.strides[0] + kv_head * keys.strides[1] + shift * keys.strides[2]
        k, v, stride = keys.k + at, keys.v + at, tl.cast(keys.strides[2], tl.int32)
    else:
        rows = tl.cast(keys_held(ring.table, source, SHAPE), tl.int64)
        k = _shard_ptr(ring, source, SHAPE)
        k += ((batch * keys.fetched + kv_head - keys.first) * rows + shift) * SHAPE.pitch
        v, stride = k + _fetched_heads(keys) * rows * SHAPE.pitch, tl.cast(SHAPE.pitch, tl.int32)
    return HeadKeys(k, v, stride)


@triton.jit
def first_chunk(head, chunks, SHAPE: tl.constexpr):
    """The first chunk from this head on that this program copies, to fetch as to publish: each head
    has `chunks`.

    It waits for its namesakes alone, so they must have published all that it fetches.
    """
    return tiles.first_of(head * chunks, tl.program_id(0), SHAPE.config.copy_programs)


@triton.jit
def publish_rows(to_ptr, x, H, heads, rows, SHAPE: tl.constexpr):
    """Publish `rows` rows of `heads` = B * H heads of x (Heads): the chunks of this program."""
    COPY_M: tl.constexpr = SHAPE.config.copy_m
    chunks = tiles.cdiv(rows, COPY_M)
    for unit in range(tl.program_id(0), heads * chunks, SHAPE.config.copy_programs):
        head, first = unit // chunks, (unit % chunks).to(tl.int64) * COPY_M
        batch, head_in_batch = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
        copy_one_block(
            to_ptr + (tl.cast(head, tl.int64) * rows + first) * SHAPE.pitch,
            head_ptr(x, batch, head_in_batch) + first * x.stride_m,
            tl.minimum(COPY_M, rows - first),
            SHAPE.head_dim,
            SHAPE.pitch,
            x.stride_m,
            1,
            COPY_M,
            SHAPE.block_d,
        )


@triton.jit
def _fetch_rows(out_ptr, shard_ptr, ring, source, rows, SHAPE: tl.constexpr):
    """Fetch the keys or values of `source` that are needed here: the chunks of this program."""
    COPY_M: tl.constexpr = SHAPE.config.copy_m
    keys, chunks = ring.keys, tiles.cdiv(rows, COPY_M)
    needed = rows_needed(ring.table, ring.rank, source, SHAPE)
    for batch in range(keys.heads // keys.H_KV):
        # In one loop: what a step computes before its loads is time in which no byte moves.
        head = batch * keys.H_KV + keys.first
        into = out_ptr + tl.cast(batch * keys.fetched, tl.int64) * rows * SHAPE.pitch
        shown = shard_ptr + tl.cast(head, tl.int64) * rows * SHAPE.pitch
        for unit in range(
            first_chunk(head, chunks, SHAPE), keys.fetched * chunks, SHAPE.config.copy_programs
        ):
            first = unit % chunks * COPY_M
            last = tl.minimum(first + COPY_M, rows)
            at = (tl.cast(unit // chunks, tl.int64) * rows + first) * SHAPE.pitch
            if meets(needed, first, last):
                copy_one_block(
                    into + at, shown + at, last - first, SHAPE.head_dim, SHAPE.pitch, SHAPE.pitch,
                    1, COPY_M, SHAPE.block_d,
                )  # fmt: skip


@triton.jit
def publish_keys(ring, SHAPE: tl.constexpr):
    """Step 1 of the protocol, up to the signal. A group of one reads its keys in place."""
    if SHAPE.world_size > 1:
        _publish_keys(ring, SHAPE)


@triton.jit
def _publish_keys(ring, SHAPE: tl.constexpr):
    link, rank, generation, keys = ring.link, ring.rank, ring.generation, ring.keys
    dtype: tl.constexpr = keys.k.dtype.element_ty
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, dtype)
    rows = keys_held(ring.table, rank, SHAPE)
    stride_b, stride_h, stride_m = keys.strides
    k, v = Heads(keys.k, stride_b, stride_h, stride_m), Heads(keys.v, stride_b, stride_h, stride_m)
    publish_rows(half, k, keys.H_KV, keys.heads, rows, SHAPE)
    half += tl.cast(keys.heads, tl.int64) * rows * SHAPE.pitch
    publish_rows(half, v, keys.H_KV, keys.heads, rows, SHAPE)


@triton.jit
def signal_published(ring, SHAPE: tl.constexpr):
    """The signal of step 1."""
    signals.signal_peers(
        ring.link.signal_ptrs, ring.rank, SHAPE.world_size, 0, tl.program_id(0), ring.generation
    )


@triton.jit
def fetch_keys(ring, SHAPE: tl.constexpr):
    """Step 2 of the protocol."""
    link, rank, generation, program = ring.link, ring.rank, ring.generation, tl.program_id(0)
    WORLD_SIZE: tl.constexpr = SHAPE.world_size
    PEERS: tl.constexpr = WORLD_SIZE - 1
    for visit in range(2 * PEERS):
        source = (rank + 1 + visit % tl.maximum(PEERS, 1)) % WORLD_SIZE
        rows = keys_held(ring.table, source, SHAPE)
        useful = is_needed(ring.table, rank, source, 0, rows, SHAPE)
        if useful == (visit < PEERS):
            arrived = signals.wait_for(
                link.signal_ptrs, rank, WORLD_SIZE, 0, source, program, generation, link.timeout_ns
            )
            if arrived & useful:
                fetch_shard(ring, source, SHAPE)
            if arrived:
                announce_source(ring, source, SHAPE)


@triton.jit
def fetch_shard(ring, source, SHAPE: tl.constexpr):
    """This program's share of the keys of `source`, which have been published."""
    keys = ring.keys
    shard = area_ptr(ring, source, 0, keys.gathered.dtype.element_ty)
    out, rows = _shard_ptr(ring, source, SHAPE), keys_held(ring.table, source, SHAPE)
    pitch = tl.cast(rows, tl.int64) * SHAPE.pitch
    _fetch_rows(out, shard, ring, source, rows, SHAPE)
    out += _fetched_heads(keys) * pitch
    _fetch_rows(out, shard + keys.heads * pitch, ring, source, rows, SHAPE)


@triton.jit
def announce_source(ring, source, SHAPE: tl.constexpr):
    """Tell the programs of this launch that this one has fetched its share of `source`."""
    word = signals.slot_ptr(
        ring.link.signal_ptrs, ring.rank, SHAPE.world_size, 1, source, tl.program_id(0)
    )
    signals.signal_local(word, ring.generation)


@triton.jit
def announce_results(arrivals, ring, owner, SHAPE: tl.constexpr):
    """Tell `owner` that all results that this program makes for it are in place.

    If keys did not arrive they are not, and the owner waits in vain as well.
    """
    if arrivals >= 0:
        word = signals.slot_ptr(
            ring.link.signal_ptrs, owner, SHAPE.world_size, 0, ring.rank, tl.program_id(0)
        )
        signals.signal(word, ring.generation)


@triton.jit
def await_results(ring, SHAPE: tl.constexpr):
    """Wait until program p of every peer has announced its results. False on a time-out."""
    return signals.wait_for_peers(
        ring.link.signal_ptrs, ring.rank, SHAPE.world_size, 0, tl.program_id(0), ring.generation,
        ring.link.timeout_ns,
    )  # fmt: skip


@triton.jit
def no_arrivals(SHAPE: tl.constexpr):
    """An `arrivals` word for `wait_for_source` with no bit set.

    It has one bit per rank, and is negative once a source did not arrive in time. It stays in
    registers, so it is as short as the group allows.
    """
    return tl.cast(0, tl.int32 if SHAPE.world_size < 32 else tl.int64)


@triton.jit
def wait_for_source(arrivals, step, ring, SHAPE: tl.constexpr):
    """Step 3: wait for the keys of rank + step unless they have arrived; return the new `arrivals`.

    Args:
        arrivals: bit `step` is set once the keys of rank + step are here. See `no_arrivals`.
    """
    if (arrivals >> step & 1) == 0:
        source = (ring.rank + step) % SHAPE.world_size
        arrived = copies_came(ring, source, 1, SHAPE)
        if arrived:
            arrived = copies_came(ring, source, SHAPE.config.copy_programs, SHAPE)
        BITS: tl.constexpr = arrivals.dtype.primitive_bitwidth
        arrivals |= tl.cast(1, arrivals.dtype) << tl.where(arrived, step, BITS - 1)
    return arrivals


@triton.jit
def over_keys(
    arrivals,
    total,
    add: tl.constexpr,
    queries,  # what `add` needs of them
    tile,  # TokenTile: where they are
    head,  # Head
    ring,
    SHAPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Go over all keys that a tile of queries sees: own ones first, the others as they arrive.

    For each span with such keys total = add(total, queries, tile.position, keys, within, ring,
    SHAPE, BLOCK_N), where `keys` is HeadKeys with row 0 at position 0, and `within` the Interval
    that the tile sees.

    Returns `arrivals` as `wait_for_source` leaves it, and the total.
    """
    SPANS: tl.constexpr = SHAPE.spans
    ends = bounds(tile, ring.sees)
    # Not a `for`: through that, Triton carries a softmax in up to seven layouts at once, and makes
    # every exponential twice.
    step = 0
    while step < SHAPE.world_size:
        source = (ring.rank + step) % SHAPE.world_size
        for span in range(SPANS):
            start, row, rows = span_of(key_spans(ring.table, SHAPE), source, span, SPANS)
            within = interval(ends, start, start + rows, BLOCK_N)
            if within.begin < within.end:
                arrivals = wait_for_source(arrivals, step, ring, SHAPE)
                keys = head_keys(ring, source, head.batch, head.kv, row - start, SHAPE)
                total = add(total, queries, tile.position, keys, within, ring, SHAPE, BLOCK_N)
        step += 1
    return arrivals, total
