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

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.memory.symmetric import persistent
from weft.collectives.ranks.chunks import offsets
from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, LaunchOptions
from weft.kernels.flash.attention_tiles import Heads, Sight, head_ptr
from weft.kernels.flash.geometry import Geometry, Span, needed_rows


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for, apart from its tiles.

    Attributes:
        world_size: W.
        spans: spans of a shard, 1 or 2.
        head_dim: D.
        pitch, fp32_pitch: elements from one row to the next, of published keys and of fp32 partial
            sums.
        block_d: D rounded up to a power of two, at least 16.
        copy_programs, copy_m: programs that publish and fetch keys, and rows that they move at a
            time.
    """

    world_size: int
    spans: int
    head_dim: int
    pitch: int
    fp32_pitch: int
    block_d: int
    copy_programs: int
    copy_m: int


@dataclass(frozen=True, kw_only=True)
class RingOptions(LaunchOptions):
    """How a kernel is launched, apart from its tiles; the same on all ranks.

    Attributes:
        group_heads: heads whose tiles run together, to share keys in L2.
        programs: grid, copy programs included.
        copy_programs, copy_m: programs that fetch keys, and rows that they move at a time.
    """

    group_heads: int
    programs: int
    copy_programs: int
    copy_m: int


class Keys(NamedTuple):
    """Keys and values of B * H_KV = `heads` heads.

    Fields: this rank's `k` and `v` (B, H_KV, m, D), with the same `strides` of batch, head and row;
    `gathered`, all ranks' keys and values of the `fetched` heads of each batch from `first` on.
    """

    k: Any
    v: Any
    strides: Any
    gathered: Any
    H_KV: Any
    heads: Any
    first: Any
    fetched: Any


class Ring(NamedTuple):
    """One call as its kernel knows it.

    Fields: the way to the peers, the words of `tables`, this rank, the number of the call, the keys
    (Keys), what queries see of them (Sight) and the scale of the scores.
    """

    link: Any
    table: Any
    rank: Any
    generation: Any
    keys: Any
    sees: Any
    scale: Any


class HeadKeys(NamedTuple):
    """Pointers to a row of the keys and of the values of one head, and the stride of their rows."""

    k: Any
    v: Any
    stride: Any


def pitch_of(D: int, dtype: torch.dtype) -> int:
    """Elements from one row of a published shard to the next."""
    unit = 16 // dtype.itemsize
    return -(-D // unit) * unit


def shard_bytes(heads: int, rows: int, D: int, dtype: torch.dtype) -> int:
    """Size of a published shard of `heads` heads (B * H_kv) and `rows` rows."""
    return 2 * heads * rows * pitch_of(D, dtype) * dtype.itemsize


def copy_programs(
    chip: Chip, heads: int, kv_heads: int, rows: int, dtype: torch.dtype, W: int
) -> int:
    """How many programs copy: just enough to fetch a shard while the others attend to one.

    A program fetches 32 GB/s (64 KiB a load, 2 us); the chip attends at some 400 TFLOP/s. An eighth
    of the cores fills the link.
    """
    if W == 1 or chip is INTERPRETER:
        return 1
    wanted = -(-6250 * dtype.itemsize * kv_heads // max(heads * rows, 1))
    return max(2, min(chip.cores // 8, wanted))


_Tables = tuple[torch.Tensor, Sight, Sight]

# Tables are kept for later calls, the oldest dropped beyond 128 MiB: those of documents take 8
# bytes a token, and every packed batch is another geometry.
_kept: dict[tuple[Geometry, int, torch.device, bool], _Tables] = {}
_MOST_BYTES = 128 << 20


def tables(
    geometry: Geometry, rank: int, device: torch.device, all_queries: bool = False
) -> _Tables:
    """What the kernels of `rank` need to know of a geometry, in tensors on their device.

    Args:
        rank: the values are the same on every rank, but virtual ranks must not share tensors.
        all_queries: whether every rank attends for the queries of all, not only for its own.

    Returns:
        int32 words: start, row and length of the spans of every rank's queries, then of its keys;
        the first row of every rank's keys, and of its queries, where those of all ranks lie one
        after another; for every (rank, source, span of source) the first row that is needed and the
        one after the last. Then what queries see of keys, and which queries see a key; if documents
        are packed, with the start and stop of every token's document.
    """
    key = geometry, rank, device, all_queries
    found = _kept.get(key)
    if found is None:
        found = _tables(*key)
        room = _MOST_BYTES - _nbytes(found)
        for other, old in reversed(list(_kept.items())):
            room -= _nbytes(old)
            if room < 0:
                _kept.pop(other, None)
        _kept[key] = found
    return found


def _nbytes(found: _Tables) -> int:
    table, sees, _ = found
    on_the_host = 1 << 16  # less, but it also bounds how many there are
    return on_the_host + table.nbytes + (0 if sees.documents is None else sees.documents.nbytes)


def _tables(geometry: Geometry, rank: int, device: torch.device, all_queries: bool) -> _Tables:
    W = len(geometry.q_sizes)

    def words(spans: tuple[tuple[Span, ...], ...]) -> list[int]:
        return [
            word for held in spans for span in held for word in (span.start, span.row, span.length)
        ]

    needed = [
        word
        for user in range(W)
        for source in range(W)
        for interval in needed_rows(geometry, range(W) if all_queries else (user,), source)
        for word in interval
    ]
    bases = [n for sizes in (geometry.k_sizes, geometry.q_sizes) for n in offsets(sizes)]
    table = torch.tensor(
        words(geometry.q_spans) + words(geometry.k_spans) + bases + needed,
        dtype=torch.int32,
        device="cpu",
    )
    sees, documents = geometry.sees, None
    if sees.documents is not None:
        starts = torch.tensor(sees.documents, device="cpu")
        lengths = starts.diff()
        bounds = [each.repeat_interleave(lengths) for each in (starts[:-1], starts[1:])]
        documents = persistent(torch.stack(bounds, -1).int(), device)
    of_queries = Sight(documents, sees.before, sees.after, sees.keys)
    of_keys = Sight(documents, sees.after, sees.before, sum(geometry.q_sizes))
    return persistent(table, device), of_queries, of_keys


def shape_for(k: torch.Tensor, geometry: Geometry, copies: int, copy_m: int) -> Shape:
    """The Shape of keys `k` (B, H_kv, m, D), with `copies` programs that fetch them."""
    D = k.shape[3]
    return Shape(
        world_size=len(geometry.k_sizes),
        spans=len(geometry.k_spans[0]),
        head_dim=D,
        pitch=pitch_of(D, k.dtype),
        fp32_pitch=pitch_of(D, torch.float32),
        block_d=max(16, triton.next_power_of_2(D)),
        copy_programs=copies,
        copy_m=copy_m,
    )


def keys_of(
    k: torch.Tensor, v: torch.Tensor, geometry: Geometry, heads: range | None = None
) -> Keys:
    """The rank's own shard (B, H_kv, m, D) as kernels take it, and room for others' `heads`."""
    B, H_kv, _, D = k.shape
    heads = range(H_kv) if heads is None else heads
    remote = geometry.sees.keys if len(geometry.k_sizes) > 1 else 0
    gathered = k.new_empty(2 * B * len(heads) * remote * pitch_of(D, k.dtype))
    return Keys(k, v, k.stride()[:3], gathered, H_kv, B * H_kv, heads.start, len(heads))


@triton.jit
def span_of(spans_ptr, rank, span, SPANS: tl.constexpr):
    """Start in the sequence, first row and length of a span of `rank`, of its queries or keys."""
    words = spans_ptr + (rank * SPANS + span) * 3
    return tl.load(words), tl.load(words + 1), tl.load(words + 2)


@triton.jit
def key_spans(table_ptr, SHAPE: tl.constexpr):
    """The words of the keys' spans, which follow those of the queries."""
    return table_ptr + SHAPE.world_size * SHAPE.spans * 3


