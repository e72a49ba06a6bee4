"""Partial products added up in one step, for few rows: the decode path of two ops.

Legend: W ranks; rank r holds x_r (M, K_r) and w_r (K_r, N); K_r may differ between ranks. Partial
sums are fp32, rounded once, and travel as `weft.kernels.device.partial_sums` says.

    all-reduce       y (M, N) = scale * sum over r of x_r @ w_r + bias + residual    on all ranks
    reduce-scatter   y_d      = rows offsets[d] .. offsets[d+1] of that              on rank d

Tiles of (block_m, block_n) are numbered 0 .. T-1; in a reduce-scatter a tile may straddle the rows
of several owners. They travel as blocks of their own, row after row, less the rows that only pad a
tile. The half of a generation is W slots of T tiles of partial sums, one slot for each source rank.

    rank r: tile t of x_r @ w_r --> slot r, of every rank, or of each row's owner
    then:   y = slot 0 + slot 1 + ...

If there are few tiles, SPLIT programs share each (`weft.kernels.device.splits`), and the last of
them carries out the protocol.

Protocol, in each program p that has the sums of whole tiles (p % SPLIT == SPLIT - 1)
  1. Store each tile in slot `rank` of the ranks that need it; signal the words (0, rank, p) of all
     peers: release at system scope.
  2. Wait for the words (0, r, p) of all peers (acquire, system scope); add the slots in rank order.
  3. All programs take a ticket; the last one sets GENERATION.

Why it neither races nor deadlocks: no program waits for a peer before it has signalled everything,
and p waits for p. Slots of two calls lie in different halves; rules 1 and 2 of
`weft.collectives.device.signals` hold because each of those programs signals every peer after this
rank's last call has ended, and waits for every peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from weft.collectives import Workspace
from weft.collectives.device import signals
from weft.collectives.device.launches import launching
from weft.collectives.memory.workspace import link_of
from weft.kernels.device import partial_sums, splits, summed_tiles, tiles
from weft.kernels.device.partial_sums import Wire
from weft.kernels.device.summed_tiles import Products, SumConfig, slot_bytes, tile_count
from weft.kernels.engine.chips import Chip, Tiling, sum_tiling_for


@dataclass(frozen=True)
class OneShotConfig(SumConfig):
    """Also `split`: programs that share a tile, each with a part of K; grid: tiles * split."""

    split: int = 1


# Ranks may differ in K but not in the grid: tiles are split as if K were this.
_TYPICAL_K = 2048


@lru_cache(maxsize=1024)
def one_shot_config(
    M: int, N: int, dtype: torch.dtype, chip: Chip, tiling: Tiling | None = None
) -> OneShotConfig:
    """The launch for a sum of (M, N) matrices."""
    tiling = tiling or sum_tiling_for(chip, M, N, dtype)
    count = tile_count(M, N, tiling)
    split = splits.programs_a_tile(count, _TYPICAL_K, tiling, chip)
    return OneShotConfig(
        tiling,
        programs=max(1, min(chip.programs, count * split)),
        reduce_m=8,  # 16 rows spill, 16 bytes on sm_100
        descriptors=chip.descriptors and dtype != torch.float32,
        split=split if count else 1,
    )


def workspace_bytes(M: int, N: int, wire: Wire, world_size: int, config: OneShotConfig) -> int:
    """Symmetric memory that the call needs on each rank."""
    return world_size * slot_bytes(tile_count(M, N, config.tiling), config.tiling, wire)


@triton.jit
def send_rows(row_ptrs, acc, inside, WIRE: tl.constexpr):
    """Send those rows of partial sums that are `inside` (ROWS, 1) to row_ptrs (ROWS, 1)."""
    COLUMNS: tl.constexpr = acc.shape[1]
    if WIRE.bits == 16:
        left, right = tiles.halves(acc)
        ptrs = row_ptrs + tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(ptrs, partial_sums.pair(left, right, WIRE.bfloat16), mask=inside)
    elif WIRE.bits == 24:
        QUARTER: tl.constexpr = COLUMNS // 4
        ptrs = row_ptrs + tl.arange(0, QUARTER)[None, :]
        left, right = tiles.halves(acc)
        a, b = tiles.halves(left)
        c, d = tiles.halves(right)
        last = partial_sums.upper_bits(d)
        # One after the other: all three at once take more registers.
        tl.store(ptrs, partial_sums.packed_word(a, last >> 8), mask=inside)
        tl.store(ptrs + QUARTER, partial_sums.packed_word(b, last >> 16), mask=inside)
        tl.store(ptrs + 2 * QUARTER, partial_sums.packed_word(c, last >> 24), mask=inside)
    elif COLUMNS > 128:
        left, right = tiles.halves(acc)
        ptrs = row_ptrs + tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(ptrs, left, mask=inside)
        tl.store(ptrs + COLUMNS // 2, right, mask=inside)
    else:
        tl.store(row_ptrs + tl.arange(0, COLUMNS)[None, :], acc, mask=inside)


@triton.jit
def load_sent_rows(row_ptrs, inside, COLUMNS: tl.constexpr, WIRE: tl.constexpr):
    """What `send_rows` has sent, fp32: rows, or their halves or quarters."""
    PLANE: tl.constexpr = COLUMNS // 4 if WIRE.bits == 24 else COLUMNS * WIRE.bits // 32
    ptrs = row_ptrs + tl.arange(0, PLANE)[None, :]
    u = tl.load(ptrs, mask=inside)
    parts = (u,)
    if WIRE.bits == 16:
        parts = partial_sums.parted(u, WIRE.bfloat16)
    elif WIRE.bits == 24:
        v, w = tl.load(ptrs + PLANE, mask=inside), tl.load(ptrs + 2 * PLANE, mask=inside)
        parts = partial_sums.words_unpacked(u, v, w)
    return parts


@triton.jit
def _collect_rows(
    out_ptr, tile_ptr, slot_stride, finish, start_m, start_n, rows, N, V: tl.constexpr
):
    """As `summed_tiles.collect`, of rows that `send_rows` has sent: those of out alone, where
    start_m may be negative. All slots of some rows are on their way at a time.
    """
    WORLD_SIZE: tl.constexpr = V.world_size
    WIRE: tl.constexpr = V.wire
    COLUMNS: tl.constexpr = V.tiles.block_n
    for part in range(0, V.tiles.block_m, V.reduce_m):
        offs_m = start_m + part + tl.arange(0, V.reduce_m)
        if (start_m + part < rows) & (start_m + part + V.reduce_m > 0):
            inside = ((offs_m < rows) & (offs_m >= 0))[:, None]
            ptrs = tile_ptr + (part + tl.arange(0, V.reduce_m)[:, None]) * V.row_words
            sums = load_sent_rows(ptrs, inside, COLUMNS, WIRE)
            for slot in tl.static_range(1, WORLD_SIZE):
                found = load_sent_rows(ptrs + slot * slot_stride, inside, COLUMNS, WIRE)
                sums = partial_sums.added(sums, found)
            total = partial_sums.parts_beside(sums)
            summed_tiles.store_sums(out_ptr, total, part, finish, start_m, start_n, rows, N, V)


@triton.jit
def _send_to_owners(acc, start_m, offs, offsets, link, generation, V: tl.constexpr):
    """Store each row of a tile in the slot, `offs` words into the half, of the row's owner."""
    WORLD_SIZE: tl.constexpr = V.world_size
    ROWS: tl.constexpr = acc.shape[0]
    offs_m = start_m + tl.arange(0, ROWS)
    row_ptrs = summed_tiles.half_of(link, 0, generation) + offs + offs_m * 0
    for owner in tl.static_range(1, WORLD_SIZE):
        half = summed_tiles.half_of(link, owner, generation)
        row_ptrs = tl.where(offs_m >= offsets[owner], half + offs, row_ptrs)
    row_ptrs += tl.arange(0, ROWS) * V.row_words
    inside = (offs_m < offsets[WORLD_SIZE])[:, None]
    WIRE: tl.constexpr = V.wire
    send_rows(row_ptrs[:, None], acc, inside, WIRE)


