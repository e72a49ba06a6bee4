"""What the kernels share that add up partial products over ranks: making a tile, adding up slots.

A tile of rank r's x_r @ w_r travels as a block of (block_m, block_n) fp32 of its own, row after
row, into a slot for r; whoever owns it adds up the W slots in rank order, scales, adds bias and
residual, and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.kernels import splits, tiles
from weft.kernels.operands import matrix, scales_of

if TYPE_CHECKING:
    from weft.collectives.workspace import Workspace


class Factors(NamedTuple):
    """x (M, K) @ w (K, N), the sum of several such products, as kernels take it.

    Fields: `xs`, `ws` and `Ks`, one Matrix and one K a term; `row_scales` and `column_scales` of
    fp8 factors (one term).
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
    factors,
    x_desc,  # of the only term, or None
    w_desc,
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
    """One tile of the product, or number `part` of SPLIT parts of it: (block_m, block_n) fp32."""
    acc = tiles.zeros(TILES.block_m, TILES.block_n)
    for i in tl.static_range(TERMS):
        first_k, last_k = splits.part_of(factors.Ks[i], part, TILES.block_k, SPLIT)
        acc, _ = tiles.accumulate(
            acc, None, tiles.row_ptrs(factors.xs[i], rows), factors.xs[i].stride_n,
            x_desc, start_m, factors.ws[i], None, w_desc, None, start_n, N, first_k, 0, last_k,
            TILES, EVEN_K, X_TRANSPOSED, W_TRANSPOSED,
        )  # fmt: skip
    if factors.row_scales.ptr is not None:
        scales = factors.row_scales.ptr + rows.to(tl.int64) * factors.row_scales.stride
        acc = tiles.times_rows(acc, scales, rows >= 0)
    return tiles.times_columns(acc, factors.column_scales, start_n, N)


@triton.jit
def finished(
    slots_ptr,
    slot_stride,
    offs,  # of the part of a tile in each slot
    finish,
    rows,  # of out
    inside_m,
    start_n,
    N,
    WORLD_SIZE: tl.constexpr,
    WHOLE_TILES: tl.constexpr = True,  # or only the rows inside have been written
):
    """scale * (sum of the slots in rank order) + bias + residual, in fp32."""
    written = None if WHOLE_TILES else inside_m[:, None]
    total = tiles.sum_of_slots(slots_ptr, slot_stride, offs, written, WORLD_SIZE) * finish.scale
    total = tiles.with_bias(total, finish.bias, start_n, N)
    if finish.residual is not None:
        offs_n = start_n + tl.arange(0, total.shape[1])
        inside = inside_m[:, None] & (offs_n[None, :] < N)
        ptrs = finish.residual + rows.to(tl.int64)[:, None] * N + offs_n[None, :]
        total += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    return total


def too_small(needed: int, ws: Workspace, ask: str) -> ValueError:
    """The error for a workspace with room for less than `needed` bytes; `ask` says how to know."""
    return ValueError(
        f"the workspace must hold {needed} bytes a call, got {ws.half_bytes=}; ask for {ask}"
    )


def factors_of(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
) -> Factors:
    """The operands as a kernel takes them."""
    return Factors(
        tuple(matrix(x) for x in xs),
        tuple(matrix(w) for w in weights),
        tuple(x.shape[1] for x in xs),
        scales_of(scale_a),
        scales_of(scale_b),
    )


def finish_of(scale: float, bias: torch.Tensor | None, residual: torch.Tensor | None) -> Finish:
    """The last steps as a kernel takes them."""
    return Finish(scale, bias, None if residual is None else residual.contiguous())
