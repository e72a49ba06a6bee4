"""Heads assigned to ranks, and results sent home: what the kernels of ulysses_attention share.

Legend as in `ring_keys`; rank r holds n_r rows of queries of B * H heads, and computes the heads
first .. first + count - 1 (torch.chunk's rule) of the tokens of all ranks, with the key heads that
they use. The half of this generation on every rank holds, after its keys, *areas*: what it
publishes, and what its peers store there. Offsets of areas are the same on all ranks.

    area of rows      [heads] x [n_r] x PITCH         queries, out, gradients of both
    area of numbers   [heads] x [n_r]        fp32     lse, delta

Tiles of one owner's tokens have the same numbers on all ranks, as *units*: by head, then batch,
then tile. Unit u of owner d is made by number (u + d * stagger) % P of the P programs that compute,
on the rank that has the head. A rank's units are consecutive, so that its programs have equally
many; and what program p of the owner collects was made by program p of each peer.

Protocol of results: for the owners rank+1, rank+2, .., rank: make the units; store them in the
owner's area; signal the word (0, rank, program) of its pad, even if there was nothing to make
(release at system scope). At the end wait for the words (0, r, program) of all peers r (acquire),
and copy what they stored, or add it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from weft.kernels.device import tiles
from weft.kernels.device.copies import copy_one_block
from weft.kernels.flash.geometry import Geometry, Span
from weft.kernels.flash.ring_call import area_ptr, compute_program, head_of, pitch_of
from weft.kernels.flash.ring_tables import count_rows, count_tiles, shard_tile

_LINE_BYTES = 128


def heads_at(rank: int, H: int, world_size: int) -> range:
    """The heads that `rank` computes: torch.chunk's rule."""
    share = -(-H // world_size)
    return range(min(rank * share, H), min((rank + 1) * share, H))


def kv_range(heads: range, H: int, H_kv: int) -> range:
    """The key heads that the query heads `heads` use.

    Example: heads 3 .. 5 of 8, on 4 key heads: 1 .. 2.
    """
    share = H // H_kv
    return range(heads.start // share, -(-heads.stop // share)) if heads else range(0)


def offsets_of(nbytes: Sequence[int]) -> list[int]:
    """Where areas of so many bytes begin, in whole cache lines, and where the last one ends."""
    return [0, *accumulate(-(-each // _LINE_BYTES) * _LINE_BYTES for each in nbytes)]


def rows_bytes(x: torch.Tensor, geometry: Geometry) -> int:
    """Size of an area of rows for the largest shard of x (B, H, n, D)."""
    B, H, _, D = x.shape
    return B * H * max(geometry.q_sizes) * pitch_of(D, x.dtype) * x.dtype.itemsize


def numbers_bytes(x: torch.Tensor, geometry: Geometry) -> int:
    """Size of an area of fp32 numbers, one for each row of x (B, H, n, D)."""
    return x.shape[0] * x.shape[1] * max(geometry.q_sizes) * 4


def stagger_of(spans: Sequence[Sequence[Span]], heads: int, block: int) -> int:
    """Units of a rank with `heads` heads (B * count) in the largest of the shards."""
    return heads * max(sum(-(-span.length // block) for span in held) for held in spans)


@triton.jit
def own_heads(rank, H, SHAPE: tl.constexpr):
    """The first head of `rank`, and the one after its last."""
    share = tiles.cdiv(H, SHAPE.world_size)
    return tl.minimum(rank * share, H), tl.minimum((rank + 1) * share, H)


@triton.jit
def first_unit(begin, shift, SHAPE: tl.constexpr):
    """The first unit from `begin` on that is this program's; the next one is P later."""
    program, programs = compute_program(SHAPE)
    return begin + tiles.first_of(begin + shift, program, programs)


@triton.jit
def unit_of(unit, B, count):
    """Head, batch and tile of a unit, where a head of a batch has `count` tiles.

    All are int32: a division of int64 is a function call, around which registers are saved.
    """
    of_head = unit // count
    return of_head // B, of_head % B, unit % count


@triton.jit
def query_tile(unit, owner, B, H, n, count, ring, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of `owner`'s n queries that a unit is: Head, TokenTile, and row of the head's first.

    The last tile comes first: in causal attention its queries see the most.
    """
    head, batch, number = unit_of(unit, B, count)
    tile = shard_tile(ring.table, owner, count - 1 - number, SHAPE.spans, BLOCK)
    return head_of(batch, head, H, ring), tile, tl.cast(batch * H + head, tl.int64) * n


@triton.jit
def place_of_results(own_ptr, offset, owner, at, width: tl.constexpr, pitch: tl.constexpr, ring):
    """Where results for row `at` of `owner` go, and the stride of rows: here, or to its area."""
    if owner == ring.rank:
        to, stride = own_ptr + at * width, tl.cast(width, tl.int32)
    else:
        to = area_ptr(ring, owner, offset, own_ptr.dtype.element_ty) + at * pitch
        stride = tl.cast(pitch, tl.int32)
    return to, stride


@triton.jit
def collect_rows(
    out_ptr,  # (B, H, n, D)
    area,  # of rows
    numbers_ptr,  # (B, H, n) fp32, or None
    numbers,  # area of numbers, or None
    ring,
    B,
    H,
    stagger,
    SHAPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the units of the rank's own tokens that this program's namesakes made of other heads."""
    SPANS: tl.constexpr = SHAPE.spans
    D: tl.constexpr = SHAPE.head_dim
    table, rank = ring.table, ring.rank
    first, last = own_heads(rank, H, SHAPE)
    n, count = count_rows(table, rank, SPANS), count_tiles(table, rank, SPANS, BLOCK)
    programs = compute_program(SHAPE)[1]
    for unit in range(first_unit(0, rank * stagger, SHAPE), H * B * count, programs):
        head, tile, at = query_tile(unit, rank, B, H, n, count, ring, SHAPE, BLOCK)
        if (head.q < first) | (head.q >= last):
            at += tile.row
            copy_one_block(
                out_ptr + at * D, area + at * SHAPE.pitch, tile.length, D, D, SHAPE.pitch, 1,
                BLOCK, SHAPE.block_d,
            )  # fmt: skip
            if numbers is not None:
                rows = tl.arange(0, BLOCK)
                values = tl.load(numbers + at + rows, mask=rows < tile.length)
                tl.store(numbers_ptr + at + rows, values, mask=rows < tile.length)
