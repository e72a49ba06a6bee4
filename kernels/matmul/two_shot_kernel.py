"""matmul_all_reduce: the sum over ranks of x @ w, bitwise the same on every rank, in one launch.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N); K_r may differ between ranks. Inputs
are bf16, fp16, fp32 or scaled fp8; partial sums are fp32, rounded once, and travel as
`weft.kernels.device.partial_sums` says.

    y (M, N) = scale * sum over r, in the order 0, 1, ..., W-1, of x_r @ w_r + bias + residual

Few bytes (decode) go in one shot, `weft.kernels.matmul.one_shot_kernel`: W - 1 copies of every
partial tile.

More bytes go in two shots: tile t is added up by one owner, rank t % W, which sends the finished
tile to all. Tiles of (block_m, block_n) are numbered 0 .. T-1 and travel as blocks of their own,
row after row. The half of a generation is W slots of ceil(T / W) tiles of partial sums, then the T
finished tiles in the output's dtype.

    rank r: tile t of x_r @ w_r --> slot r of rank t % W    owner: sum --> finished t of every rank

    by the switch               --> slot t % W of rank r    owner: the switch's sum of slots t % W

The switch (`collectives.device.switch`) also takes finished tiles to all ranks: a link carries each
byte once. Its order is its own, so it must be asked for.

Protocol, in each program p. Tile j of an owner is t = j W + owner; one after another, owners' tiles
go to the P programs in turn (`tiles.first_of`), so that all have work if there is any.
  1. For the owners rank+1, rank+2, ..., rank-1: store the tiles in the owner's slot `rank`, or for
     the switch in the own slot of the owner. Signal the words (0, rank, f) of all peers, f being
     p's first tile of that peer: release at system scope. Store the own tiles in the own slot.
  2. Wait for the words (0, r, f) of all peers (acquire, system scope); add up this rank's tiles in
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

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from weft.collectives import Workspace
from weft.collectives.device import signals
from weft.collectives.device.launches import launching
from weft.collectives.memory.workspace import check_room, link_of
from weft.collectives.protocols import Fabric
from weft.kernels.device import partial_sums, summed_tiles, tiles, turns
from weft.kernels.device.partial_sums import wire_of
from weft.kernels.device.summed_tiles import Products, SumConfig, slot_bytes, tile_count
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import (
    Chip,
    Tiling,
    chip_of,
    sum_tiling_for,
    sums_in_one_shot,
)
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.engine.fused_times import adds_by_switch
from weft.kernels.matmul import one_shot_kernel


@dataclass(frozen=True)
class TwoShotConfig(SumConfig):
    """Also `by_switch`: whether the NVLink switch adds up, in an order of its own. `flattened`: as
    of a `ReduceScatterConfig`.
    """

    by_switch: bool = False
    flattened: bool = not signals.INTERPRETED


def all_reduce_config(
    M: int, N: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> TwoShotConfig | one_shot_kernel.OneShotConfig:
    """The launch for a sum of (M, N) matrices. K plays no part: ranks may differ in it."""
    choice = tuning.choice_for("matmul_all_reduce", chip, M, N, 0, dtype, world_size)
    if sums_in_one_shot(chip, M, N, world_size):
        return one_shot_kernel.one_shot_config(M, N, dtype, chip, choice.tiling)
    return two_shot_config(M, N, dtype, chip, choice.tiling)


@lru_cache(maxsize=1024)
def two_shot_config(
    M: int, N: int, dtype: torch.dtype, chip: Chip, tiling: Tiling | None = None
) -> TwoShotConfig:
    """The launch in two shots, whatever the size."""
    if tiling is None:
        tiling = sum_tiling_for(chip, M, N, dtype, two_shots=True)
        if chip.descriptors:  # tiles of 128 x 128 would spill 8 bytes on sm_100
            tiling = replace(tiling, all_registers=True)
    return TwoShotConfig(
        tiling,
        programs=max(1, min(chip.programs, tile_count(M, N, tiling))),
        reduce_m=min(32, tiling.block_m),
        descriptors=chip.descriptors and dtype != torch.float32,
        ahead_bytes=chip.shared_bytes * 2 // 3,
    )


def switched_config(
    x: torch.Tensor, N: int, out_dtype: torch.dtype, wire_dtype: torch.dtype | None, links: Fabric
) -> TwoShotConfig | None:
    """The launch where the switch adds up; None if it cannot, or others are predicted quicker."""
    M, wire = x.shape[0], wire_of(out_dtype, wire_dtype)
    config = all_reduce_config(M, N, x.dtype, links.ranks, chip_of(x.device))
    if wire.bits == 24 or not isinstance(config, TwoShotConfig):
        return None
    sent, shown = M * N * wire.bits / 8, M * N * out_dtype.itemsize
    return replace(config, by_switch=True) if adds_by_switch(sent, shown, links) else None


def workspace_bytes(
    M: int,
    N: int,
    out_dtype: torch.dtype,
    world_size: int,
    config: TwoShotConfig | one_shot_kernel.OneShotConfig,
    wire_dtype: torch.dtype | None = None,
) -> int:
    """Symmetric memory that the call needs on each rank."""
    wire = wire_of(out_dtype, wire_dtype)
    if isinstance(config, one_shot_kernel.OneShotConfig):
        return one_shot_kernel.workspace_bytes(M, N, wire, world_size, config)
    tiling, count = config.tiling, tile_count(M, N, config.tiling)
    finished = count * tiling.block_m * tiling.block_n * out_dtype.itemsize
    return world_size * slot_bytes(-(-count // world_size), tiling, wire) + finished


def room_for(
    x: torch.Tensor,
    w: torch.Tensor,
    world_size: int,
    out_dtype: torch.dtype,
    wire_dtype: torch.dtype | None = None,
) -> int:
    """`workspace_bytes` for the sum of x (M, K) @ w (K, N)."""
    M, N = x.shape[0], w.shape[1]
    config = all_reduce_config(M, N, x.dtype, world_size, chip_of(x.device))
    return workspace_bytes(M, N, out_dtype, world_size, config, wire_dtype)


@triton.jit
def _finished_ptr(link, peer, generation, finished_at, dtype: tl.constexpr):
    """Address of the finished tiles on `peer`, `finished_at` bytes into its half."""
    half = signals.half_ptr(link.buffer_ptrs, peer, generation, link.half_bytes, tl.int8)
    return (half + finished_at).to(tl.pointer_type(dtype))


@triton.jit
def _show(total, part, shown, V: tl.constexpr):
    """Store finished rows, from row `part` of a tile on, among the finished tiles of all peers."""
    tile, out_ptr, link, rank, generation, finished_at, multicast_ptr = shown
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    final = tiles.rounded(total, dtype)
    offs = tl.cast(tile, tl.int64) * (V.tiles.block_m * V.tiles.block_n) + part * V.tiles.block_n
    if V.by_switch:
        at = (generation & 1) * link.half_bytes + finished_at
        at += offs * (dtype.primitive_bitwidth // 8)
        partial_sums.show_rows(link, multicast_ptr, at, final, V.world_size)
    else:
        offs += tiles.block_offsets(V.reduce_m, V.tiles.block_n)
        for step in range(1, V.world_size):
            peer = (rank + step) % V.world_size
            tl.store(_finished_ptr(link, peer, generation, finished_at, dtype) + offs, final)


@triton.jit(do_not_specialize=["M", "rank"])
def _two_shot_kernel(
    out_ptr,  # (M, N)
    terms,  # Terms of (M, N), one term
    x_desc,  # or None
    w_desc,
    finish,  # Finish
    link,
    multicast_ptr,  # int64: address of the data of all ranks, if V.by_switch
    M,
    N,
    rank,
    V: tl.constexpr,
) -> None:
    """y = scale * sum over ranks of x @ w, + bias + residual. Grid: the same on all ranks.

    Example: 2 ranks, 5 tiles, 2 programs: rank 0 owns tiles 0 2 4, rank 1 owns 1 3. Program 0 of
    both ranks makes 0 4 for rank 0 and 3 for rank 1, program 1 makes 2 and 1.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    WORLD_SIZE: tl.constexpr = V.world_size
    BLOCK_M: tl.constexpr = V.tiles.block_m
    BLOCK_N: tl.constexpr = V.tiles.block_n
    SENT: tl.constexpr = BLOCK_M * V.row_words
    STAGES: tl.constexpr = V.slot_stages
    tiles_m, tiles_n = tiles.cdiv(M, BLOCK_M), tiles.cdiv(N, BLOCK_N)
    count = tiles_m * tiles_n
    owned = tiles.cdiv(count, WORLD_SIZE)
    slot_stride = tl.cast(owned, tl.int64) * SENT
    first = tiles.first_of(rank * owned, program, programs)
    ahead, away = turns.before_own(rank, owned, WORLD_SIZE)
    call = turns.Sending(
        terms, (x_desc,), (w_desc,), M, N, link, None, rank, generation, program, programs,
        tiles_m, tiles_n, owned, ahead, away,
    )  # fmt: skip
    turns.make_and_send(call, V)
    tl.debug_barrier()
    arrived = signals.wait_for_peers(
        link.signal_ptrs, rank, WORLD_SIZE, 0, first, generation, link.timeout_ns
    )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    finished_at = WORLD_SIZE * slot_stride * 4  # bytes into the half
    if arrived:
        slots = summed_tiles.half_of(link, rank, generation)
        for j in range(first, tiles.cdiv(count - rank, WORLD_SIZE), programs):
            tile = j * WORLD_SIZE + rank
            start_m, start_n = summed_tiles.tile_place(tile, tiles_m, tiles_n, V)
            at = (generation & 1) * link.half_bytes
            at += (rank * slot_stride + tl.cast(j, tl.int64) * SENT) * 4
            summed_tiles.collect(
                out_ptr, slots + tl.cast(j, tl.int64) * SENT, slot_stride, finish,
                start_m, start_n, M, N, V,
                _show, (tile, out_ptr, link, rank, generation, finished_at, multicast_ptr),
                (link, multicast_ptr, at) if V.by_switch else None,
            )  # fmt: skip
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
                first_m, start_n = summed_tiles.tile_place(tile, tiles_m, tiles_n, V)
                # Only the rows that were sent: the rest of the tile was never written.
                parts = tiles.cdiv(tl.minimum(M - first_m, BLOCK_M), V.reduce_m)
                for part in tl.range(parts, num_stages=STAGES):
                    row = part * V.reduce_m
                    offs = tl.cast(tile, tl.int64) * (BLOCK_M * BLOCK_N) + row * BLOCK_N
                    final = tl.load(got + offs + tiles.block_offsets(V.reduce_m, BLOCK_N))
                    tiles.store(out_ptr, final.to(tl.float32), first_m + row, start_n, M, N, N, 1)
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
    wire_dtype: torch.dtype | None = None,
    config: TwoShotConfig | one_shot_kernel.OneShotConfig | None = None,
) -> torch.Tensor:
    """Enqueue scale * sum over ranks of x @ w, + bias + residual.

    Args:
        x, w: (M, K_r) and (K_r, N), any strides, one dtype. K_r may differ from rank to rank.
        bias, residual, scale, scaling, wire_dtype: as in `Products`; the same on all ranks.
        ws: room for `workspace_bytes(M, N, out_dtype, W, config, wire_dtype)`.
        config: the same on all ranks; default `all_reduce_config`.

    Returns:
        (M, N), contiguous, bitwise the same on all ranks.
    """
    M, N, W = x.shape[0], w.shape[1], ws.world_size
    config = config or all_reduce_config(M, N, x.dtype, W, chip_of(x.device))
    products = Products([x], [w], bias, residual, scale, scaling, wire_dtype)
    out = products.output(M)
    needed = workspace_bytes(M, N, out.dtype, W, config, wire_dtype)
    check_room(ws, needed, "workspace_bytes(M, N, out_dtype, world_size, config, wire_dtype)")
    if isinstance(config, one_shot_kernel.OneShotConfig):
        one_shot_kernel.launch_one_shot(out, products, ws, None, config)
        return out
    (terms, x_desc, w_desc, *_, finish), variant = products.arguments(ws, config, out.dtype)
    flattened = config.flattened and tile_count(M, N, config.tiling) % W == 0
    flattened = flattened and x_desc is not None and not variant.x_transposed
    variant = replace(variant, by_switch=config.by_switch, flattened=flattened)
    launching(_two_shot_kernel, config.programs)(
        out, terms, x_desc, w_desc, finish, link_of(ws), ws.buffer.multicast_ptr, M, N, ws.rank,
        V=variant, **config.tiling.options,
    )  # fmt: skip
    return out
