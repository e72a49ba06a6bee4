"""matmul_reduce_scatter: each rank's chunk of the sum over ranks of x @ w, in one launch.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N), or several such pairs (terms); K_r may
differ between ranks. Rank d owns rows offsets[d] .. offsets[d+1], at most `chunk`; chunks may
differ in size and be empty. Inputs are bf16, fp16, fp32 or scaled fp8; partial sums are fp32,
rounded once, and travel as fp32 or as its upper 24 bits (`weft.kernels.device.partial_sums`).

    y_d (rows of chunk d, N) = scale * sum over r of x_r[chunk d] @ w_r + bias + residual_d

Chunks with fewer rows than a large tile are left to `weft.kernels.matmul.one_shot_kernel`, whose
tiles straddle chunks; here they would be mostly empty.

Data, for W = 3: the half of this generation on every rank is W slots, one for each source rank, in
which this rank's chunk lies as tiles of BLOCK_M rows of ROW_WORDS words, one after another:

    rank 0 makes chunk 1 --> rank 1, slot 0       rank 1 makes chunk 2 --> rank 2, slot 1      ...
           then  chunk 2 --> rank 2, slot 0              then  chunk 0 --> rank 0, slot 1
           last  chunk 0 --> rank 0, slot 0              last  chunk 1 --> rank 1, slot 1
    rank 0: y_0 = slot 0 + slot 1 + slot 2

Tiles are numbered through all chunks: tile u of chunk d has number d * (tiles a chunk) + u, and on
every rank program p of P makes the tiles with number % P == p. So program p adds up on the owner
what program p has made on each peer, and the work is even although a chunk may have fewer tiles
than there are programs. Within chunk d these are tiles f, f + P, ..; signals name f, not p.

Programs take turns to send (`weft.kernels.device.turns`): all finish a tile at the same time, and
would otherwise all wait for the link after each.

Protocol, in each program p
  1. For the destinations rank+1, rank+2, ..., rank-1: make the tiles and store them in the owner's
     slot `rank`.
  2. Signal the words (0, rank, f) of all peers, f being the first tile of that peer's chunk, also
     for empty chunks: release at system scope. Earlier signals would help nobody, and each would
     wait until the peer has acknowledged what was stored.
  3. Make the tiles of the rank's own chunk and store them in its own slot `rank`. After the first:
     wait for the words (0, r, f) of all peers r, f now of the own chunk (acquire, system scope),
     after which slots r hold p's tiles. Add up each tile's slots in rank order and store the
     output, while other programs, staggered by their turns, still multiply.
  4. Take a ticket; the last program sets GENERATION.

Why it neither races nor deadlocks: no program waits for a peer before it has signalled everything,
and p waits only for p; for its turn it waits for a smaller number, and turns order no data. Slots
of two calls lie in different halves; rules 1 and 2 of `weft.collectives.device.signals` hold
because each program signals every peer after this rank's last call has ended, and waits for every
peer, even if it has no tiles of its own chunk.

The rank's own partial sums pass through its own slot as well. In registers they would have to wait
for the sums of lower ranks, which takes a second accumulator of the tile's size; a round trip
through L2 for 1/W of the tiles is cheaper than the smaller tile which that would force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, workspace
from weft.collectives.device import signals
from weft.collectives.memory.workspace import check_room, link_of
from weft.kernels.device import partial_sums, tiles, turns
from weft.kernels.device.operands import described
from weft.kernels.device.partial_sums import finish_of, terms_of
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import Chip, chip_of, scatters_in_one_shot, tiling_for
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.matmul import one_shot_kernel


@dataclass(frozen=True)
class Config(partial_sums.Config):
    """Also `senders`: how many programs store tiles to peers at a time; see `turns`."""

    senders: int = 1


def config_for(
    chunk: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> Config | one_shot_kernel.Config:
    """The launch for chunks of at most (chunk, N). K plays no part: ranks may differ in it."""
    op, M = "matmul_reduce_scatter", world_size * chunk
    choice = tuning.choice_for(op, chip, M, N, 0, dtype, world_size)
    tiling = choice.tiling or tiling_for(chip, chunk, N, dtype, world_size)
    # Tiles that straddle chunks read w once for all of them.
    if scatters_in_one_shot(chip, chunk, N, dtype, world_size, choice.tiling):
        return one_shot_kernel.config_for(M, N, dtype, chip, choice.tiling)
    count = world_size * -(-chunk // tiling.block_m) * -(-N // tiling.block_n)
    return Config(
        tiling,
        programs=max(1, min(chip.programs, count)),
        reduce_m=min(16, tiling.block_m),
        descriptors=chip.descriptors and dtype != torch.float32,
        # A core stores up to 64 bytes a clock, 110 GB/s: eight could fill a 450 GB/s link twice.
        senders=max(1, chip.cores // 16),
    )


def workspace_bytes(
    chunk: int,
    N: int,
    out_dtype: torch.dtype,
    world_size: int,
    config: Config | one_shot_kernel.Config,
) -> int:
    """Symmetric memory that the call needs on each rank."""
    if isinstance(config, one_shot_kernel.Config):
        return one_shot_kernel.workspace_bytes(world_size * chunk, N, out_dtype, world_size, config)
    tiling = config.tiling
    count = -(-chunk // tiling.block_m) * -(-N // tiling.block_n)
    row = partial_sums.row_words(tiling.block_n, out_dtype)
    return world_size * count * tiling.block_m * row * 4


def workspace_for(
    x: torch.Tensor, w: torch.Tensor, group: Group, sizes: Sequence[int], out_dtype: torch.dtype
) -> Workspace:
    """The group's workspace, with room for x (M, K) @ w (K, N) in chunks of `sizes` rows."""
    chunk, N, W = max(sizes), w.shape[1], group.world_size
    config = config_for(chunk, N, x.dtype, W, chip_of(x.device))
    nbytes = workspace_bytes(chunk, N, out_dtype, W, config)
    return workspace(group, nbytes, channel="scatter", device=x.device)


