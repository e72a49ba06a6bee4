"""The tiles of `all_gather_kernel`: rows that descriptors read, and all others by pointers.

By descriptor (TMA), a tile has own rows, which are read in x, or others, in `gathered`, of which
those after and those before the own ones have tiles of their own. For W = 3, on rank 1, in the
order in which tiles are made:

    tile         0       1     | 2       3     | 4       5
    rows    | x_1           |  | x_2        |  | x_0        |
    from      x                  gathered        gathered

What a descriptor reads outside of its matrix are zeros. Everything else goes by pointers, one for
each row of a tile: shards in memory that hardware cannot copy, rows in place at their owners, tiles
that programs share, several weights with outputs of their own, other chips.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.kernels.device import gathers, splits, tiles
from weft.kernels.device.flattened import order_descriptors
from weft.kernels.device.gathered_rows import (
    TileRows,
    own_or_fetched_rows,
    rows_of_tile,
    wait_for_tile_rows,
)
from weft.kernels.device.outputs import finish_tile
from weft.kernels.engine.chips import Tiling
from weft.kernels.engine.epilogues import Activation


@dataclass(frozen=True)
class GatherVariant:
    """What the kernel is compiled for.

    Attributes:
        weights: how many.
        activation: see `weft.kernels.engine.epilogues`; swiglu makes one output of two weights.
        half_tiles: tiles of half the columns.
        tiles: tiles of the matmul.
        fetch: how shards are fetched.
        direct: whether rows are read in place at their owners.
        split: programs that share a tile.
        halved: 1 if some tiles are made in halves, first of all, else 0.
        x_in_place: whether the rank's own rows are read in x, not as they were published.
        w_transposed: whether descriptors are of the transposes.
        even_k: whether K is whole steps of the tiles.
        described: whether rows are read by descriptor.
        flattened: whether those tiles are made in one loop; see `weft.kernels.device.flattened`.
        by_halves: whether this is the variant for tiles in halves.
    """

    weights: int
    activation: Activation | None
    half_tiles: Tiling
    tiles: Tiling
    fetch: gathers.Fetch
    direct: bool
    split: int
    halved: int
    x_in_place: bool
    w_transposed: bool
    even_k: bool
    described: bool
    flattened: bool
    by_halves: bool = False

    @property
    def pair(self) -> bool:
        """Whether one output is made of two sums."""
        return self.activation == "swiglu"

    @property
    def outputs(self) -> int:
        """How many outputs there are."""
        return 1 if self.pair else self.weights

    @property
    def parts(self) -> int:
        """Into how many parts K is cut for fetching."""
        return self.fetch.parts

    @property
    def of_halves(self) -> GatherVariant:
        """The same for tiles in halves."""
        return replace(self, tiles=self.half_tiles, by_halves=True)

    @property
    def whole_n(self) -> int:
        """Columns of a whole tile."""
        return self.tiles.block_n * (2 if self.by_halves else 1)


class Weights(NamedTuple):
    """What a tile multiplies its rows with: one Matrix or two, and their descriptors, or None."""

    w: Any
    w2: Any
    desc: Any
    desc2: Any


class TiledGather(NamedTuple):
    """What tiles need to know of a call.

    Fields: Shards; Outputs, and their columns; Scales of the own rows; Rows, and descriptors of the
    own rows and of these, or None; how many tiles are made in halves, which are the first ones;
    rows and columns of tiles.
    """

    shards: Any
    out: Any
    Ns: Any
    x_scales: Any
    gathered: Any
    x_desc: Any
    gathered_desc: Any
    halved: Any
    tiles_m: Any
    tiles_n: Any


@triton.jit
def items_of(call, V: tl.constexpr):
    """How many items the tiles are: halves, or those parts of K that programs share."""
    if V.by_halves:
        items = 2 * call.halved
    else:
        items = (call.tiles_m * call.tiles_n - call.halved) * V.split
    return items


@triton.jit
def _tile_of(call, item, V: tl.constexpr):
    """Row and column of an item's tile, and the first column of the item in the column of tiles."""
    if V.by_halves:
        tile, shift = item // 2, item % 2 * V.tiles.block_n
    else:
        tile, shift = item // V.split + call.halved, 0
    GROUP_M: tl.constexpr = V.tiles.group_m
    tile_m, tile_n = tiles.grouped_tile(tile, call.tiles_m, call.tiles_n, GROUP_M)
    return tile_m, tile_n, shift


@triton.jit
def begin_tile(call, item, part, until, V: tl.constexpr):
    """Wait for parts of a tile's rows: BEGIN of `weft.kernels.device.flattened`."""
    FETCH: tl.constexpr = V.fetch
    BLOCK_M: tl.constexpr = V.tiles.block_m
    tile_m, tile_n, shift = _tile_of(call, item, V)
    rows, is_own, row = own_or_fetched_rows(
        call.shards, call.x_scales, call.gathered, tile_m, FETCH.world_size, BLOCK_M
    )
    came = True
    for each in range(part, until):
        came &= wait_for_tile_rows(call.shards, rows, each, FETCH)
    # Of what has not come nothing is read: own rows stand for it, and are not stored.
    row = order_descriptors(tl.where(came, row, 0))
    desc = call.gathered_desc
    if is_own | (not came):
        desc = call.x_desc
    return desc, row, tile_n * V.whole_n + shift, came


