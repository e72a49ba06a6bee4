"""all_gather_matmul: activation(cat(x over ranks) @ w + bias), the gather behind the arithmetic.

Legend: W ranks; rank r holds x_r (m_r, K) and its own weights w_i (K, N_i), one or several.
`offsets[r]` is the row at which x_r begins in the gathered matrix (W + 1 numbers, the last one M);
shards may differ in size and be empty. Inputs are bf16, fp16, fp32 or scaled fp8; sums are fp32 and
rounded once.

    y_i (M, N_i) = activation([x_0; x_1; ...] @ w_i + bias_i)          or, for two weights,
    y (M, N)     = silu([x_0; x_1; ...] @ w_0 + bias_0) * ([x_0; x_1; ...] @ w_1 + bias_1)

Tiles count rows cyclically from the rank's own first row, so that a rank starts with the rows that
it already has and goes on with those of rank+1. A tile may straddle shards. For W = 3, on rank 1:

    tile         0       1       2       3       4      ...
    rows    | x_1         | x_2           | x_0              |
    from      x in place    `gathered` (or the peers)

Shards arrive in one of three ways, all by the protocol of `weft.kernels.device.gathers`:
  - fetched: the first COPY_PROGRAMS programs copy them to `gathered`. The others wait, before each
    tile and outside the loop over K, for the chunks that the tile reads. With PARTS > 1, K is cut:
    of all rows that the programs want at one time the first columns arrive first, and a tile loops
    over one part after another, so that it can start before its rows are complete.
  - by copy engines: the same without copy programs; see `weft.kernels.matmul.copy_engines`.
  - DIRECT, for small M: no copy. Every program waits for the publish kernels of all peers and then
    reads the rows in place at their owners, through one pointer a row. A tile covers many small
    shards, for which fetching would cost a further hop. Each column tile reads all rows again.

Small M and N give few tiles; SPLIT neighbouring programs then share one
(`weft.kernels.device.splits`). With copy engines, where all programs make tiles, those that do not
fill a wave are made first, in halves of their columns, so that more programs take part in them.

Why it neither races nor deadlocks: as in `gathers`; where nothing is fetched, every program waits
for every peer before it does anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.collectives.memory.workspace import Workspace, link_of
from weft.collectives.ranks.pad import MAX_PROGRAMS
from weft.kernels.device import gathers, splits, tiles
from weft.kernels.device.epilogues import Activation
from weft.kernels.device.operands import contiguous, described_weights, matrix, scales_of
from weft.kernels.engine import tuning
from weft.kernels.engine.chips import (
    INTERPRETER,
    Chip,
    Tiling,
    chip_of,
    gathers_by_copy_engines,
    tiling_for,
)
from weft.kernels.engine.fp8 import Scaling
from weft.kernels.matmul import copy_engines

# The most that all programs together read directly over the link rather than from a copy made once:
# at 450 GB/s that takes about the 3 us that the copy costs in signals.
_DIRECT_BYTES = 1 << 20

# The least that a copy engine copies at a time, unless the shard is smaller.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Config:
    """How the kernels of this file are launched.

    Attributes:
        tiling: tiles of the matmul.
        programs: grid of the consumer kernel, copy programs included.
        copy_programs: how many of them fetch shards; 0 if this kernel fetches nothing.
        chunk_rows: rows of a shard that are announced together.
        copy_m, copy_n: block that a copy moves at a time.
        descriptors: whether weights that allow it are read by tensor descriptor. Gathered rows
            never are: copies by descriptor are not ordered by the acquire of a signal.
        direct: whether rows are read in place at their owners.
        split: programs that share a tile, each taking a part of K. Only without copy programs.
        copy_engines: whether the chip's copy engines fetch the shards, so that all programs make
            tiles.
        parts: into how many parts K is cut for fetching. Only with copy programs.
        halves: whether tiles that fill no wave are made in halves of their columns. Only with copy
            engines.
    """

    tiling: Tiling
    programs: int
    copy_programs: int
    chunk_rows: int
    copy_m: int
    copy_n: int
    descriptors: bool = False
    direct: bool = False
    split: int = 1
    copy_engines: bool = False
    parts: int = 1
    halves: bool = False


def config_for(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    chip: Chip,
    *,
    activation: Activation | None = None,
    keep: bool = False,
    keep_sums: bool = False,
) -> Config:
    """The launch for an (M, K) @ (K, N), of which each rank brings 1/W of the rows.

    Args:
        activation: for "swiglu", N counts the columns of both weights.
        keep: whether the gathered matrix is wanted too.
        keep_sums: whether the activation's argument is wanted too.
    """
    choice = tuning.choice_for("all_gather_matmul", chip, M, N, K, dtype, world_size)
    return _config(choice, M, N, K, dtype, world_size, chip, activation, keep, keep_sums)


@lru_cache(maxsize=1024)
def _config(
    choice: tuning.Choice,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    world_size: int,
    chip: Chip,
    activation: Activation | None,
    keep: bool,
    keep_sums: bool,
) -> Config:
    tiling = _tiling(choice, M, N, dtype, chip, activation, keep_sums)
    columns = N // 2 if activation == "swiglu" else N  # of the output
    column_tiles = -(-columns // tiling.block_n)
    count = -(-M // tiling.block_m) * column_tiles
    # A group of tiles that run together should not wait for two peers.
    tiles_a_shard = max(1, M // world_size // tiling.block_m)
    tiling = replace(tiling, group_m=min(tiling.group_m, tiles_a_shard))
    interpreted = chip is INTERPRETER
    remote_bytes = column_tiles * M * K * dtype.itemsize * (world_size - 1) // world_size
    direct = not keep and remote_bytes <= (4 << 10 if interpreted else _DIRECT_BYTES)
    descriptors = chip.descriptors and dtype != torch.float32
    # A link of 450 GB/s and 2 us latency is full with 0.9 MB in flight: a load of 64 KiB (8 warps)
    # on each of an eighth of the cores. With one rank nothing is fetched.
    copy_programs = max(1, chip.cores // 8) if world_size > 1 and not interpreted else 1
    # A table is of whole chips.
    copy_programs = min(choice.copy_programs or copy_programs, max(1, chip.programs // 2))
    copy_n = 32 if interpreted else 512 * tiling.num_warps // dtype.itemsize
    copy_m = 32 if interpreted else 2 * tiling.num_warps  # 16 rows spill beside 4 warps' tiles
    # Two parts if each is a copy block wide and a shard has two chunks: more or smaller ones cost
    # more in signals than tiles gain by starting early (docs/scaling.md). Two chunks a program.
    least_m, least_k = (0, 33) if interpreted else (128 * world_size, 2 * copy_n)
    parts = 2 if min(M - least_m, K - least_k) >= 0 else 1
    chunk_rows = 16 if interpreted else parts * min(32, max(8, M // (2 * copy_programs)))
    config = Config(
        tiling, chip.programs, copy_programs, chunk_rows, copy_m, copy_n, descriptors, parts=parts
    )
    # Ranks may differ in the other ways, which signal alike, but must agree on this one: it depends
    # neither on N nor on a tuned choice.
    if gathers_by_copy_engines(M, K, dtype, world_size) and not interpreted:
        if dtype.itemsize != 2 and N % 16:
            # With the registers that `beside_others` leaves, unaligned columns spill on sm_90: 216
            # bytes in fp32, 328 in fp8.
            config = replace(config, tiling=replace(tiling, block_n=min(tiling.block_n, 64)))
        config = by_copy_engines(config, M, K, dtype, world_size, chip)
        if activation == "swiglu" and dtype.itemsize == 1:  # 8 bytes spill on sm_100
            config = replace(config, halves=False)
        return config
    if not direct:
        return config
    split = splits.programs_a_tile(count, K, tiling, chip)
    programs = max(1, min(chip.programs, count * split))
    return replace(config, programs=programs, copy_programs=0, direct=True, split=split)


def _tiling(
    choice: tuning.Choice,
    M: int,
    N: int,
    dtype: torch.dtype,
    chip: Chip,
    activation: Activation | None,
    keep_sums: bool,
) -> Tiling:
    """The tuned or default tiles, narrowed where the epilogue would make the kernel spill."""
    tiling = choice.tiling or tiling_for(chip, M, N, dtype)
    pair = activation == "swiglu"
    if pair and (tiling.block_m * tiling.block_n > 32 * 64 or dtype == torch.float32):
        # Two accumulators at a time.
        tiling = replace(tiling, block_n=max(16, tiling.block_n // 2))
    elif activation == "gelu" or keep_sums:  # 256 columns spill on sm_90, 8 and 24 bytes
        tiling = replace(tiling, block_n=min(tiling.block_n, 128))
    if keep_sums and (pair or N % 16) and tiling.block_m * tiling.block_n > 64 * 32:
        # Addresses of two more outputs, or of unaligned columns, spill 24 to 790 bytes there.
        tiling = replace(tiling, block_n=max(16, tiling.block_n // 2))
    return tiling


def by_copy_engines(
    config: Config, M: int, K: int, dtype: torch.dtype, world_size: int, chip: Chip
) -> Config:
    """The same launch with shards fetched by copy engines."""
    rows = -(-M // world_size)
    chunk_bytes = 1 << 10 if chip is INTERPRETER else _CHUNK_BYTES
    return replace(
        config,
        # The small kernels between the copies must find room even where another kernel has taken
        # the free core, such as a collective that waits for ranks which wait for those kernels.
        tiling=replace(config.tiling, beside_others=chip.name.startswith("sm_")),
        copy_engines=True,
        direct=False,
        split=1,
        copy_programs=0,
        # One core stays free for the small kernels between the copies.
        programs=max(1, min(chip.programs, chip.cores - 1)),
        # Narrower halves would read x too often for their arithmetic.
        halves=config.tiling.block_n >= (32 if chip is INTERPRETER else 128),
        # Several copies a shard, so that a peer's first tiles need not wait for its last rows.
        chunk_rows=max(1, -(-rows // 4), chunk_bytes // (K * dtype.itemsize)),
    )


def _halved(count: int, own: int, config: Config) -> int:
    """How many of `count` tiles to make in halves of their columns; `own` have own rows alone.

    As many as do not fill a wave: whole, they would leave the other programs idle for the time of
    one tile. They come first, so that each program has one half of them before its whole tiles.
    Where they are too many for that, some programs have two. This gains only if the first of these
    has own rows and others do not: then it is made while others wait for theirs.

    A rank decides for itself, as only its own programs make its tiles: N may play a part.
    """
    if not config.halves:
        return 0
    partial = count % config.programs
    twice = 2 * partial - config.programs
    return partial if twice <= 0 or twice <= 2 * own < config.programs else 0


@triton.jit
def _wait_for_rows(
    link, offsets, first, last, part, chunk_rows, rank, generation, WORLD_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Wait until `part` of rows first..last, counted from the rank's own first row, is gathered."""
    arrived = True
    begin = 0
    for step in range(WORLD_SIZE):
        source = (rank + step) % WORLD_SIZE
        rows = tiles.element(offsets, source + 1, WORLD_SIZE + 1)
        rows -= tiles.element(offsets, source, WORLD_SIZE)
        low, high = tl.maximum(first, begin) - begin, tl.minimum(last + 1, begin + rows) - begin
        if (step > 0) & (low < high):
            arrived &= gathers.wait_for_chunks(
                link, rank, source, low // chunk_rows, (high - 1) // chunk_rows, part, generation,
                WORLD_SIZE, PARTS,
            )  # fmt: skip
        begin += rows
    return arrived