@triton.jit
def _wait_for_sums(link, rank, first, generation, WORLD_SIZE: tl.constexpr):
    """Whether all peers have sent their partial sums of the tiles that begin with `first`."""
    return signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, first, generation, link.timeout_ns
    )


@triton.jit
def _add_up(
    out_ptr,  # (rows, N)
    tile_ptr,  # of the tile in slot 0
    slot_stride,
    finish,
    start_m,
    start_n,
    rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    REDUCE_M: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """out[start_m:, start_n:] = the tile's sum over all slots, REDUCE_M rows at a time."""
    for part in range(0, BLOCK_M, REDUCE_M):
        first_m = start_m + part
        if first_m < rows:
            offs_m = first_m + tl.arange(0, REDUCE_M)
            total = partial_sums.finished(
                tile_ptr + part * ROW_WORDS, slot_stride, finish, offs_m, offs_m < rows, start_n, N,
                BLOCK_N, ROW_WORDS, WORLD_SIZE,
            )  # fmt: skip
            tiles.store(out_ptr, total, first_m, start_n, rows, N, N, 1)


@triton.jit(do_not_specialize=["chunk", "rank"])
def _gemm_rs_kernel(
    out_ptr,  # (rows of the own chunk, N)
    terms,  # Terms of (M, N)
    x_desc,  # of each term, or None
    w_desc,
    x_desc_2,
    w_desc_2,
    x_desc_3,
    w_desc_3,
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
    ROW_WORDS: tl.constexpr,
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
    generation = signals.begin_call(link.signal_ptrs, rank)
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_N: tl.constexpr = TILES.block_n
    BLOCK: tl.constexpr = BLOCK_M * ROW_WORDS
    tiles_m, tiles_n = tiles.cdiv(chunk, BLOCK_M), tiles.cdiv(N, BLOCK_N)
    count = tiles_m * tiles_n
    slot_stride = tl.cast(count, tl.int64) * BLOCK
    own_slots = signals.half_ptr(link.buffer_ptrs, rank, generation, link.half_bytes, tl.float32)
    sends = 0
    waited, arrived = False, False
    for step in range(1, WORLD_SIZE + 1):
        owner = (rank + step) % WORLD_SIZE
        away = owner != rank
        if not away:
            turns.end_all(link, rank, program, generation, WORLD_SIZE)
            lanes, peers = signals.peer_lanes(rank + 1, WORLD_SIZE)
            firsts = tiles.first_of(peers * count, program, programs)
            words = signals.slot_ptr(link.signal_ptrs, peers, WORLD_SIZE, 0, rank, firsts)
            signals.signal(words, generation, lanes < WORLD_SIZE - 1)
        begin = tiles.element(offsets, owner, WORLD_SIZE)
        rows = tiles.element(offsets, owner + 1, WORLD_SIZE + 1) - begin
        half_bytes = link.half_bytes
        slot = signals.half_ptr(link.buffer_ptrs, owner, generation, half_bytes, tl.float32)
        slot += rank * slot_stride
        first = tiles.first_of(owner * count, program, programs)
        for tile in range(first, count, programs):
            tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
            start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
            if start_m < rows:
                acc = partial_sums.product(
                    terms, (x_desc, x_desc_2, x_desc_3), (w_desc, w_desc_2, w_desc_3),
                    begin + tiles.wrapped(start_m, rows, BLOCK_M), begin + start_m, start_n, N, 0,
                    TILES, TERMS, 1, EVEN_K, X_TRANSPOSED, W_TRANSPOSED,
                )  # fmt: skip
                if away:
                    turns.wait(link, rank, program, generation, sends, WORLD_SIZE, SENDERS)
                offs = tl.cast(tile, tl.int64) * BLOCK
                partial_sums.store_block(slot + offs, acc, ROW_WORDS)
                if away:
                    sends += 1
                    turns.end(link, rank, program, generation, sends, WORLD_SIZE)
                else:
                    if not waited:
                        arrived = _wait_for_sums(link, rank, first, generation, WORLD_SIZE)
                        waited = True
                    # Other threads stored this tile than will read it next.
                    tl.debug_barrier()
                    if arrived:
                        _add_up(
                            out_ptr, own_slots + offs, slot_stride, finish, start_m, start_n, rows,
                            N, BLOCK_M, BLOCK_N, ROW_WORDS, REDUCE_M, WORLD_SIZE,
                        )  # fmt: skip
    if not waited:
        first = tiles.first_of(rank * count, program, programs)
        _wait_for_sums(link, rank, first, generation, WORLD_SIZE)
    if signals.end_call(link.signal_ptrs, rank, generation):
        own_rows = tiles.element(offsets, rank + 1, WORLD_SIZE + 1)
        own_rows -= tiles.element(offsets, rank, WORLD_SIZE)
        signals.spoil(out_ptr, tl.cast(own_rows, tl.int64) * N)


def launch_matmul_reduce_scatter(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    sizes: Sequence[int],
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    scaling: Scaling | None = None,
    config: Config | one_shot_kernel.Config | None = None,
) -> torch.Tensor:
    """Enqueue this rank's chunk of scale * sum over ranks of (sum_i x_i @ w_i), + bias + residual.

    Args:
        xs: (M, K_i), any strides, one dtype.
        weights: (K_i, N), any strides, dtype of x. K_i may differ from rank to rank.
        ws: room for `workspace_bytes(max(sizes), N, out_dtype, W, config)`.
        sizes: rows of every rank's chunk, the same list on all ranks.
        bias: (N,), added once, after the scale.
        residual: (sizes[rank], N), likewise.
        scale: 1 / W makes an average.
        scaling: of fp8 operands (one term).
        config: the same on all ranks; default `config_for`.

    Returns:
        (sizes[rank], N), contiguous.
    """
    x, W = xs[0], ws.world_size
    chunk, N = max(sizes), weights[0].shape[1]
    config = config or config_for(chunk, N, x.dtype, W, chip_of(x.device))
    out = x.new_empty(sizes[ws.rank], N, dtype=scaling.out_dtype if scaling else x.dtype)
    needed = workspace_bytes(chunk, N, out.dtype, W, config)
    check_room(ws, needed, "workspace_bytes(max(sizes), N, out_dtype, world_size, config)")
    offsets = (0, *accumulate(sizes))
    terms = terms_of(xs, weights, scaling)
    finish = finish_of(scale, bias, residual)
    if isinstance(config, one_shot_kernel.Config):
        one_shot_kernel.launch(out, xs, weights, terms, finish, ws, offsets, config)
        return out
    tiling = config.tiling
    options = tiling.options
    if len(xs) > 1 and config.descriptors:
        # With a loop for each term and four stages, the widest tiles spill 24 bytes.
        options["num_stages"] = min(options["num_stages"], 3)
    operands = described(xs, weights, tiling, config.descriptors, offsets)
    _gemm_rs_kernel[(config.programs,)](
        out,
        terms,
        *operands.arguments,
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
        ROW_WORDS=partial_sums.row_words(tiling.block_n, out.dtype),
        REDUCE_M=config.reduce_m,
        SENDERS=config.senders,
        **options,
    )
    return out
