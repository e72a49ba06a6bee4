"""Keys and values on their way round: what the ring attention kernels share.

Legend: W ranks; rank s holds m_s rows of keys and of values for each of B * H_kv heads, D wide, in
one or two spans (see `sharded_sequence`). PITCH is D rounded up to 16 bytes' worth of elements.

    shard of s     [k | v] x [heads] x [rows] x PITCH     published: first in s's half
                                                          fetched: in `gathered`, at row base[s]

Protocol, shared by forward and backward; programs 0 .. C-1 copy, the others compute
  1. Copy program p publishes every C-th chunk of rows of the own shard, and signals the word
     (0, rank, p) of every peer's pad: release at system scope.
  2. Copy program p, for the peers rank+1, rank+2, ...: waits for the peer's word (0, peer, p)
     (acquire: chunks p, p+C, .. may be read), copies those of them that some query here sees to
     `gathered`, signals the own word (1, peer, p): release at device scope. Peers of whose keys
     nothing is seen come last, and are only waited for.
  3. A compute program waits for the words (1, source, 0 .. C-1) before its first use of a source,
     once in a launch: it remembers in a bit mask which have come.

A remote row crosses the link once. Read in place it would cross once for each tile of queries that
sees it: 128 flops of a 128-row tile for each byte, where a link of 450 GB/s feeds a chip of
600 TFLOP/s from 1,300 on. So `gathered` holds the keys and values of all ranks; q, out and their
gradients are never more than a shard.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from weft.collectives import signals
from weft.kernels import tiles
from weft.kernels.chips import INTERPRETER, Chip
from weft.kernels.sharded_sequence import Geometry, Span, needed_rows


def pitch_of(D: int, dtype: torch.dtype) -> int:
    """Elements from one row of a published shard to the next."""
    unit = 16 // dtype.itemsize
    return -(-D // unit) * unit


def shard_bytes(heads: int, rows: int, D: int, dtype: torch.dtype) -> int:
    """Of a published shard of `heads` heads (B * H_kv) and `rows` rows."""
    return 2 * heads * rows * pitch_of(D, dtype) * dtype.itemsize


def copy_programs(
    chip: Chip, heads: int, kv_heads: int, rows: int, dtype: torch.dtype, W: int
) -> int:
    """Programs that copy: as few as bring a shard while the others attend to one.

    A program brings 32 GB/s (64 KiB a load, 2 us); the chip attends at some 400 TFLOP/s. An eighth
    of the cores fills the link.
    """
    if W == 1 or chip is INTERPRETER:
        return 1
    wanted = -(-6250 * dtype.itemsize * kv_heads // (heads * max(rows, 1)))
    return max(2, min(chip.cores // 8, wanted))


@lru_cache(maxsize=64)
def tables(
    geometry: Geometry, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What kernels of `rank` must know of a geometry, on their device: the same on every rank, but
    virtual ranks in one process must not share the tensors.

    Returns:
        int32 words: start, row and length of the spans of every rank's queries, then of its keys;
        base of every rank's keys in `gathered`, in rows; for every (rank, source, span of source)
        the first row that is needed and the one after the last.
        And, where documents are packed, start and stop of the document of every token.
    """
    W = len(geometry.q_sizes)

    def words(spans: tuple[tuple[Span, ...], ...]) -> list[int]:
        return [
            word for held in spans for span in held for word in (span.start, span.row, span.length)
        ]

    needed = [
        word
        for rank in range(W)
        for source in range(W)
        for interval in needed_rows(geometry, rank, source)
        for word in interval
    ]
    bases = [0, *accumulate(geometry.k_sizes)][:W]
    table = torch.tensor(
        words(geometry.q_spans) + words(geometry.k_spans) + bases + needed,
        dtype=torch.int32,
        device=device,
    )
    documents = geometry.sees.documents
    if documents is None:
        return table, None
    starts = torch.tensor(documents, device=device)
    lengths = starts.diff()
    bounds = [each.repeat_interleave(lengths) for each in (starts[:-1], starts[1:])]
    return table, torch.stack(bounds).to(torch.int32)


@triton.jit
def span_of(spans_ptr, rank, span, SPANS: tl.constexpr):
    """Start in the sequence, first row and length of a span of `rank`, of its queries or keys."""
    words = spans_ptr + (rank * SPANS + span) * 3
    return tl.load(words), tl.load(words + 1), tl.load(words + 2)


@triton.jit
def key_spans(table_ptr, WORLD_SIZE: tl.constexpr, SPANS: tl.constexpr):
    """The words of the keys' spans; those of the queries begin the table."""
    return table_ptr + WORLD_SIZE * SPANS * 3


