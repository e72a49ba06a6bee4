"""What kernels that add up partial products over ranks share: making tiles and adding up slots.

A tile of rank r's x_r @ w_r travels as a block of its own, row after row, into a slot for r. The
tile's owner adds up the W slots in rank order, in fp32, scales, adds bias and residual, and rounds
once.

Partial sums travel in fp32 if the result is fp32. For a result in bf16 or fp16 they are rounded to
their upper 24 bits: an error of 2^-16, against 2^-8 or 2^-11 of the result's own rounding, for a
quarter less traffic. Four numbers, a quarter of the row apart, make three words:

    word 0   number 3, bits  8-15 | number 0, bits 8-31         NaN stays NaN, infinity infinity;
    word 1   number 3, bits 16-23 | number 1, bits 8-31         numbers from 2^128 (1 - 2^-17) on
    word 2   number 3, bits 24-31 | number 2, bits 8-31         round to infinity

Words are stored and loaded as fp32 but never computed with. Numbers a quarter of the row apart are
held by one thread: in the layout of tensor cores it has the same columns of every quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels.device import splits, tiles
from weft.kernels.device.operands import contiguous, matrix, scales_of
from weft.kernels.engine.chips import Tiling
from weft.kernels.engine.fp8 import Scaling


@dataclass(frozen=True)
class Config:
    """How a kernel that adds up partial products is launched; the same on all ranks.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid.
        reduce_m: rows of a tile that are added up at a time.
        descriptors: whether operands that allow it are read by tensor descriptor.
    """

    tiling: Tiling
    programs: int
    reduce_m: int
    descriptors: bool


class Terms(NamedTuple):
    """A sum of products x (M, K) @ w (K, N) as kernels take it.

    Fields: `xs`, `ws` and `Ks` hold a Matrix, a Matrix and a K for each term; `row_scales` and
    `column_scales` are those of fp8 operands (one term).
    """

    xs: Any
    ws: Any
    Ks: Any
    row_scales: Any
    column_scales: Any


class Finish(NamedTuple):
    """out = scale * sum + bias + residual; `bias` (N,) and `residual`, laid out as out, or None."""

    scale: Any
    bias: Any
    residual: Any


@triton.jit
def product(
    terms,
    x_descs,  # of each term, or None
    w_descs,
    rows,  # (block_m,) of x, all inside
    start_m,  # the first of them, for the descriptor
    start_n,
    N,
    part,
    TILES: tl.constexpr,
    TERMS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    X_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
):
    """One tile of the sum of products, or part `part` of SPLIT of it: (block_m, block_n) fp32."""
    acc = tiles.zeros(TILES.block_m, TILES.block_n)
    for i in tl.static_range(TERMS):
        first_k, last_k = splits.part_of(terms.Ks[i], part, TILES.block_k, SPLIT)
        acc, _ = tiles.accumulate(
            acc, None, tiles.row_ptrs(terms.xs[i], rows), terms.xs[i].stride_n,
            x_descs[i], start_m, terms.ws[i], None, w_descs[i], None, start_n, N, first_k, 0,
            last_k, TILES, EVEN_K, X_TRANSPOSED, W_TRANSPOSED,
        )  # fmt: skip
    if terms.row_scales.ptr is not None:
        scales = terms.row_scales.ptr + rows.to(tl.int64) * terms.row_scales.stride
        acc = tiles.times_rows(acc, scales, rows >= 0)
    return tiles.times_columns(acc, terms.column_scales, start_n, N)


def row_words(columns: int, out_dtype: torch.dtype) -> int:
    """Four-byte words that a row of `columns` partial sums takes while it travels."""
    return columns * 3 // 4 if out_dtype.itemsize == 2 else columns


@triton.jit
def _bits(x):
    """fp32 as uint32, rounded to its upper 24 bits, ties away from zero; the lower 8 are noise."""
    bits = x.to(tl.uint32, bitcast=True)
    # The NaN of tensor cores, 0x7fffffff, would become -0.
    return tl.where(x == x, bits + 0x80, 0x7FC00000)


@triton.jit
def _word(x, last):
    """The upper 24 bits of x, fp32, below the lowest 8 bits of `last`."""
    return ((_bits(x) >> 8) | (last << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _unpacked(u, v, w):
    """The four numbers that these three words were made of."""
    u = u.to(tl.uint32, bitcast=True)
    v = v.to(tl.uint32, bitcast=True)
    w = w.to(tl.uint32, bitcast=True)
    last = ((u >> 24) << 8) | ((v >> 24) << 16) | ((w >> 24) << 24)
    return (
        (u << 8).to(tl.float32, bitcast=True),
        (v << 8).to(tl.float32, bitcast=True),
        (w << 8).to(tl.float32, bitcast=True),
        last.to(tl.float32, bitcast=True),
    )


@triton.jit
def store_rows(row_ptrs, acc, inside, ROW_WORDS: tl.constexpr):
    """Send rows of partial sums to row_ptrs (ROWS, 1): those `inside` (ROWS, 1), or all if None."""
    COLUMNS: tl.constexpr = acc.shape[1]
    if ROW_WORDS < COLUMNS:
        QUARTER: tl.constexpr = COLUMNS // 4
        ptrs = row_ptrs + tl.arange(0, QUARTER)[None, :]
        left, right = tiles.halves(acc)
        a, b = tiles.halves(left)
        c, d = tiles.halves(right)
        last = _bits(d)
        # One after the other: all three at once take more registers.
        tl.store(ptrs, _word(a, last >> 8), mask=inside)
        tl.store(ptrs + QUARTER, _word(b, last >> 16), mask=inside)
        tl.store(ptrs + 2 * QUARTER, _word(c, last >> 24), mask=inside)
    elif COLUMNS > 128:
        left, right = tiles.halves(acc)
        ptrs = row_ptrs + tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(ptrs, left, mask=inside)
        tl.store(ptrs + COLUMNS // 2, right, mask=inside)
    else:
        tl.store(row_ptrs + tl.arange(0, COLUMNS)[None, :], acc, mask=inside)


@triton.jit
def store_block(block_ptr, acc, ROW_WORDS: tl.constexpr):
    """Send a whole tile of partial sums."""
    rows = tl.arange(0, acc.shape[0])[:, None] * ROW_WORDS
    store_rows(block_ptr + rows, acc, None, ROW_WORDS)


@triton.jit
def sum_of_slots(
    part_ptr,  # of a tile in slot 0: its first row there
    slot_stride,  # words
    inside,  # (ROWS, 1), whether each row was written; None: all were
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Rows of a tile, added up over COUNT slots in order: (ROWS, COLUMNS) fp32."""
    rows = tl.arange(0, ROWS)[:, None] * ROW_WORDS
    if ROW_WORDS < COLUMNS:
        offs = rows + tl.arange(0, COLUMNS // 4)[None, :]
        a, b, c, d = _load_packed(part_ptr, offs, inside)
        for slot in tl.static_range(1, COUNT):
            next_a, next_b, next_c, next_d = _load_packed(
                part_ptr + slot * slot_stride, offs, inside
            )
            a += next_a
            b += next_b
            c += next_c
            d += next_d
        total = tiles.beside(tiles.beside(a, b), tiles.beside(c, d))
    else:
        offs = rows + tl.arange(0, COLUMNS)[None, :]
        total = tl.load(part_ptr + offs, mask=inside)
        for slot in tl.static_range(1, COUNT):
            total += tl.load(part_ptr + slot * slot_stride + offs, mask=inside)
    return total


@triton.jit
def _load_packed(part_ptr, offs, inside):
    QUARTER: tl.constexpr = offs.shape[1]
    u = tl.load(part_ptr + offs, mask=inside)
    v = tl.load(part_ptr + QUARTER + offs, mask=inside)
    w = tl.load(part_ptr + 2 * QUARTER + offs, mask=inside)
    return _unpacked(u, v, w)


@triton.jit
def finished(
    part_ptr,  # of a tile in slot 0: its first row there
    slot_stride,  # words
    finish,
    rows,  # of out
    inside_m,
    start_n,
    N,
    COLUMNS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WHOLE_TILES: tl.constexpr = True,  # whether rows outside have been written too
):
    """scale * (sum of the slots in rank order) + bias + residual, in fp32."""
    written = None if WHOLE_TILES else inside_m[:, None]
    ROWS: tl.constexpr = rows.shape[0]
    total = sum_of_slots(part_ptr, slot_stride, written, ROWS, COLUMNS, ROW_WORDS, WORLD_SIZE)
    total = tiles.with_bias(total * finish.scale, finish.bias, start_n, N)
    if finish.residual is not None:
        offs_n = start_n + tl.arange(0, COLUMNS)
        inside = inside_m[:, None] & (offs_n[None, :] < N)
        ptrs = finish.residual + rows.to(tl.int64)[:, None] * N + offs_n[None, :]
        total += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    return total


def terms_of(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], scaling: Scaling | None
) -> Terms:
    """The operands as kernels take them."""
    return Terms(
        tuple(matrix(x) for x in xs),
        tuple(matrix(w) for w in weights),
        tuple(x.shape[1] for x in xs),
        scales_of(scaling.rows if scaling else None),
        scales_of(scaling.columns[0] if scaling else None),
    )


def finish_of(scale: float, bias: torch.Tensor | None, residual: torch.Tensor | None) -> Finish:
    """Scale, bias and residual as kernels take them."""
    return Finish(scale, contiguous(bias), contiguous(residual))
