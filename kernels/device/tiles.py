"""Tile arithmetic shared by the fused kernels.

An output of (M, N) is cut into tiles of (BLOCK_M, BLOCK_N), the contraction into steps of BLOCK_K.
Tiles at the edge read rows and columns modulo the size, so that the loop over K needs a mask for
its last step at most; what they compute outside the output is not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.collectives.device.addresses import INTERPRETED, Constant
from weft.collectives.device.device_math import cdiv as cdiv
from weft.collectives.device.device_math import element as element
from weft.collectives.device.device_math import rounded as rounded

_INTERPRETED = Constant(INTERPRETED)


# Not tl.zeros: it is a jit function of Triton's own, interpreted only if TRITON_INTERPRET was set
# when triton was imported, which torch may have done before us.
@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """An empty sum: (BLOCK_M, BLOCK_N) fp32."""
    return tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)


@triton.jit
def first_of(before, program, programs):
    """The first of some items that is `program`'s; its next one is `programs` later.

    Items go to the programs in turn, and `before` items have gone before these.
    """
    return (program + programs - before % programs) % programs


@triton.jit
def dealt(turn, program, programs):
    """The item that `program` is dealt in a `turn`: forth in even turns, back in odd ones.

    Where items go from long to short, whoever has the longest of a turn has the shortest of the
    next.

    Example: 3 programs: 0 is dealt items 0, 5, 6, 11, ..; 1 items 1, 4, 7, 10; 2 items 2, 3, 8, 9.
    """
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile number `tile`, going down GROUP_M rows before the next column.

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
    """The BLOCK indices from `start` on, modulo `size`, so always inside."""
    return (start + tl.arange(0, BLOCK)) % size


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; fp32 operands are not rounded to tf32.

    For fp8 the matrix units of sm_90 keep 14 bits of a sum, which is added to acc block by block.
    """
    COARSE_K: tl.constexpr = a.shape[1] if a.dtype == tl.float8e4nv else 0
    if _INTERPRETED:
        a, b = widened(a), widened(b)
    return tl.dot(a, b, acc, input_precision="ieee", max_num_imprecise_acc=COARSE_K)


@triton.jit
def widened(x):
    """`x` in fp32: the interpreter stores bf16 and fp8 as integers and would multiply those."""
    wide = x.to(tl.float32)
    if _INTERPRETED and x.dtype == tl.float8e4nv:
        # It also reads this format's two NaNs as the number that would follow 448.
        wide = tl.where(tl.abs(wide) > 448.0, float("nan"), wide)
    return wide


@triton.jit
def row_ptrs(matrix, rows):
    """Pointers to the first elements of the given rows."""
    return matrix.ptr + rows.to(tl.int64) * matrix.stride_m


@triton.jit
def read_described(desc, row, column, TRANSPOSED: tl.constexpr):
    """The block at (row, column) of a matrix, given a descriptor of it or of its transpose."""
    # One return: Triton also compiles what follows a return in a branch.
    return desc.load([column, row]).T if TRANSPOSED else desc.load([row, column])


@triton.jit
def _column_blocks(w, first_k, offs_k, columns):
    """Pointers to w[first_k + offs_k, columns]."""
    rows = first_k + offs_k.to(tl.int64)
    ptrs = w.ptr + rows[:, None] * w.stride_m
    return ptrs + columns.to(tl.int64)[None, :] * w.stride_n


