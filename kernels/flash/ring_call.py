"""One call of attention over sharded sequences, as its kernels know it: launch and geometry.

Forward and backward, by ring and by heads, are launched with `RingOptions`, are compiled for a
`Shape` and take `Keys`, tables of who holds which tokens, and what sees what (`Sight`). Legend as
in `ring_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.memory.symmetric import persistent
from weft.collectives.ranks import caches
from weft.collectives.ranks.chunks import offsets
from weft.kernels.device import tiles
from weft.kernels.engine.chips import INTERPRETER, Chip, LaunchOptions
from weft.kernels.flash.attention_tiles import Sight
from weft.kernels.flash.geometry import Geometry, Span, needed_rows


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        world_size: W.
        spans: spans of a shard, 1 or 2.
        head_dim: D.
        pitch, fp32_pitch: elements from one row to the next, of published keys and of fp32 partial
            sums.
        block_d: D rounded up to a power of two, at least 16.
        config: its tiles, and how it is launched.
    """

    world_size: int
    spans: int
    head_dim: int
    pitch: int
    fp32_pitch: int
    block_d: int
    config: Any  # RingConfig, RingGradConfig


@dataclass(frozen=True, kw_only=True)
class RingOptions(LaunchOptions):
    """How a kernel is launched, apart from its tiles; the same on all ranks.

    Attributes:
        group_heads: heads whose tiles run together, to share keys in L2.
        programs: grid, copy programs included.
        copy_programs, copy_m: programs that publish and fetch keys, and rows at a time.
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
caches.register(
    f"{__name__}._kept", _kept, _MOST_BYTES, lambda: sum(map(_nbytes, list(_kept.values())))
)


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


def shape_for(k: torch.Tensor, geometry: Geometry, config: RingOptions) -> Shape:
    """The Shape of keys `k` (B, H_kv, m, D)."""
    D = k.shape[3]
    return Shape(
        world_size=len(geometry.k_sizes),
        spans=len(geometry.k_spans[0]),
        head_dim=D,
        pitch=pitch_of(D, k.dtype),
        fp32_pitch=pitch_of(D, torch.float32),
        block_d=max(16, triton.next_power_of_2(D)),
        config=config,
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
def base_of(table_ptr, source, QUERIES: tl.constexpr, SHAPE: tl.constexpr):
    """Keys (0) or queries (1) that the ranks before `source` hold."""
    words = table_ptr + SHAPE.world_size * (2 * SHAPE.spans * 3 + QUERIES)
    return tl.load(words + source).to(tl.int64)


@triton.jit
def compute_program(SHAPE: tl.constexpr):
    """This program's number among those that compute, and how many there are."""
    return tl.program_id(0) - SHAPE.config.copy_programs, tl.num_programs(
        0
    ) - SHAPE.config.copy_programs