@triton.jit
def count_tiles(spans_ptr, rank, SPANS: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of BLOCK rows that `rank` holds. No tile straddles two spans."""
    count = 0
    for span in tl.static_range(SPANS):
        count += tiles.cdiv(span_of(spans_ptr, rank, span, SPANS)[2], BLOCK)
    return count


@triton.jit
def tile_of(spans_ptr, rank, tile, SPANS: tl.constexpr, BLOCK: tl.constexpr):
    """Position and row of the first token, and number of tokens, of a tile of `rank`."""
    start, row, length = span_of(spans_ptr, rank, 0, SPANS)
    if SPANS == 2:
        first_tiles = tiles.cdiv(length, BLOCK)
        if tile >= first_tiles:
            tile -= first_tiles
            start, row, length = span_of(spans_ptr, rank, 1, SPANS)
    inside = tile * BLOCK
    return start + inside, row + inside, tl.minimum(BLOCK, length - inside)


@triton.jit
def count_rows(spans_ptr, rank, SPANS: tl.constexpr):
    """Rows that `rank` holds, of queries or keys."""
    rows = 0
    for span in tl.static_range(SPANS):
        rows += span_of(spans_ptr, rank, span, SPANS)[2]
    return rows


@triton.jit
def rows_of(table_ptr, source, SHAPE: tl.constexpr):
    """Keys that `source` holds."""
    return count_rows(key_spans(table_ptr, SHAPE), source, SHAPE.spans)


@triton.jit
def is_needed(table_ptr, rank, source, first, last, SHAPE: tl.constexpr):
    """Whether a query of `rank` may see any of rows first .. last - 1 of `source`."""
    SPANS: tl.constexpr = SHAPE.spans
    words = table_ptr + SHAPE.world_size * (2 * SPANS * 3 + 2)
    words += (rank * SHAPE.world_size + source) * SPANS * 2
    found = False
    for span in tl.static_range(SPANS):
        begin, end = tl.load(words + 2 * span), tl.load(words + 2 * span + 1)
        found |= (first < end) & (begin < last)
    return found


@triton.jit
def _shard_ptr(ring, source, SHAPE: tl.constexpr):
    """Where the keys of `source` begin in `gathered`."""
    base = base_of(ring.table, source, 0, SHAPE)
    return ring.keys.gathered + base * 2 * _fetched_heads(ring.keys) * SHAPE.pitch


@triton.jit
def base_of(table_ptr, source, QUERIES: tl.constexpr, SHAPE: tl.constexpr):
    """Keys (0) or queries (1) that the ranks before `source` hold."""
    words = table_ptr + SHAPE.world_size * (2 * SHAPE.spans * 3 + QUERIES)
    return tl.load(words + source).to(tl.int64)


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
        rows = tl.cast(rows_of(ring.table, source, SHAPE), tl.int64)
        k = _shard_ptr(ring, source, SHAPE)
        k += ((batch * keys.fetched + kv_head - keys.first) * rows + shift) * SHAPE.pitch
        v, stride = k + _fetched_heads(keys) * rows * SHAPE.pitch, tl.cast(SHAPE.pitch, tl.int32)
    return HeadKeys(k, v, stride)


@triton.jit
def first_chunk(head, chunks, SHAPE: tl.constexpr):
    """The first of the `chunks` of a head that this program copies, to fetch as to publish.

    It waits for its namesakes alone, so they must have published all that it fetches.
    """
    return tiles.first_of(head * chunks, tl.program_id(0), SHAPE.copy_programs)


@triton.jit
def publish_rows(to_ptr, x, H, heads, rows, SHAPE: tl.constexpr):
    """Publish `rows` rows of `heads` = B * H heads of x (Heads): the chunks of this program."""
    COPY_M: tl.constexpr = SHAPE.copy_m
    chunks = tiles.cdiv(rows, COPY_M)
    for unit in range(tl.program_id(0), heads * chunks, SHAPE.copy_programs):
        head, first = unit // chunks, (unit % chunks).to(tl.int64) * COPY_M
        batch, head_in_batch = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
        tiles.copy_block(
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
    COPY_M: tl.constexpr = SHAPE.copy_m
    keys, chunks = ring.keys, tiles.cdiv(rows, COPY_M)
    for head in range(_fetched_heads(keys)):
        global_head = head // keys.fetched * keys.H_KV + keys.first + head % keys.fetched
        for chunk in range(first_chunk(global_head, chunks, SHAPE), chunks, SHAPE.copy_programs):
            first = chunk * COPY_M
            last = tl.minimum(first + COPY_M, rows)
            if is_needed(ring.table, ring.rank, source, first, last, SHAPE):
                tiles.copy_block(
                    out_ptr + (tl.cast(head, tl.int64) * rows + first) * SHAPE.pitch,
                    shard_ptr + (tl.cast(global_head, tl.int64) * rows + first) * SHAPE.pitch,
                    last - first,
                    SHAPE.head_dim,
                    SHAPE.pitch,
                    SHAPE.pitch,
                    1,
                    COPY_M,
                    SHAPE.block_d,
                )


@triton.jit
def publish_keys(ring, SHAPE: tl.constexpr):
    """Step 1 of the protocol, up to the signal."""
    link, rank, generation, keys = ring.link, ring.rank, ring.generation, ring.keys
    dtype: tl.constexpr = keys.k.dtype.element_ty
    half = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, dtype)
    rows = rows_of(ring.table, rank, SHAPE)
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
        rows = rows_of(ring.table, source, SHAPE)
        useful = is_needed(ring.table, rank, source, 0, rows, SHAPE)
        if useful == (visit < PEERS):
            arrived = signals.wait_for(
                link.signal_ptrs, rank, WORLD_SIZE, 0, source, program, generation, link.timeout_ns
            )
            if arrived & useful:
                fetch_shard(ring, source, SHAPE)
            if arrived:
                announce(ring, source, SHAPE)


@triton.jit
def fetch_shard(ring, source, SHAPE: tl.constexpr):
    """This program's share of the keys of `source`, which have been published."""
    link, keys = ring.link, ring.keys
    dtype: tl.constexpr = keys.gathered.dtype.element_ty
    shard = signals.half_ptr(link.buffer_ptrs, source, ring.generation, link.half_bytes, dtype)
    out, rows = _shard_ptr(ring, source, SHAPE), rows_of(ring.table, source, SHAPE)
    pitch = tl.cast(rows, tl.int64) * SHAPE.pitch
    _fetch_rows(out, shard, ring, source, rows, SHAPE)
    out += _fetched_heads(keys) * pitch
    _fetch_rows(out, shard + keys.heads * pitch, ring, source, rows, SHAPE)


@triton.jit
def announce(ring, source, SHAPE: tl.constexpr):
    """Tell the programs of this launch that this one has fetched its share of `source`."""
    word = signals.slot_ptr(
        ring.link.signal_ptrs, ring.rank, SHAPE.world_size, 1, source, tl.program_id(0)
    )
    signals.signal_local(word, ring.generation)


@triton.jit
def compute_program(SHAPE: tl.constexpr):
    """This program's number among those that compute, and how many there are."""
    return tl.program_id(0) - SHAPE.copy_programs, tl.num_programs(0) - SHAPE.copy_programs


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
        arrived = signals.wait_for_own(
            ring.link.signal_ptrs, ring.rank, SHAPE.world_size, 1, source, 0,
            SHAPE.copy_programs - 1, ring.generation, ring.link.timeout_ns,
            triton.next_power_of_2(SHAPE.copy_programs),
        )  # fmt: skip
        BITS: tl.constexpr = arrivals.dtype.primitive_bitwidth
        arrivals |= tl.cast(1, arrivals.dtype) << tl.where(arrived, step, BITS - 1)
    return arrivals
