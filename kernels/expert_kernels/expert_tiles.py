"""Tiles of rows that are sorted by expert: which expert a tile is of, found in the kernel.

    ends     5  5  12         rows 0..4 are of expert 0, none of expert 1, rows 5..11 of expert 2
    tiles    | 0 1 | | 2 3 |  of 4 rows; none has rows of two experts

Where experts end is known on the device alone, so that grids do not depend on it: programs go on
until there are no more tiles. Each has a lane for every expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.device.operands import Matrix, described_weights
from weft.kernels.engine.chips import INTERPRETER, Chip, Tiling, tiling_for


class RowTable(NamedTuple):
    """A rank's rows, as kernels know them; all int32.

    Fields: where the rows of each of its experts end (E,); for each row the rank that it comes
    from, its number there, and its slot there, that is number * k + j (R,). Of the last three only
    the first ends[-1] are read.
    """

    ends: Any
    ranks: Any
    rows: Any
    slots: Any


class ExpertWeights(NamedTuple):
    """Weights (E, K, N): pointer to the first element, strides of experts, rows and columns."""

    ptr: Any
    stride_e: Any
    stride_m: Any
    stride_n: Any


class Experts(NamedTuple):
    """Fields: for each expert, (LANES,), where its rows begin and end, and the tiles of rows of all
    experts up to it.
    """

    begins: Any
    ends: Any
    until: Any


class ExpertTile(NamedTuple):
    """Fields: the tile's expert, first row, one after the expert's last row, column of tiles."""

    expert: Any
    first: Any
    end: Any
    tile_n: Any


@triton.jit
def experts_of(ends_ptr, E, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """The experts whose rows end at ends_ptr[:E], as Experts. Lanes from E on have no rows."""
    lanes = tl.arange(0, LANES)
    ends = tl.load(ends_ptr + lanes, mask=lanes < E, other=0)
    begins = tl.load(ends_ptr + lanes - 1, mask=(lanes > 0) & (lanes < E), other=0)
    counts = tiles.cdiv(ends - begins, BLOCK_M)
    # Not tl.cumsum, for the reason that `greatest` is not tl.max.
    return Experts(begins, ends, tl.associative_scan(counts, 0, tl.standard._sum_combine))


@triton.jit
def rows_of(experts):
    """How many rows all experts have."""
    return signals.greatest(experts.ends)


@triton.jit
def tiles_of(experts):
    """How many tiles of rows they have."""
    return signals.greatest(experts.until)


@triton.jit
def total_of(x):
    """The sum of a vector."""
    return tl.reduce(x, 0, tl.standard._sum_combine)


@triton.jit
def expert_tile(experts, tile, tiles_n, shift, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile number `tile` of (all experts' tiles of rows) x tiles_n, as ExpertTile.

    Those of an expert follow each other, in the order of `grouped_tile`, and begin with its row
    of tiles number shift[0] / shift[1] of them, around.
    """
    lanes = tl.arange(0, experts.ends.shape[0])
    expert = total_of((experts.until * tiles_n <= tile).to(tl.int32))
    mine = lanes == expert
    begin = total_of(tl.where(mine, experts.begins, 0))
    end = total_of(tl.where(mine, experts.ends, 0))
    tiles_m = tiles.cdiv(end - begin, BLOCK_M)
    number = tile - (total_of(tl.where(mine, experts.until, 0)) - tiles_m) * tiles_n
    tile_m, tile_n = tiles.grouped_tile(number, tiles_m, tiles_n, GROUP_M)
    tile_m = (tile_m + tiles_m * shift[0] // shift[1]) % tiles_m
    return ExpertTile(expert, begin + tile_m * BLOCK_M, end, tile_n)


@triton.jit
def weight_of(w, expert):
    """The Matrix of that expert, of ExpertWeights."""
    return Matrix(w.ptr + tl.cast(expert, tl.int64) * w.stride_e, w.stride_m, w.stride_n)


@triton.jit
def weight_place(expert, K, N, start_n, w_desc, TRANSPOSED: tl.constexpr):
    """Where the expert's weight begins: the row, and the column of its column start_n, as
    `tiles.accumulate` counts them. By descriptor, all experts' weights are one matrix.
    """
    row, column = 0, start_n
    if w_desc is not None:
        if TRANSPOSED:
            column += expert * N
        else:
            row = expert * K
    return row, column


def expert_tiling(
    chip: Chip, rows: int, N: int, dtype: torch.dtype, experts: int, aligned: bool
) -> Tiling:
    """Tiles for (rows, N) of each of `experts`; `aligned`: all sizes are multiples of 16."""
    tiling = tiling_for(chip, rows, N, dtype, max(1, experts))
    if aligned or chip is INTERPRETER:
        return tiling
    # Addresses of single numbers spill up to 1,048 bytes beside wide tiles.
    m, n, warps = min(tiling.block_m, 64), min(tiling.block_n, 64), min(tiling.num_warps, 4)
    return replace(tiling, block_m=m, block_n=n, num_warps=warps)


def aligned_sizes(*sizes: int) -> bool:
    """Whether rows of these lengths begin at whole words."""
    return all(size % 16 == 0 for size in sizes)


def lanes_for(experts: int) -> int:
    """LANES for so many experts."""
    return 1 << max(0, experts - 1).bit_length()


def expert_weights(w: torch.Tensor) -> ExpertWeights:
    """A 3-D tensor as a kernel takes it."""
    w = w.resolve_neg()
    return ExpertWeights(w, *w.stride())


def described_experts(
    weights: Sequence[torch.Tensor], tiling: Tiling, wanted: bool
) -> tuple[list[Any], bool]:
    """`described_weights` of one or two weights (E, K, N) as matrices: (E K, N), or (K, E N) where
    K is contiguous.
    """
    flat = [matrix for w in weights if (matrix := _flat_weights(w, tiling)) is not None]
    return described_weights(flat, tiling, wanted and len(flat) == len(weights))


def _flat_weights(w: torch.Tensor, tiling: Tiling) -> torch.Tensor | None:
    E, K, N = w.shape
    if w.is_neg() or w.numel() == 0:
        return None
    if w.stride(2) == 1 and K % tiling.block_k == 0 and w.stride(0) == K * w.stride(1):
        return w.as_strided((E * K, N), (w.stride(1), 1))
    if w.stride(1) == 1 and w.stride(0) == N * w.stride(2):
        return w.as_strided((K, E * N), (1, w.stride(2)))
    return None


def check_table(table: RowTable, experts: int, device: torch.device) -> None:
    """Raise ValueError unless the table is of so many experts, on that device."""
    ends, *rows = table
    fits = ends.shape == (experts,) and len({each.shape for each in rows}) == 1
    if not fits or any(each.dtype != torch.int32 or each.device != device for each in table):
        raise ValueError(
            f"the table must be int32 on {device}, with ends ({experts},) and three of one length, "
            f"got {[(tuple(each.shape), each.dtype, each.device) for each in table]}"
        )