@triton.jit
def accumulate(
    acc,  # (BLOCK_M, BLOCK_N) fp32
    second,  # the same for w2, or None
    a_rows,  # (BLOCK_M,) pointers to the first elements of the rows of a; or a_desc
    stride_ak,
    a_desc,  # of a, or of its transpose if A_TRANSPOSED
    start_m,
    w,  # Matrix (.., N); or w_desc
    w2,  # a second one, or None
    w_desc,  # of w, or of its transpose if W_TRANSPOSED
    w2_desc,
    start_n,
    N,
    first_k,  # first column of a
    shift_k,  # the row of w that goes with column 0 of a
    K,  # one after the last column of a
    TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    a_scales=None,  # (BLOCK_M,) fp32, of fp8 rows beside a wider w
):
    """acc + a[:, first_k:K] @ w[first_k + shift_k:, start_n:start_n + BLOCK_N], `second` likewise.

    Operands are read by descriptor where there is one, else by pointers of any stride. Descriptors
    read zeros outside of a matrix: unless EVEN_K, a described w must end where a does. K may be 0.
    Scaled rows of a are rounded to the dtype of w before they are multiplied.
    Without a second w, the first sum is returned twice: Triton 3.6 cannot return None.
    """
    BLOCK_K: tl.constexpr = TILES.block_k
    offs_k = tl.arange(0, BLOCK_K)
    if a_desc is None:
        wide_k = first_k + offs_k.to(tl.int64)
        a_ptrs = a_rows[:, None] + wide_k[None, :] * stride_ak
        step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    if w_desc is None:
        columns = wrapped(start_n, N, TILES.block_n)
        w_ptrs = _column_blocks(w, first_k + shift_k, offs_k, columns)
        step_w = tl.cast(w.stride_m, tl.int64) * BLOCK_K
        if w2 is not None:
            w2_ptrs = _column_blocks(w2, first_k + shift_k, offs_k, columns)
            step_w2 = tl.cast(w2.stride_m, tl.int64) * BLOCK_K
    for k in range(first_k, K, BLOCK_K):
        left = K - k
        if a_desc is not None:
            a = read_described(a_desc, start_m, k, A_TRANSPOSED)
        elif EVEN_K:
            a = tl.load(a_ptrs)
        else:
            a = tl.load(a_ptrs, mask=offs_k[None, :] < left, other=0.0)
        if a_scales is not None:
            a = rounded(widened(a) * a_scales[:, None], w.ptr.dtype.element_ty)
        if w_desc is not None:
            row = tl.cast(k + shift_k, tl.int32)
            acc = dot(a, read_described(w_desc, row, start_n, W_TRANSPOSED), acc)
            if w2_desc is not None:
                second = dot(a, read_described(w2_desc, row, start_n, W_TRANSPOSED), second)
        elif EVEN_K:
            acc = dot(a, tl.load(w_ptrs), acc)
            if w2 is not None:
                second = dot(a, tl.load(w2_ptrs), second)
        else:
            inside = offs_k[:, None] < left
            acc = dot(a, tl.load(w_ptrs, mask=inside, other=0.0), acc)
            if w2 is not None:
                second = dot(a, tl.load(w2_ptrs, mask=inside, other=0.0), second)
        if a_desc is None:
            a_ptrs += step_a
        if w_desc is None:
            w_ptrs += step_w
            if w2 is not None:
                w2_ptrs += step_w2
    return acc, acc if second is None else second


@triton.jit
def block_offsets(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets within a tile stored as a block of its own: row after row, no padding."""
    return tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def halves(values):
    """The left and the right half of the columns.

    Wide tiles are stored by halves: addresses and masks of a whole one, 128 x 256, do not fit
    beside it in registers (255 and 104 bytes of spills on sm_100; by halves 202 and none).
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    return tl.split(values.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))


@triton.jit
def beside(left, right):
    """The inverse of `halves`: (ROWS, COLUMNS) twice as (ROWS, 2 COLUMNS)."""
    ROWS: tl.constexpr = left.shape[0]
    COLUMNS: tl.constexpr = left.shape[1]
    return tl.join(left, right).permute(0, 2, 1).reshape(ROWS, 2 * COLUMNS)


@triton.jit
def store_block(block_ptr, acc):
    """Store a tile as a block of its own, as in `block_offsets`."""
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
def _store_inside(out_ptr, values, rows, inside_m, start_n, N, stride_m, stride_n):
    offs_n = start_n + tl.arange(0, values.shape[1]).to(tl.int64)
    out_ptrs = out_ptr + rows[:, None] * stride_m + offs_n[None, :] * stride_n
    inside = inside_m[:, None] & (offs_n[None, :] < N)
    tl.store(out_ptrs, rounded(values, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store(out_ptr, values, start_m, start_n, M, N, stride_m, stride_n):
    """out[start_m:, start_n:] = values, rounded once, within (M, N)."""
    rows = start_m + tl.arange(0, values.shape[0])
    store_rows(out_ptr, values, rows, rows < M, start_n, N, stride_m, stride_n)


@triton.jit
def store_rows(
    out_ptr,
    values,  # (rows, columns) fp32
    rows,  # of out
    inside_m,  # whether to store each of them
    start_n,
    N,
    stride_m,
    stride_n,
):
    """out[rows, start_n:] = values, rounded once, within N columns."""
    rows = rows.to(tl.int64)
    if values.shape[1] > 128:
        left, right = halves(values)
        _store_inside(out_ptr, left, rows, inside_m, start_n, N, stride_m, stride_n)
        start_n += values.shape[1] // 2
        _store_inside(out_ptr, right, rows, inside_m, start_n, N, stride_m, stride_n)
    else:
        _store_inside(out_ptr, values, rows, inside_m, start_n, N, stride_m, stride_n)