@triton.jit
def _peers_rows(
    own_rows, own_scales, rows, link, offsets, pitch, scales_at, rank, generation, dtype,
    SCALED: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Pointers to the given rows of the gathered matrix, and to their scales, at their owners.

    Without scales, the rows are returned twice: Triton 3.6 cannot return None.
    """
    a_rows, a_scales = own_rows, own_scales if SCALED else own_rows
    for source in tl.static_range(WORLD_SIZE):
        theirs = (rows >= offsets[source]) & (rows < offsets[source + 1]) & (source != rank)
        inside = tl.where(theirs, rows - offsets[source], 0).to(tl.int64)
        half = signals.half_ptr(link.buffer_ptrs, source, generation, link.half_bytes, dtype)
        a_rows = tl.where(theirs, half + inside * pitch, a_rows)
        if SCALED:
            scales = gathers.scales_ptr(link, source, generation, scales_at)
            a_scales = tl.where(theirs, scales + inside, a_scales)
    return a_rows, a_scales


@triton.jit(do_not_specialize=["scales_at", "chunk_rows", "rank", "halved"])
def _ag_gemm_kernel(
    outs,  # (M, N_i) for each weight, contiguous; a single one for swiglu
    sums,  # likewise before the activation, one for each weight, or None
    gathered_ptr,  # (M, K), or None if DIRECT
    gathered_scales_ptr,  # (M,) fp32, or None
    x,  # Matrix (m_local, K)
    x_scales,  # of its rows
    weights,  # Matrix (K, N_i)
    w_desc,  # descriptors of the first two, or None
    w2_desc,
    half_desc,  # of halves of the columns of tiles, or None
    half2_desc,
    biases,  # (N_i,) or None
    weight_scales,  # of the columns of each
    scratch_ptr,  # (tiles * SPLIT * sums a tile, block) fp32, or None
    link,
    offsets,
    Ns,
    K,
    pitch,
    scales_at,
    chunk_rows,
    rank,
    halved,  # how many tiles are made in halves; 0 unless HALVED
    WORLD_SIZE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HALF_TILES: tl.constexpr,
    TILES: tl.constexpr,
    DIRECT: tl.constexpr,
    SPLIT: tl.constexpr,
    HALVED: tl.constexpr,  # 0 or 1
    W_TRANSPOSED: tl.constexpr,
    X_IN_PLACE: tl.constexpr,
    WITH_OWN: tl.constexpr,
    EVEN_K: tl.constexpr,
    COPY_PROGRAMS: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_N: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """y_i = activation(gathered @ w_i + bias_i) for all i. Grid: COPY_PROGRAMS and at least one.

    Example: 2 ranks with 48 and 16 rows, block_m=32, one weight of 2 column tiles, 3 programs of
    which 1 copies. On rank 1, program 1 makes tiles (rows 48..63 and 0..15, column 0), (16..47, 0)
    and program 2 those of column 1; both wait for rank 0's first chunk before the first.
    """
    program = tl.program_id(0)
    generation = signals.last_generation(link.signal_ptrs, rank)
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    SCALED: tl.constexpr = x_scales.ptr is not None
    # swiglu makes one output of two sums.
    PAIR: tl.constexpr = ACTIVATION == "swiglu"
    OUTPUTS: tl.constexpr = 1 if PAIR else WEIGHTS
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_N: tl.constexpr = TILES.block_n
    programs = tl.num_programs(0) - COPY_PROGRAMS
    tiles_n = 0
    for i in tl.static_range(OUTPUTS):
        tiles_n += tiles.cdiv(Ns[i], BLOCK_N)
    if COPY_PROGRAMS > 0 and program < COPY_PROGRAMS:
        gathers.fetch_shards(
            gathered_ptr, gathered_scales_ptr, link, offsets, K, pitch, scales_at,
            chunk_rows, rank, generation,
            # The rows of the first tiles of all programs, then those of the second ones, ...
            tiles.cdiv(programs, TILES.group_m * tl.maximum(tiles_n, 1)) * TILES.group_m * BLOCK_M,
            WITH_OWN, WORLD_SIZE, COPY_PROGRAMS, COPY_M, COPY_N, PARTS, TILES.block_k,
        )  # fmt: skip
    if program >= COPY_PROGRAMS:
        begin = tiles.element(offsets, rank, WORLD_SIZE)
        own_rows = tiles.element(offsets, rank + 1, WORLD_SIZE + 1) - begin
        M = offsets[WORLD_SIZE]
        tiles_m = tiles.cdiv(M, BLOCK_M)
        peers_came = True
        if DIRECT:
            peers_came = signals.wait_for_peers(
                link.signal_ptrs, rank, WORLD_SIZE, 0, 0, generation, link.timeout_ns
            )
        own_ptr, own_pitch = x.ptr, x.stride_m
        if not X_IN_PLACE:
            half_bytes = link.half_bytes
            own_ptr = signals.half_ptr(link.buffer_ptrs, rank, generation, half_bytes, dtype)
            own_pitch = pitch
        # The first tiles in halves, then the others whole.
        for HALVES in tl.static_range(HALVED, -1, -1):
            items = tiles_m * tiles_n * SPLIT
            if HALVES:
                items = 2 * halved
            elif HALVED:  # where no tile is split
                items -= halved
            for item in range(program - COPY_PROGRAMS, items, programs):
                tile, part = item // SPLIT, item % SPLIT
                if HALVES:
                    tile = item // 2
                elif HALVED:
                    tile += halved
                tile_m, tile_n = tiles.grouped_tile(tile, tiles_m, tiles_n, TILES.group_m)
                first = tile_m * BLOCK_M
                last = tl.minimum(first + BLOCK_M, M) - 1
                arrived = peers_came
                # Rows counted from the rank's own first one, then as numbered in the gathered
                # matrix. Past the end the last row is repeated: the first ones may not have arrived
                # yet.
                inside_m = first + tl.arange(0, BLOCK_M) < M
                cyclic = tl.minimum(first + tl.arange(0, BLOCK_M), M - 1)
                own = cyclic < own_rows
                rows = cyclic + begin
                rows = tl.where(rows >= M, rows - M, rows)
                nearby = tl.where(own, cyclic, 0).to(tl.int64)
                a_rows = own_ptr + nearby * own_pitch
                a_scales = None
                if SCALED:
                    a_scales = x_scales.ptr + nearby * x_scales.stride
                if DIRECT:
                    a_rows, a_scales = _peers_rows(
                        a_rows, a_scales, rows, link, offsets, pitch, scales_at, rank, generation,
                        dtype, SCALED, WORLD_SIZE,
                    )  # fmt: skip
                    if not SCALED:
                        a_scales = None
                else:
                    wide = rows.to(tl.int64)
                    a_rows = tl.where(own, a_rows, gathered_ptr + wide * K)
                    if SCALED:
                        a_scales = tl.where(own, a_scales, gathered_scales_ptr + wide)
                # Exactly one of these branches runs: that of the output in whose columns the tile
                # lies.
                for i in tl.static_range(OUTPUTS):
                    tiles_i = tiles.cdiv(Ns[i], BLOCK_N)
                    if (tile_n >= 0) & (tile_n < tiles_i):
                        start_n = tile_n * BLOCK_N
                        if HALVES:
                            start_n += item % 2 * HALF_TILES.block_n
                        acc = tiles.zeros(BLOCK_M, HALF_TILES.block_n if HALVES else BLOCK_N)
                        second = acc if PAIR else None
                        for gathered_part in range(PARTS):
                            if not DIRECT:
                                arrived &= _wait_for_rows(
                                    link, offsets, first, last, gathered_part, chunk_rows, rank,
                                    generation, WORLD_SIZE, PARTS,
                                )  # fmt: skip
                            first_k, last_k = splits.part_of(
                                K, part + gathered_part, TILES.block_k, SPLIT * PARTS
                            )
                            acc, other = tiles.accumulate(
                                acc, second,
                                a_rows, 1, None, 0,
                                weights[i], weights[1] if PAIR else None,
                                half_desc if HALVES else w_desc,
                                (half2_desc if HALVES else w2_desc) if PAIR else None,
                                start_n, Ns[i], first_k, 0, tl.where(arrived, last_k, first_k),
                                HALF_TILES if HALVES else TILES, EVEN_K, False, W_TRANSPOSED,
                            )  # fmt: skip
                            if PAIR:
                                second = other
                        whole = True
                        if SPLIT > 1:
                            acc, second, whole = splits.add_up(
                                acc, second, scratch_ptr, tile, part, program, link,
                                rank, generation, WORLD_SIZE, SPLIT,
                            )  # fmt: skip
                        if not PAIR:
                            second = None
                        if arrived & whole:
                            if acc.shape[1] > 128:
                                # In quarters: with erf or exp a whole tile does not fit in
                                # registers.
                                left, right = tiles.halves(acc)
                                for quarter in tl.static_range(4):
                                    even, odd = tiles.halves(left if quarter < 2 else right)
                                    _finish(
                                        even if quarter % 2 == 0 else odd, second, outs[i], sums,
                                        a_scales, weight_scales, biases, rows, inside_m,
                                        start_n + quarter * (BLOCK_N // 4), Ns[i], i, ACTIVATION,
                                    )  # fmt: skip
                            else:
                                _finish(
                                    acc, second, outs[i], sums, a_scales, weight_scales, biases,
                                    rows, inside_m, start_n, Ns[i], i, ACTIVATION,
                                )  # fmt: skip
                    tile_n -= tiles_i
    if DIRECT or COPY_PROGRAMS > 0:
        in_vain = signals.end_call(link.signal_ptrs, rank, generation)
    else:  # by copy engines: the exchange around this kernel ends the call
        in_vain = signals.failed(signals.peer_ptr(link.signal_ptrs, rank, tl.int64))
    if in_vain:
        rows = tl.cast(offsets[WORLD_SIZE], tl.int64)
        for i in tl.static_range(OUTPUTS):
            signals.spoil(outs[i], rows * Ns[i])
        if sums is not None:
            for i in tl.static_range(WEIGHTS):
                signals.spoil(sums[i], rows * Ns[i])
        if gathered_ptr is not None:
            signals.spoil(gathered_ptr, rows * K)


@triton.jit
def _finish(
    acc, second, out_ptr, sums, a_scales, column_scales, biases, rows, inside_m, start_n, N,
    WEIGHT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store activation(acc * scales + bias) and, where wanted, its argument first."""
    acc = tiles.times_rows(acc, a_scales, inside_m)
    acc = tiles.times_columns(acc, column_scales[WEIGHT], start_n, N)
    acc = tiles.with_bias(acc, biases[WEIGHT], start_n, N)
    if sums is not None:
        tiles.store_rows(sums[WEIGHT], acc, rows, inside_m, start_n, N, N, 1)
    if second is not None:
        second = tiles.times_rows(second, a_scales, inside_m)
        second = tiles.times_columns(second, column_scales[1], start_n, N)
        second = tiles.with_bias(second, biases[1], start_n, N)
        if sums is not None:
            tiles.store_rows(sums[1], second, rows, inside_m, start_n, N, N, 1)
    acc = tiles.activated(acc, second, ACTIVATION)
    tiles.store_rows(out_ptr, acc, rows, inside_m, start_n, N, N, 1)


@dataclass(frozen=True)
class Gathered:
    """What a launch returns.

    Attributes:
        matrix: the gathered rows (M, K), contiguous; None if they were read in place.
        ys: the outputs, (M, N_i) each.
        sums: the activation's arguments, one for each weight; empty unless asked for.
    """

    matrix: torch.Tensor | None
    ys: list[torch.Tensor]
    sums: list[torch.Tensor]


def launch_all_gather_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ws: Workspace,
    sizes: Sequence[int],
    *,
    biases: Sequence[torch.Tensor | None] | None = None,
    activation: Activation | None = None,
    keep_sums: bool = False,
    with_own: bool = False,
    scaling: Scaling | None = None,
    config: Config | None = None,
) -> Gathered:
    """Enqueue y_i = activation(cat(x over ranks) @ w_i + bias_i).

    Args:
        x: (m_r, K), this rank's rows, any strides.
        weights: (K, N_i), any strides, dtype of x.
        ws: room for `gathers.workspace_bytes(max(sizes), K, x.dtype)`; on a channel of its own if
            `config.copy_engines`.
        sizes: m_r of every rank, the same list on all ranks.
        biases: (N_i,) or None for each weight.
        activation: see `weft.kernels.device.epilogues`; "swiglu" makes one y of two weights.
        keep_sums: also return the activation's arguments.
        with_own: also copy this rank's rows into the gathered matrix, where they else are
            undefined.
        scaling: of fp8 operands.
        config: default `config_for`; `copy_engines` must be the same on all ranks.
    """
    K, M, W = x.shape[1], sum(sizes), ws.world_size
    pair = activation == "swiglu"
    config = config or config_for(
        M, sum(w.shape[1] for w in weights), K, x.dtype, W, chip_of(x.device),
        activation=activation, keep=with_own, keep_sums=keep_sums,
    )  # fmt: skip
    tiling, pitch = config.tiling, gathers.pitch_of(K)
    Ns = tuple(w.shape[1] for w in weights)
    out_dtype = scaling.out_dtype if scaling else x.dtype
    row_scales = scaling.rows if scaling else None
    outs = [x.new_empty(M, N, dtype=out_dtype) for N in (Ns[:1] if pair else Ns)]
    sums = [x.new_empty(M, N, dtype=out_dtype) for N in Ns] if keep_sums else []
    gathered = scales = None
    if not config.direct:
        gathered = x.new_empty(M, K)
        scales = torch.empty(M, dtype=torch.float32, device=x.device) if scaling else None
    if config.copy_engines and not gathers.in_place(x):
        x = x.contiguous()
    # Triton's launcher takes no descriptors in a tuple.
    (w_desc, w2_desc), w_transposed = described_weights(
        weights, tiling, config.descriptors and (pair or len(weights) == 1)
    )
    column_tiles = sum(-(-out.shape[1] // tiling.block_n) for out in outs)
    count = -(-M // tiling.block_m) * column_tiles
    halved = _halved(count, sizes[ws.rank] // tiling.block_m * column_tiles, config)
    half = replace(tiling, block_n=tiling.block_n // 2) if halved else tiling
    (half_desc, half2_desc), _ = described_weights(
        weights, half, halved > 0 and config.descriptors and (pair or len(weights) == 1)
    )
    parts = config.parts if config.copy_programs else 1
    # Every part of every chunk of a shard needs its own word of the pad.
    chunk_rows = max(config.chunk_rows, -(-max(sizes) // (MAX_PROGRAMS // parts)))
    scales_at = gathers.scales_offset(max(sizes), K, x.dtype)
    with ExitStack() as stack:
        if config.copy_engines:
            assert gathered is not None
            stack.enter_context(
                copy_engines.fetching(
                    x, row_scales, gathered, scales, ws, sizes, chunk_rows, scales_at, with_own
                )
            )
        else:
            # A single rank need not publish rows that it does not read back itself.
            unread = W == 1 and gathers.in_place(x) and not with_own
            shown = x[:0] if unread else x
            gathers.publish(
                shown, ws, pitch, config.programs, config.copy_m, config.copy_n,
                scales_of(row_scales), scales_at,
            )  # fmt: skip
        _ag_gemm_kernel[(config.programs,)](
            tuple(outs),
            tuple(sums) if keep_sums else None,
            gathered,
            scales,
            matrix(x),
            scales_of(row_scales),
            tuple(matrix(w) for w in weights),
            w_desc,
            w2_desc,
            half_desc,
            half2_desc,
            tuple(map(contiguous, biases or [None] * len(weights))),
            tuple(map(scales_of, scaling.columns if scaling else [None] * len(weights))),
            splits.scratch_for(count * (2 if pair else 1), config.split, x, tiling),
            link_of(ws),
            (0, *accumulate(sizes)),
            Ns,
            K,
            pitch,
            scales_at,
            chunk_rows,
            ws.rank,
            halved,
            WORLD_SIZE=W,
            WEIGHTS=len(weights),
            ACTIVATION=activation,
            HALF_TILES=half,
            TILES=tiling,
            DIRECT=config.direct,
            SPLIT=config.split,
            HALVED=int(halved > 0),
            W_TRANSPOSED=w_transposed,
            X_IN_PLACE=gathers.in_place(x),
            WITH_OWN=with_own,
            EVEN_K=K % tiling.block_k == 0,
            COPY_PROGRAMS=config.copy_programs,
            COPY_M=config.copy_m,
            COPY_N=config.copy_n,
            PARTS=parts,
            **tiling.options,
        )
    return Gathered(gathered, outs, sums)