@triton.jit
def count_tiles(spans_ptr, rank, SPANS: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of BLOCK rows that `rank` holds. No tile straddles two spans."""
    count = 0
    for span in tl.static_range(SPANS):
        count += tiles.cdiv(span_of(spans_ptr, rank, span, SPANS)[2], BLOCK)
    return count


@triton.jit
def tile_of(spans_ptr, rank, tile, SPANS: tl.constexpr, BLOCK: tl.constexpr):
    """Of tile number `tile` of `rank`: position and row of its first token, number of tokens."""
    start, row, length = span_of(spans_ptr, rank, 0, SPANS)
    if SPANS == 2:
        first_tiles = tiles.cdiv(length, BLOCK)
        if tile >= first_tiles:
            tile -= first_tiles
            start, row, length = span_of(spans_ptr, rank, 1, SPANS)
    inside = tile * BLOCK
    return start + inside, row + inside, tl.minimum(BLOCK, length - inside)


@triton.jit
def shard_offset(
    table_ptr,
    source,
    heads,
    PITCH: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Where the shard of `source` begins in `gathered`, in elements."""
    row = tl.load(table_ptr + 2 * WORLD_SIZE * SPANS * 3 + source).to(tl.int64)
    return row * 2 * heads * PITCH


@triton.jit
def needed(table_ptr, rank, source, span, WORLD_SIZE: tl.constexpr, SPANS: tl.constexpr):
    """Rows first .. last - 1 of a span of `source` that `rank`'s queries may see."""
    words = table_ptr + (2 * WORLD_SIZE * SPANS * 3 + WORLD_SIZE)
    words += ((rank * WORLD_SIZE + source) * SPANS + span) * 2
    return tl.load(words), tl.load(words + 1)


@triton.jit
def is_needed(table_ptr, rank, source, first, last, WORLD_SIZE: tl.constexpr, SPANS: tl.constexpr):
    """Whether `rank` needs any of rows first .. last - 1 of `source`."""
    found = False
    for span in tl.static_range(SPANS):
        begin, end = needed(table_ptr, rank, source, span, WORLD_SIZE, SPANS)
        found |= (first < end) & (begin < last)
    return found


@triton.jit
def visible(position, documents_ptr, before, after, limit):
    """First token that one at `position` sees, and the one after the last.

    `limit` is the length of the sequence looked at. Queries see keys with (before, after), keys are
    seen by queries with (after, before). For blocks of positions and for scalars.

    Example: before=2, after=0, limit=5: position 3 sees 1 .. 4, position 6 sees 4 .. 5.
    """
    first = tl.maximum(position - before, 0)
    last = tl.minimum(position + after + 1, limit)
    if documents_ptr is not None:
        inside = tl.minimum(position, limit - 1)
        first = tl.maximum(first, tl.load(documents_ptr + inside))
        last = tl.minimum(last, tl.load(documents_ptr + limit + inside))
    return first, last


@triton.jit
def _publish_rows(
    half_ptr,
    x_ptr,
    strides,
    heads,
    H_KV,
    rows,
    HEAD_DIM: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
):
    chunks = tiles.cdiv(rows, COPY_M)
    for unit in range(tl.program_id(0), heads * chunks, COPY_PROGRAMS):
        head, first = (unit // chunks).to(tl.int64), (unit % chunks).to(tl.int64) * COPY_M
        x_head = x_ptr + head // H_KV * strides[0] + head % H_KV * strides[1]
        tiles.copy_block(
            half_ptr + (head * rows + first) * PITCH,
            x_head + first * strides[2],
            tl.minimum(COPY_M, rows - first),
            HEAD_DIM,
            PITCH,
            strides[2],
            1,
            COPY_M,
            BLOCK_D,
        )


@triton.jit
def _fetch_rows(
    out_ptr,
    shard_ptr,
    table_ptr,
    rank,
    source,
    heads,
    rows,
    WORLD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
):
    chunks = tiles.cdiv(rows, COPY_M)
    for unit in range(tl.program_id(0), heads * chunks, COPY_PROGRAMS):
        first = unit % chunks * COPY_M
        last = tl.minimum(first + COPY_M, rows)
        if is_needed(table_ptr, rank, source, first, last, WORLD_SIZE, SPANS):
            at = ((unit // chunks).to(tl.int64) * rows + first) * PITCH
            tiles.copy_block(
                out_ptr + at,
                shard_ptr + at,
                last - first,
                HEAD_DIM,
                PITCH,
                PITCH,
                1,
                COPY_M,
                BLOCK_D,
            )


@triton.jit
def rows_of(table_ptr, source, WORLD_SIZE: tl.constexpr, SPANS: tl.constexpr):
    """Keys that `source` holds."""
    rows = 0
    for span in tl.static_range(SPANS):
        rows += span_of(key_spans(table_ptr, WORLD_SIZE, SPANS), source, span, SPANS)[2]
    return rows


@triton.jit
def publish_keys(
    k_ptr,
    v_ptr,
    kv_strides,
    table_ptr,
    buffer_ptrs,
    signal_ptrs,
    heads,
    H_KV,
    half_bytes,
    rank,
    generation,
    WORLD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
):
    """Step 1 of the protocol."""
    half = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, k_ptr.dtype.element_ty)
    rows = rows_of(table_ptr, rank, WORLD_SIZE, SPANS)
    _publish_rows(
        half, k_ptr, kv_strides, heads, H_KV, rows, HEAD_DIM, PITCH, BLOCK_D, COPY_PROGRAMS, COPY_M
    )
    half += tl.cast(heads, tl.int64) * rows * PITCH
    _publish_rows(
        half, v_ptr, kv_strides, heads, H_KV, rows, HEAD_DIM, PITCH, BLOCK_D, COPY_PROGRAMS, COPY_M
    )
    signals.signal_peers(signal_ptrs, rank, WORLD_SIZE, 0, tl.program_id(0), generation)


@triton.jit
def fetch_keys(
    gathered_ptr,
    table_ptr,
    buffer_ptrs,
    signal_ptrs,
    heads,
    half_bytes,
    max_polls,
    rank,
    generation,
    WORLD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
):
    """Step 2 of the protocol."""
    program = tl.program_id(0)
    dtype: tl.constexpr = gathered_ptr.dtype.element_ty
    PEERS: tl.constexpr = WORLD_SIZE - 1
    for visit in range(2 * PEERS):
        source = (rank + 1 + visit % tl.maximum(PEERS, 1)) % WORLD_SIZE
        rows = rows_of(table_ptr, source, WORLD_SIZE, SPANS)
        useful = is_needed(table_ptr, rank, source, 0, rows, WORLD_SIZE, SPANS)
        if useful == (visit < PEERS):
            arrived = signals.wait_for(
                signal_ptrs, rank, WORLD_SIZE, 0, source, program, generation, max_polls
            )
            if arrived & useful:
                shard = signals.half_ptr(buffer_ptrs, source, generation, half_bytes, dtype)
                out = gathered_ptr + shard_offset(
                    table_ptr, source, heads, PITCH, WORLD_SIZE, SPANS
                )
                for values in range(2):
                    at = tl.cast(values * heads, tl.int64) * rows * PITCH
                    _fetch_rows(
                        out + at,
                        shard + at,
                        table_ptr,
                        rank,
                        source,
                        heads,
                        rows,
                        WORLD_SIZE,
                        SPANS,
                        HEAD_DIM,
                        PITCH,
                        BLOCK_D,
                        COPY_PROGRAMS,
                        COPY_M,
                    )
                signals.signal_local(
                    signals.slot_ptr(signal_ptrs, rank, WORLD_SIZE, 1, source, program), generation
                )


@triton.jit
def wait_for_parts(
    signal_ptrs, rank, source, generation, max_polls, WORLD_SIZE: tl.constexpr, PARTS: tl.constexpr
):
    """Step 3: until all copy programs have announced `source`. False on a time-out."""
    arrived = True
    own_pad = signals.peer_ptr(signal_ptrs, rank, tl.int64)
    for part in range(PARTS):
        slot = signals.slot_ptr(signal_ptrs, rank, WORLD_SIZE, 1, source, part)
        arrived &= signals.wait_local(slot, generation, signals.patience(own_pad, max_polls))
    if not arrived:
        signals.record_timeout(own_pad, rank, source, generation)
    return arrived


@triton.jit
def having(
    come,  # int64, bit `step`: the keys of rank + step are here
    step,
    signal_ptrs,
    rank,
    generation,
    max_polls,
    WORLD_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`come`, after a wait for the keys of rank + step if they had not come yet."""
    if (come >> step & 1) == 0:
        source = (rank + step) % WORLD_SIZE
        arrived = wait_for_parts(
            signal_ptrs, rank, source, generation, max_polls, WORLD_SIZE, PARTS
        )
        come |= tl.where(arrived, tl.cast(1, tl.int64) << step, 0)
    return come
