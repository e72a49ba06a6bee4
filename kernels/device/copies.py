"""Copies of a matrix by the programs of a kernel, over the link or within a device; and the words
by which copy engines tell of theirs (`weft.kernels.matmul.copy_engines`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device.addresses import slot_ptr
from weft.collectives.device.device_math import cdiv, fp8_bits
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

    The next block is loaded while one is stored, which keeps a link busy.
    """
    across = tl.maximum(cdiv(columns, BLOCK_N), 1)
    blocks = (cdiv(rows, BLOCK_M) * across).to(tl.int32)
    block = _block_of(in_ptr, 0, across, rows, columns, stride_im, stride_in, BLOCK_M, BLOCK_N)
    for number in range(blocks):
        following = _block_of(
            in_ptr, number + 1, across, rows, columns, stride_im, stride_in, BLOCK_M, BLOCK_N
        )
        offs_m, offs_n, inside = _place_of(number, across, rows, columns, BLOCK_M, BLOCK_N)
        tl.store(out_ptr + offs_m[:, None] * stride_om + offs_n[None, :], block, mask=inside)
        block = following


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
        largest = tl.full((BLOCK_M, BLOCK_N), 1.1754943508222875e-38, tl.float32)
        for i in range(first, first + across):
            block = _block_of(
                in_ptr, i, across, rows, columns, stride_im, stride_in, BLOCK_M, BLOCK_N
            )
            place = _place_of(i, across, rows, columns, BLOCK_M, BLOCK_N)
            values = tl.where(place[2], tl.abs(block.to(tl.float32)), 0.0)
            largest = tl.maximum(largest, values)
        scales = tl.reduce(largest, 1, tl.standard._elementwise_max) / 448.0
        offs_m = _place_of(first, across, rows, columns, BLOCK_M, BLOCK_N)[0]
        tl.store(scales_ptr + offs_m, scales, mask=offs_m < rows)
        for i in range(first, first + across):
            block = _block_of(
                in_ptr, i, across, rows, columns, stride_im, stride_in, BLOCK_M, BLOCK_N
            )
            place = _place_of(i, across, rows, columns, BLOCK_M, BLOCK_N)
            bits = fp8_bits(block.to(tl.float32) / scales[:, None])
            into = out_ptr + offs_m[:, None] * stride_om + place[1][None, :]
            tl.store(into, bits, mask=place[2])


@triton.jit
def _place_of(number, across, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a block, and a mask of those inside. Blocks go along the rows."""
    offs_m = (number // across) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    offs_n = (number % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    return offs_m, offs_n, (offs_m[:, None] < rows) & (offs_n[None, :] < columns)


@triton.jit
def _block_of(
    in_ptr,
    number,
    across,
    rows,
    columns,
    stride_m,
    stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m, offs_n, inside = _place_of(number, across, rows, columns, BLOCK_M, BLOCK_N)
    in_ptrs = in_ptr + offs_m[:, None] * stride_m + offs_n[None, :].to(tl.int64) * stride_n
    return tl.load(in_ptrs, mask=inside)


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
