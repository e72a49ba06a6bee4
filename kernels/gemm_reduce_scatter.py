"""matmul_reduce_scatter: each rank's chunk of the sum over ranks of x @ w, in one launch.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N), or several such pairs (terms), K_r its
own affair. Rank d owns rows offsets[d] .. offsets[d+1], `chunk` at most; chunks may differ in size
and be empty. bf16, fp16, fp32, or scaled fp8, in; partial sums, their transport and their sum are
fp32, one rounding.

    y_d (rows of chunk d, N) = scale * sum over r of x_r[chunk d] @ w_r + bias + residual_d

Chunks of fewer rows than a large tile has go by `weft.kernels.gemm_one_shot` instead: there tiles
straddle chunks, here they would be mostly empty.

Data, for W = 3: the half of this generation on every rank is W slots, one a source rank, each
holding this rank's chunk as tiles of (BLOCK_M, BLOCK_N) fp32, one after another:

    rank 0 makes chunk 1 --> rank 1, slot 0       rank 1 makes chunk 2 --> rank 2, slot 1      ...
           then  chunk 2 --> rank 2, slot 0              then  chunk 0 --> rank 0, slot 1
           last  chunk 0 --> rank 0, slot 0              last  chunk 1 --> rank 1, slot 1
    rank 0: y_0 = slot 0 + slot 1 + slot 2

Tiles are numbered through all chunks: tile u of chunk d is number d * (tiles a chunk) + u, and
program p of any rank makes those with number % P == p. So what p of the owner adds up was made by p
of each peer, and the work is even although a chunk may have fewer tiles than there are programs.
Of chunk d those are the tiles f, f + P, ..: f stands for p in what ranks tell each other.

Tiles go to peers in turns (`weft.kernels.turns`): else programs would all wait for the link at the
end of every tile, as all end at once.

Protocol, in each program p
  1. For the destinations rank+1, rank+2, ..., rank: make the tiles, store them in the owner's slot
     `rank`; then signal the word (0, rank, f) of the owner's pad: release at system scope. It is
     signalled for empty chunks too.
  2. Wait for the words (0, r, f) of all peers r, f that of the own chunk (acquire, system scope):
     slots r now hold p's tiles.
  3. Add the slots in rank order, store the output.
  4. Take a ticket; the last program sets GENERATION.

Why it neither races nor deadlocks: nobody waits before it has signalled everything, and p waits for
p; but for its turn, for which it waits for a smaller number, and which orders no data. Slots of two
calls lie in different halves; rules 1 and 2 of `weft.collectives.signals` hold because each program
signals every peer after this rank's last call has ended, and waits for every peer.

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
from weft.collectives.workspace import link_of
from weft.kernels import gemm_one_shot, partial_sums, tiles, tuning, turns
from weft.kernels.chips import INTERPRETER, Chip, Tiling, chip_of, tiling_for
from weft.kernels.operands import described
from weft.kernels.partial_sums import factors_of, finish_of


@dataclass(frozen=True)
class Config:
    """How the kernel is launched; the same on all ranks.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid.
        reduce_m: rows of a tile that are added up at a time.
        descriptors: whether operands that allow it are read by tensor descriptor.
        senders: programs that store tiles to peers at a time: see `weft.kernels.turns`.
    """

    tiling: Tiling
    programs: int
    reduce_m: int
    descriptors: bool
    senders: int = 1


# Rows of a chunk from which on no tile of it is smaller than those of a large matmul.
_WHOLE_ROWS = 128


def config_for(
    chunk: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> Config | gemm_one_shot.Config:
    """The launch for chunks of at most (chunk, N). K plays no part, as ranks may differ in it."""
    op, M = "matmul_reduce_scatter", world_size * chunk
    choice = tuning.choice_for(op, chip, M, N, 0, dtype, world_size)
    tiling = choice.tiling or tiling_for(chip, chunk, N, dtype, world_size)
    # Tiles that straddle chunks read w once for all of them.
    if world_size > 1 and chunk < (tiling.block_m if chip is INTERPRETER else _WHOLE_ROWS):
        return gemm_one_shot.config_for(M, N, dtype, chip, choice.tiling)
    count = world_size * -(-chunk // tiling.block_m) * -(-N // tiling.block_n)
    return Config(
        tiling,
        programs=max(1, min(chip.programs, count)),
        reduce_m=min(16, tiling.block_m),
        descriptors=chip.descriptors and dtype != torch.float32,
        # A core stores up to 64 bytes a clock, 110 GB/s: eight fill a link of 450 GB/s twice over.
        senders=max(1, chip.cores // 16),
    )


def workspace_bytes(
    chunk: int, N: int, world_size: int, config: Config | gemm_one_shot.Config
) -> int:
    """Symmetric memory that the call needs on each rank."""
    if isinstance(config, gemm_one_shot.Config):
        return gemm_one_shot.workspace_bytes(world_size * chunk, N, world_size, config)
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


@triton.jit(do_not_specialize=["chunk", "rank"])
def _gemm_rs_kernel(
    out_ptr,  # (rows of the own chunk, N)
    factors,  # Factors of (M, N)
    x_desc,  # of the only term, or None
    w_desc,
    finish,  # Finish
    link,
    offsets,
    N,
    chunk,
    rank,
    WORLD_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TERMS: tl.constexpr,
    X_TRANSPOSED: tl.constexpr,
    W_TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    REDUCE_M: tl.constexpr,
    SENDERS: tl.constexpr,
) -> None:
    """out = scale * sum over ranks of sum_i x_i @ w_i, own chunk, + bias + residual.

    Grid: the same on all ranks.

    Example: 2 ranks, offsets (0, 3, 5), one column tile, block_m=2: 2 tiles a chunk, numbers 0 1 |
    2 3. Of 3 programs, program 0 makes tile 0 (rows 0, 1) and tile 3 (rows 5.., nothing), on both
    ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.last_generation(link.signal_ptrs, rank) + 1
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_N: tl.constexpr = TILES.block_n
    BLOCK: tl.constexpr = BLOCK_M * BLOCK_N
    tiles_m, tiles_n = tiles.cdiv(chunk, BLOCK_M), tiles.cdiv(N, BLOCK_N)
    count = tiles_m * tiles_n
    slot_stride = tl.cast(count, tl.int64) * BLOCK
    sends = 0
    for step in range(1, WORLD_SIZE + 1):
        owner = (rank + step) % WORLD_SIZE
        begin = tiles.element(offsets, owner, WORLD_SIZE)
        rows = tiles.element(offsets, owner + 1, WORLD_SIZE + 1) - begin
        half_bytes = link.half_bytes
        slot = signals.half_ptr(link.buffer_ptrs, owner, generation, half_bytes, tl.float32)
        slot += rank * slot_stride
        first = (program + programs - owner * count % programs) % programs
        for tile in range(first, count, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
            start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            if start_m < rows:
                acc = partial_sums.product(
                    factors, x_desc, w_desc, begin + tiles.wrapped(start_m, rows, BLOCK_M),
                    begin + start_m, start_n, N, 0,
                    TILES, TERMS, 1, EVEN_K, X_TRANSPOSED, W_TRANSPOSED,
                )  # fmt: skip
                away = owner != rank
                if away:
                    turns.wait(link, rank, program, generation, sends, WORLD_SIZE, SENDERS)
                tiles.store_block(slot + tl.cast(tile, tl.int64) * BLOCK, acc)
                if away:
                    sends += 1
                    turns.end(link, rank, program, generation, sends, WORLD_SIZE)
        if owner != rank:
            signals.signal(
                signals.slot_ptr(link.signal_ptrs, owner, WORLD_SIZE, 0, rank, first), generation
            )
    turns.end_all(link, rank, program, generation, WORLD_SIZE)
    # Own tiles too were stored by other threads than the ones that read them next.
    tl.debug_barrier()
    own_first = (program + programs - rank * count % programs) % programs
    if signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, own_first, generation, link.max_polls
    ):
        rows = tiles.element(offsets, rank + 1, WORLD_SIZE + 1)
        rows -= tiles.element(offsets, rank, WORLD_SIZE)
        slots = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.float32)
        for tile in range(own_first, count, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
            for part in range(0, BLOCK_M, REDUCE_M):
                start_m = tile_m * BLOCK_M + part
                if start_m < rows:
                    offs_m = start_m + tl.arange(0, REDUCE_M)
                    inside_m = offs_m < rows
                    offs = tl.cast(tile, tl.int64) * BLOCK + part * BLOCK_N
                    total = partial_sums.finished(
                        slots, slot_stride, offs + tiles.block_offsets(REDUCE_M, BLOCK_N), finish,
                        offs_m, inside_m, tile_n * BLOCK_N, N, WORLD_SIZE,
                    )  # fmt: skip
                    tiles.store(out_ptr, total, start_m, tile_n * BLOCK_N, rows, N, N, 1)
    if signals.is_last_program(link.signal_ptrs, rank, programs):
        signals.set_generation(link.signal_ptrs, rank, generation)


def launch_matmul_reduce_scatter(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    sizes: Sequence[int],
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | gemm_one_shot.Config | None = None,
) -> torch.Tensor:
    """Enqueue this rank's chunk of scale * sum over ranks of (sum_i x_i @ w_i), + bias + residual.

    Args:
        xs: (M, K_i), any strides, one dtype.
        weights: (K_i, N), any strides, dtype of x. K_i may differ from rank to rank.
        ws: room for `workspace_bytes(max(sizes), N, W, config)`.
        sizes: rows of every rank's chunk, the same list on all ranks.
        bias: (N,), added once, after the scale.
        residual: (sizes[rank], N), likewise.
        scale: 1 / W makes an average.
        scale_a, scale_b: of fp8 operands (one term), fp32: one factor, or one a row, a column.
        out_dtype: default that of x.
        config: the same on all ranks; default `config_for`.

    Returns:
        (sizes[rank], N), contiguous.
    """
    x, W = xs[0], ws.world_size
    chunk, N = max(sizes), weights[0].shape[1]
    config = config or config_for(chunk, N, x.dtype, W, chip_of(x.device))
    if (needed := workspace_bytes(chunk, N, W, config)) > ws.half_bytes:
        raise partial_sums.too_small(
            needed, ws, "workspace_bytes(max(sizes), N, world_size, config)"
        )
    out = x.new_empty(sizes[ws.rank], N, dtype=out_dtype or x.dtype)
    offsets = (0, *accumulate(sizes))
    factors = factors_of(xs, weights, scale_a, scale_b)
    finish = finish_of(scale, bias, residual)
    if isinstance(config, gemm_one_shot.Config):
        gemm_one_shot.launch(out, xs, weights, factors, finish, ws, offsets, config)
        return out
    tiling = config.tiling
    # Triton's launcher takes no descriptors in a tuple, and the number of terms varies.
    operands = described(x, weights[0], tiling, config.descriptors and len(xs) == 1, offsets)
    _gemm_rs_kernel[(config.programs,)](
        out,
        factors,
        operands.x,
        operands.w,
        finish,
        link_of(ws),
        offsets,
        N,
        chunk,
        ws.rank,
        WORLD_SIZE=W,
        TILES=tiling,
        TERMS=len(xs),
        X_TRANSPOSED=operands.x_transposed,
        W_TRANSPOSED=operands.w_transposed,
        EVEN_K=all(x.shape[1] % tiling.block_k == 0 for x in xs),
        REDUCE_M=config.reduce_m,
        SENDERS=config.senders,
        **tiling.options,
    )
    return out
