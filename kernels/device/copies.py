"""Copies of a matrix by the programs of a kernel, over the link or within a device; and the words
by which copy engines tell of theirs (`weft.kernels.matmul.copy_engines`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device.addresses import slot_ptr
from weft.collectives.device.device_math import cdiv, fp8_bits, fp8_scale
from weft.collectives.device.signals import mark_local


@triton.jit
def copy_block(
    out_ptr,
    in_ptr,
    rows,
    columns,
    stride_om,
    stride_im,
    stride_in,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[:rows, :columns] = in[:rows, :columns], where rows of `out` are contiguous.

    The next block is loaded while one is stored.
    """
    across = tl.maximum(cdiv(columns, BLOCK_N), 1)
    place = _place_of(0, across, rows, columns, BLOCK_M, BLOCK_N)
    block = tl.load(_ptrs_to(in_ptr, place, stride_im, stride_in), mask=place.inside)
    for number in range((cdiv(rows, BLOCK_M) * across).to(tl.int32)):
        place = _place_of(number + 1, across, rows, columns, BLOCK_M, BLOCK_N)
        following = tl.load(_ptrs_to(in_ptr, place, stride_im, stride_in), mask=place.inside)
        place = _place_of(number, across, rows, columns, BLOCK_M, BLOCK_N)
        tl.store(_ptrs_to(out_ptr, place, stride_om, 1), block, mask=place.inside)
        block = following


@triton.jit
def copy_one_block(
    out_ptr,
    in_ptr,
    rows,
    columns,
    stride_om,
    stride_im,
    stride_in,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`copy_block` of no more than a block, which may be as large as registers allow."""
    place = _place_of(0, 1, rows, columns, BLOCK_M, BLOCK_N)
    block = tl.load(_ptrs_to(in_ptr, place, stride_im, stride_in), mask=place.inside)
    tl.store(_ptrs_to(out_ptr, place, stride_om, 1), block, mask=place.inside)


@triton.jit
def quantize_block(
    out_ptr,  # of bytes
    scales_ptr,
    in_ptr,
    rows,
    columns,
    stride_om,
    stride_im,
    stride_in,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[:rows, :columns] = in over the scale of its row, in e4m3, as `fp8.quantized` has them."""
    across = tl.maximum(cdiv(columns, BLOCK_N), 1)
    for number in range(cdiv(rows, BLOCK_M).to(tl.int32)):
        first = number * across
        largest = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for i in range(first, first + across):
            place = _place_of(i, across, rows, columns, BLOCK_M, BLOCK_N)
            block = tl.load(_ptrs_to(in_ptr, place, stride_im, stride_in), mask=place.inside)
            values = tl.where(place.inside, tl.abs(block.to(tl.float32)), 0.0)
            largest = tl.maximum(largest, values)
        scales = fp8_scale(tl.reduce(largest, 1, tl.standard._elementwise_max))
        offs_m = tl.cast(number, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(scales_ptr + offs_m, scales, mask=offs_m < rows)
        for i in range(first, first + across):
            place = _place_of(i, across, rows, columns, BLOCK_M, BLOCK_N)
            block = tl.load(_ptrs_to(in_ptr, place, stride_im, stride_in), mask=place.inside)
            bits = fp8_bits(block.to(tl.float32) / scales[:, None])
            tl.store(_ptrs_to(out_ptr, place, stride_om, 1), bits, mask=place.inside)


class _Place(NamedTuple):
    """Where a block is: its first row and column, and a mask of what is inside the matrix."""

    row: Any
    column: Any
    inside: Any


@triton.jit
def _place_of(number, across, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The _Place of a block. Blocks go along the rows.

    What is compared are numbers of 32 bits within the block: of rows of the matrix, a thread would
    keep two registers for each.
    """
    row = tl.cast(number // across, tl.int64) * BLOCK_M
    column = number % across * BLOCK_N
    left = tl.minimum(rows - row, BLOCK_M).to(tl.int32)
    inside = (tl.arange(0, BLOCK_M)[:, None] < left) & (
        tl.arange(0, BLOCK_N)[None, :] < columns - column
    )
    return _Place(row, column, inside)


@triton.jit
def _ptrs_to(ptr, place, stride_m, stride_n):
    """Pointers to the elements of a block."""
    offs_m = tl.arange(0, place.inside.shape[0]).to(tl.int64)
    offs_n = tl.arange(0, place.inside.shape[1]).to(tl.int64)
    ptr += place.row * stride_m + tl.cast(place.column, tl.int64) * stride_n
    return ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n


@triton.jit
def copied_by_engine(generation):
    """What the word of a chunk holds once a copy engine has fetched it in this call."""
    return (generation.to(tl.int64) << 32) + 1


@triton.jit
def expect_engines(signal_ptrs, rank, generation, WORLD_SIZE: tl.constexpr, CHUNKS: tl.constexpr):
    """Begin the words (1, peer, chunk) of a call whose shards copy engines will fetch."""
    chunks = tl.arange(0, CHUNKS)
    for peer in range(WORLD_SIZE):
        slots = slot_ptr(signal_ptrs, rank, WORLD_SIZE, 1, peer, chunks)
        mark_local(slots, copied_by_engine(generation) - 1)