@triton.jit(do_not_specialize=["M", "rank"])
def _one_shot_kernel(
    out_ptr,  # (M, N), or this rank's rows of it
    terms,  # Terms of (M, N)
    x_desc,  # of each term, or None
    w_desc,
    x_desc_2,
    w_desc_2,
    x_desc_3,
    w_desc_3,
    finish,  # Finish
    scratch_ptr,  # (T * SPLIT, block) fp32, or None
    link,
    offsets,  # of each rank's rows, or None for all rows on every rank
    M,
    N,
    rank,
    V: tl.constexpr,
) -> None:
    """y = scale * sum over ranks of sum_i x_i @ w_i, + bias + residual.

    Grid: the same on all ranks; tiles * SPLIT if SPLIT > 1.

    Example: 3 tiles, 2 programs: program 0 of every rank sends and adds up tiles 0 and 2. With
    SPLIT=2 of 6 programs, 1, 3 and 5 do, one tile each.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    generation = signals.begin_call(link.signal_ptrs, rank)
    WORLD_SIZE: tl.constexpr = V.world_size
    SPLIT: tl.constexpr = V.split
    WIRE: tl.constexpr = V.wire
    BLOCK: tl.constexpr = V.tiles.block_m * V.row_words
    tiles_m, tiles_n = tiles.cdiv(M, V.tiles.block_m), tiles.cdiv(N, V.tiles.block_n)
    count = tiles_m * tiles_n
    slot_stride = tl.cast(count, tl.int64) * BLOCK
    complete = True
    for item in range(program, count * SPLIT, programs):
        tile, part = item // SPLIT, item % SPLIT
        start_m, start_n = summed_tiles.tile_place(tile, tiles_m, tiles_n, V)
        acc = summed_tiles.tile_product(
            terms, (x_desc, x_desc_2, x_desc_3), (w_desc, w_desc_2, w_desc_3),
            0, start_m, start_n, M, N, part, V,
        )  # fmt: skip
        if SPLIT > 1:
            acc, _, whole = splits.add_up(
                acc, None, scratch_ptr, tile, part, program, link, rank, generation,
                WORLD_SIZE, SPLIT,
            )  # fmt: skip
            complete &= whole
        if complete:
            offs = rank * slot_stride + tl.cast(tile, tl.int64) * BLOCK
            if offsets is not None:
                _send_to_owners(acc, start_m, offs, offsets, link, generation, V)
            else:
                places = tl.arange(0, V.tiles.block_m)[:, None]
                for step in range(1, WORLD_SIZE + 1):
                    slots = summed_tiles.half_of(link, (rank + step) % WORLD_SIZE, generation)
                    row_ptrs = slots + offs + places * V.row_words
                    send_rows(row_ptrs, acc, start_m + places < M, WIRE)
    begin, rows = 0, M
    if offsets is not None:
        begin = tiles.element(offsets, rank, WORLD_SIZE)
        rows = tiles.element(offsets, rank + 1, WORLD_SIZE + 1) - begin
    if complete:
        # If a part is missing there is nothing to announce, and the peers time out as well.
        signals.signal_peers(link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation)
        # Other threads stored this rank's own slot than will read it next.
        tl.debug_barrier()
        complete &= signals.wait_for_peers(
            link.signal_ptrs, rank, WORLD_SIZE, 0, program, generation, link.timeout_ns
        )
    if complete:
        slots = summed_tiles.half_of(link, rank, generation)
        for tile in range(program // SPLIT, count, tiles.cdiv(programs, SPLIT)):
            start_m, start_n = summed_tiles.tile_place(tile, tiles_m, tiles_n, V)
            _collect_rows(
                out_ptr, slots + tl.cast(tile, tl.int64) * BLOCK, slot_stride, finish,
                start_m - begin, start_n, rows, N, V,
            )  # fmt: skip
    if signals.end_call(link.signal_ptrs, rank, generation):
        signals.spoil(out_ptr, tl.cast(rows, tl.int64) * N)


def launch_one_shot(
    out: torch.Tensor,
    products: Products,
    ws: Workspace,
    offsets: tuple[int, ...] | None,
    config: OneShotConfig,
) -> None:
    """Enqueue out = scale * sum over ranks of (sum_i x_i @ w_i), + bias + residual.

    Args:
        out: (M, N), or with `offsets` this rank's rows of it; contiguous.
        offsets: where each rank's rows begin, and M; None for all rows on every rank.
    """
    x, tiling = products.xs[0], config.tiling
    M, N = x.shape[0], products.weights[0].shape[1]
    given, variant = products.arguments(ws, config, out.dtype, split=config.split)
    scratch = splits.scratch_for(tile_count(M, N, tiling), config.split, x, tiling)
    launching(_one_shot_kernel, config.programs)(
        out, *given, scratch, link_of(ws), offsets, M, N, ws.rank, V=variant, **tiling.options
    )
