"""Where tokens lie and who sees whom: the rectangles of a call against a plain mask."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from weft.collectives.ranks.chunks import chunk_sizes
from weft.kernels import from_zigzag, to_zigzag, zigzag_sizes
from weft.kernels.flash import ring_tables
from weft.kernels.flash.geometry import (
    UNBOUNDED,
    Geometry,
    Rectangle,
    Span,
    Visibility,
    needed_rows,
    rectangles,
    rectangles_between,
    spans_of,
)


def mask_of(queries: Span, keys: Span, sees: Visibility) -> torch.Tensor:
    mask = torch.zeros(queries.length, keys.length, dtype=torch.int)
    for a in range(queries.length):
        i = queries.start + a
        for b in range(keys.length):
            j = keys.start + b
            near = -sees.before <= j - i <= sees.after
            together = sees.documents is None or not any(
                (i < boundary) != (j < boundary) for boundary in sees.documents
            )
            mask[a, b] = near and together
    return mask


def covered(found: Iterable[Rectangle], rows: int, columns: int, sees: Visibility) -> torch.Tensor:
    """How often the rectangles cover each pair of a query's row and a key's."""
    count = torch.zeros(rows, columns, dtype=torch.int)
    for rectangle in found:
        (q0, q1), (k0, k1) = rectangle.queries, rectangle.keys
        assert 0 <= q0 < q1 <= rows
        assert 0 <= k0 < k1 <= columns
        ones = torch.ones(q1 - q0, k1 - k0, dtype=torch.int)
        if rectangle.kind == "causal":
            ones = ones.tril()
        elif rectangle.kind == "band":
            distance = torch.arange(k1 - k0) - torch.arange(q1 - q0).unsqueeze(1) - rectangle.shift
            ones = ((distance >= -sees.before) & (distance <= sees.after)).int()
        count[q0:q1, k0:k1] += ones
    return count


def random_visibility(rng: random.Random, length: int) -> Visibility:
    reach = lambda: rng.choice([UNBOUNDED, rng.randint(0, 5), rng.randint(0, length)])  # noqa: E731
    documents = None
    if rng.random() < 0.4:
        cuts = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 4)))
        documents = (0, *cuts, length)
    return Visibility(length, reach(), reach(), documents)


@pytest.mark.parametrize("seed", range(20))
def test_rectangles_cover_each_visible_pair_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        length = rng.randint(1, 40)
        sees = random_visibility(rng, length)
        spans = []
        for _ in range(2):
            start = rng.randint(0, length - 1)
            spans.append(Span(start, rng.randint(0, 9), rng.randint(0, length - start)))
        queries, keys = spans
        if sees.documents is None and rng.random() < 0.3:  # more queries than keys
            queries = Span(queries.start, queries.row, queries.length + 7)
        found = rectangles(queries, keys, sees, rng.randint(1, 9))
        rows, columns = (span.row + span.length for span in (queries, keys))
        count = covered(found, rows, columns, sees)
        assert torch.equal(count[queries.row :, keys.row :], mask_of(queries, keys, sees)), (
            spans, sees
        )  # fmt: skip
        assert count.sum() == count[queries.row :, keys.row :].sum()


def test_unmasked_and_causal_calls_are_few_rectangles() -> None:
    sees = Visibility(4096, after=0)
    geometry = Geometry((2048, 2048), (2048, 2048), "zigzag", sees)
    kinds = [
        [(p.kind, p.queries, p.keys) for p in rectangles_between(geometry, *pair)]
        for pair in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    own = [("causal", (0, 2048), (0, 2048))]
    assert kinds == [
        own,
        [("full", (1024, 2048), (0, 2048))],
        [("full", (0, 2048), (0, 1024))],
        own,
    ]
    full = Geometry((2048, 2048), (2048, 2048), "zigzag", Visibility(4096))
    assert [p.kind for p in rectangles_between(full, 0, 1)] == ["full"]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_joined_rectangles_cover_each_visible_pair_once(layout: str) -> None:
    rng = random.Random(layout)
    for _ in range(100):
        W, length = rng.randint(1, 4), rng.randint(1, 40)
        sizes = tuple((zigzag_sizes if layout == "zigzag" else chunk_sizes)(length, W))
        sees = rng.choice([Visibility(length, after=0), random_visibility(rng, length)])
        geometry = Geometry(sizes, sizes, layout, sees)
        for rank in range(W):
            for source in range(W):
                mask = torch.cat([
                    torch.cat([mask_of(q, k, sees) for k in geometry.k_spans[source]], 1)
                    for q in geometry.q_spans[rank]
                ])  # fmt: skip
                found = rectangles_between(geometry, rank, source)
                assert torch.equal(covered(found, *mask.shape, sees), mask), (geometry, rank)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_needed_rows_hold_all_that_is_seen(layout: str) -> None:
    rng = random.Random(layout)
    for _ in range(200):
        W, length = rng.randint(1, 4), rng.randint(1, 40)
        sizes = zigzag_sizes(length, W) if layout == "zigzag" else chunk_sizes(length, W)
        geometry = Geometry(tuple(sizes), tuple(sizes), layout, random_visibility(rng, length))
        for rank in range(W):
            for source in range(W):
                needed = needed_rows(geometry, (rank,), source)
                for rectangle in rectangles_between(geometry, rank, source):
                    first, last = rectangle.keys
                    held = sum(max(0, min(b, last) - max(a, first)) for a, b in needed)
                    assert held == last - first


def test_zigzag_and_back() -> None:
    for W in (1, 2, 3, 5):
        for length in (0, 1, 7, 4 * W, 31):
            x = torch.arange(length).view(1, length, 1)
            there = to_zigzag(x, W, 1)
            assert torch.equal(from_zigzag(there, W, 1), x)
            assert sum(zigzag_sizes(length, W)) == length
            parts = there.split(zigzag_sizes(length, W), 1)
            chunks = x.split(chunk_sizes(length, 2 * W), 1)
            for r, part in enumerate(parts):
                assert torch.equal(part, torch.cat([chunks[r], chunks[-1 - r]], 1))


def test_sizes_that_are_not_the_layouts() -> None:
    with pytest.raises(ValueError, match=r"10 tokens lie on 2 ranks as \[4, 6\], got \[5, 5\]"):
        spans_of((5, 5), "zigzag")


def test_tables_of_documents_are_kept_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cpu = 1 << 19, torch.device("cpu")
    monkeypatch.setattr(ring_tables, "_kept", {})
    monkeypatch.setattr(ring_tables, "_MOST_BYTES", 20 << 20)  # twice 8 MiB, and what lies beside

    def tables(boundary: int) -> torch.Tensor | None:
        sees = Visibility(2 * rows, documents=(0, boundary, 2 * rows))
        geometry = Geometry((rows, rows), (rows, rows), "contiguous", sees)
        return ring_tables.tables(geometry, 0, cpu)[1].documents

    first = [tables(boundary) for boundary in (1, 2, 3)]
    assert first[1] is tables(2) and first[2] is tables(3)
    assert len(ring_tables._kept) == 2
    again = tables(1)
    assert again is not first[0] and again is tables(1)
    assert torch.equal(again, first[0])  # type: ignore[arg-type]
    assert len(ring_tables._kept) == 2
