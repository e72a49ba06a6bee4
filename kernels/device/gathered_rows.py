"""Where a tile finds its rows of the gathered matrix, and when they are there.

A rank counts rows from its own first one on, around the gathered matrix. Its own it reads in place;
those of others from `gathered`, once they have come (`weft.kernels.device.gathers`), or at their
owners, after a wait for the publish kernels of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.device_math import cdiv, element
from weft.kernels.device import gathers


class Own(NamedTuple):
    """This rank's shard: pointer to its first element, elements from row to row."""

    ptr: Any
    pitch: Any


class TileRows(NamedTuple):
    """The rows that a tile multiplies, (BLOCK_M,) each.

    Fields: pointers to the rows, and to their scales (without scales the same again: Triton 3.6
    cannot return None); their `numbers` in the gathered matrix, and which are `inside` of it;
    the `first` and `last` one, counted from the rank's own first row.
    """

    ptrs: Any
    scales: Any
    numbers: Any
    inside: Any
    first: Any
    last: Any


@triton.jit
def own_shard(shards, x, IN_PLACE: tl.constexpr):
    """This rank's shard as Own: x (a Matrix) itself, or as it was published."""
    ptr, pitch = x.ptr, x.stride_m
    if not IN_PLACE:
        link, rank, dtype = shards.link, shards.rank, x.ptr.dtype.element_ty
        ptr = signals.half_ptr(link.buffer_ptrs, rank, shards.generation, link.half_bytes, dtype)
        pitch = shards.pitch
    return Own(ptr, pitch)


@triton.jit
def rows_of_tile(
    shards,
    own,  # Own
    own_scales,  # Scales of the same rows
    gathered,  # Rows
    first,
    WORLD_SIZE: tl.constexpr,
    DIRECT: tl.constexpr,  # whether peers' rows are read at their owners
    BLOCK_M: tl.constexpr,
):
    """The rows from `first` on, counted from the rank's own first one, as TileRows.

    Past the end the last row is repeated: the first ones may not have arrived yet.
    """
    SCALED: tl.constexpr = own_scales.ptr is not None
    offsets, M = shards.offsets, shards.offsets[WORLD_SIZE]
    begin = element(offsets, shards.rank, WORLD_SIZE)
    own_rows = element(offsets, shards.rank + 1, WORLD_SIZE + 1) - begin
    inside = first + tl.arange(0, BLOCK_M) < M
    cyclic = tl.minimum(first + tl.arange(0, BLOCK_M), M - 1)
    is_own = cyclic < own_rows
    numbers = cyclic + begin
    numbers = tl.where(numbers >= M, numbers - M, numbers)
    nearby = tl.where(is_own, cyclic, 0).to(tl.int64)
    ptrs = own.ptr + nearby * own.pitch
    scales = own_scales.ptr + nearby * own_scales.stride if SCALED else ptrs
    if DIRECT:
        ptrs, scales = _peers_rows(shards, ptrs, scales, numbers, SCALED, WORLD_SIZE)
    else:
        wide = numbers.to(tl.int64)
        ptrs = tl.where(is_own, ptrs, gathered.ptr + wide * shards.columns)
        scales = tl.where(is_own, scales, gathered.scales + wide) if SCALED else ptrs
    return TileRows(ptrs, scales, numbers, inside, first, tl.minimum(first + BLOCK_M, M) - 1)


@triton.jit
def _peers_rows(shards, ptrs, scales, numbers, SCALED: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """`ptrs` and `scales`, those of peers' rows as these lie at their owners."""
    link, generation, offsets = shards.link, shards.generation, shards.offsets
    dtype: tl.constexpr = ptrs.dtype.element_ty
    for source in tl.static_range(WORLD_SIZE):
        theirs = (numbers >= offsets[source]) & (numbers < offsets[source + 1])
        theirs &= source != shards.rank
        row = tl.where(theirs, numbers - offsets[source], 0).to(tl.int64)
        half = signals.half_ptr(link.buffer_ptrs, source, generation, link.half_bytes, dtype)
        ptrs = tl.where(theirs, half + row * shards.pitch, ptrs)
        if SCALED:
            shown = gathers.scales_ptr(link, source, generation, shards.scales_at)
            scales = tl.where(theirs, shown + row, scales)
    return ptrs, scales if SCALED else ptrs


@triton.jit
def tile_rows(shards, WORLD_SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many rows of tiles there are of the own shard, and of those after and before it."""
    begin = element(shards.offsets, shards.rank, WORLD_SIZE)
    end = element(shards.offsets, shards.rank + 1, WORLD_SIZE + 1)
    own, after = cdiv(end - begin, BLOCK_M), cdiv(shards.offsets[WORLD_SIZE] - end, BLOCK_M)
    return own, after, cdiv(begin, BLOCK_M)


@triton.jit
def own_or_fetched_rows(
    shards,
    own_scales,  # Scales of the own rows
    gathered,  # Rows
    tile_m,  # of the `tile_rows`, the own ones first, then those after and before them
    WORLD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The rows of a tile that has own rows or none: TileRows, with numbers for pointers.

    Returns also whether they are own, and the tile's first row in x, or else in `gathered`. The
    last tile of the rows before the own ones ends with them, so that the first one may begin
    before row 0.
    """
    SCALED: tl.constexpr = own_scales.ptr is not None
    offsets, M = shards.offsets, shards.offsets[WORLD_SIZE]
    begin = element(offsets, shards.rank, WORLD_SIZE)
    end = element(offsets, shards.rank + 1, WORLD_SIZE + 1)
    own, after, before = tile_rows(shards, WORLD_SIZE, BLOCK_M)
    is_own, is_after = tile_m < own, tile_m < own + after
    start = begin - (own + after + before - tile_m) * BLOCK_M
    start = tl.where(is_after, end + (tile_m - own) * BLOCK_M, start)
    start = tl.where(is_own, begin + tile_m * BLOCK_M, start)
    stop = tl.minimum(start + BLOCK_M, tl.where(is_own, end, tl.where(is_after, M, begin)))
    numbers = start + tl.arange(0, BLOCK_M)
    inside = (numbers >= 0) & (numbers < stop)
    # Counted from the rank's own first row.
    first = tl.maximum(start, 0) - begin
    first = tl.where(first < 0, first + M, first)
    last = first + stop - tl.maximum(start, 0) - 1
    row = start - tl.where(is_own, begin, 0)
    scales = numbers
    if SCALED:
        nearby = tl.where(is_own, row + tl.arange(0, BLOCK_M), 0).to(tl.int64)
        scales = own_scales.ptr + nearby * own_scales.stride
        scales = tl.where(is_own, scales, gathered.scales + numbers.to(tl.int64))
    return TileRows(numbers, scales, numbers, inside, first, last), is_own, row


@triton.jit
def wait_for_tile_rows(shards, rows, part, FETCH: tl.constexpr):
    """Wait until `part` of a tile's `rows` (TileRows) is gathered. False on a time-out."""
    W: tl.constexpr = FETCH.world_size
    arrived = True
    begin = 0  # of a shard, counted from the rank's own first row
    for step in range(W):
        source = (shards.rank + step) % W
        length = element(shards.offsets, source + 1, W + 1)
        length -= element(shards.offsets, source, W)
        low = tl.maximum(rows.first, begin) - begin
        high = tl.minimum(rows.last + 1, begin + length) - begin
        if (step > 0) & (low < high):
            arrived &= gathers.wait_for_rows_of(shards, source, low, high, part, FETCH)
        begin += length
    return arrived
