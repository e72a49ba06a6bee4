"""matmul_reduce_scatter: each rank's chunk of the sum over ranks of x @ w, in one launch.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N), or several such pairs (terms), K_r its
own affair. Rank d owns rows offsets[d] .. offsets[d+1], `chunk` at most; chunks may differ in size
and be empty. bf16, fp16 or fp32 in and out; partial sums, their transport and their sum are fp32,
one rounding.

    y_d (rows of chunk d, N) = scale * sum over r = 0, 1, ..., W-1 of x_r[chunk d] @ w_r + bias

Data, for W = 3: the half of this generation on every rank is W slots, one a source rank, each
holding this rank's chunk as tiles of (BLOCK_M, BLOCK_N) fp32, one after another:

    rank 0 makes chunk 1 --> rank 1, slot 0       rank 1 makes chunk 2 --> rank 2, slot 1      ...
           then  chunk 2 --> rank 2, slot 0              then  chunk 0 --> rank 0, slot 1
           last  chunk 0 --> rank 0, slot 0              last  chunk 1 --> rank 1, slot 1
    rank 0: y_0 = slot 0 + slot 1 + slot 2

Tiles are numbered through all chunks: tile u of chunk d is number d * (tiles a chunk) + u, and
program p of any rank makes those with number % P == p. So what p of the owner adds up was made by p
of each peer, and the work is even although a chunk may have fewer tiles than there are programs.

Protocol, in each program p
  1. For the destinations rank+1, rank+2, ..., rank: make the tiles, store them in the owner's slot
     `rank`; then signal the word (0, rank, p) of the owner's pad: release at system scope. It is
     signalled for empty chunks too.
  2. Wait for the words (0, r, p) of all peers r (acquire, system scope): slots r now hold
     p's tiles.
  3. Add the slots in rank order, store the output.
  4. Take a ticket; the last program sets GENERATION.

Why it neither races nor deadlocks: nobody waits before it has signalled everything, and p waits for
p. Slots of two calls lie in different halves; rules 1 and 2 of `weft.collectives.signals` hold
because each program signals every peer after this rank's last call has ended, and waits for every
peer.

The own partial sums pass through the own slot as well. Kept in registers they would have to wait
there for the sums of lower ranks, a second accumulator of the tile's size; a round trip through L2
of 1/W of the tiles is cheaper than the smaller tile which that would force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, signals, workspace
from weft.kernels import tiles
from weft.kernels.chips import Chip, Tiling, chip_of, tiling_for
from weft.kernels.operands import described


@dataclass(frozen=True)
class Config:
    """How the kernel is launched; the same on all ranks.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid.
        reduce_m: rows of a tile that are added up at a time.
        descriptors: whether operands that allow it are read by tensor descriptor.
    """

    tiling: Tiling
    programs: int
    reduce_m: int
    descriptors: bool


def config_for(chunk: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip) -> Config:
    """The launch for chunks of at most (chunk, N). K plays no part, as ranks may differ in it."""
    tiling = tiling_for(chip, chunk, N, dtype, world_size)
    count = world_size * -(-chunk // tiling.block_m) * -(-N // tiling.block_n)
    return Config(
        tiling,
        programs=max(1, min(chip.programs, count)),
        reduce_m=min(16, tiling.block_m),
        descriptors=chip.descriptors and dtype != torch.float32,
    )


def workspace_bytes(chunk: int, N: int, world_size: int, config: Config) -> int:
    """Symmetric memory that the call needs on each rank."""
    tiling = config.tiling
    count = -(-chunk // tiling.block_m) * -(-N // tiling.block_n)
    return world_size * count * tiling.block_m * tiling.block_n * 4


def workspace_for(
    dtype: torch.dtype, N: int, group: Group, sizes: Sequence[int], device: torch.device
) -> Workspace:
    """The group's workspace, with room for chunks of `sizes` rows and N columns."""
    chunk, W = max(sizes), group.world_size
    config = config_for(chunk, N, dtype, W, chip_of(device))
    return workspace(group, workspace_bytes(chunk, N, W, config), channel="scatter", device=device)


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _gemm_rs_kernel(
    out_ptr,  # (rows of the own chunk, N)
    xs,  # (M, K_i) a term; if DESCRIBED, the one term's descriptor
    ws,  # (K_i, N), likewise
    bias_ptr,  # (N,) or None
    buffer_ptrs,
    signal_ptrs,
    offsets,
    N,
    Ks,
    chunk,
    strides_xm,
    strides_xk,
    strides_wk,
    strides_wn,
    scale,
    half_bytes,
    max_polls,
    rank,
    WORLD_SIZE: tl.constexpr,
    TERMS: tl.constexpr,
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
    """out = scale * sum over ranks of sum_i x_i @ w_i, own chunk, + bias.

    Grid: the same on all ranks.

    Example: 2 ranks, offsets (0, 3, 5), one column tile, BLOCK_M=2: 2 tiles a chunk, numbers 0 1 |
    2 3. Of 3 programs, program 0 makes tile 0 (rows 0, 1) and tile 3 (rows 5.., nothing), on both
    ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(signal_ptrs, rank) + 1
    tiles_n = tiles.cdiv(N, BLOCK_N)
    tiles_m = tiles.cdiv(chunk, BLOCK_M)
    count = tiles_m * tiles_n
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    slot_stride = tl.cast(count, tl.int64) * BLOCK
    for step in range(1, WORLD_SIZE + 1):
        owner = (rank + step) % WORLD_SIZE
        begin = tiles.element(offsets, owner, WORLD_SIZE)
        rows = tiles.element(offsets, owner + 1, WORLD_SIZE + 1) - begin
        slot = signals.half_ptr(buffer_ptrs, owner, generation, half_bytes, tl.float32)
        slot += rank * slot_stride
        first = (program + programs - owner * count % programs) % programs
        for tile in range(first, count, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            if start_m < rows:
                acc = tiles.zeros(BLOCK_M, BLOCK_N)
                if DESCRIBED:
                    acc = tiles.accumulate_described(
                        acc,
                        xs,
                        ws,
                        begin + start_m,
                        start_n,
                        Ks[0],
                        BLOCK_K,
                        X_TRANSPOSED,
                        W_TRANSPOSED,
                    )
                else:
                    for i in tl.static_range(TERMS):
                        acc = tiles.accumulate(
                            acc,
                            xs[i],
                            ws[i],
                            begin + tiles.wrapped(start_m, rows, BLOCK_M),
                            tiles.wrapped(start_n, N, BLOCK_N),
                            Ks[i],
                            strides_xm[i],
                            strides_xk[i],
                            strides_wk[i],
                            strides_wn[i],
                            BLOCK_K,
                            EVEN_K,
                        )
                tiles.store_block(slot + tl.cast(tile, tl.int64) * BLOCK, acc)
        if owner != rank:
            signals.signal(
                signals.slot_ptr(signal_ptrs, owner, WORLD_SIZE, 0, rank, program), generation
            )
    # Own tiles too were stored by other threads than the ones that read them next.
    tl.debug_barrier()
    if signals.wait_for_peers(signal_ptrs, rank, WORLD_SIZE, 0, program, generation, max_polls):
        rows = tiles.element(offsets, rank + 1, WORLD_SIZE + 1)
        rows -= tiles.element(offsets, rank, WORLD_SIZE)
        slots = signals.half_ptr(buffer_ptrs, rank, generation, half_bytes, tl.float32)
        first = (program + programs - rank * count % programs) % programs
        for tile in range(first, count, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            start_n = tile_n * BLOCK_N
            for part in range(0, BLOCK_M, REDUCE_M):
                start_m = tile_m * BLOCK_M + part
                if start_m < rows:
                    offs = tl.cast(tile, tl.int64) * BLOCK + part * BLOCK_N
                    offs = offs + tiles.block_offsets(REDUCE_M, BLOCK_N)
                    total = tiles.sum_of_slots(slots, slot_stride, offs, WORLD_SIZE) * scale
                    if bias_ptr is not None:
                        total = tiles.with_bias(total, bias_ptr, start_n, N)
                    tiles.store(out_ptr, total, start_m, start_n, rows, N, N, 1)
    if signals.is_last_program(signal_ptrs, rank, programs):
        signals.set_generation(signal_ptrs, rank, generation)


def launch_matmul_reduce_scatter(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    sizes: Sequence[int],
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    config: Config | None = None,
) -> torch.Tensor:
    """Enqueue this rank's chunk of scale * sum over ranks of (sum_i x_i @ w_i), + bias.

    Args:
        xs: (M, K_i), any strides, one dtype.
        weights: (K_i, N), any strides, dtype of x. K_i may differ from rank to rank.
        ws: room for `workspace_bytes(max(sizes), N, W, config)`.
        sizes: rows of every rank's chunk, the same list on all ranks.
        bias: (N,), added once, after the scale.
        scale: 1 / W makes an average.
        config: the same on all ranks; default `config_for`.

    Returns:
        (sizes[rank], N), contiguous, dtype of x.
    """
    x, W = xs[0], ws.world_size
    chunk, N = max(sizes), weights[0].shape[1]
    config = config or config_for(chunk, N, x.dtype, W, chip_of(x.device))
    tiling = config.tiling
    if (needed := workspace_bytes(chunk, N, W, config)) > ws.half_bytes:
        raise ValueError(
            f"the workspace must hold {needed} bytes a call, got {ws.half_bytes=}; "
            f"ask for workspace_bytes(max(sizes), N, world_size, config)"
        )
    out = x.new_empty(sizes[ws.rank], N)
    # Triton's launcher takes no descriptors in a tuple, and the number of terms varies.
    wanted, offsets = config.descriptors and len(xs) == 1, (0, *accumulate(sizes))
    operands = described(x, weights[0], tiling, wanted, offsets)
    _gemm_rs_kernel[(config.programs,)](
        out,
        operands.x if operands.described else tuple(xs),
        operands.w if operands.described else tuple(weights),
        bias,
        ws.buffer_ptrs,
        ws.signal_ptrs,
        offsets,
        N,
        tuple(x.shape[1] for x in xs),
        chunk,
        tuple(x.stride(0) for x in xs),
        tuple(x.stride(1) for x in xs),
        tuple(w.stride(0) for w in weights),
        tuple(w.stride(1) for w in weights),
        scale,
        ws.half_bytes,
        ws.timeout_polls,
        ws.rank,
        WORLD_SIZE=W,
        TERMS=len(xs),
        DESCRIBED=operands.described,
        X_TRANSPOSED=operands.x_transposed,
        W_TRANSPOSED=operands.w_transposed,
        EVEN_K=all(x.shape[1] % tiling.block_k == 0 for x in xs),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        GROUP_M=tiling.group_m,
        REDUCE_M=config.reduce_m,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out
