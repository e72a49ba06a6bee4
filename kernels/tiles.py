"""Tile arithmetic shared by the fused kernels.

Sizes: an output of (M, N) is cut into tiles of (BLOCK_M, BLOCK_N), the contraction into steps of
BLOCK_K. Tiles at the edge read rows and columns modulo the size, so that the loop over K needs a
mask for its last step at most, and nothing of theirs outside the output is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device_math import cdiv, rounded
from weft.collectives.device_math import element as element
from weft.collectives.signals import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


# Triton's own tl.zeros is a kernel: interpreted only if triton was imported that way, and torch may
# have imported it before.
@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """An empty sum: (BLOCK_M, BLOCK_N) fp32."""
    return tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile number `tile`, walking down GROUP_M rows before the next column.

    Tiles that run together then share rows of one operand and columns of the other in L2.

    Example: 3 x 2 tiles, GROUP_M=2: tiles 0..5 are (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    group = tile // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile - group * GROUP_M * tiles_n
    return first_m + inside % rows, inside // rows


@triton.jit
def wrapped(start, size, BLOCK: tl.constexpr):
    """The BLOCK indices from `start` on, modulo `size`: always inside."""
    return (start + tl.arange(0, BLOCK)) % size


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; fp32 operands are not rounded to tf32."""
    if _INTERPRETED:
        # The interpreter holds bf16 as integers and would multiply those.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def accumulate(
    acc,  # (BLOCK_M, BLOCK_N) fp32
    a_ptr,
    b_ptr,
    rows,  # (BLOCK_M,) of a
    columns,  # (BLOCK_N,) of b
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """acc + a[rows, :K] @ b[:K, columns]. Any strides; K may be 0."""
    offs_k = tl.arange(0, BLOCK_K)
    wide_k = offs_k.to(tl.int64)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_am + wide_k[None, :] * stride_ak
    b_ptrs = b_ptr + wide_k[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    step_b = tl.cast(stride_bk, tl.int64) * BLOCK_K
    for k in range(cdiv(K, BLOCK_K)):
        if EVEN_K:
            a, b = tl.load(a_ptrs), tl.load(b_ptrs)
        else:
            left = K - k * BLOCK_K
            a = tl.load(a_ptrs, mask=offs_k[None, :] < left, other=0.0)
            b = tl.load(b_ptrs, mask=offs_k[:, None] < left, other=0.0)
        acc = dot(a, b, acc)
        a_ptrs += step_a
        b_ptrs += step_b
    return acc


@triton.jit
def read_described(desc, row, column, TRANSPOSED: tl.constexpr):
    """The block at (row, column) of a matrix, given a descriptor of it or of its transpose."""
    # One return: Triton's compiler looks at what follows a return in a branch, too.
    return desc.load([column, row]).T if TRANSPOSED else desc.load([row, column])


@triton.jit
def accumulate_described(
    acc,  # (BLOCK_M, BLOCK_N) fp32
    a_desc,  # of a (M, K), or of its transpose if A_TRANSPOSED
    b_desc,  # of b (K, N), or of its transpose if B_TRANSPOSED
    start_m,
    start_n,
    K,
    BLOCK_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """`accumulate` through tensor descriptors, which read zeros outside the tensor."""
    for k in range(cdiv(K, BLOCK_K)):
        start_k = k * BLOCK_K
        a = read_described(a_desc, start_m, start_k, A_TRANSPOSED)
        b = read_described(b_desc, start_k, start_n, B_TRANSPOSED)
        acc = dot(a, b, acc)
    return acc


@triton.jit
def accumulate_half_described(
    acc,  # (BLOCK_M, BLOCK_N) fp32
    a_ptr,
    b_desc,  # of b, or of its transpose if B_TRANSPOSED
    rows,  # (BLOCK_M,) of a
    first_k,  # row of b that goes with column 0 of a
    start_n,
    K,
    stride_am,
    stride_ak,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
):
    """acc + a[rows, :K] @ b[first_k:first_k + K, columns], a by pointers, b by descriptor.

    Unless EVEN_K, b must end with row first_k + K: the last step reads beyond, where zeros are.
    """
    offs_k = tl.arange(0, BLOCK_K)
    wide_k = offs_k.to(tl.int64)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * stride_am + wide_k[None, :] * stride_ak
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    for k in range(cdiv(K, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        start_k = tl.cast(first_k + k * BLOCK_K, tl.int32)
        b = read_described(b_desc, start_k, start_n, B_TRANSPOSED)
        acc = dot(a, b, acc)
        a_ptrs += step_a
    return acc


@triton.jit
def block_offsets(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets inside a tile that is kept on its own: its rows one after another, no padding."""
    return tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def halves(values):
    """The left and the right half of the columns.

    Stores go by halves of wide tiles: the addresses and masks of a whole one, 128 x 256, do not fit
    beside it in registers (255 and 104 bytes of spills on sm_100; by halves 202 and none).
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    return tl.split(values.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))


@triton.jit
def store_block(block_ptr, acc):
    """Keep a tile on its own, as `block_offsets` says."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    if COLUMNS > 128:
        left, right = halves(acc)
        rows = tl.arange(0, ROWS)[:, None] * COLUMNS
        columns = tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(block_ptr + rows + columns, left)
        tl.store(block_ptr + rows + columns + COLUMNS // 2, right)
    else:
        tl.store(block_ptr + block_offsets(ROWS, COLUMNS), acc)


@triton.jit
def sum_of_slots(slots_ptr, slot_stride, offs, COUNT: tl.constexpr):
    """Sum of the elements at `offs` of COUNT slots, `slot_stride` elements apart, in order."""
    total = tl.load(slots_ptr + offs)
    for slot in tl.static_range(1, COUNT):
        total += tl.load(slots_ptr + slot * slot_stride + offs)
    return total


@triton.jit
def _store_inside(out_ptr, values, start_m, start_n, M, N, stride_m, stride_n):
    offs_m = start_m + tl.arange(0, values.shape[0]).to(tl.int64)
    offs_n = start_n + tl.arange(0, values.shape[1]).to(tl.int64)
    out_ptrs = out_ptr + offs_m[:, None] * stride_m + offs_n[None, :] * stride_n
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(out_ptrs, rounded(values, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store(
    out_ptr,
    values,  # (rows, columns) fp32
    start_m,
    start_n,
    M,
    N,
    stride_m,
    stride_n,
):
    """out[start_m:, start_n:] = values, as far as it lies inside (M, N), rounded once."""
    if values.shape[1] > 128:
        left, right = halves(values)
        _store_inside(out_ptr, left, start_m, start_n, M, N, stride_m, stride_n)
        start_n += values.shape[1] // 2
        _store_inside(out_ptr, right, start_m, start_n, M, N, stride_m, stride_n)
    else:
        _store_inside(out_ptr, values, start_m, start_n, M, N, stride_m, stride_n)


@triton.jit
def with_bias(acc, bias_ptr, start_n, N):
    """acc + bias[columns of the tile]."""
    offs_n = start_n + tl.arange(0, acc.shape[1])
    bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
    return acc + bias.to(tl.float32)[None, :]


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
    """out[:rows, :columns] = in[:rows, :columns], where rows of `out` are contiguous."""
    for start_m in range(0, rows, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M).to(tl.int64)
        for start_n in range(0, columns, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            inside = (offs_m[:, None] < rows) & (offs_n[None, :] < columns)
            in_ptrs = (
                in_ptr + offs_m[:, None] * stride_im + offs_n[None, :].to(tl.int64) * stride_in
            )
            out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :]
            tl.store(out_ptrs, tl.load(in_ptrs, mask=inside), mask=inside)
