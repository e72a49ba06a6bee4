"""Weight gradients of experts: each expert's rows contracted with another matrix's, on one rank.

Legend: a (R, K) and b (R, N) have rows sorted by expert, which end at ends (E,), known on the
device alone. Sums are fp32, rounded once.

    dw (E, K, N)      dw[e] = a[rows of e]^T @ b[rows of e]                        0 without rows

    a^T | expert 0 | expert 1 |     b | expert 0 |      dw | tile 0 .. |  of expert 0
        |  K x 5   |  K x 7   |       | 5 x N    |         | tile 2 .. |  of expert 1
                                      | expert 1 |
                                      | 7 x N    |

Tiles are of (BLOCK_M, BLOCK_N) of one expert's dw; programs take turns at them. A sum goes through
the expert's rows in their order, in one program: equal bits in every run. Nobody waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.collectives.device.launches import launching
from weft.kernels.device import tiles
from weft.kernels.device.operands import matrix
from weft.kernels.engine.chips import Tiling, chip_of, tiling_for
from weft.kernels.expert_kernels.expert_tiles import expert_weights, weight_of


@triton.jit
def contract_grouped_kernel(
    out,  # ExpertWeights (E, K, N)
    a,  # Matrix (R, K)
    b,  # Matrix (R, N)
    ends_ptr,  # (E,)
    E,
    K,
    N,
    TILES: tl.constexpr,
) -> None:
    """out[e] = a[ends[e-1]:ends[e]]^T @ b[ends[e-1]:ends[e]]. Grid: any.

    Example: ends [1, 1], a [[2]], b [[3, 4]]: out is [[[6, 8]], [[0, 0]]].
    """
    tiles_m, tiles_n = tiles.cdiv(K, TILES.block_m), tiles.cdiv(N, TILES.block_n)
    for tile in range(tl.program_id(0), E * tiles_m * tiles_n, tl.num_programs(0)):
        expert = tile // (tiles_m * tiles_n)
        tile_m, tile_n = tiles.grouped_tile(
            tile % (tiles_m * tiles_n), tiles_m, tiles_n, TILES.group_m
        )
        begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        rows = tl.load(ends_ptr + expert) - begin
        start_m, start_n = tile_m * TILES.block_m, tile_n * TILES.block_n
        columns = tiles.wrapped(start_m, K, TILES.block_m).to(tl.int64)
        ptrs = tiles.row_ptrs(a, begin) + columns * a.stride_n
        acc = tiles.zeros(TILES.block_m, TILES.block_n)
        acc, _ = tiles.accumulate(
            acc,
            None,
            ptrs,
            a.stride_m,
            None,
            0,
            b,
            None,
            None,
            None,
            start_n,
            N,
            0,
            begin,
            rows,
            TILES,
            False,
            False,
            False,
        )
        into = weight_of(out, expert)
        tiles.store(into.ptr, acc, start_m, start_n, K, N, into.stride_m, into.stride_n)


def launch_contract_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    ends: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Enqueue dw[e] = a[rows of e]^T @ b[rows of e].

    Args:
        a, b: (R, K) and (R, N), any strides; rows from ends[-1] on are not read.
        ends: (E,) int32, contiguous: one after the last row of each expert.
        out: (E, K, N), any strides, for the result; default new and contiguous.
        tiling: default that of the chip.

    Returns:
        (E, K, N).
    """
    (K, N), E, chip = (a.shape[1], b.shape[1]), len(ends), chip_of(a.device)
    out = a.new_empty(E, K, N) if out is None else out
    tiling = tiling or tiling_for(chip, K, N, a.dtype, max(1, E))
    launching(contract_grouped_kernel, chip.programs)(
        expert_weights(out), matrix(a), matrix(b), ends, E, K, N, TILES=tiling, **tiling.options
    )
    return out
