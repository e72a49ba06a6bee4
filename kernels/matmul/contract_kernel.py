"""Matmul over gathered rows: y = cat(x over ranks)^T @ w, the gradient of a weight.

Legend: W ranks; rank r holds x_r (k_r, M) and all of w (K, N). `offsets[r]` is where x_r begins in
K (W + 1 numbers, the last one K); shards may differ in size and be empty. bf16, fp16 or fp32 in and
out, fp32 accumulation.

    y (M, N) = sum over r of x_r^T (M, k_r) @ w[offsets[r]:offsets[r+1]]

For W = 3, on rank 1 (its own part of K is read from x in place, the others from `gathered`):

    y tile = x_0^T @ w[0:k_0]  +  x_1^T @ w[k_0:k_0+k_1]  +  x_2^T @ w[k_0+k_1:]      in this order
             `gathered`           x                          `gathered`

    publish kernel of rank 0 --(0, 0, 0)--> copy programs --(1, 0, chunk)--> tiles

The first programs fetch the shards as described in `weft.kernels.device.gathers`. The others make
tiles of y; before its first tile each waits for all chunks of all peers, one shard at a time as the
tile reaches it. They signal nothing back, so the argument made there, why nothing races or
deadlocks, covers this kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.device.launches import launching, layouts_of
from weft.collectives.memory.workspace import Workspace, link_of
from weft.kernels.device import gathers, tiles
from weft.kernels.device.gathered_rows import own_shard
from weft.kernels.device.operands import Rows, described_weights, in_place, matrix
from weft.kernels.engine.chips import INTERPRETER, Chip, Tiling, chip_of, tiling_for


@dataclass(frozen=True)
class ContractConfig:
    """How the kernels of `contract_kernel` are launched.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid of the consumer kernel, copy programs included.
        copy_programs: how many of them fetch shards.
        copy_m, copy_n: block that a copy moves at a time.
        descriptors: whether w is read by tensor descriptor, if it allows it.
    """

    tiling: Tiling
    programs: int
    copy_programs: int
    copy_m: int
    copy_n: int
    descriptors: bool = False


def contract_config(
    M: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> ContractConfig:
    """The launch for an (M, N) output."""
    tiling = tiling_for(chip, M, N, dtype)
    if chip is INTERPRETER:
        return ContractConfig(tiling, chip.programs, 1, 32, 32)
    # As many copy programs as of `AllGatherConfig`, for the same reason.
    copy_programs = max(1, chip.cores // 8) if world_size > 1 else 1
    copy_n = 512 * tiling.num_warps // dtype.itemsize
    descriptors = chip.descriptors and dtype != torch.float32
    return ContractConfig(tiling, chip.programs, copy_programs, 16, copy_n, descriptors)


@dataclass(frozen=True)
class ContractVariant:
    """What the kernel is compiled for.

    Attributes:
        tiles: tiles of the matmul.
        fetch: how shards are fetched.
        x_in_place: whether the rank's own rows are read in x, not as they were published.
        w_transposed: whether the descriptor is of the transpose.
        even_k: whether all shards are whole steps of the tiles.
    """

    tiles: Tiling
    fetch: gathers.Fetch
    x_in_place: bool
    w_transposed: bool
    even_k: bool


@triton.jit(do_not_specialize=["chunk_rows", "rank"])
def _all_gather_contract_kernel(
    out,  # Matrix (M, N)
    gathered,  # Rows of (K, M)
    x,  # Matrix (k_local, M)
    w,  # Matrix (K, N)
    w_desc,  # its descriptor, or None
    link,
    offsets,
    M,
    N,
    pitch,
    chunk_rows,
    rank,
    V: tl.constexpr,  # ContractVariant
) -> None:
    """y = sum over ranks, in rank order, of x_r^T @ (its rows of w).

    Grid: copy programs and at least one more.

    Example: offsets (0, 3, 5): y = x_0^T @ w[0:3] + x_1^T @ w[3:5].
    """
    generation = signals.last_generation(link.signal_ptrs, rank)
    shards = gathers.Shards(link, rank, generation, offsets, M, pitch, 0, chunk_rows)
    FETCH: tl.constexpr = V.fetch
    TILES: tl.constexpr = V.tiles
    BLOCK_M: tl.constexpr = V.tiles.block_m
    BLOCK_N: tl.constexpr = V.tiles.block_n
    W: tl.constexpr = V.fetch.world_size
    COPIES: tl.constexpr = V.fetch.programs
    EVEN_K: tl.constexpr = V.even_k
    X_IN_PLACE: tl.constexpr = V.x_in_place
    W_TRANSPOSED: tl.constexpr = V.w_transposed
    program = tl.program_id(0)
    if program < COPIES:
        gathers.fetch_shards(shards, gathered, 0, FETCH)
    else:
        programs, first = tl.num_programs(0) - COPIES, program - COPIES
        own = own_shard(shards, x, X_IN_PLACE)
        tiles_m, tiles_n = tiles.cdiv(M, BLOCK_M), tiles.cdiv(N, BLOCK_N)
        arrived = True
        for tile in range(first, tiles_m * tiles_n, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
            start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            offs_m = tiles.wrapped(start_m, M, BLOCK_M).to(tl.int64)
            acc = tiles.zeros(BLOCK_M, BLOCK_N)
            # Rank order, not arrival order: replicated inputs give bitwise equal sums on all ranks.
            for source in range(W):
                begin = tiles.element(offsets, source, W).to(tl.int64)
                length = tiles.element(offsets, source + 1, W + 1) - begin
                a_ptr, stride_a = own.ptr, own.pitch
                if source != rank:
                    a_ptr, stride_a = gathered.ptr + begin * M, M
                if (tile == first) & (source != rank) & (length > 0):
                    arrived &= gathers.wait_for_rows_of(shards, source, 0, length, 0, FETCH)
                acc, _ = tiles.accumulate(
                    acc, None, a_ptr + offs_m, stride_a, None, 0, w, None, w_desc, None,
                    start_n, N, 0, begin, length, TILES, EVEN_K, False, W_TRANSPOSED,
                )  # fmt: skip
            if arrived:
                tiles.store(out.ptr, acc, start_m, start_n, M, N, out.stride_m, out.stride_n)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(gathered.ptr, tl.cast(offsets[W], tl.int64) * M)
        for row in range(M):
            for start in range(0, N, BLOCK_N):
                nothing = tl.full((1, BLOCK_N), float("nan"), tl.float32)
                tiles.store(out.ptr, nothing, row, start, M, N, out.stride_m, out.stride_n)


def launch_all_gather_contract(
    x: torch.Tensor,
    w: torch.Tensor,
    ws: Workspace,
    sizes: Sequence[int],
    *,
    out: torch.Tensor | None = None,
    with_own: bool = False,
    config: ContractConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Enqueue y = cat(x over ranks)^T @ w.

    Args:
        x: (k_r, M), any strides.
        w: (sum of sizes, N), any strides, dtype of x.
        ws: room for `gathers.workspace_bytes` of the largest x.
        sizes: k_r of every rank, the same list on all ranks.
        out: (M, N), any strides, for the result; default new and contiguous.
        with_own: also copy this rank's x into the gathered matrix; else it is undefined there.
        config: default `contract_config`.

    Returns:
        the gathered matrix (K, M), contiguous, and y (M, N). A weight gradient x^T @ cat(dy) is the
        transpose of cat(dy)^T @ x: gather dy, pass x as w and the transposed gradient as `out`.
    """
    K, W, M, N = sum(sizes), ws.world_size, x.shape[1], w.shape[1]
    config = config or contract_config(M, N, x.dtype, W, chip_of(x.device))
    tiling, pitch = config.tiling, gathers.pitch_of(M)
    gathered = x.new_empty(K, M)
    out = x.new_empty(M, N) if out is None else out
    even_k = all(size % tiling.block_k == 0 for size in sizes)
    # By descriptor, the last step of a shard would read the next one's rows of w, not zeros.
    (w_desc, _), w_transposed = described_weights([w], tiling, config.descriptors and even_k)
    gathers.publish(x, ws, pitch, config.programs, config.copy_m, config.copy_n)
    launching(_all_gather_contract_kernel, config.programs)(
        matrix(out),
        Rows(gathered, None),
        matrix(x),
        matrix(w),
        w_desc,
        link_of(ws),
        (0, *accumulate(sizes)),
        M,
        N,
        pitch,
        # A tile reads whole shards: large chunks, one a copy program.
        max(1, -(-max(sizes) // config.copy_programs)),
        ws.rank,
        V=ContractVariant(
            tiles=tiling,
            fetch=gathers.Fetch(W, config.copy_programs, config.copy_m, config.copy_n, with_own),
            x_in_place=in_place(x),
            w_transposed=w_transposed,
            even_k=even_k,
        ),
        **tiling.options,
    )
    return gathered, out


def call_contract(
    op: str,
    told: tuple[Hashable, ...],
    x: torch.Tensor,
    w: torch.Tensor,
    ws: Workspace,
    sizes: Sequence[int],
    out: torch.Tensor,
    *,
    with_own: bool = False,
) -> torch.Tensor:
    """`launch_all_gather_contract` into `out` as a call of `op`, or its launches of before.

    Args:
        told: as in `Workspace.call`.

    Returns:
        the gathered matrix.
    """

    def launched() -> list[torch.Tensor]:
        return [launch_all_gather_contract(x, w, ws, sizes, out=out, with_own=with_own)[0]]

    operands = x, w, out
    with ws.call(op, told):
        key = op, *sizes, with_own, layouts_of(operands)
        (gathered,) = ws.repeat(key, operands, launched)
    return gathered
