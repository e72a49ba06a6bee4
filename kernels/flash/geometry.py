"""Where the tokens of a sharded sequence lie, and which keys each query sees.

W ranks; rank r holds n_r tokens of a sequence of S = sum of n_r. Its *spans* are the runs of the
sequence that it holds, in the order of its rows:

    "contiguous"   one span, after those of the lower ranks, of any length
    "zigzag"       the sequence is cut into 2 W chunks (torch.chunk's rule): rank r holds chunks r
                   and 2W - 1 - r, which balances causal work. For W = 2:

                   sequence   | 0 | 1 | 2 | 3 |      rank 0: | 0 | 3 |      rank 1: | 1 | 2 |

A query at position i sees the keys at positions lo(i) <= j < hi(i): at most `before` to its left
and `after` to its right, and only within its document if sequences are packed. Both bounds grow
with i, so that what a run of queries sees of a span is an interval too, and kernels need only these
few numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from weft.collectives.ranks.chunks import chunk_sizes, offsets

SequenceLayout = Literal["contiguous", "zigzag"]

UNBOUNDED = 1 << 30  # no limit; positions, and sums of two, still fit in int32

# Queries that share an explicit mask, which bounds its size.
_MASK_ROWS = 512


@dataclass(frozen=True)
class Span:
    """Tokens `start` .. `start + length` - 1 of the sequence, on rows `row` .. of a rank."""

    start: int
    row: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def zigzag_sizes(length: int, world_size: int) -> list[int]:
    """How many tokens of a sequence of `length` each rank holds in the zigzag layout.

    Example: 10 tokens, 2 ranks: chunks of 3, 3, 3, 1 give [4, 6].
    """
    chunks = chunk_sizes(length, 2 * world_size)
    return [chunks[r] + chunks[-1 - r] for r in range(world_size)]


def to_zigzag(x: torch.Tensor, world_size: int, dim: int) -> torch.Tensor:
    """Reorder a whole sequence so that splitting it by `zigzag_sizes` along `dim` gives the shards.

    Example: 2 ranks, [0 1 2 3 4 5 6 7] becomes [0 1 6 7 2 3 4 5].
    """
    chunks = x.split(chunk_sizes(x.shape[dim], 2 * world_size), dim)
    return torch.cat([chunks[c] for r in range(world_size) for c in (r, -1 - r)], dim)


def from_zigzag(x: torch.Tensor, world_size: int, dim: int) -> torch.Tensor:
    """The inverse of `to_zigzag`: all ranks' shards, one after another, in sequence order."""
    chunks = chunk_sizes(x.shape[dim], 2 * world_size)
    held = x.split([chunks[c] for r in range(world_size) for c in (r, -1 - r)], dim)
    return torch.cat([*held[::2], *reversed(held[1::2])], dim)


@lru_cache(maxsize=256)
def spans_of(sizes: tuple[int, ...], layout: SequenceLayout) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank.

    Raises:
        ValueError: `sizes` are not those of the layout.
    """
    if layout == "contiguous":
        return tuple(
            (Span(start, 0, size),) for start, size in zip(offsets(sizes), sizes, strict=False)
        )
    W, length = len(sizes), sum(sizes)
    if list(sizes) != zigzag_sizes(length, W):
        raise ValueError(
            f"in the zigzag layout {length} tokens lie on {W} ranks as "
            f"{zigzag_sizes(length, W)}, got {list(sizes)}; weft.kernels.to_zigzag reorders a "
            f"sequence"
        )
    chunks = chunk_sizes(length, 2 * W)
    starts = offsets(chunks)
    return tuple(
        (
            Span(starts[r], 0, chunks[r]),
            Span(starts[2 * W - 1 - r], chunks[r], chunks[2 * W - 1 - r]),
        )
        for r in range(W)
    )


@dataclass(frozen=True)
class Visibility:
    """Which of `keys` keys a query sees.

    Attributes:
        before, after: how far to its left and right, in tokens.
        documents: where packed documents begin, and last where the sequence ends; None: one.
    """

    keys: int
    before: int = UNBOUNDED
    after: int = UNBOUNDED
    documents: tuple[int, ...] | None = None

    def document(self, position: int) -> tuple[int, int]:
        """First token of the document at `position`, and the one after its last."""
        if self.documents is None:
            return 0, self.keys
        # Empty documents begin where the next one does; the last of these holds the token.
        i = bisect_right(self.documents, position)
        return self.documents[i - 1], self.documents[i]

    def lo(self, position: int) -> int:
        """The first key that the query at `position` sees."""
        return max(position - self.before, self.document(position)[0])

    def hi(self, position: int) -> int:
        """One after the last key that it sees; not above `lo` if it sees none."""
        return min(position + self.after + 1, self.document(position)[1])


@dataclass(frozen=True)
class Rectangle:
    """Rows of queries and rows of keys for one call of a local attention.

    Attributes:
        queries, keys: first row, and the one after the last.
        kind: "full": every query sees every key. "causal": query i of the rectangle sees its keys
            0 .. i. "band": query a sees key b where before >= a + shift - b >= -after.
        shift: position of the first query minus that of the first key.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: Literal["full", "causal", "band"]
    shift: int = 0


