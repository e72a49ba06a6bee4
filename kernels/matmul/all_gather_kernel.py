"""all_gather_matmul: activation(cat(x over ranks) @ w + bias), the gather behind the arithmetic.

Legend: W ranks; rank r holds x_r (m_r, K) and its own weights w_i (K, N_i), one or several.
`offsets[r]` is the row at which x_r begins in the gathered matrix (W + 1 numbers, the last one M);
shards may differ in size and be empty. Inputs are bf16, fp16, fp32 or scaled fp8; sums are fp32 and
rounded once.

    y_i (M, N_i) = activation([x_0; x_1; ...] @ w_i + bias_i)          or, for two weights,
    y (M, N)     = silu([x_0; x_1; ...] @ w_0 + bias_0) * ([x_0; x_1; ...] @ w_1 + bias_1)

Tiles count rows cyclically from the rank's own first row, so that a rank starts with the rows that
it already has and goes on with those of rank+1. A tile may straddle shards, unless descriptors read
its rows (`gathered_tiles`). For W = 3, on rank 1:

    tile         0       1       2       3       4      ...
    rows    | x_1         | x_2           | x_0              |
    from      x in place    `gathered` (or the peers)

Shards arrive in one of three ways, all by the protocol of `weft.kernels.device.gathers`. "->" is a
signal, words (phase, rank, number) are those of its receiver; all wait before they read:

    rank 0                      rank 1
    publish: x -> half  ------> (0, 0, 0)   copy program: waits, half of rank 0 -> `gathered`
                                            -> own word (1, 0, chunk)
                                            tile: waits for the words of its chunks

  - fetched: the first `fetch.programs` programs copy them to `gathered`. The others wait, before
    each tile and outside the loop over K, for the chunks that the tile reads. In several parts, K
    is cut: of all rows that the programs want at one time the first columns arrive first, and a
    tile loops over one part after another, so that it can start before its rows are complete.
  - by copy engines: the same without copy programs; see `weft.kernels.matmul.copy_engines`.
  - direct, for small M: no copy. Every program waits for the publish kernels of all peers and then
    reads the rows in place at their owners, through one pointer a row. A tile covers many small
    shards, for which fetching would cost a further hop. Each column tile reads all rows again.

Small M and N give few tiles; `split` neighbouring programs then share one
(`weft.kernels.device.splits`). With copy engines, where all programs make tiles, those that do not
fill a wave are made first, in halves of their columns, so that more programs take part in them.

Why it neither races nor deadlocks: publish kernels wait for nobody, copy programs for those alone,
tiles for copy programs, which have smaller numbers, or for copies in other streams, for which a
core is free; parts of a tile for smaller programs. Nothing is read before the word that tells of
it is acquired. Where nothing is fetched, every program waits for every peer before it does
anything else. That halves are not overwritten too early is shown in `gathers`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import flattened, gathers, tiles
from weft.kernels.device.gathered_rows import own_shard, tile_rows
from weft.kernels.device.gathered_tiles import (
    TiledGather,
    begin_tile,
    finish_described,
    items_of,
    tiles_by_pointers,
)


class GatherSizes(NamedTuple):
    """Offsets of shards and what follows the last, columns of weights, K, pitch of a half."""

    offsets: Any
    Ns: Any
    K: Any
    pitch: Any


@triton.jit(do_not_specialize=["scales_at", "chunk_rows", "rank", "halved"])
def all_gather_matmul_kernel(
    out,  # Outputs
    gathered,  # Rows of (M, K)
    x,  # Matrix (m_local, K)
    x_scales,  # of its rows
    x_desc,  # descriptors of x and of `gathered`, or None
    gathered_desc,
    weights,  # Matrix (K, N_i)
    w_desc,  # descriptors of the first two, or None
    w2_desc,
    half_desc,  # of halves of the columns of tiles, or None
    half2_desc,
    scratch_ptr,  # (tiles * split * sums a tile, block) fp32, or None
    link,
    sizes,  # GatherSizes
    scales_at,
    chunk_rows,
    rank,
    halved,  # how many tiles are made in halves
    V: tl.constexpr,  # GatherVariant
) -> None:
    """y_i = activation(gathered @ w_i + bias_i) for all i. Grid: copy programs and at least one.

    Example: 2 ranks with 48 and 16 rows, block_m=32, one weight of 2 column tiles, 3 programs of
    which 1 copies. On rank 1, program 1 makes tiles (rows 48..63 and 0..15, column 0), (16..47, 0)
    and program 2 those of column 1; both wait for rank 0's first chunk before the first.
    """
    generation = signals.last_generation(link.signal_ptrs, rank)
    offsets, Ns, K = sizes.offsets, sizes.Ns, sizes.K
    shards = gathers.Shards(link, rank, generation, offsets, K, sizes.pitch, scales_at, chunk_rows)
    W: tl.constexpr = V.fetch.world_size
    BLOCK_M: tl.constexpr = V.tiles.block_m
    BLOCK_N: tl.constexpr = V.tiles.block_n
    GROUP_M: tl.constexpr = V.tiles.group_m
    COPIES: tl.constexpr = V.fetch.programs
    OUTPUTS: tl.constexpr = V.outputs
    HALVED: tl.constexpr = V.halved
    FETCH: tl.constexpr = V.fetch
    DIRECT: tl.constexpr = V.direct
    DESCRIBED: tl.constexpr = V.described
    X_IN_PLACE: tl.constexpr = V.x_in_place
    program, programs = tl.program_id(0), tl.num_programs(0) - COPIES
    M, tiles_n = offsets[W], 0
    for i in tl.static_range(OUTPUTS):
        tiles_n += tiles.cdiv(Ns[i], BLOCK_N)
    if COPIES > 0 and program < COPIES:
        # The rows of the first tiles of all programs, then those of the second ones, ...
        group_rows = tiles.cdiv(programs, GROUP_M * tl.maximum(tiles_n, 1)) * GROUP_M * BLOCK_M
        gathers.fetch_shards(shards, gathered, group_rows, FETCH)
    if program >= COPIES:
        tiles_m = tiles.cdiv(M, BLOCK_M)
        if DESCRIBED:
            own_m, after_m, before_m = tile_rows(shards, W, BLOCK_M)
            tiles_m = own_m + after_m + before_m
        call = TiledGather(
            shards, out, Ns, x_scales, gathered, x_desc, gathered_desc,
            halved if HALVED else 0, tiles_m, tiles_n,
        )  # fmt: skip
        own = own_shard(shards, x, X_IN_PLACE)
        came = True
        if DIRECT:
            came = signals.wait_for_peers(
                link.signal_ptrs, rank, W, 0, 0, generation, link.timeout_ns
            )
        # The first tiles in halves, then the others whole.
        for HALVES in tl.static_range(HALVED, -1, -1):
            _make_tiles(
                call, own, weights, half_desc if HALVES else w_desc,
                half2_desc if HALVES else w2_desc, scratch_ptr, program - COPIES, programs, came,
                HALVES, V,
            )  # fmt: skip
    if DIRECT or COPIES > 0:
        in_vain = signals.end_call(link.signal_ptrs, rank, generation)
    else:  # by copy engines: `copy_engines.Fetching.finish` ends the call
        in_vain = signals.failed(signals.peer_ptr(link.signal_ptrs, rank, tl.int64))
    if in_vain:
        _spoil(out, gathered, M, Ns, K, V)


@triton.jit
def _make_tiles(
    call, own, weights, desc, desc2, scratch_ptr, program, programs, came,
    HALVES: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Make the tiles of `program`: those in halves, or the others."""
    VARIANT: tl.constexpr = V.of_halves if HALVES else V
    if V.described:
        flattened.multiply_tiles(
            call, call.x_desc, desc, desc2, call.shards.columns, program, programs, items_of,
            begin_tile, finish_described, VARIANT,
        )  # fmt: skip
    else:
        tiles_by_pointers(
            call, own, weights, desc, desc2, scratch_ptr, program, programs, came, VARIANT
        )


@triton.jit
def _spoil(out, gathered, M, Ns, K, V: tl.constexpr):
    """Fill all results with NaN."""
    OUTPUTS: tl.constexpr = V.outputs
    WEIGHTS: tl.constexpr = V.weights
    rows = tl.cast(M, tl.int64)
    for i in tl.static_range(OUTPUTS):
        signals.spoil(out.ys[i], rows * Ns[i])
    if out.sums is not None:
        for i in tl.static_range(WEIGHTS):
            signals.spoil(out.sums[i], rows * Ns[i])
    if gathered.ptr is not None:
        signals.spoil(gathered.ptr, rows * K)
