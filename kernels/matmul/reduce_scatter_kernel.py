"""matmul_reduce_scatter: each rank's chunk of the sum over ranks of x @ w, in one launch.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N), or several such pairs (terms); K_r may
differ between ranks. Rank d owns rows offsets[d] .. offsets[d+1], at most `chunk`; chunks may
differ in size and be empty. Inputs are bf16, fp16, fp32 or scaled fp8; partial sums are fp32,
rounded once, and travel as `weft.kernels.device.partial_sums` says.

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
would otherwise all wait for the link after each. By descriptor, the tiles of a program are made in
one loop (`weft.kernels.device.flattened`).

Protocol, in each program p
  1. For the destinations rank+1, rank+2, ..., rank-1: make the tiles and store them in the owner's
     slot `rank`.
  2. Signal the words (0, rank, f) of all peers, f being the first tile of that peer's chunk, also
     for empty chunks: release at system scope. Earlier signals would help nobody, and each would
     wait until the peer has acknowledged what was stored.
  3. Make the tiles of the rank's own chunk and store them in its own slot `rank`. Wait for the
     words (0, r, f) of all peers r, f now of the own chunk (acquire, system scope), after which
     slots r hold p's tiles. Add up each tile's slots in rank order and store the output.
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
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import triton
import triton.language as tl

from weft.collectives import Group, Workspace, workspace
from weft.collectives.device import signals
from weft.collectives.device.launches import launching
from weft.collectives.memory.workspace import check_room, link_of
from weft.kernels.device import summed_tiles, tiles, turns
from weft.kernels.device.partial_sums import wire_of
from weft.kernels.device.summed_tiles import Products, SumConfig, slot_bytes, tile_count
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import (
    Chip,
    chip_of,
    chunk_tiling_for,
    scatters_in_one_shot,
    senders_for,
)
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.matmul import one_shot_kernel


@dataclass(frozen=True)
class ReduceScatterConfig(SumConfig):
    """Also `senders`: how many programs store tiles to peers at a time; see `turns`, also for
    `spread`. `flattened`: whether tiles that descriptors read are made in one loop, if all chunks
    have as many.
    """

    senders: int = 1
    spread: bool = False
    flattened: bool = not signals.INTERPRETED


def reduce_scatter_config(
    chunk: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> ReduceScatterConfig | one_shot_kernel.OneShotConfig:
    """The launch for chunks of at most (chunk, N). K plays no part: ranks may differ in it."""
    op, M = "matmul_reduce_scatter", world_size * chunk
    choice = tuning.choice_for(op, chip, M, N, 0, dtype, world_size)
    tiling = choice.tiling or chunk_tiling_for(chip, chunk, N, dtype, world_size)
    # Tiles that straddle chunks read w once for all of them.
    if scatters_in_one_shot(chip, chunk, N, dtype, world_size, choice.tiling):
        return one_shot_kernel.one_shot_config(M, N, dtype, chip, choice.tiling)
    count = world_size * tile_count(chunk, N, tiling)
    return ReduceScatterConfig(
        tiling,
        programs=max(1, min(chip.programs, count)),
        reduce_m=min(32, tiling.block_m),
        descriptors=chip.descriptors and dtype != torch.float32,
        ahead_bytes=chip.shared_bytes * 2 // 3,
        senders=senders_for(chip, count),
        spread=chip.is_amd,  # whose links are a mesh
    )


def workspace_bytes(
    chunk: int,
    N: int,
    out_dtype: torch.dtype,
    world_size: int,
    config: ReduceScatterConfig | one_shot_kernel.OneShotConfig,
    wire_dtype: torch.dtype | None = None,
) -> int:
    """Symmetric memory that the call needs on each rank."""
    wire = wire_of(out_dtype, wire_dtype)
    if isinstance(config, one_shot_kernel.OneShotConfig):
        return one_shot_kernel.workspace_bytes(world_size * chunk, N, wire, world_size, config)
    count = tile_count(chunk, N, config.tiling)
    return world_size * slot_bytes(count, config.tiling, wire)


def room_for(
    x: torch.Tensor,
    w: torch.Tensor,
    world_size: int,
    sizes: Sequence[int],
    out_dtype: torch.dtype,
    wire_dtype: torch.dtype | None = None,
) -> int:
    """`workspace_bytes` for x (M, K) @ w (K, N) in chunks of `sizes` rows."""
    chunk, N = max(sizes), w.shape[1]
    config = reduce_scatter_config(chunk, N, x.dtype, world_size, chip_of(x.device))
    return workspace_bytes(chunk, N, out_dtype, world_size, config, wire_dtype)


def workspace_for(
    x: torch.Tensor, w: torch.Tensor, group: Group, sizes: Sequence[int], out_dtype: torch.dtype
) -> Workspace:
    """The group's workspace, with `room_for` them."""
    nbytes = room_for(x, w, group.world_size, sizes, out_dtype)
    return workspace(group, nbytes, channel="scatter", device=x.device)