def rectangles(
    queries: Span, keys: Span, sees: Visibility, mask_rows: int = _MASK_ROWS
) -> list[Rectangle]:
    """What `queries` see of `keys`, each pair in exactly one rectangle.

    There are few of them, with few unseen pairs.

    Example: 4 causal queries from position 2 on and keys from 0 on: queries 0..4 see keys 0..2
    fully and keys 2..6 causally.
    """
    found: list[Rectangle] = []

    def add(p0: int, p1: int, k0: int, k1: int, kind: Literal["full", "causal", "band"]) -> None:
        if p0 < p1 and k0 < k1:
            q_row, k_row = queries.row - queries.start, keys.row - keys.start
            shift = p0 - k0 if kind == "band" else 0
            found.append(Rectangle((p0 + q_row, p1 + q_row), (k0 + k_row, k1 + k_row), kind, shift))

    def right_edge(p0: int, p1: int, k0: int, k1: int) -> None:
        """Queries that all see k0: the keys that all see, then the triangle."""
        first = min(max(p0 + sees.after, k0), k1)
        if p0 + sees.after + 1 >= k1:  # the first query sees them all
            first = k1
        add(p0, p1, k0, first, "full")
        add(p0, p1, first, min(k1, p1 + sees.after), "causal")

    position = queries.start
    while position < queries.stop:
        begin, end = sees.document(position)
        p0, p1 = position, min(queries.stop, end) if sees.documents else queries.stop
        position = p1
        k0, k1 = max(keys.start, begin), min(keys.stop, end)
        # Queries that see any of these keys.
        p0, p1 = max(p0, k0 - sees.after), min(p1, k1 + sees.before)
        if p0 >= p1 or k0 >= k1:
            continue
        if p1 - 1 - sees.before <= k0:
            right_edge(p0, p1, k0, k1)
            continue
        for r0 in range(p0, p1, mask_rows):
            r1 = min(r0 + mask_rows, p1)
            left, common = max(k0, r0 - sees.before), max(k0, r1 - 1 - sees.before)
            right = min(k1, r1 + sees.after)
            if common < min(r0 + sees.after, right):
                add(r0, r1, left, common, "band")
                right_edge(r0, r1, common, right)
            else:
                add(r0, r1, left, right, "band")
    return found


@dataclass(frozen=True)
class Geometry:
    """A call of attention over sharded sequences, by what every rank knows.

    Attributes:
        q_sizes, k_sizes: rows of every rank.
    """

    q_sizes: tuple[int, ...]
    k_sizes: tuple[int, ...]
    layout: SequenceLayout
    sees: Visibility

    @property
    def q_spans(self) -> tuple[tuple[Span, ...], ...]:
        return spans_of(self.q_sizes, self.layout)

    @property
    def k_spans(self) -> tuple[tuple[Span, ...], ...]:
        return spans_of(self.k_sizes, self.layout)


@lru_cache(maxsize=4096)
def rectangles_between(geometry: Geometry, rank: int, source: int) -> tuple[Rectangle, ...]:
    """What the queries of `rank` see of the keys of `source`; adjacent rectangles are joined."""
    found = [
        rectangle
        for queries in geometry.q_spans[rank]
        for keys in geometry.k_spans[source]
        for rectangle in rectangles(queries, keys, geometry.sees)
    ]
    joined: list[Rectangle] = []
    for rectangle in found:
        while joined and (larger := _join(joined[-1], rectangle)):
            joined.pop()
            rectangle = larger
        joined.append(rectangle)
        if len(joined) > 2 and (triangle := _triangle(*joined[-3:])):
            joined[-3:] = [triangle]
    return tuple(joined)


def _join(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """One full rectangle in place of two with adjacent rows."""
    if a.kind == b.kind == "full":
        if a.queries == b.queries and a.keys[1] == b.keys[0]:
            return Rectangle(a.queries, (a.keys[0], b.keys[1]), "full")
        if a.keys == b.keys and a.queries[1] == b.queries[0]:
            return Rectangle((a.queries[0], b.queries[1]), a.keys, "full")
    return None


def _triangle(a: Rectangle, b: Rectangle, c: Rectangle) -> Rectangle | None:
    """One causal rectangle in place of two, and of the square between them.

    A rank's two chunks in the zigzag layout give these.
    """
    square = a.queries[1] - a.queries[0] == a.keys[1] - a.keys[0]
    if (a.kind, b.kind, c.kind) != ("causal", "full", "causal") or not square:
        return None
    if b.keys != a.keys or b.queries != c.queries:
        return None
    if (a.queries[1], a.keys[1]) != (c.queries[0], c.keys[0]):
        return None
    return Rectangle((a.queries[0], c.queries[1]), (a.keys[0], c.keys[1]), "causal")


def needed_rows(geometry: Geometry, ranks: Sequence[int], source: int) -> list[tuple[int, int]]:
    """For each span of `source`, the first row of keys that a query of `ranks` may see and the one
    after the last; (0, 0) if none. All seen rows lie between them, perhaps with some unseen ones.
    """
    sees = geometry.sees
    needed = []
    for keys in geometry.k_spans[source]:
        rows = [
            (max(sees.lo(q.start), keys.start), min(sees.hi(q.stop - 1), keys.stop))
            for rank in ranks
            for q in geometry.q_spans[rank]
            if q.length and geometry.sees.keys
        ]
        rows = [(first, last) for first, last in rows if first < last]
        shift = keys.row - keys.start
        needed.append(
            (min(r[0] for r in rows) + shift, max(r[1] for r in rows) + shift) if rows else (0, 0)
        )
    return needed
