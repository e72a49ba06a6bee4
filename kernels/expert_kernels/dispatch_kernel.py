"""Tokens to their experts' ranks, and the first grouped matmul there, as rows arrive.

Legend: W ranks; rank r holds tokens x_r (T_r, K), each for k experts, and E_r experts' weights w_i
(E_r, K, N_i), one or several. R_r rows come to it, sorted by expert, with a `RowTable`: row p is
row rows[p] of x of ranks[p]. R is a bound; ends[-1] rows are real. Sums are fp32, rounded once.

    y_i (R, N_i) = activation(rows @ w_i[expert of the row])           or, for two weights,
    y (R, N)     = silu(rows @ w_0[..]) * (rows @ w_1[..])

    rank 0            rank 1 (experts 2 and 3)
    x_0 -> X_0        x_1 -> X_1 (peers read it)
      |               rows [ of x_0, of x_1 | of x_0, of x_1 ]
      +--- pulled ----------^------------------^             y tiles: | 0 1 | 2 3 4 |
                      expert 2               expert 3

Each row crosses the link once, however many tiles read it. Beside its row may travel a number for
each slot (T_r, k), fp32, which lies `numbers_at` bytes into the half: numbers (R,). Quantized, rows
travel as e4m3, and their scales (T_r,) lie there: copy programs make the dtype of w of both.

Protocol
  1. `gathers.publish`: x, and the numbers, to the rank's own half, and a signal to the word (0,
     rank, 0) of every peer.
  2. Copy program c of C: wait for all peers' signals (acquire, system scope); copy every C-th chunk
     of rows from their owners' halves and signal the rank's own word (1, 0, chunk): release at
     device scope (`pulled_rows`).
  3. The other programs make tiles, in the order of the rows (`expert_tiles`): each waits for the
     words of the chunks that it reads.
  With `direct`, for few rows: no copies. Every program waits for all peers, and reads rows in place
  at their owners, for each column of tiles anew.

Why it neither races nor deadlocks: publish kernels wait for nobody, copy programs for those alone,
tiles for copy programs, which have smaller numbers. Every copy program, or every program, waits for
every peer, so that no call ends before all have published: halves are safe as `gathers` says.

From ends[-1] on neither rows nor y nor numbers are written, and tables are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.collectives.device import signals
from weft.kernels.device import tiles
from weft.kernels.device.flattened import order_descriptors
from weft.kernels.device.gathered_rows import TileRows
from weft.kernels.device.outputs import finish_tile
from weft.kernels.engine.chips import Tiling
from weft.kernels.engine.epilogues import Activation
from weft.kernels.expert_kernels.expert_tiles import (
    expert_tile,
    experts_of,
    rows_of,
    tiles_of,
    weight_of,
    weight_place,
)
from weft.kernels.expert_kernels.pulled_rows import (
    PulledRows,
    chunk_of,
    delivered_rows,
    fetch_rows,
    rows_at_owners,
    wait_for_owners,
    wait_for_rows,
)


@dataclass(frozen=True)
class DispatchVariant:
    """What the kernel is compiled for.

    Attributes:
        weights: how many; 0: rows are fetched, and no more.
        activation: see `weft.kernels.engine.epilogues`; swiglu makes one output of two weights.
        tiles: tiles of the matmul.
        world_size: of the group.
        lanes: at least as many as experts.
        copies: how many programs fetch rows; 0: rows are read at their owners.
        copy_m, copy_n: block that a copy moves at a time.
        even_k: whether K is whole steps of the tiles.
        w_transposed: whether descriptors are of the transposes.
        quantized: whether rows travel in fp8.
        delivered: whether rows lie in the own half, where `few_tokens` has them, as they travel.
    """

    weights: int
    activation: Activation | None
    tiles: Tiling
    world_size: int
    lanes: int
    copies: int
    copy_m: int
    copy_n: int
    even_k: bool
    w_transposed: bool
    quantized: bool = False
    delivered: bool = False

    @property
    def outputs(self) -> int:
        """How many outputs there are."""
        return 1 if self.activation == "swiglu" else self.weights


class DispatchTiles(NamedTuple):
    """One call, as tiles know it.

    Fields: PulledRows; ExpertWeights, and their columns; descriptors of the rows, and of the first
    two weights, or None; Outputs.
    """

    pull: Any
    weights: Any
    Ns: Any
    row_desc: Any
    w_desc: Any
    w2_desc: Any
    out: Any


@triton.jit
def _tile_rows(call, tile, came, V: tl.constexpr):
    """The rows of an ExpertTile as TileRows, and whether they are there, once they are."""
    pull = call.pull
    dtype: tl.constexpr = call.weights[0].ptr.dtype.element_ty
    end = tile.first + V.tiles.block_m
    last = tl.minimum(end, tile.end) - 1
    numbers = tile.first + tl.arange(0, V.tiles.block_m)
    # Past the end the last row is repeated: the first ones of the next expert may not be there.
    nearby = tl.minimum(numbers, last)
    scales = numbers
    if V.delivered:
        wire: tl.constexpr = tl.float8e4nv if V.quantized else dtype
        ptrs, scales = delivered_rows(pull, nearby, nearby <= last, wire, V.quantized)
    elif V.copies == 0:
        ptrs = rows_at_owners(pull, nearby, nearby <= last, dtype)
    else:
        ptrs = pull.fetched.ptr + nearby.to(tl.int64) * pull.K
        until = last
        if call.row_desc is not None:  # which reads them nevertheless
            until = tl.minimum(end, pull.total) - 1
        came = wait_for_rows(pull, tile.first, until, V)
    inside = tl.where(came, numbers <= last, numbers < tile.first)  # & would interpret as numbers
    return TileRows(ptrs, scales, numbers, inside, tile.first, last), came


@triton.jit
def _make_tile(call, tile, came, V: tl.constexpr):
    """Multiply the rows of an ExpertTile when they are there, and store what is made of them."""
    ACTIVATION: tl.constexpr = V.activation
    PAIR: tl.constexpr = ACTIVATION == "swiglu"
    OUTPUTS: tl.constexpr = V.outputs
    TILES: tl.constexpr = V.tiles
    rows, came = _tile_rows(call, tile, came, V)
    first = order_descriptors(tile.first) if call.row_desc is not None else tile.first
    depth, tile_n = tl.where(came, call.pull.K, 0), tile.tile_n
    scales = None
    if V.delivered and V.quantized:
        scales = tl.load(rows.scales, mask=rows.inside, other=0.0)
    # Exactly one of these branches runs: that of the output in whose columns the tile lies.
    for i in tl.static_range(OUTPUTS):
        N = call.Ns[i]
        if (tile_n >= 0) & (tile_n < tiles.cdiv(N, TILES.block_n)):
            start_n = tile_n * TILES.block_n
            row, column = weight_place(
                tile.expert, call.pull.K, N, start_n, call.w_desc, V.w_transposed
            )
            w, w2 = weight_of(call.weights[i], tile.expert), None
            if PAIR:
                w2 = weight_of(call.weights[1], tile.expert)
            acc = tiles.zeros(TILES.block_m, TILES.block_n)
            acc, second = tiles.accumulate(
                acc,
                acc if PAIR else None,
                rows.ptrs,
                1,
                call.row_desc,
                first,
                w,
                w2,
                call.w_desc,
                call.w2_desc,
                column,
                N,
                0,
                row,
                depth,
                TILES,
                V.even_k,
                False,
                V.w_transposed,
                scales,
            )
            finish_tile(call.out, acc, second, rows, start_n, N, i, ACTIVATION)
        tile_n -= tiles.cdiv(N, TILES.block_n)


@triton.jit
def make_tiles(call, experts, program, programs, came, V: tl.constexpr):
    """Every `programs`-th tile from number `program` on; none by copy programs, which have < 0."""
    OUTPUTS: tl.constexpr = V.outputs
    TILES: tl.constexpr = V.tiles
    if program >= 0:
        tiles_n = 0
        for i in tl.static_range(OUTPUTS):
            tiles_n += tiles.cdiv(call.Ns[i], TILES.block_n)
        for number in range(program, tiles_of(experts) * tiles_n, programs):
            tile = expert_tile(experts, number, tiles_n, (0, 1), TILES.block_m, TILES.group_m)
            _make_tile(call, tile, came, V)


@triton.jit(do_not_specialize=["R", "E", "numbers_at", "chunk_rows", "rank"])
def dispatch_kernel(
    out,  # Outputs
    fetched,  # Rows of (R, K) and their numbers, or None
    row_desc,  # a descriptor of these rows, or None
    table,  # RowTable
    weights,  # ExpertWeights (E, K, N_i)
    w_desc,  # descriptors of the first two as matrices, or None
    w2_desc,
    link,
    R,
    E,
    Ns,
    K,
    pitch,
    numbers_at,
    chunk_rows,
    rank,
    V: tl.constexpr,  # DispatchVariant
) -> None:
    """y_i = activation(rows @ w_i of each row's expert) for all i. Grid: copy programs and more.

    Example: ends [5, 12], block_m=4, one column tile, 3 programs of which 1 copies. Program 1 makes
    the tiles of rows 0..3 and 5..8, program 2 those of row 4 and of rows 9..11.
    """
    WEIGHTS: tl.constexpr = V.weights
    TILES: tl.constexpr = V.tiles
    generation = signals.last_generation(link.signal_ptrs, rank)
    program, programs = tl.program_id(0), tl.num_programs(0) - V.copies
    experts = experts_of(table.ends, E, V.lanes, TILES.block_m)
    total = rows_of(experts)
    chunk_rows = chunk_of(total, chunk_rows, V)
    pull = PulledRows(
        table, total, chunk_rows, link, rank, generation, pitch, numbers_at, fetched, K, 0
    )
    call = DispatchTiles(pull, weights, Ns, row_desc, w_desc, w2_desc, out)
    came = True
    if V.copies == 0:
        came = wait_for_owners(pull, V)
    elif program < V.copies:
        fetch_rows(pull, V)
    if WEIGHTS > 0:  # else there is none that tiles could be compiled for, and all programs copy
        make_tiles(call, experts, program - V.copies, programs, came, V)
    if signals.end_call(link.signal_ptrs, rank, generation):
        spoil_results(call, tl.cast(R, tl.int64), V)


@triton.jit
def spoil_results(call, R, V: tl.constexpr):
    """Fill all results with NaN."""
    OUTPUTS: tl.constexpr = V.outputs
    WEIGHTS: tl.constexpr = V.weights
    for i in tl.static_range(OUTPUTS):
        signals.spoil(call.out.ys[i], R * call.Ns[i])
    if call.out.sums is not None:
        for i in tl.static_range(WEIGHTS):
            signals.spoil(call.out.sums[i], R * call.Ns[i])
    if call.pull.fetched.ptr is not None:
        signals.spoil(call.pull.fetched.ptr, R * call.pull.K)
    if call.pull.fetched.scales is not None:
        signals.spoil(call.pull.fetched.scales, R)