@triton.jit
def finish_described(call, acc, second, item, ready, V: tl.constexpr):
    """Store a tile that is ready: FINISH of `weft.kernels.device.flattened`."""
    W: tl.constexpr = V.fetch.world_size
    ACTIVATION: tl.constexpr = V.activation
    BLOCK_M: tl.constexpr = V.tiles.block_m
    tile_m, tile_n, shift = _tile_of(call, item, V)
    rows, _, _ = own_or_fetched_rows(call.shards, call.x_scales, call.gathered, tile_m, W, BLOCK_M)
    start_n = tile_n * V.whole_n + shift
    inside = rows.inside & ready
    rows = TileRows(rows.ptrs, rows.scales, rows.numbers, inside, rows.first, rows.last)
    # Beside what a loop carries, 128 columns of gelu or swiglu spill up to 112 bytes on sm_90.
    finish_tile(call.out, acc, second, rows, start_n, call.Ns[0], 0, ACTIVATION, 64)


@triton.jit
def tiles_by_pointers(
    call, own, weights, w_desc, w2_desc, scratch_ptr, program, programs, came, V: tl.constexpr
):
    """Make the tiles of `program`, with pointers to their rows.

    Takes also the Own shard, a Matrix for each weight, descriptors of the first two or None, and
    whether the peers' shards are there if they are read in place.
    """
    W: tl.constexpr = V.fetch.world_size
    BLOCK_M: tl.constexpr = V.tiles.block_m
    OUTPUTS: tl.constexpr = V.outputs
    DIRECT: tl.constexpr = V.direct
    PAIR: tl.constexpr = V.pair
    ACTIVATION: tl.constexpr = V.activation
    for item in range(program, items_of(call, V), programs):
        tile_m, tile_n, shift = _tile_of(call, item, V)
        rows = rows_of_tile(
            call.shards, own, call.x_scales, call.gathered, tile_m * BLOCK_M, W, DIRECT, BLOCK_M
        )
        # Exactly one of these branches runs: that of the output in whose columns the tile lies.
        for i in tl.static_range(OUTPUTS):
            tiles_i = tiles.cdiv(call.Ns[i], V.whole_n)
            if (tile_n >= 0) & (tile_n < tiles_i):
                start_n = tile_n * V.whole_n + shift
                operands = Weights(weights[i], weights[1] if PAIR else None, w_desc, w2_desc)
                acc, second, whole = _sums_of_tile(
                    call, rows, operands, scratch_ptr, item, start_n, call.Ns[i], came, V
                )
                if whole:
                    finish_tile(call.out, acc, second, rows, start_n, call.Ns[i], i, ACTIVATION)
            tile_n -= tiles_i


@triton.jit
def _sums_of_tile(call, rows, weights, scratch_ptr, item, start_n, N, came, V: tl.constexpr):
    """rows @ w, as the rows arrive, and whether it is whole: all came, and no program has more.

    Two sums if there are two weights, else the first one twice: Triton 3.6 cannot return None.
    """
    TILES: tl.constexpr = V.tiles
    FETCH: tl.constexpr = V.fetch
    SPLIT: tl.constexpr = V.split
    PARTS: tl.constexpr = FETCH.parts
    PAIR: tl.constexpr = V.pair
    EVEN_K: tl.constexpr = V.even_k
    W_TRANSPOSED: tl.constexpr = V.w_transposed
    shards = call.shards
    part = item % SPLIT
    whole = came
    acc = tiles.zeros(TILES.block_m, TILES.block_n)
    second = acc if PAIR else None
    for k_part in range(PARTS):
        if not V.direct:
            whole &= wait_for_tile_rows(shards, rows, k_part, FETCH)
        first_k, last_k = splits.part_of(
            shards.columns, part + k_part, TILES.block_k, SPLIT * PARTS
        )
        acc, other = tiles.accumulate(
            acc, second, rows.ptrs, 1, None, 0, weights.w, weights.w2, weights.desc, weights.desc2,
            start_n, N, first_k, 0, tl.where(whole, last_k, first_k),
            TILES, EVEN_K, False, W_TRANSPOSED,
        )  # fmt: skip
        if PAIR:
            second = other
    if SPLIT > 1:
        program, link, rank = tl.program_id(0), shards.link, shards.rank
        acc, second, last = splits.add_up(
            acc, second, scratch_ptr, item // SPLIT, part, program, link, rank, shards.generation,
            FETCH.world_size, SPLIT,
        )  # fmt: skip
        whole &= last
    return acc, second if PAIR else acc, whole
