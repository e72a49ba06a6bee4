"""matmul_all_reduce: the sum over ranks of x @ w, bitwise the same on every rank, in one launch.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N); K_r may differ between ranks. Inputs
are bf16, fp16, fp32 or scaled fp8; partial sums are fp32, rounded once, and travel as fp32 or as
its upper 24 bits (`weft.kernels.device.partial_sums`).

    y (M, N) = scale * sum over r, in the order 0, 1, ..., W-1, of x_r @ w_r + bias + residual

Few bytes (decode) go in one shot, `weft.kernels.matmul.one_shot_kernel`: W - 1 copies of every
partial tile.

More bytes go in two shots: tile t is added up by one owner, rank t % W, which sends the finished
tile to all. Tiles of (block_m, block_n) are numbered 0 .. T-1 and travel as blocks of their own,
row after row. The half of a generation is W slots of ceil(T / W) tiles of partial sums, then the T
finished tiles in the output's dtype.

    rank r: tile t of x_r @ w_r --> slot r of rank t % W    owner: sum --> finished t of every rank

Protocol, in each program p. Tile j of an owner is t = j W + owner; one after another, owners' tiles
go to the P programs in turn (`tiles.first_of`), so that all have work if there is any.
  1. For the owners rank+1, rank+2, ..., rank-1: store the tiles in the owner's slot `rank`. Signal
     the words (0, rank, p) of all peers: release at system scope. Store the tiles of this rank in
     its own slot.
  2. Wait for the words (0, r, p) of all peers (acquire, system scope); add up this rank's tiles in
     rank order, store them in the output and among the finished tiles of every peer; signal the
     words (1, rank, p) of all peers.
  3. Wait for the words (1, r, p) of all peers; copy their finished tiles to the output.
  4. Take a ticket; the last program sets GENERATION.

Why it neither races nor deadlocks: before each wait a program signals everything that it has made,
and p waits for p alone. Calls alternate halves; rules 1 and 2 of `weft.collectives.device.signals`
hold because each program signals every peer after this rank's last call has ended, and waits for
every peer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, workspace
from weft.collectives.device import signals
from weft.collectives.memory.workspace import check_room, link_of
from weft.kernels.device import partial_sums, tiles
from weft.kernels.device.operands import described
from weft.kernels.device.partial_sums import Config as Config
from weft.kernels.device.partial_sums import finish_of, terms_of
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import (
    INTERPRETER,
    ONE_SHOT_BYTES,
    Chip,
    Tiling,
    chip_of,
    tiling_for,
)
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.matmul import one_shot_kernel
from weft.kernels.matmul.one_shot_kernel import tile_count


def config_for(
    M: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> Config | one_shot_kernel.Config:
    """The launch for a sum of (M, N) matrices. K plays no part: ranks may differ in it."""
    one_shot_bytes = 32 * 32 * 4 * 4 if chip is INTERPRETER else ONE_SHOT_BYTES
    choice = tuning.choice_for("matmul_all_reduce", chip, M, N, 0, dtype, world_size)
    if world_size <= 2 or one_shot_bytes >= M * N * 4:
        return one_shot_kernel.config_for(M, N, dtype, chip, choice.tiling)
    return two_shot_config_for(M, N, dtype, chip, choice.tiling)


@lru_cache(maxsize=1024)
def two_shot_config_for(
    M: int, N: int, dtype: torch.dtype, chip: Chip, tiling: Tiling | None = None
) -> Config:
    """The launch in two shots, whatever the size."""
    if tiling is None:
        tiling = tiling_for(chip, M, N, dtype)
        if chip.descriptors:  # tiles of 128 x 128 would spill 8 bytes on sm_100
            tiling = replace(tiling, all_registers=True)
    return Config(
        tiling,
        programs=max(1, min(chip.programs, tile_count(M, N, tiling))),
        reduce_m=min(16, tiling.block_m),
        descriptors=chip.descriptors and dtype != torch.float32,
    )


def workspace_bytes(
    M: int,
    N: int,
    out_dtype: torch.dtype,
    world_size: int,
    config: Config | one_shot_kernel.Config,
) -> int:
    """Symmetric memory that the call needs on each rank."""
    if isinstance(config, one_shot_kernel.Config):
        return one_shot_kernel.workspace_bytes(M, N, out_dtype, world_size, config)
    tiling, count = config.tiling, tile_count(M, N, config.tiling)
    sums = world_size * -(-count // world_size) * partial_sums.row_words(tiling.block_n, out_dtype)
    return tiling.block_m * (sums * 4 + count * tiling.block_n * out_dtype.itemsize)


def workspace_for(
    x: torch.Tensor, w: torch.Tensor, group: Group, out_dtype: torch.dtype
) -> Workspace:
    """The group's workspace, with room for the sum of x (M, K) @ w (K, N)."""
    M, N, W = x.shape[0], w.shape[1], group.world_size
    config = config_for(M, N, x.dtype, W, chip_of(x.device))
    nbytes = workspace_bytes(M, N, out_dtype, W, config)
    return workspace(group, nbytes, channel="scatter", device=x.device)


