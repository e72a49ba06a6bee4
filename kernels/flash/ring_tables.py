"""The tables of a geometry: who holds which tokens, and who needs which of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device.launches import lasting
from weft.collectives.memory.backends import persistent
from weft.collectives.ranks import caches
from weft.collectives.ranks.chunks import offsets
from weft.collectives.ranks.group import unwatched
from weft.kernels.device import tiles
from weft.kernels.flash.attention_tiles import Sight
from weft.kernels.flash.geometry import Geometry, Span, needed_rows


class Tables(NamedTuple):
    """A geometry, as the kernels of a rank take it.

    Fields: int32 words (start, row and length of the spans of every rank's queries, then of its
    keys; the first row of every rank's keys, and of its queries, where those of all ranks lie one
    after another; for every (rank, source, span of source) the first row that is needed and the one
    after the last); what queries see of keys (Sight), and which queries see a key. The latter two
    have the start and stop of every token's document if documents are packed.
    """

    words: Any
    sees: Any
    seen_by: Any


class TokenTile(NamedTuple):
    """Tokens of a rank: the position and the row of the first, and how many."""

    position: Any
    row: Any
    length: Any


# Tables are kept for later calls, the oldest dropped beyond 128 MiB: those of documents take 8
# bytes a token, and every packed batch is another geometry.
_kept: dict[tuple[Geometry, int, torch.device, bool], Tables] = {}


_MOST_BYTES = 128 << 20
caches.register(
    f"{__name__}._kept", _kept, _MOST_BYTES, lambda: sum(map(_nbytes, list(_kept.values())))
)


def tables(
    geometry: Geometry, rank: int, device: torch.device, all_queries: bool = False
) -> Tables:
    """What the kernels of `rank` need to know of a geometry, in tensors on their device.

    Args:
        rank: the values are the same on every rank, but virtual ranks must not share tensors.
        all_queries: whether every rank attends for the queries of all, not only for its own.
    """
    key = geometry, rank, device, all_queries
    found = _kept.get(key)
    if found is None:
        with unwatched():
            found = _tables(*key)
        room = _MOST_BYTES - _nbytes(found)
        for other, old in reversed(list(_kept.items())):
            room -= _nbytes(old)
            if room < 0:
                _kept.pop(other, None)
        _kept[key] = found
    for each in (found.words, found.sees.documents, found.seen_by.documents):
        if each is not None:
            lasting(each)
    return found


def _nbytes(found: Tables) -> int:
    documents = found.sees.documents
    on_the_host = 1 << 16  # less, but it also bounds how many there are
    return on_the_host + int(found.words.nbytes) + (0 if documents is None else documents.nbytes)


def _tables(geometry: Geometry, rank: int, device: torch.device, all_queries: bool) -> Tables:
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
    return Tables(persistent(table, device), of_queries, of_keys)


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
def shard_tile(spans_ptr, rank, tile, SPANS: tl.constexpr, BLOCK: tl.constexpr):
    """Tile number `tile` of `rank`: a TokenTile."""
    start, row, length = span_of(spans_ptr, rank, 0, SPANS)
    if SPANS == 2:
        first_tiles = tiles.cdiv(length, BLOCK)
        if tile >= first_tiles:
            tile -= first_tiles
            start, row, length = span_of(spans_ptr, rank, 1, SPANS)
    inside = tile * BLOCK
    return TokenTile(start + inside, row + inside, tl.minimum(BLOCK, length - inside))


@triton.jit
def count_rows(spans_ptr, rank, SPANS: tl.constexpr):
    """Rows that `rank` holds, of queries or keys."""
    rows = 0
    for span in tl.static_range(SPANS):
        rows += span_of(spans_ptr, rank, span, SPANS)[2]
    return rows


@triton.jit
def keys_held(table_ptr, source, SHAPE: tl.constexpr):
    """Keys that `source` holds."""
    return count_rows(key_spans(table_ptr, SHAPE), source, SHAPE.spans)


@triton.jit
def is_needed(table_ptr, rank, source, first, last, SHAPE: tl.constexpr):
    """Whether a query of `rank` may see any of rows first .. last - 1 of `source`."""
    return meets(rows_needed(table_ptr, rank, source, SHAPE), first, last)


@triton.jit
def rows_needed(table_ptr, rank, source, SHAPE: tl.constexpr):
    """The rows of `source` that a query of `rank` may see: begin and end, in each of two spans.

    If there is one span it is here twice.
    """
    SPANS: tl.constexpr = SHAPE.spans
    words = table_ptr + SHAPE.world_size * (2 * SPANS * 3 + 2)
    words += (rank * SHAPE.world_size + source) * SPANS * 2
    last = words + 2 * (SPANS - 1)
    return tl.load(words), tl.load(words + 1), tl.load(last), tl.load(last + 1)


@triton.jit
def meets(needed, first, last):
    """Whether any of rows first .. last - 1 are among those of `rows_needed`."""
    begin, end, begin_2, end_2 = needed
    return ((first < end) & (begin < last)) | ((first < end_2) & (begin_2 < last))


@triton.jit
def base_of(table_ptr, source, QUERIES: tl.constexpr, SHAPE: tl.constexpr):
    """Keys (0) or queries (1) that the ranks before `source` hold."""
    words = table_ptr + SHAPE.world_size * (2 * SHAPE.spans * 3 + QUERIES)
    return tl.load(words + source).to(tl.int64)
