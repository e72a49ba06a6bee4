"""matmul_all_reduce: the sum over ranks of x @ w, bitwise the same on every rank, in one launch.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N), K_r its own affair. bf16, fp16 or fp32
in and out; partial sums, their transport and their sum are fp32, one rounding.

    y (M, N) = scale * sum over r, in the order 0, 1, ..., W-1, of x_r @ w_r + bias     on all ranks

Tiles of (BLOCK_M, BLOCK_N) are numbered 0 .. T-1 and travel as blocks of their own, row after row.

One shot, for few bytes (decode): one step, W - 1 copies of every partial tile. The half of a
generation is W slots of T fp32 tiles.

    rank r: tile t of x_r @ w_r --> slot r of every rank      all: y = slot 0 + slot 1 + ...

Two shots, for more: each tile is added up by one owner, t % W, and sent around once it is finished.
The half is W slots of ceil(T / W) fp32 tiles, then the T finished tiles in the output's dtype.

    rank r: tile t of x_r @ w_r --> slot r of rank t % W    owner: sum --> finished t of every rank

Protocol, in each program p. One shot: it makes the tiles t % P == p.
  1. Store each tile in slot `rank` of every rank; signal the words (0, rank, p) of all peers:
     release at system scope.
  2. Wait for the words (0, r, p) of all peers (acquire, system scope); add the slots in rank order.
Two shots: tile j of an owner is t = j W + owner, and p makes those with j % P == p.
  1. For the owners rank+1, rank+2, ..., rank: store the tiles in the owner's slot `rank`, signal
     its word (0, rank, p).
  2. Wait for the words (0, r, p) of all peers; add up the own tiles in rank order, store them in
     the output and among the finished tiles of every peer; signal the words (1, rank, p) of all
     peers.
  3. Wait for the words (1, r, p) of all peers; copy their finished tiles to the output.
Then each program takes a ticket, and the last one sets GENERATION.

Why it neither races nor deadlocks: between its waits a program signals everything that it has, and
p waits for p alone. Calls alternate halves; rules 1 and 2 of `weft.collectives.signals` hold
because each program signals every peer after this rank's last call has ended, and waits for every
peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, signals, workspace
from weft.kernels import tiles
from weft.kernels.chips import INTERPRETER, Chip, Tiling, chip_of, tiling_for
from weft.kernels.operands import described

# One shot receives (W - 1) x as many bytes as the partial sum has; two shots about 1.5 x, but pay
# a second exchange of signals. At 450 GB/s and 5 us a step they meet at about 1 MiB for 8 ranks.
_ONE_SHOT_BYTES = 1 << 20


@dataclass(frozen=True)
class Config:
    """How the kernel is launched; the same on all ranks.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid.
        two_shot: whether each tile is added up by one owner, rather than by everybody.
        reduce_m: rows of a tile that are added up at a time.
        descriptors: whether operands that allow it are read by tensor descriptor.
    """

    tiling: Tiling
    programs: int
    two_shot: bool
    reduce_m: int
    descriptors: bool


def config_for(M: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip) -> Config:
    """The launch for a sum of (M, N) matrices. K plays no part, as ranks may differ in it."""
    tiling = tiling_for(chip, M, N, dtype)
    count = -(-M // tiling.block_m) * -(-N // tiling.block_n)
    one_shot_bytes = 32 * 32 * 4 * 4 if chip is INTERPRETER else _ONE_SHOT_BYTES
    return Config(
        tiling,
        programs=max(1, min(chip.programs, count)),
        two_shot=world_size > 2 and one_shot_bytes < M * N * 4,
        reduce_m=min(16, tiling.block_m),
        descriptors=chip.descriptors and dtype != torch.float32,
    )


def _tile_count(M: int, N: int, tiling: Tiling) -> int:
    return -(-M // tiling.block_m) * -(-N // tiling.block_n)


def workspace_bytes(M: int, N: int, dtype: torch.dtype, world_size: int, config: Config) -> int:
    """Symmetric memory that the call needs on each rank."""
    count, tile = _tile_count(M, N, config.tiling), config.tiling.block_m * config.tiling.block_n
    if config.two_shot:
        return tile * (world_size * -(-count // world_size) * 4 + count * dtype.itemsize)
    return tile * world_size * count * 4


def workspace_for(x: torch.Tensor, w: torch.Tensor, group: Group) -> Workspace:
    """The group's workspace, with room for the sum of x (M, K) @ w (K, N)."""
    M, N, W = x.shape[0], w.shape[1], group.world_size
    config = config_for(M, N, x.dtype, W, chip_of(x.device))
    nbytes = workspace_bytes(M, N, x.dtype, W, config)
    return workspace(group, nbytes, channel="scatter", device=x.device)