@triton.jit
def _finished_ptr(link, peer, generation, finished_at, dtype: tl.constexpr):
    """Address of the finished tiles on `peer`, `finished_at` bytes into its half."""
    half = signals.half_ptr(link.buffer_ptrs, peer, generation, link.half_bytes, tl.int8)
    return (half + finished_at).to(tl.pointer_type(dtype))


@triton.jit(do_not_specialize=["M", "rank"])
def _gemm_two_shot_kernel(
    out_ptr,  # (M, N)
    terms,  # Terms of (M, N), one term
    x_desc,  # or None
    w_desc,
    finish,  # Finish
    link,
    M,
    N,
    rank,
    WORLD_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    X_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    REDUCE_M: tl.constexpr,
) -> None:
    """y = scale * sum over ranks of x @ w, + bias + residual. Grid: the same on all ranks.

    Example: 2 ranks, 5 tiles, 2 programs: rank 0 owns tiles 0 2 4, rank 1 owns 1 3. Program 0 of
    both ranks makes 0 4 for rank 0 and 3 for rank 1, program 1 makes 2 and 1.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_N: tl.constexpr = TILES.block_n
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    tiles_m, tiles_n = tiles.cdiv(M, BLOCK_M), tiles.cdiv(N, BLOCK_N)
    count = tiles_m * tiles_n
    SENT: tl.constexpr = BLOCK_M * ROW_WORDS
    owned = tiles.cdiv(count, WORLD_SIZE)
    slot_stride = tl.cast(owned, tl.int64) * SENT
    for step in range(1, WORLD_SIZE + 1):
        owner = (rank + step) % WORLD_SIZE
        if owner == rank:
            signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation)
        half_bytes = link.half_bytes
        slot = signals.half_ptr(link.buffer_ptrs, owner, generation, half_bytes, tl.float32)
        slot += rank * slot_stride
        first = tiles.first_of(owner * owned, program, programs)
        for j in range(first, tiles.cdiv(count - owner, WORLD_SIZE), programs):
            tile = j * WORLD_SIZE + owner
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
            start_m = tile_m * BLOCK_M
            acc = partial_sums.product(
                terms, (x_desc,), (w_desc,), tiles.wrapped(start_m, M, BLOCK_M), start_m,
                tile_n * BLOCK_N, N, 0, TILES, 1, 1, EVEN_K, X_TRANSPOSED, W_TRANSPOSED,
            )  # fmt: skip
            partial_sums.store_block(slot + tl.cast(j, tl.int64) * SENT, acc, ROW_WORDS)
    tl.debug_barrier()
    arrived = signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
    )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    finished_at = WORLD_SIZE * slot_stride * 4  # bytes into the half
    if arrived:
        slots = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.float32)
        first = tiles.first_of(rank * owned, program, programs)
        for j in range(first, tiles.cdiv(count - rank, WORLD_SIZE), programs):
            tile = j * WORLD_SIZE + rank
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
            for part in range(0, BLOCK_M, REDUCE_M):
                start_m = tile_m * BLOCK_M + part
                if start_m < M:
                    offs_m = start_m + tl.arange(0, REDUCE_M)
                    total = partial_sums.finished(
                        slots + tl.cast(j, tl.int64) * SENT + part * ROW_WORDS, slot_stride, finish,
                        offs_m, offs_m < M, tile_n * BLOCK_N, N, BLOCK_N, ROW_WORDS, WORLD_SIZE,
                    )  # fmt: skip
                    tiles.store(out_ptr, total, start_m, tile_n * BLOCK_N, M, N, N, 1)
                    final = tiles.rounded(total, dtype)
                    offs = tl.cast(tile, tl.int64) * BLOCK + part * BLOCK_N
                    offs += tiles.block_offsets(REDUCE_M, BLOCK_N)
                    for step in range(1, WORLD_SIZE):
                        peer = (rank + step) % WORLD_SIZE
                        sent = _finished_ptr(link, peer, generation, finished_at, dtype)
                        tl.store(sent + offs, final)
        signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation)
        arrived = signals.wait_for_peers(
            link.signal_ptrs, rank, WORLD_SIZE, 1, program, generation, link.timeout_ns
        )
    if arrived:
        got = _finished_ptr(link, rank, generation, finished_at, dtype)
        for step in range(1, WORLD_SIZE):
            owner = (rank + step) % WORLD_SIZE
            first = tiles.first_of(owner * owned, program, programs)
            for j in range(first, tiles.cdiv(count - owner, WORLD_SIZE), programs):
                tile = j * WORLD_SIZE + owner
                tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
                # Only the rows that were sent: the rest of the tile was never written.
                for part in range(0, BLOCK_M, REDUCE_M):
                    start_m = tile_m * BLOCK_M + part
                    if start_m < M:
                        offs = tl.cast(tile, tl.int64) * BLOCK + part * BLOCK_N
                        final = tl.load(got + offs + tiles.block_offsets(REDUCE_M, BLOCK_N))
                        final = final.to(tl.float32)
                        tiles.store(out_ptr, final, start_m, tile_n * BLOCK_N, M, N, N, 1)
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(out_ptr, tl.cast(M, tl.int64) * N)


def launch_matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    ws: Workspace,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    scaling: Scaling | None = None,
    config: Config | one_shot_kernel.Config | None = None,
) -> torch.Tensor:
    """Enqueue scale * sum over ranks of x @ w, + bias + residual.

    Args:
        x: (M, K_r), any strides.
        w: (K_r, N), any strides, dtype of x. K_r may differ from rank to rank.
        ws: room for `workspace_bytes(M, N, out_dtype, W, config)`.
        bias: (N,), added once, after the scale; the same on all ranks.
        residual: (M, N), likewise.
        scale: 1 / W makes an average.
        scaling: of fp8 operands.
        config: the same on all ranks; default `config_for`.

    Returns:
        (M, N), contiguous, bitwise the same on all ranks.
    """
    (M, _), N, W = x.shape, w.shape[1], ws.world_size
    config = config or config_for(M, N, x.dtype, W, chip_of(x.device))
    out = x.new_empty(M, N, dtype=scaling.out_dtype if scaling else x.dtype)
    needed = workspace_bytes(M, N, out.dtype, W, config)
    check_room(ws, needed, "workspace_bytes(M, N, out_dtype, world_size, config)")
    terms, finish = terms_of([x], [w], scaling), finish_of(scale, bias, residual)
    if isinstance(config, one_shot_kernel.Config):
        one_shot_kernel.launch(out, [x], [w], terms, finish, ws, None, config)
        return out
    tiling = config.tiling
    operands = described([x], [w], tiling, config.descriptors)
    _gemm_two_shot_kernel[(config.programs,)](
        out,
        terms,
        *operands.arguments[:2],
        finish,
        link_of(ws),
        M,
        N,
        ws.rank,
        WORLD_SIZE=W,
        TILES=tiling,
        X_TRANSPOSED=operands.x_transposed,
        W_TRANSPOSED=operands.w_transposed,
        EVEN_K=x.shape[1] % tiling.block_k == 0,
        ROW_WORDS=partial_sums.row_words(tiling.block_n, out.dtype),
        REDUCE_M=config.reduce_m,
        **tiling.options,
    )
    return out
