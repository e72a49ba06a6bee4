"""Tiles of attention: rows of a head, which of them see which, and the online softmax.

Legend: what a query sees is given by *positions* in the whole sequence; D is the width of a head.
Scores are multiplied by log2(e), so that exp2 serves, which the hardware has.

Softmax over blocks of keys, for M queries: `top` (M,) is the largest score so far (m of the
FlashAttention papers), `total` (M,) the sum of exp2(score - top) (their l), and `acc` (M, D) the
sum of exp2(score - top) * v. A query that has seen nothing has (-inf, 0, 0).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device.addresses import Constant
from weft.collectives.device.device_math import cdiv

LN_2 = Constant(0.6931471805599453)
LOG2_E = Constant(1.4426950408889634)


class Heads(NamedTuple):
    """A (B, H, rows, D) tensor, D contiguous: pointer and strides of batch, head and row."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_m: Any


class Sight(NamedTuple):
    """What a position sees: itself, `before` positions to its left and `after` to its right.

    It sees only its own document (`documents`: (limit, 2), the first token of each token's document
    and the one after its last; or None) and only the first `limit` tokens.
    """

    documents: Any
    before: Any
    after: Any
    limit: Any


class Interval(NamedTuple):
    """Tokens `begin` .. `end` - 1 of a span, of which a tile sees some.

    All of the tile sees all of `full` .. `full_end` - 1, which lie in whole blocks from `begin` on.
    """

    begin: Any
    full: Any
    full_end: Any
    end: Any


def heads_of(x: torch.Tensor) -> Heads:
    """A (B, H, rows, D) tensor as a kernel takes it."""
    x = x.resolve_neg()
    return Heads(x, *x.stride()[:3])


def contiguous_rows(*tensors: torch.Tensor) -> Any:
    """The tensors as kernels read them: rows contiguous and strides alike, copied if need be.

    Elements from one row to the next must fit 32 bits.
    """
    tensors = tuple(x.resolve_neg() for x in tensors)
    strides = tensors[0].stride()
    if all(x.stride() == strides for x in tensors) and strides[3] == 1 and strides[2] < 1 << 31:
        return tensors if len(tensors) > 1 else tensors[0]
    return contiguous_rows(*(x.clone(memory_format=torch.contiguous_format) for x in tensors))


def with_positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Queries and a scale above 0 that give the same scores: `softmax_step` needs one."""
    if scale == 0:
        return torch.zeros_like(q), 1.0
    return (-q, -scale) if scale < 0 else (q, scale)


# tl.max and tl.sum are jit functions of Triton's own (see `tiles.zeros`); tl.reduce is not.
@triton.jit
def row_max(x):
    """The largest of each row."""
    return tl.reduce(x, 1, tl.standard._elementwise_max)


@triton.jit
def row_sum(x):
    """The sum of each row."""
    return tl.reduce(x, 1, tl.standard._sum_combine)


@triton.jit
def head_ptr(heads, batch, head):
    """Address of row 0 of a head; batch and head are int64."""
    return heads.ptr + batch * heads.stride_b + head * heads.stride_h


@triton.jit
def load_rows(
    ptr, start, stop, stride, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """BLOCK rows of a matrix D wide, from row `start` on; 0 beyond column D and from row `stop` on.

    Each row's address is computed from its number in every iteration: offsets inside the block,
    which do not change, would stay in registers through the whole loop.
    """
    rows, columns = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows[:, None] < stop) & (columns[None, :] < D)
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def load_columns(ptr, start, stop, ROWS: tl.constexpr, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """(ROWS, BLOCK): in every row the numbers `start` .. of a vector; 0 from `stop` on.

    By one load with a number for every thread of WARPS warps. Of fewer, Triton 3.6 has each lane
    copy those of its own columns: 16 copies of 4 bytes, where BLOCK is 64, in place of one.
    """
    COPIES: tl.constexpr = max(1, min(ROWS, 32 * WARPS // BLOCK))
    columns = tl.broadcast_to((start + tl.arange(0, BLOCK))[None, :], (COPIES, BLOCK))
    held = tl.load(ptr + columns, mask=columns < stop, other=0.0)
    held = tl.broadcast_to(held.reshape(COPIES, 1, BLOCK), (COPIES, ROWS // COPIES, BLOCK))
    return held.reshape(ROWS, BLOCK)


@triton.jit
def visible(position, sees):
    """The first token that one at `position` sees, and the one after the last.

    Works on blocks of positions and on scalars.

    Example: before=2, after=0, limit=5: position 3 sees 1 .. 3, position 6 sees 4 .. 4.
    """
    first = tl.maximum(position - sees.before, 0)
    last = tl.minimum(position + sees.after + 1, sees.limit)
    if sees.documents is not None:
        # The two lie side by side, so one address serves both.
        document = sees.documents + 2 * tl.minimum(position, sees.limit - 1)
        first = tl.maximum(first, tl.load(document))
        last = tl.minimum(last, tl.load(document + 1))
    return first, last


@triton.jit
def seen_pairs(start, seen_start, seen_stop, sees, BLOCK: tl.constexpr, SEEN: tl.constexpr):
    """(BLOCK, SEEN): whether tokens from `start` on see those from `seen_start` to `seen_stop` - 1.

    Recomputed where it is used: otherwise its rows' bounds would be live through the whole loop.
    """
    rows, columns = start + tl.arange(0, BLOCK), seen_start + tl.arange(0, SEEN)
    first, last = visible(rows, sees)
    last = tl.minimum(last, seen_stop)
    return (columns[None, :] >= first[:, None]) & (columns[None, :] < last[:, None])


@triton.jit
def bounds(tile, sees):
    """What the first and the last token of a tile see (see `visible`)."""
    return visible(tile.position, sees), visible(tile.position + tile.length - 1, sees)


@triton.jit
def interval(ends, start, stop, BLOCK: tl.constexpr):
    """What a tile with the `bounds` `ends` sees of tokens start .. stop - 1: an Interval.

    Example: rows 8 .. 15 that see what is before them and themselves, so (0, 9) and (0, 16), tokens
    4 .. 31, BLOCK=2: (4, 4, 8, 16).
    """
    lowest, highest = ends
    begin, end = tl.maximum(lowest[0], start), tl.minimum(highest[1], stop)
    common, until = tl.maximum(highest[0], begin), tl.minimum(lowest[1], end)
    full = begin + cdiv(common - begin, BLOCK) * BLOCK
    full_end = full + tl.maximum(until - full, 0) // BLOCK * BLOCK
    return Interval(begin, full, full_end, end)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """(top, total, acc) of queries that have seen no key yet."""
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.full((ROWS,), 0.0, dtype=tl.float32)
    return top, total, tl.full((ROWS, BLOCK_D), 0.0, dtype=tl.float32)


@triton.jit
def softmax_step(top, total, products, scale):
    """Take in a block of keys: the new (top, total), its weights, and the rescaling of `acc`.

    `products` times `scale` > 0 are the scores: one multiply-add makes the exponent of a weight.
    """
    new_top = tl.maximum(top, row_max(products) * scale)
    # A row that has seen nothing keeps -inf; -inf - -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(products * scale - base[:, None])
    rescale = tl.exp2(top - base)
    return new_top, total * rescale + row_sum(weights), weights, rescale


@triton.jit
def normalized(top, total, acc):
    """The attention output and its log-sum-exp in base 2; 0 and -inf where nothing was seen."""
    total = tl.where(total == 0, 1.0, total)
    return acc / total[:, None], top + tl.log2(total)