@triton.jit(do_not_specialize=["chunk", "rank"])
def _matmul_reduce_scatter_kernel(
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
    V: tl.constexpr,
) -> None:
    """out = scale * sum over ranks of sum_i x_i @ w_i, own chunk, + bias + residual.

    Grid: the same on all ranks.

    Example: 2 ranks, offsets (0, 3, 5), one column tile, block_m=2: 2 tiles a chunk, numbers 0 1 |
    2 3. Of 3 programs, program 0 makes tile 0 (rows 0, 1) and tile 3 (rows 5.., nothing), on both
    ranks.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    WORLD_SIZE: tl.constexpr = V.world_size
    BLOCK: tl.constexpr = V.tiles.block_m * V.row_words
    tiles_m, tiles_n = tiles.cdiv(chunk, V.tiles.block_m), tiles.cdiv(N, V.tiles.block_n)
    count = tiles_m * tiles_n
    first = tiles.first_of(rank * count, program, programs)
    ahead, away = turns.before_own(rank, count, WORLD_SIZE)
    call = turns.Sending(
        terms, (x_desc, x_desc_2, x_desc_3), (w_desc, w_desc_2, w_desc_3), 0, N, link, offsets,
        rank, generation, program, programs, tiles_m, tiles_n, count, ahead, away,
    )  # fmt: skip
    turns.make_and_send(call, V)
    arrived = signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, first, generation, link.timeout_ns
    )
    rows = tiles.element(offsets, rank + 1, WORLD_SIZE + 1)
    rows -= tiles.element(offsets, rank, WORLD_SIZE)
    if arrived:
        # Other threads stored the own tiles than will read them next.
        tl.debug_barrier()
        slots = summed_tiles.half_of(link, rank, generation)
        for tile in range(first, count, programs):
            start_m, start_n = summed_tiles.tile_place(tile, tiles_m, tiles_n, V)
            summed_tiles.collect(
                out_ptr, slots + tl.cast(tile, tl.int64) * BLOCK, tl.cast(count, tl.int64) * BLOCK,
                finish, start_m, start_n, rows, N, V,
            )  # fmt: skip
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(out_ptr, tl.cast(rows, tl.int64) * N)


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
    wire_dtype: torch.dtype | None = None,
    config: ReduceScatterConfig | one_shot_kernel.OneShotConfig | None = None,
) -> torch.Tensor:
    """Enqueue this rank's chunk of scale * sum over ranks of (sum_i x_i @ w_i), + bias + residual.

    Args:
        xs, weights, bias, residual, scale, scaling, wire_dtype: as in `Products`.
        ws: room for `workspace_bytes(max(sizes), N, out_dtype, W, config, wire_dtype)`.
        sizes: rows of every rank's chunk, the same list on all ranks.
        config: the same on all ranks; default `reduce_scatter_config`.

    Returns:
        (sizes[rank], N), contiguous.
    """
    W, chunk, N = ws.world_size, max(sizes), weights[0].shape[1]
    config = config or reduce_scatter_config(chunk, N, xs[0].dtype, W, chip_of(xs[0].device))
    products = Products(xs, weights, bias, residual, scale, scaling, wire_dtype)
    out = products.output(sizes[ws.rank])
    needed = workspace_bytes(chunk, N, out.dtype, W, config, wire_dtype)
    check_room(ws, needed, "workspace_bytes(max(sizes), N, out_dtype, W, config, wire_dtype)")
    offsets = (0, *accumulate(sizes))
    if isinstance(config, one_shot_kernel.OneShotConfig):
        one_shot_kernel.launch_one_shot(out, products, ws, offsets, config)
        return out
    options = config.tiling.options
    if len(xs) > 1 and config.descriptors:
        # With a loop for each term and four stages, the widest tiles spill 24 bytes.
        options["num_stages"] = min(options["num_stages"], 3)
    given, variant = products.arguments(ws, config, out.dtype, row_starts=offsets)
    # In one loop all tiles are multiplied, also those past the end of a chunk.
    alike = len({-(-size // config.tiling.block_m) for size in sizes}) == 1
    in_one_loop = config.flattened and len(xs) == 1 and given[1] is not None and alike
    in_one_loop = in_one_loop and not variant.x_transposed
    variant = replace(variant, senders=config.senders, spread=config.spread, flattened=in_one_loop)
    launching(_matmul_reduce_scatter_kernel, config.programs)(
        out, *given, link_of(ws), offsets, N, chunk, ws.rank, V=variant, **options
    )
    return out
