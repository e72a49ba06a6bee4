"""Copies of a matrix by the programs of a kernel, over the link or within a device."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device.device_math import cdiv


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