@triton.jit
def _partial_tile(
    x,  # pointer or descriptor of (M, K)
    w,  # pointer or descriptor of (K, N)
    start_m,
    start_n,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wk,
    stride_wn,
    DESCRIBED: tl.constexpr,
    X_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x @ w, one tile of it, in fp32."""
    acc = tiles.zeros(BLOCK_M, BLOCK_N)
    if DESCRIBED:
        acc = tiles.accumulate_described(
            acc, x, w, start_m, start_n, K, BLOCK_K, X_TRANSPOSED, W_TRANSPOSED
        )
    else:
        acc = tiles.accumulate(
            acc,
            x,
            w,
            tiles.wrapped(start_m, M, BLOCK_M),
            tiles.wrapped(start_n, N, BLOCK_N),
            K,
            stride_xm,
            stride_xk,
            stride_wk,
            stride_wn,
            BLOCK_K,
            EVEN_K,
        )
    return acc


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _gemm_one_shot_kernel(
    out_ptr,  # (M, N)
    x,  # pointer or descriptor of (M, K)
    w,  # pointer or descriptor of (K, N)
    bias_ptr,  # (N,) or None
    buffer_ptrs,
    signal_ptrs,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wk,
    stride_wn,
    scale,
    half_bytes,
    max_polls,
    rank,
    WORLD_SIZE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    X_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    REDUCE_M: tl.constexpr,
) -> None:
    """y = scale * sum over ranks of x @ w, + bias. Grid: the same on all ranks.

    Example: 3 tiles, 2 programs: program 0 of every rank sends and adds up tiles 0 and 2.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(signal_ptrs, rank) + 1
    tiles_m, tiles_n = tiles.cdiv(M, BLOCK_M), tiles.cdiv(N, BLOCK_N)
    count = tiles_m * tiles_n
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    slot_stride = tl.cast(count, tl.int64) * BLOCK
    for tile in range(program, count, programs):
        tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        acc = _partial_tile(
            x,
            w,
            tile_m * BLOCK_M,
            tile_n * BLOCK_N,
            M,
            N,
            K,
            stride_xm,
            stride_xk,
            stride_wk,
            stride_wn,
            DESCRIBED,
            X_TRANSPOSED,
            W_TRANSPOSED,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        offs = rank * slot_stride + tl.cast(tile, tl.int64) * BLOCK
        for step in range(1, WORLD_SIZE + 1):
            peer = (rank + step) % WORLD_SIZE
            slots = signals.half_ptr(buffer_ptrs, peer, generation, half_bytes, tl.float32)
            tiles.store_block(slots + offs, acc)
    signals.signal_peers(signal_ptrs, rank, WORLD_SIZE, 0, program, generation)
    # The own slot too was stored by other threads than the ones that read it next.
    tl.debug_barrier()
    if signals.wait_for_peers(signal_ptrs, rank, WORLD_SIZE, 0, program, generation, max_polls):
        slots = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.float32)
        for tile in range(program, count, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            start_n = tile_n * BLOCK_N
            for part in range(0, BLOCK_M, REDUCE_M):
                start_m = tile_m * BLOCK_M + part
                if start_m < M:
                    offs = tl.cast(tile, tl.int64) * BLOCK + part * BLOCK_N
                    offs = offs + tiles.block_offsets(REDUCE_M, BLOCK_N)
                    total = tiles.sum_of_slots(slots, slot_stride, offs, WORLD_SIZE) * scale
                    if bias_ptr is not None:
                        total = tiles.with_bias(total, bias_ptr, start_n, N)
                    tiles.store(out_ptr, total, start_m, start_n, M, N, N, 1)
    if signals.is_last_program(signal_ptrs, rank, programs):
        signals.set_generation(signal_ptrs, rank, generation)


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _gemm_two_shot_kernel(
    out_ptr,  # (M, N)
    x,  # pointer or descriptor of (M, K)
    w,  # pointer or descriptor of (K, N)
    bias_ptr,  # (N,) or None
    buffer_ptrs,
    signal_ptrs,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wk,
    stride_wn,
    scale,
    half_bytes,
    max_polls,
    rank,
    WORLD_SIZE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    X_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    REDUCE_M: tl.constexpr,
) -> None:
    """y = scale * sum over ranks of x @ w, + bias. Grid: the same on all ranks.

    Example: 2 ranks, 5 tiles, 2 programs: rank 0 owns tiles 0 2 4, rank 1 owns 1 3. Program 0 of
    both ranks makes 0 4 for rank 0 and 1 for rank 1, program 1 makes 2 and 3.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(signal_ptrs, rank) + 1
    tiles_m, tiles_n = tiles.cdiv(M, BLOCK_M), tiles.cdiv(N, BLOCK_N)
    count = tiles_m * tiles_n
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    slot_stride = tl.cast(tiles.cdiv(count, WORLD_SIZE), tl.int64) * BLOCK
    for step in range(1, WORLD_SIZE + 1):
        owner = (rank + step) % WORLD_SIZE
        slot = signals.half_ptr(buffer_ptrs, owner, generation, half_bytes, tl.float32)
        slot += rank * slot_stride
        for j in range(program, tiles.cdiv(count - owner, WORLD_SIZE), programs):
            tile_m, tile_n = tiles.grouped_tile(j * WORLD_SIZE + owner, tiles_m, tiles_n, GROUP_M)
            acc = _partial_tile(
                x,
                w,
                tile_m * BLOCK_M,
                tile_n * BLOCK_N,
                M,
                N,
                K,
                stride_xm,
                stride_xk,
                stride_wk,
                stride_wn,
                DESCRIBED,
                X_TRANSPOSED,
                W_TRANSPOSED,
                EVEN_K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            tiles.store_block(slot + tl.cast(j, tl.int64) * BLOCK, acc)
        if owner != rank:
            signals.signal(
                signals.slot_ptr(signal_ptrs, owner, WORLD_SIZE, 0, rank, program), generation
            )
    tl.debug_barrier()
    arrived = signals.wait_for_peers(
        signal_ptrs, rank, WORLD_SIZE, 0, program, generation, max_polls
    )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    finished_at = WORLD_SIZE * slot_stride * 4  # bytes into the half
    if arrived:
        slots = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.float32)
        for j in range(program, tiles.cdiv(count - rank, WORLD_SIZE), programs):
            tile = j * WORLD_SIZE + rank
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            start_n = tile_n * BLOCK_N
            for part in range(0, BLOCK_M, REDUCE_M):
                start_m = tile_m * BLOCK_M + part
                if start_m < M:
                    inside = part * BLOCK_N + tiles.block_offsets(REDUCE_M, BLOCK_N)
                    offs = tl.cast(j, tl.int64) * BLOCK + inside
                    total = tiles.sum_of_slots(slots, slot_stride, offs, WORLD_SIZE) * scale
                    if bias_ptr is not None:
                        total = tiles.with_bias(total, bias_ptr, start_n, N)
                    tiles.store(out_ptr, total, start_m, start_n, M, N, N, 1)
                    final = tiles.rounded(total, dtype)
                    offs = tl.cast(tile, tl.int64) * BLOCK + inside
                    for step in range(1, WORLD_SIZE):
                        peer = (rank + step) % WORLD_SIZE
                        finished = signals.half_ptr(
                            buffer_ptrs, peer, generation, half_bytes, tl.int8
                        )
                        finished = (finished + finished_at).to(tl.pointer_type(dtype))
                        tl.store(finished + offs, final)
        signals.signal_peers(signal_ptrs, rank, WORLD_SIZE, 1, program, generation)
        arrived = signals.wait_for_peers(
            signal_ptrs, rank, WORLD_SIZE, 1, program, generation, max_polls
        )
    if arrived:
        finished = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.int8)
        finished = (finished + finished_at).to(tl.pointer_type(dtype))
        for step in range(1, WORLD_SIZE):
            owner = (rank + step) % WORLD_SIZE
            for j in range(program, tiles.cdiv(count - owner, WORLD_SIZE), programs):
                tile = j * WORLD_SIZE + owner
                tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
                start_n = tile_n * BLOCK_N
                # By the parts that were sent: the rest of the tile was never written.
                for part in range(0, BLOCK_M, REDUCE_M):
                    start_m = tile_m * BLOCK_M + part
                    if start_m < M:
                        offs = tl.cast(tile, tl.int64) * BLOCK + part * BLOCK_N
                        offs = offs + tiles.block_offsets(REDUCE_M, BLOCK_N)
                        final = tl.load(finished + offs).to(tl.float32)
                        tiles.store(out_ptr, final, start_m, start_n, M, N, N, 1)
    if signals.is_last_program(signal_ptrs, rank, programs):
        signals.set_generation(signal_ptrs, rank, generation)


def launch_matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    ws: Workspace,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    config: Config | None = None,
) -> torch.Tensor:
    """Enqueue scale * sum over ranks of x @ w, + bias.

    Args:
        x: (M, K_r), any strides.
        w: (K_r, N), any strides, dtype of x. K_r may differ from rank to rank.
        ws: room for `workspace_bytes(M, N, dtype, W, config)`.
        bias: (N,), added once, after the scale; the same on all ranks.
        scale: 1 / W makes an average.
        config: the same on all ranks; default `config_for`.

    Returns:
        (M, N), contiguous, dtype of x, bitwise the same on all ranks.
    """
    (M, K), N, W = x.shape, w.shape[1], ws.world_size
    config = config or config_for(M, N, x.dtype, W, chip_of(x.device))
    tiling = config.tiling
    if (needed := workspace_bytes(M, N, x.dtype, W, config)) > ws.half_bytes:
        raise ValueError(
            f"the workspace must hold {needed} bytes a call, got {ws.half_bytes=}; "
            f"ask for workspace_bytes(M, N, dtype, world_size, config)"
        )
    out = x.new_empty(M, N)
    operands = described(x, w, tiling, config.descriptors)
    kernel = _gemm_two_shot_kernel if config.two_shot else _gemm_one_shot_kernel
    kernel[(config.programs,)](
        out,
        operands.x,
        operands.w,
        bias,
        ws.buffer_ptrs,
        ws.signal_ptrs,
        M,
        N,
        K,
        x.stride(0),
        x.stride(1),
        w.stride(0),
        w.stride(1),
        scale,
        ws.half_bytes,
        ws.timeout_polls,
        ws.rank,
        WORLD_SIZE=W,
        DESCRIBED=operands.described,
        X_TRANSPOSED=operands.x_transposed,
        W_TRANSPOSED=operands.w_transposed,
        EVEN_K=K % tiling.block_k == 0,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP_M=tiling.group_m,
        REDUCE_M=config.reduce_m,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out
